"""Kill workers of real torchrun jobs, which must resume on their own, and stop jobs that are then restarted.

    python -m lab.faults.torchrun [--kills 2] [--seed 0]

Each job must end bit-identical to an undisturbed one. For every four jobs that lose a worker, rounded up, one job
gets SIGTERM. The exit status is 1 if anything differs.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lab.faults import runs
from lab.faults.kills import Tally, left_alone
from lab.faults.runs import PATIENCE, Case, differing, outcome, tail, write_recipe
from lab.faults.server import ROOT

EPOCHS = 10  # long enough for a signal to hit


class Torchrun:
    """A real torchrun of two workers."""

    def __init__(self, case: Case, root: Path, folder: Path) -> None:
        """Start torchrun; its output is appended to a file beside the run's folder."""
        self.log = folder.with_suffix(".log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "3", str(ROOT / "train_imagenet.py")]
        command += ["--config", str(write_recipe(root, case, EPOCHS))]
        command += ["--run.output", str(folder), "--run.save-minutes", "0.002"]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.restarts = 0

    def workers(self) -> dict[int, int]:
        """Return the process of each rank, and record how often torchrun restarted them."""
        found = {}
        for pid, stat in list(runs.processes()):
            if int(stat[1]) == self.process.pid:
                with suppress(OSError, KeyError):
                    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    environment = dict(line.split("=", 1) for line in lines if "=" in line)
                    found[int(environment["RANK"])] = pid
                    restarts = int(environment["TORCHELASTIC_RESTART_COUNT"])
                    self.restarts = max(self.restarts, restarts)
        return found

    def wait(self) -> int:
        """Wait for torchrun to end, counting restarts, and return its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.workers()
            if time.monotonic() > deadline:
                self.process.terminate()
                self.process.wait()
            time.sleep(0.1)
        return self.process.returncode


def disturb(
    root: Path, case: Case, alone: Tally, number: int, rng: random.Random, kill: bool
) -> tuple[bool, str | None]:
    """Kill a worker, after which torchrun must resume on its own, or send torchrun SIGTERM and restart it.

    Returns:
        Whether the signal hit before the run ended, and what went wrong, if anything.
    """
    folder = root / f"torchrun-{'kill' if kill else 'stop'}-{number}"
    run = Torchrun(case, root, folder)
    while not (folder / "previous.pt").exists() and run.process.poll() is None:
        time.sleep(0.01)  # until the second checkpoint: training is under way
    time.sleep(rng.uniform(0, alone.seconds / 2))
    victim = run.workers().get(rng.randrange(2)) if kill else run.process.pid
    with suppress(ProcessLookupError):
        os.kill(victim or 0, 0 if victim is None else signal.SIGKILL if kill else signal.SIGTERM)
    code = run.wait()
    hit = bool(victim) and (run.restarts > 0 or code != 0)
    good = code == 0 and run.restarts == 1
    if not kill:
        good = Torchrun(case, root, folder).wait() == 0 and run.restarts == 0
    printed = run.log.read_text()
    # Workers that have trained every epoch and are about to exit have nothing to save.
    hit = hit and "resumed  finished before" not in printed
    good = good and printed.count("resumed  ") == 1
    problem = None
    if not good and hit:
        problem = f"{folder.name} went wrong:\n{tail(run.log)}"
    elif found := differing(alone.reference, outcome(folder)):
        problem = f"{folder.name}: other {', '.join(found)}"
    name = "SIGKILL" if kill else "SIGTERM"
    verdict = "different" if problem else "equal" if hit else "not hit"
    print(f"{verdict:9} {case.slug}, {name}, code {code}, {run.restarts} restarts", flush=True)
    return hit, problem


def main() -> int:
    """Kill a worker of some torchruns, stop a quarter as many, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2, help="torchruns that lose a worker")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    args = parser.parse_args()
    problems, alone = [], {}
    with tempfile.TemporaryDirectory() as name, runs.fork_server():
        root = Path(name)
        runs.make_images(root)
        for kill, wanted in ((True, args.kills), (False, -(-args.kills // 4))):
            hits = 0
            for number in itertools.count():  # a run that was not hit is repeated
                if hits == wanted:
                    break
                case = Case(("folder", "wds")[number % 2], (0, 2)[number // 2 % 2], 2)
                if case.dataset not in alone:
                    alone[case.dataset] = left_alone(root, case, EPOCHS)
                rng = random.Random(f"{args.seed} {kill} {number}")
                hit, problem = disturb(root, case, alone[case.dataset], number, rng, kill)
                hits += hit or problem is not None
                problems += [problem] if problem else []
    print("\n".join(problems) or "all equal")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
