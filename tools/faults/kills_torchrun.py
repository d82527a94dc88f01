"""Real torchruns that lose a worker, or are asked to stop."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tools.faults.kills_runs import (
    PATIENCE,
    Case,
    Tally,
    differing,
    left_alone,
    outcome,
    processes,
    tail,
    write_recipe,
)
from tools.faults.kills_server import ROOT

EPOCHS = 10  # long enough to be hit


class Torchrun:
    """A real torchrun of two workers."""

    def __init__(self, case: Case, root: Path, folder: Path) -> None:
        """Start it; its output is added to a file beside the run's folder."""
        self.log = folder.with_suffix(".log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "3", str(ROOT / "train_imagenet.py")]
        command += ["--config", str(write_recipe(root, case, EPOCHS))]
        command += ["--run.output", str(folder), "--run.save-minutes", "0.002"]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.restarts = 0

    def workers(self) -> dict[int, int]:
        """Return the process of each rank, and note how often they were started."""
        found = {}
        for pid, stat in list(processes()):
            if int(stat[1]) == self.process.pid:
                with suppress(OSError, KeyError):
                    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    environment = dict(line.split("=", 1) for line in lines if "=" in line)
                    found[int(environment["RANK"])] = pid
                    restarts = int(environment["TORCHELASTIC_RESTART_COUNT"])
                    self.restarts = max(self.restarts, restarts)
        return found

    def wait_for(self, path: Path) -> None:
        """Wait until a file is there, or the end."""
        while not path.exists() and self.process.poll() is None:
            time.sleep(0.01)

    def wait(self) -> int:
        """Wait for the end, counting restarts, and return the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.workers()
            if time.monotonic() > deadline:
                self.process.terminate()
                self.process.wait()
            time.sleep(0.1)
        return self.process.returncode


def kill_torchrun(root: Path, case: Case, alone: Tally, number: int, rng: random.Random) -> dict:
    """Kill a worker of a torchrun, which must continue by itself.

    Args:
        root: Holds the data.
        case: How to run.
        alone: The run left alone.
        number: For the name of the run's folder.
        rng: Draws moment and victim.

    Returns:
        What happened; "hit" is False if the run ended before.
    """
    folder = root / f"torchrun-kill-{number}"
    run = Torchrun(case, root, folder)
    run.wait_for(folder / "last.pt")
    time.sleep(rng.uniform(0, alone.seconds / 2))  # it has begun, and shall not end before
    rank = rng.randrange(2)
    victim = run.workers().get(rank)
    with suppress(ProcessLookupError):
        os.kill(victim or 0, signal.SIGKILL if victim else 0)
    killed = time.monotonic()
    code = run.wait()
    row = {"case": str(case), "signal": "SIGKILL", "rank": rank, "code": code}
    row |= {"seconds": time.monotonic() - killed, "restarts": run.restarts}
    row["resumes"] = run.log.read_text().count("resumed  ")
    row["hit"] = bool(victim) and (run.restarts > 0 or code != 0)
    good = code == 0 and run.restarts == row["resumes"] == 1
    return row | {"problem": _torchrun_problem(run, alone, folder, good or not row["hit"])}


def stop_torchrun(root: Path, case: Case, alone: Tally, number: int, rng: random.Random) -> dict:
    """Send a torchrun SIGTERM, start it again, and compare; see kill_torchrun."""
    folder = root / f"torchrun-stop-{number}"
    run = Torchrun(case, root, folder)
    run.wait_for(folder / "last.pt")
    time.sleep(rng.uniform(0, alone.seconds / 2))  # it has begun, and shall not end before
    run.process.terminate()
    stopped = time.monotonic()
    code = run.wait()
    row = {"case": str(case), "signal": "SIGTERM", "rank": None, "code": code}
    row |= {"seconds": time.monotonic() - stopped, "restarts": run.restarts}
    again = Torchrun(case, root, folder)
    good = again.wait() == 0 and run.restarts == 0
    printed = run.log.read_text()
    row["resumes"] = printed.count("resumed  ")
    # Workers that had trained every epoch and were about to end have nothing to save.
    row["hit"] = code != 0 and "resumed  finished before" not in printed
    good = good and printed.count("stopped by SIGTERM") == 1  # one process of a node says it
    return row | {"problem": _torchrun_problem(run, alone, folder, good or not row["hit"])}


def _torchrun_problem(run: Torchrun, alone: Tally, folder: Path, good: bool) -> str | None:
    """Say what is wrong with a finished torchrun, if anything is."""
    if not good:
        return f"{folder.name} went wrong:\n{tail(run.log)}"
    found = differing(alone.reference, outcome(folder))
    return f"{folder.name}: other {', '.join(found)}" if found else None


def torchrun_rows(root: Path, count: int, seed: int) -> Iterator[dict]:
    """Kill a worker of so many torchruns, and stop a quarter as many; those not hit count extra."""
    alone = {}
    for kind, wanted in ((kill_torchrun, count), (stop_torchrun, -(-count // 4))):
        hits = 0
        for number in itertools.count():
            if hits == wanted:
                break
            case = Case(("folder", "wds")[number % 2], (0, 2)[number // 2 % 2], 2)
            if case.equals not in alone:
                alone[case.equals] = left_alone(root, case, EPOCHS)
            rng = random.Random(f"{seed} {kind.__name__} {number}")
            row = kind(root, case, alone[case.equals], number, rng)
            hits += row["hit"] or row["problem"] is not None
            yield row
