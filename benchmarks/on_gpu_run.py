"""The parts of ``on_gpu.py`` in turn: what is done, what is next, how long, and how it ended."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import part_process
from benchmarks.budget import UNFINISHED
from benchmarks.on_gpu_parts import ROOT, Part, sources
from benchmarks.provenance import revision
from vil.training.errors import OutputError
from vil.training.files import lock_folder, write_text

RECORD = "on_gpu.json"
SHORTEST_S = 5.0  # less than that is no time for any part
HEARTBEAT_S = 5.0
NOT_RUN, RUNNING, INTERRUPTED = "not run", "running", "interrupted"
PASSED, FAILED, CRASHED = "passed", "failed", "crashed"
OUT_OF_TIME, NOT_FINISHED = "timed out", "unfinished"

_FACTS = """
import importlib.metadata, json, platform, torch
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
gpu = torch.cuda.is_available()
print(json.dumps({
    "device": torch.cuda.get_device_name() if gpu else None,
    "arch": "{}.{}".format(*torch.cuda.get_device_capability()) if gpu else None,
    "python": platform.python_version(),
    **{name: version(name) for name in ("torch", "triton", "timm", "numpy")},
}))
"""


def facts() -> dict[str, Any]:
    """Return the GPU, its architecture and the versions that parts will see; "device" None without one.

    Asked of another process, so that this one holds no memory of the GPU.
    """
    command = [sys.executable, "-c", _FACTS]
    found = subprocess.run(
        command, capture_output=True, text=True, env=variables(), timeout=300, check=False
    )
    if found.returncode:
        sys.exit(f"torch cannot be used here:\n{found.stderr}")
    return json.loads(found.stdout.splitlines()[-1])


def slug(device: str) -> str:
    """Return a device's name as one of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def variables() -> dict[str, str]:
    """Return the environment variables of a part: what they are here, and the checkout on the path."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Session:
    """What is known of all calls of the command with one output folder."""

    def __init__(
        self,
        output: Path,
        work: Path,
        environment: dict[str, Any],
        minutes: float,
        toy: bool = False,
    ) -> None:
        """Open the record, or begin it.

        Args:
            output: Folder of the records.
            work: Folder of logs and of what parts need to continue.
            environment: As of ``facts``.
            minutes: Of all calls together.
            toy: Run the toys of the parts.

        Raises:
            SystemExit: the folder holds records of another device, other versions, or of toys, or
                another process works in it.
        """
        self.output, self.work, self.toy = output, work, toy
        self.minutes = minutes
        self.environment = environment | {"toy": toy}
        (work / "logs").mkdir(parents=True, exist_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_folder(work)  # until this process ends
            self._lock.__enter__()
        except OutputError as error:
            sys.exit(str(error))
        self.path = output / RECORD
        self.entries: dict[str, dict[str, Any]] = {}
        self._spent_before, self._start, self._written = 0.0, time.monotonic(), 0.0
        if self.path.exists():
            content = json.loads(self.path.read_text())
            if content["environment"] != self.environment:
                sys.exit(
                    f"{self.path} is of {content['environment']}, here is {self.environment}; "
                    f"name another folder with --output"
                )
            self.entries, self._spent_before = content["parts"], content["spent_s"]
        for entry in self.entries.values():
            if entry["status"] == RUNNING:  # whoever ran it was killed
                entry["status"] = INTERRUPTED

    @property
    def spent_s(self) -> float:
        """Seconds of this call and those before."""
        return self._spent_before + time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return 60 * self.minutes - self.spent_s

    def write(self) -> None:
        """Write the record."""
        content = {
            "command": f"python -m benchmarks.on_gpu {shlex.join(sys.argv[1:])}".strip(),
            "environment": self.environment,
            "minutes": self.minutes,
            "spent_s": round(self.spent_s, 1),
            "parts": self.entries,
        }
        write_text(self.path, json.dumps(content, indent=1) + "\n")
        self._written = time.monotonic()

    def run(self, parts: Sequence[Part], again: bool = False) -> bool:
        """Run what is not done of some parts, in order, within what is left of the time.

        Args:
            parts: Which.
            again: Run them even if they are done, without what they left.

        Returns:
            Whether all of them are done and passed.
        """
        for part in parts:
            self._renew(part, again)
        self.write()
        queue = self.queue(parts)
        with _signals():
            for number, part in enumerate(queue):
                share = part.share / sum(other.share for other in queue[number:])
                if self.left_s < SHORTEST_S:
                    print(f"the {self.minutes:g} minutes are over before {part.name}", flush=True)
                    break
                self._run_part(part, max(self.left_s * share, SHORTEST_S))
        return all(self.status(part) == PASSED for part in parts)

    def status(self, part: Part) -> str:
        """Return how a part ended, or that it has not been run."""
        return self.entries.get(part.name, {}).get("status", NOT_RUN)

    def queue(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts to run: those that had no turn, then those whose turn was too short."""
        fresh = [part for part in parts if self.status(part) in (NOT_RUN, INTERRUPTED)]
        return fresh + [p for p in parts if self.status(p) in (OUT_OF_TIME, NOT_FINISHED)]

    def _renew(self, part: Part, again: bool) -> None:
        """Forget what a part did if its files are others now, and put its record aside."""
        entry, digest = self.entries.get(part.name), sources(part)
        if entry is not None and entry["sources"] == digest and not again:
            return
        if entry is not None:
            print(f"{part.name}: {'again' if again else 'its files have changed'}, runs anew")
            if part.record and (self.output / part.record).exists():
                old = self.output / part.record
                old.replace(old.with_suffix(".old.json"))
        commit = revision()
        self.entries[part.name] = {
            "status": NOT_RUN,
            "sources": digest,
            "commit": f"files {digest}" if commit == "unknown" else commit,
            "seconds": 0.0,
        }

    def _run_part(self, part: Part, limit_s: float) -> None:
        entry = self.entries[part.name]
        arguments = part.arguments(self.toy, self.output, self.work, limit_s)
        log = self.work / "logs" / f"{part.name}.log"
        before = entry["seconds"]
        entry |= {
            "status": RUNNING,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "limit_s": round(limit_s, 1),
            "command": f"python {shlex.join(arguments)}",
        }
        self.write()
        print(f"\n== {part.name}: {part.what} (at most {limit_s:.0f} s)", flush=True)
        start = time.monotonic()

        def show(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()
            if time.monotonic() - self._written > HEARTBEAT_S:
                entry["seconds"] = round(before + time.monotonic() - start, 1)
                self.write()

        variables_ = variables() | {
            "VIL_COMMIT": entry["commit"],
            # Kept with the logs, so that they can be brought along to the next machine.
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
        }
        if self.toy:
            variables_ |= {
                "CUDA_VISIBLE_DEVICES": "",
                "TRITON_INTERPRET": "1",
                "OMP_NUM_THREADS": "1",
            }
        try:
            command = [sys.executable, *arguments]
            outcome = part_process.run(command, limit_s, log, variables_, ROOT, show)
        except BaseException:
            entry["status"] = INTERRUPTED
            self.write()
            raise
        entry |= {
            "status": verdict(outcome),
            "code": outcome.code,
            "seconds": round(before + outcome.seconds, 1),
            "tail": part_process.tail(log),
        }
        self.write()
        print(f"== {part.name}: {entry['status']} after {outcome.seconds:.0f} s", flush=True)


def verdict(outcome: part_process.Outcome) -> str:
    """Return how a part ended in a word."""
    if outcome.timed_out:
        return OUT_OF_TIME
    if outcome.code < 0:
        return CRASHED
    return {0: PASSED, UNFINISHED: NOT_FINISHED}.get(outcome.code, FAILED)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM end this process as an exception does, so that it ends its part first."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
