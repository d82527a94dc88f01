"""Kill training runs at random moments, resume them, and compare with an undisturbed run.

    python -m lab.faults.kills --kills 40 [--seed 0]

However often it is killed and resumed, a run must end bit-identical in weights, average, optimiser state, log, best
checkpoint and skipped.txt. --kills counts SIGKILLs that hit a living process. The cases are images in
folders and in shards, 0 and 2 data-loading workers, and 1, 2 and 4 training processes. Half of the moments are drawn
uniformly over the run; the other half aim at checkpoint writing and the time after it.
Everything runs on CPUs with a tiny model. The exit status is 1 if anything differs or goes wrong.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import ClassVar

from lab.benchmarks.provenance import revision
from lab.faults import runs
from lab.faults.runs import CONTEXT, PATIENCE, Case, differing, outcome, tail, write_recipe
from lab.faults.server import train
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
        self.folder, self.log = folder, folder.with_suffix(".log")
        arguments = ["--config", str(recipe), "--run.output", str(folder)]
        arguments += ["--run.save-minutes", str(save_minutes)]
        port, self.processes = str(runs.free_port()), []
        for rank in range(case.processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {k: str(v) for k, v in place.items()} if case.processes > 1 else {}
            rest = (arguments, environment, self.log)
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

    def kill(self, rng: random.Random, duration: float) -> bool:
        """Kill one process at a random moment; ``duration`` is the seconds of an undisturbed run.

        Returns:
            Whether a living process was killed.
        """
        kind, since = rng.random(), self.start
        if kind < 0.5:
            seconds = rng.uniform(0, duration)
        else:  # a checkpoint is being written, or was just written
            event = ".last.pt.*.tmp" if kind < 0.8 else "last.pt"
            if not self._await(event, rng.randint(1, 4)):
                return False
            seconds, since = rng.uniform(0, 0.02 if kind < 0.8 else 0.003), time.monotonic()
        rank = rng.randrange(len(self.processes))
        if self.wait(max(since + seconds - time.monotonic(), 0)):
            return False
        victim = self.processes[rank]
        victim.kill()
        victim.join()
        return victim.exitcode == -signal.SIGKILL

    def settle(self) -> None:
        """Give all processes GRACE seconds to end, then kill the rest, as torchrun would after a failure."""
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                process.kill()
                process.join()

    def _await(self, pattern: str, count: int) -> bool:
        """Wait for the ``count``-th new file of a name; return False if a process ends or time runs out first."""

        def inodes() -> set[int]:
            found = set()
            for path in self.folder.glob(pattern):
                with suppress(FileNotFoundError):  # renamed since it was listed
                    found.add(path.stat().st_ino)
            return found

        before = inodes()
        while all(process.exitcode is None for process in self.processes):
            now = inodes()
            count -= bool(now - before)
            if count == 0:
                return True
            before = now
            if time.monotonic() - self.start > PATIENCE:
                return False
            time.sleep(0.0002)
        return False


@dataclass
class Tally:
    """What happened to the runs of a case."""

    case: Case
    reference: dict[str, str]
    """Outcome of the undisturbed run."""
    seconds: float
    """Duration of that run."""
    runs: int = 0
    kills: int = 0
    """Number of kills that hit."""
    problems: list[str] = field(default_factory=list)


def left_alone(root: Path, case: Case, epochs: int = 3) -> Tally:
    """Run a case without kills."""
    folder = root / f"{case.slug}-alone-{epochs}"
    attempt = Attempt(case, write_recipe(root, case, epochs), folder, 1e6)
    ended = attempt.wait(PATIENCE)
    seconds = time.monotonic() - attempt.start
    attempt.settle()
    if not ended or any(process.exitcode for process in attempt.processes):
        raise RuntimeError(f"{case.slug}: the run left alone failed:\n{tail(attempt.log)}")
    return Tally(case, outcome(folder), seconds)


def kill_case(root: Path, case: Case, kills: int, seed: int) -> Tally:
    """Kill runs of a case until ``kills`` kills have hit; resume each run until it ends."""
    tally = left_alone(root, case)
    while tally.kills < kills and len(tally.problems) < 3:
        rng = random.Random(f"{seed} {case.slug} {tally.runs}")
        _kill_run(root, tally, rng, min(rng.randint(1, MOST_KILLS), kills - tally.kills))
    return tally


def _kill_run(root: Path, tally: Tally, rng: random.Random, most: int) -> None:
    """Kill a run, resume it until it ends, and compare its outcome."""
    case = tally.case
    folder, recipe = root / f"{case.slug}-{tally.runs}", write_recipe(root, case)
    save_minutes = SAVE_MINUTES[tally.runs % len(SAVE_MINUTES)]
    tally.runs += 1
    for _ in range(most):
        attempt = Attempt(case, recipe, folder, save_minutes)
        if not attempt.kill(rng, tally.seconds):
            break
        attempt.settle()
        tally.kills += 1
        tally.problems += [f"{folder.name}: {fault}" for fault in _faults(folder)]
    else:
        attempt = Attempt(case, recipe, folder, save_minutes)
    ended = attempt.wait(PATIENCE)
    attempt.settle()
    printed = attempt.log.read_text()
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
        left = [str(pid) for pid, stat in runs.processes() if int(stat[3]) in Attempt.sessions]
        if not left or time.monotonic() > deadline:
            return [f"loader processes are left: {', '.join(left)}"] if left else []
        time.sleep(0.2)


def main() -> int:
    """Kill runs of every case, print a line for each case, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="SIGKILLs that hit, over all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    args = parser.parse_args()
    environment = versions() | {"commit": revision(), "seed": args.seed}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    problems, hits, references = [], 0, {}
    with tempfile.TemporaryDirectory() as name, runs.fork_server():
        root = Path(name)
        runs.make_images(root)
        for number, case in enumerate(runs.CASES):
            share = args.kills // len(runs.CASES) + (number < args.kills % len(runs.CASES))
            tally = kill_case(root, case, share, args.seed)
            alike = references.setdefault((case.dataset, case.processes), tally.reference)
            if differing(alike, tally.reference):
                tally.problems.append("differs from another number of loader processes")
            verdict = "different" if tally.problems else "equal"
            print(f"{case.slug:10} {verdict:9} {tally.runs} runs, {tally.kills} kills", flush=True)
            problems += tally.problems
            hits += tally.kills
    for problem in [*problems, *orphans()]:
        print(problem)
    print(f"{hits} kills, " + (f"{len(problems)} problems" if problems else "all equal"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
