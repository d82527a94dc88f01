"""Kill training runs at random moments, resume them, and compare with an undisturbed run.

    python -m tools.faults.kills --kills 40 [--seed 0]

However often it is killed and resumed, a run must end bit-identical in weights, average, optimiser state, log, best
checkpoint and skipped.txt. --kills counts SIGKILLs that hit a living process. The cases are images in
folders and in shards, 0 and 2 data-loading workers, and 1, 2 and 4 training processes. Half of the moments are drawn
uniformly over the run; the other half aim at checkpoint writing, the time after it, and evaluation.
Everything runs on CPUs with a tiny model. The exit status is 1 if anything differs or goes wrong.
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

SAVE_MINUTES = (0.0, 0.005, 1e6)  # save at every step, several times an epoch, after epochs only
MOST_KILLS = 6  # per run
GRACE = 5.0  # seconds for the other processes to exit after one is killed


class Attempt:
    """One start of all processes of a run."""

    sessions: ClassVar[set[int]] = set()
    """Sessions of all processes ever started; their data-loading workers stay in them."""

    def __init__(self, case: Case, recipe: Path, folder: Path, save_minutes: float) -> None:
        """Start the processes; their output goes to a file beside the run's folder."""
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
        """Wait until a process fails or all end; return False if this takes longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while running := [process for process in self.processes if process.exitcode is None]:
            if any(process.exitcode for process in self.processes):
                return True
            if not wait([p.sentinel for p in running], max(deadline - time.monotonic(), 0)):
                return False
        return True

    def kill(self, rng: random.Random, duration: float) -> str | None:
        """Kill one process at a random moment; ``duration`` is the seconds of an undisturbed run.

        Returns:
            The activity of the killed process, or None if the run ended first.
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
        """Give all processes GRACE seconds to end, then kill the rest, as torchrun would after a failure."""
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                process.kill()
                process.join()

    def _await(self, event: str, count: int) -> bool:
        """Wait for the ``count``-th event; return False if a process ends or time runs out first."""
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
        """Return a number that changes to a new value, not 0, with each event."""
        if event == "replaced":
            return self.last.stat().st_ino if self.last.exists() else 0
        return int(self.activities[0] == ACTIVITIES.index(event))


def _moment(rng: random.Random, duration: float) -> tuple[float, str | None, int]:
    """Draw a delay after the start (None), or after the n-th time that rank 0 does something."""
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
    """Outcome of the undisturbed run."""
    seconds: float
    """Duration of that run."""
    runs: int = 0
    resumes: int = 0
    """Starts that found a checkpoint and steps left to do."""
    at: Counter = field(default_factory=Counter)
    """Activities of the killed processes."""
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Number of kills that hit."""
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
    """Kill runs of a case until ``kills`` kills have hit; resume each run until it ends."""
    tally = left_alone(root, case)
    while tally.kills < kills and len(tally.problems) < 3:
        rng = random.Random(f"{seed} {case} {tally.runs}")
        _kill_run(root, case, tally, rng, min(rng.randint(1, MOST_KILLS), kills - tally.kills))
    return tally


def _kill_run(root: Path, case: Case, tally: Tally, rng: random.Random, most: int) -> None:
    """Kill a run, resume it until it ends, and compare its outcome."""
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
    # After a kill, the other ranks and the killed rank's data-loading workers fail with tracebacks.
    if any(codes) or ((case.processes, case.workers) == (1, 0) and "Traceback" in printed):
        how = f"ended with {codes}" if ended else "hung"
        tally.problems.append(f"{folder.name}: {how}\n{tail(attempt.log)}")
    elif found := differing(tally.reference, outcome(folder)):
        tally.problems.append(f"{folder.name}: other {', '.join(found)}")


def _faults(folder: Path) -> list[str]:
    """Return the problems of a killed run's folder: each of its checkpoints must load."""
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
    """Wait until the data-loading workers of killed processes exit, and name the ones that remain."""
    deadline = time.monotonic() + seconds
    while True:
        left = [str(pid) for pid, stat in processes() if int(stat[3]) in Attempt.sessions]
        if not left or time.monotonic() > deadline:
            return [f"loader processes are left: {', '.join(left)}"] if left else []
        time.sleep(0.2)


def main() -> int:
    """Kill runs of every case, print a line for each case, and return the exit status."""
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
