r"""Run this repository's checks and benchmarks on a GPU: 25 minutes in total, at most ten in one call.

    python -m benchmarks.on_gpu              # repeat it until its exit status is not 75
    python -m benchmarks.on_gpu --report     # print the records
    python -m benchmarks.on_gpu --toy        # run every part on the CPU with tiny sizes, to check that it works

Parts run in the order of ``PARTS``: kernels against the reference, tiny models at 224 px, scans against the
roofline, training steps, then everything else. Each part runs in separate processes, with a share of the 25
minutes. A failed or hanging part costs only its share. A part that lacked time gets the time that the rest leaves.

A call ends after ``--call`` minutes with status 75; repeat it to resume. You may also kill it at any moment:
records are written row by row, and the interrupted part is resumed. Records, logs and compiled kernels are in
output/on_gpu/GPU, which git ignores. Copy that folder to resume on another machine. Records of other versions or
another GPU are refused. ``--again PART`` deletes a part's results and repeats it. Every part names its commit.

For a machine without a network, install the missing wheels here and copy them there:

    pip install --target site --python-version 3.12 --only-binary :all: --no-deps tyro docstring-parser typeguard \
        webdataset braceexpand pydantic pydantic-core annotated-types typing-inspection 'pillow<13'
    PYTHONPATH=site VIL_COMMIT=$(git describe --always) python -m benchmarks.on_gpu
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.budget import UNFINISHED
from vil.training.files import write_text

ROOT = Path(__file__).resolve().parents[1]
SHORTEST_S = 10.0  # no part starts with less time left
SAMPLE_S = 5.0  # between two readings of clock and power
SHARE = 0.9  # of a part's time, after which it starts nothing new
PASSED, FAILED, LACKED_TIME, NOT_RUN = "passed", "failed", "lacked time", "not run"


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other, each in a separate process group.

    In their arguments, {output} is the folder of the records. {seconds} is the time after which a command
    should start nothing new.
    """

    name: str
    seconds: int
    """Share of the 25 minutes."""
    command: str
    """Arguments of Python on a GPU; ``&&`` separates commands."""
    toy: str
    """The same, tiny and without a GPU."""


_MODELS = (
    "-m benchmarks.models deit_tiny_patch16_224 vil_tiny vil_tiny_exact vim_tiny --memory"
    " --passes training inference --seconds {seconds}"
)
_SCANS = "-m benchmarks.scan --resume --output {output}/scans.json --seconds {seconds}"
_IMAGES = "-m experiments.fractals {output}/fractals --classes"
_STEPS = (
    "train_imagenet.py --config configs/fractals.yaml --data.path {output}/fractals --run.output {output}/steps"
    " --schedule.epochs 1 --schedule.warmup-epochs 0 --model.num-classes"
)
_TINY = (
    "--run.no-amp --data.num-workers 0 --data.batch-size 8 --augment.mix-size 8 --model.num-classes 4"
    " --model.img-size 32 --model.depth 2 --model.embed-dim 48"
)
_TESTS = "-m pytest -q -p no:cacheprovider tests/kernels/triton/test_on_gpu.py"
_RECALL = (
    "-m experiments.recall --setting published --recurrences longhorn longhorn_exact mamba --rates 2.2e-3"
    " --seeds 123 --jobs 3 --output {output}/recall.json --seconds {seconds} --lengths"
)
_FRACTALS = (
    "-m experiments.images fractals_224 --models ViL 'ViL exact' ViM 'DeiT tiny' --rates 2e-3 --seeds 0"
    " --output {output}/fractals.json --seconds {seconds} --steps"
)
PARTS = (
    Part("kernels", 150, "-m vil.selfcheck", "-m vil.selfcheck"),
    Part(
        "models",
        350,
        f"{_MODELS} --output {{output}}/models.json --device cuda --ways graphs compile eager --sizes 224:128",
        f"{_MODELS} --output {{output}}/models.json --rounds 1 --sizes 32:1",
    ),
    Part(
        "scans",
        280,
        f"{_SCANS} --limit 120 --shapes 128,197,384 8,6085,384 64,197,768 1,6085,384",
        f"{_SCANS} --toy --repetitions 2",
    ),
    Part(
        "steps",  # 1,000 steps in bfloat16; the trainer counts skipped steps
        200,
        f"{_IMAGES} 100 --images 640 --jobs 14 && {_STEPS} 100 --run.amp --data.num-workers 14"
        " --data.batch-size 64 --augment.mix-size 64",
        f"{_IMAGES} 4 --images 16 --size 32 --jobs 1 && {_STEPS} 4 {_TINY}",
    ),
    Part(
        "large images",
        200,
        f"{_MODELS} --output {{output}}/large_images.json --device cuda --ways graphs eager --sizes 512:32 1024:8",
        f"{_MODELS} --output {{output}}/large_images.json --rounds 1 --sizes 48:1",
    ),
    Part("tests", 120, f"{_TESTS} tests/kernels/triton/test_scans.py -n 14", _TESTS),
    Part(
        "blocks",
        80,
        "-m benchmarks.tune --jobs 14 --output {output}/blocks.json --seconds {seconds}",
        "-m benchmarks.tune --toy --output {output}/blocks.json --seconds {seconds}",
    ),
    Part(
        "recall",
        60,
        f"{_RECALL} 512 --dims 64",
        f"{_RECALL} 64 --dims 16 --vocabulary 64 --epochs 2 --train-count 64 --test-count 64",
    ),
    Part("fractals", 60, f"{_FRACTALS} 100", f"{_FRACTALS} 1 --per-class 4 --with {_TINY}"),
)

AIM = 0.75
"""Share of the speed that bytes and instructions allow, which models should reach."""
ALLOWED = {
    "H100": {"vil_tiny": 3.45, "vil_tiny_exact": 2.31},
    "H200": {"vil_tiny": 4.23, "vil_tiny_exact": 2.34},
}
"""Least time of a training step at 224 px, relative to deit_tiny's.

The H200's times follow from kernels/README.md, "What moves through memory". The H100's times come from the same
count with its 3.35 TB/s, made once outside of this repository.
"""


class Session:
    """State shared by all calls of the command with the same folder."""

    def __init__(self, folder: Path, about: dict[str, Any], toy: bool) -> None:
        """Open the record, or create it.

        Raises:
            SystemExit: If the folder has a record of another GPU or of other versions.
        """
        self.folder, self.toy = folder, toy
        self.about = about | {"toy": toy}
        self.commit = self.about.pop("commit")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.path = folder / "on_gpu.json"
        self.parts: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            content = json.loads(self.path.read_text())
            if content["environment"] != self.about:
                sys.exit(
                    f"error: {folder} has results of {content['environment']}, but this run has "
                    f"{self.about}; move it away"
                )
            self.parts = content["parts"]
        for part in PARTS:
            self.parts.setdefault(part.name, {"status": NOT_RUN, "seconds": 0.0})
        self.write()

    def write(self) -> None:
        """Write the record."""
        content = {"environment": self.about, "parts": self.parts}
        write_text(self.path, json.dumps(content, indent=1) + "\n")

    def again(self, names: Sequence[str]) -> None:
        """Delete the results of parts, but keep the time that they took."""
        for name in names:
            self.parts[name]["status"] = NOT_RUN
            (self.folder / f"{_file(name)}.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / name, ignore_errors=True)  # output of "steps"
            (self.folder / "logs" / f"{_file(name)}.log").unlink(missing_ok=True)

    def next(self) -> Part | None:
        """Return the first unfinished part with time left in its share, else the first unfinished one."""
        left = [p for p in PARTS if self.parts[p.name]["status"] in (NOT_RUN, LACKED_TIME)]
        return min(left, key=lambda p: self.parts[p.name]["seconds"] >= p.seconds, default=None)

    def run(self, minutes: float, call_minutes: float) -> int:
        """Run parts until the time is up; return the exit status."""
        end = time.monotonic() + 60 * call_minutes
        while part := self.next():
            entry = self.parts[part.name]
            total = 60 * minutes - sum(entry["seconds"] for entry in self.parts.values())
            call, own = end - time.monotonic(), part.seconds - entry["seconds"]
            if total < SHORTEST_S:
                return 1
            if call < SHORTEST_S:
                return UNFINISHED
            self._run(part, min(call, total, max(own, SHORTEST_S) if own > 0 else total))
        return int(any(entry["status"] != PASSED for entry in self.parts.values()))

    def _run(self, part: Part, limit: float) -> None:
        entry, start = self.parts[part.name], time.monotonic()
        entry["commit"] = self.commit
        before, end = entry["seconds"], start + limit
        print(f"== {part.name}, at most {limit:.0f} s", flush=True)
        log = self.folder / "logs" / f"{_file(part.name)}.log"
        status, commands = PASSED, (part.toy if self.toy else part.command).split(" && ")
        while commands and status == PASSED:
            seconds = f"{SHARE * (end - time.monotonic()):.0f}"
            command = commands.pop(0).format(output=self.folder, seconds=seconds)
            with log.open("ab") as file, self._process(command, file) as process:
                while (code := process.poll()) is None and time.monotonic() < end:
                    entry["seconds"] = round(before + time.monotonic() - start, 1)
                    entry.setdefault("mhz_and_watts", []).extend(_mhz_and_watts())
                    self.write()  # so that the time counts even if this call is killed
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(min(SAMPLE_S, max(end - time.monotonic(), 0.1)))
            status = {0: PASSED, None: LACKED_TIME, UNFINISHED: LACKED_TIME}.get(code, FAILED)
        entry |= {"status": status, "seconds": round(before + time.monotonic() - start, 1)}
        self.write()
        print(f"{_tail(log)}\n== {part.name}: {status}", flush=True)

    @contextlib.contextmanager
    def _process(self, command: str, output: IO[bytes]) -> Iterator[subprocess.Popen]:
        """Run Python in a new process group, which is killed at the end of the ``with`` block."""
        variables = dict(os.environ, PYTHONUNBUFFERED="1", VIL_COMMIT=self.commit)
        variables["TRITON_CACHE_DIR"] = str(self.folder / "triton")
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        if self.toy:
            variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)], stdout=output, stderr=output, cwd=ROOT,
            env=variables, start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _mhz_and_watts() -> Iterator[list[float]]:
    """Yield the GPU's clock in MHz and power in watts, or nothing without a GPU."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        yield [float(number) for number in found.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, ValueError):
        return


def facts() -> tuple[bool, dict[str, Any]]:
    """Return whether there is a GPU, and the device and versions that figures depend on.

    A subprocess asks PyTorch, so that this process holds no GPU memory.
    """
    code = "import json, torch; from benchmarks.provenance import environment; "
    code += "print(json.dumps([torch.cuda.is_available(), environment()]))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return tuple(json.loads(found.stdout.splitlines()[-1]))


def _file(part: str) -> str:
    return part.replace(" ", "_")


def _tail(log: Path, characters: int = 2000) -> str:
    return log.read_bytes()[-characters:].decode(errors="replace").strip()


def report(folder: Path) -> str:
    """Return the status of every part, the aims, and the end of every log as Markdown."""
    content = json.loads((folder / "on_gpu.json").read_text())
    about = content["environment"]
    lines = [f"{'TOY, nothing was measured: ' if about['toy'] else ''}{about}", ""]
    lines += ["| part | | s | MHz | W | commit |", "|---|---|---|---|---|---|"]
    for name, entry in content["parts"].items():
        seen = zip(*entry.get("mhz_and_watts", []), strict=True)
        clock, power = [f"{min(own):.0f} to {max(own):.0f}" for own in seen] or ("", "")
        cells = [name, entry["status"], f"{entry['seconds']:.0f}", clock, power]
        lines.append(f"| {' | '.join(cells)} | {entry.get('commit', '')} |")
    allowed = next((v for name, v in ALLOWED.items() if name in about["device"]), {})
    models = folder / "models.json"
    for row in json.loads(models.read_text())["rows"] if models.exists() else []:
        if row["model"] in allowed and row["pass"] == "training" and not row["error"]:
            aim = allowed[row["model"]] / AIM
            found = f"{row['seconds_ratio']:.2f} of deit_tiny's time, aim {aim:.2f}"
            lines.append(f"\n{row['model']}, training at {row['size']} px, {row['way']}: {found}")
    for name in content["parts"]:
        log = folder / "logs" / f"{_file(name)}.log"
        lines += ["", f"{name}:", "", _tail(log)] if log.exists() else []
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run or report, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="of all calls together")
    parser.add_argument("--call", type=float, default=9.0, help="minutes of this call")
    names = [part.name for part in PARTS]
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="PART")
    parser.add_argument("--output", type=Path, help="default: output/on_gpu/GPU")
    parser.add_argument("--toy", action="store_true", help="tiny, without a GPU")
    parser.add_argument("--report", action="store_true", help="print what the records say")
    args = parser.parse_args(arguments)
    on_gpu, about = facts()
    if not (on_gpu or args.toy or args.report):
        parser.error("PyTorch finds no GPU here; --toy tries it without one")
    name = "toy" if args.toy else re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    folder = (args.output or ROOT / "output" / "on_gpu" / name).resolve()
    status = 0
    if not args.report:
        session = Session(folder, about, args.toy)
        session.again(args.again)
        status = session.run(args.minutes, args.call)
    print(report(folder))
    return status


if __name__ == "__main__":
    sys.exit(main())
