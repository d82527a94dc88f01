"""Kill training runs at random moments, start them again, and compare with a run left alone.

    python -m tools.faults.kills --kills 40 [--seed 0]

Killed and continued as often as chance has it, a run must end with the same bits in weights, average, optimiser
state, log, best checkpoint and names of what was skipped. --kills counts SIGKILLs that hit a living process, over
images in folders and in shards, 0 and 2 loader processes, and 1, 2 and 4 training processes. Half of the moments are
drawn uniformly over the run; the others aim at the writing of checkpoints, what follows it, and evaluation.
All is on CPUs, with a minuscule model. Ends with status 1 if anything differs or goes wrong.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.provenance import revision
from tools.faults.runs import (
    CASES,
    CONTEXT,
    PATIENCE,
    Case,
    differing,
    fork_server,
    free_port,
    make_images,
    outcome,
    processes,
    tail,
    write_recipe,
)
from tools.faults.server import ACTIVITIES, train
from vil.training.checkpoint import CHECKPOINTS, load_checkpoint
from vil.training.distributed import versions
from vil.training.errors import OutputError

SAVE_MINUTES = (0.0, 0.005, 1e6)  # at every step, some times an epoch, after epochs only
MOST_KILLS = 6  # of a run
GRACE = 5.0  # seconds that the others have to end by themselves after one is killed


class Attempt:
    """The processes of a run, started once."""

    sessions: ClassVar[set[int]] = set()
    """Of all processes ever started; their loader processes belong to them."""

    def __init__(self, case: Case, recipe: Path, folder: Path, save_minutes: float) -> None:
        """Start them; their output goes to a file beside the run's folder."""
        self.last, self.log = folder / "last.pt", folder.with_suffix(".log")
        self.activities = CONTEXT.RawArray("b", case.processes)
        arguments = ["--config", str(recipe), "--run.output", str(folder)]
        arguments += ["--run.save-minutes", str(save_minutes)]
        port, self.processes = str(free_port()), []
        for rank in range(case.processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {k: str(v) for k, v in place.items()} if case.processes > 1 else {}
            rest = (arguments, environment, self.log, self.activities, rank)
            self.processes.append(CONTEXT.Process(target=train, args=rest))
        self.start = time.monotonic()
        for process in self.processes:
            process.start()
            self.sessions.add(process.pid)

    def wait(self, seconds: float) -> bool:
        """Wait until one has failed or all have ended, or for some seconds; tell whether it is so."""
        deadline = time.monotonic() + seconds
        while running := [process for process in self.processes if process.exitcode is None]:
            if any(process.exitcode for process in self.processes):
                return True
            if not wait([p.sentinel for p in running], max(deadline - time.monotonic(), 0)):
                return False
        return True

    def kill(self, rng: random.Random, duration: float) -> str | None:
        """Kill one process at a moment of a run that takes so long when left alone.

        Returns:
            What it was doing, or None if the run ended before.
        """
        seconds, event, count = _moment(rng, duration)
        if event is not None and not self._await(event, count):
            return None
        since = self.start if event is None else time.monotonic()
        rank = rng.randrange(len(self.processes))
        if self.wait(max(since + seconds - time.monotonic(), 0)):
            return None
        victim = self.processes[rank]
        victim.kill()
        activity = ACTIVITIES[self.activities[rank]]
        victim.join()
        return activity if victim.exitcode == -signal.SIGKILL else None

    def settle(self) -> None:
        """Wait for all to end once one has, as torchrun would, and kill the others."""
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                process.kill()
                process.join()

    def _await(self, event: str, count: int) -> bool:
        """Wait until something happens for the nth time; False if a process ends before."""
        before = self._state(event)
        while all(process.exitcode is None for process in self.processes):
            now = self._state(event)
            count -= bool(now) and now != before
            if count == 0:
                return True
            before = now
            if time.monotonic() - self.start > PATIENCE:
                return False
            time.sleep(0.0002)
        return False

    def _state(self, event: str) -> int:
        """Return what changes to another number, not 0, with each event."""
        if event == "replaced":
            return self.last.stat().st_ino if self.last.exists() else 0
        return int(self.activities[0] == ACTIVITIES.index(event))


def _moment(rng: random.Random, duration: float) -> tuple[float, str | None, int]:
    """Draw seconds after the start, or after the main process did something for the nth time."""
    kind = rng.random()
    if kind < 0.5:
        return rng.uniform(0, duration), None, 0
    if kind < 0.65:
        return rng.uniform(0, 0.003), "replaced", rng.randint(1, 3)
    if kind < 0.8:
        return rng.uniform(0, 0.02), "saving", rng.randint(1, 4)
    return rng.uniform(0, 0.03), "evaluating", rng.randint(1, 3)


@dataclass
class Tally:
    """What happened to the runs of a case."""

    case: str
    reference: dict[str, str]
    """Outcome of the run left alone."""
    seconds: float
    """Of that run."""
    runs: int = 0
    resumes: int = 0
    """Starts that found a checkpoint and steps left to do."""
    at: Counter = field(default_factory=Counter)
    """What the killed processes were doing."""
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Those that hit."""
        return self.at.total()


def left_alone(root: Path, case: Case, epochs: int = 3) -> Tally:
    """Run a case without kills."""
    folder = root / f"{case.slug}-alone-{epochs}"
    attempt = Attempt(case, write_recipe(root, case, epochs), folder, 1e6)
    ended = attempt.wait(PATIENCE)
    seconds = time.monotonic() - attempt.start
    attempt.settle()
    if not ended or any(process.exitcode for process in attempt.processes):
        raise RuntimeError(f"{case}: the run left alone failed:\n{tail(attempt.log)}")
    return Tally(str(case), outcome(folder), seconds)


def kill_case(root: Path, case: Case, kills: int, seed: int) -> Tally:
    """Kill runs of a case until a number of kills has hit; each goes on until it ends."""
    tally = left_alone(root, case)
    while tally.kills < kills and len(tally.problems) < 3:
        rng = random.Random(f"{seed} {case} {tally.runs}")
        _kill_run(root, case, tally, rng, min(rng.randint(1, MOST_KILLS), kills - tally.kills))
    return tally


def _kill_run(root: Path, case: Case, tally: Tally, rng: random.Random, most: int) -> None:
    """Kill a run, continue it until it ends, and compare."""
    folder, recipe = root / f"{case.slug}-{tally.runs}", write_recipe(root, case)
    save_minutes = SAVE_MINUTES[tally.runs % len(SAVE_MINUTES)]
    tally.runs += 1
    for _ in range(most):
        attempt = Attempt(case, recipe, folder, save_minutes)
        activity = attempt.kill(rng, tally.seconds)
        if activity is None:
            break
        attempt.settle()
        tally.at[activity] += 1
        tally.problems += [f"{folder.name}: {fault}" for fault in _faults(folder)]
    else:
        attempt = Attempt(case, recipe, folder, save_minutes)
    ended = attempt.wait(PATIENCE)
    attempt.settle()
    printed = attempt.log.read_text()
    tally.resumes += printed.count("resumed  after")
    codes = [process.exitcode for process in attempt.processes]
    # Of several, others fail when one is killed; so do loader processes whose parent is.
    if any(codes) or ((case.processes, case.workers) == (1, 0) and "Traceback" in printed):
        how = f"ended with {codes}" if ended else "hung"
        tally.problems.append(f"{folder.name}: {how}\n{tail(attempt.log)}")
    elif found := differing(tally.reference, outcome(folder)):
        tally.problems.append(f"{folder.name}: other {', '.join(found)}")


def _faults(folder: Path) -> list[str]:
    """Say what is wrong with a killed run's folder: a checkpoint that is there must load."""
    found = []
    for name in CHECKPOINTS:
        try:
            if (folder / name).exists():
                load_checkpoint(folder / name)
        except OutputError as error:
            found.append(str(error))
    if (folder / "previous.pt").exists() and not (folder / "last.pt").exists():
        found.append("previous.pt without last.pt")
    return found


def orphans(seconds: float = 20.0) -> list[str]:
    """Wait for the loader processes of killed processes to notice, and name those that do not."""
    deadline = time.monotonic() + seconds
    while True:
        left = [str(pid) for pid, stat in processes() if int(stat[3]) in Attempt.sessions]
        if not left or time.monotonic() > deadline:
            return [f"loader processes are left: {', '.join(left)}"] if left else []
        time.sleep(0.2)


def main() -> int:
    """Run, print a line for each case and torchrun, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="SIGKILLs that hit, over all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    args = parser.parse_args()
    environment: dict[str, Any] = versions() | {"commit": revision(), "seed": args.seed}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    problems, hits, references = [], 0, {}
    with tempfile.TemporaryDirectory() as name, fork_server():
        root = Path(name)
        make_images(root)
        for number, case in enumerate(CASES):
            share = args.kills // len(CASES) + (number < args.kills % len(CASES))
            tally = kill_case(root, case, share, args.seed)
            if differing(references.setdefault(case.equals, tally.reference), tally.reference):
                tally.problems.append("differs from another number of loader processes")
            at = ", ".join(f"{name} {count}" for name, count in tally.at.most_common())
            verdict = "different" if tally.problems else "equal"
            print(
                f"{case!s:32} {verdict:9} {tally.runs} runs, {tally.resumes} resumes, {tally.kills} kills: {at}",
                flush=True,
            )
            problems += tally.problems
            hits += tally.kills
    for problem in [*problems, *orphans()]:
        print(problem)
    print(f"{hits} kills, " + (f"{len(problems)} problems" if problems else "all equal"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
