"""Kill training runs at random moments, start them again, and compare with a run left alone.

    python -m tools.faults.kills --kills 200 [--seed 0] [--output FILE]
    python -m tools.faults.kills --torchrun 20

Killed and continued as often as chance has it, a run must end with the same bits in weights,
average, optimiser state, log, best checkpoint and names of what was skipped. --kills counts SIGKILLs
that hit a living process, over images in folders and in shards, 0 and 2 loader processes, and 1, 2
and 4 training processes. Half of the moments are drawn uniformly over the run; the others aim at the
writing of checkpoints, what follows it, and evaluation. --torchrun starts real torchruns, each of
which loses one worker and must continue by itself, and for every fourth one more that gets SIGTERM
instead and is started again.

All is on CPUs, with a minuscule model. Ends with status 1 if anything differs or goes wrong.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.provenance import revision
from tools.faults.kills_runs import (
    CASES,
    Tally,
    differing,
    fork_server,
    kill_case,
    make_images,
    orphans,
)
from tools.faults.kills_torchrun import torchrun_rows
from vil.training.distributed import versions
from vil.training.files import write_text


def check_kills(root: Path, kills: int, seed: int) -> list[Tally]:
    """Kill runs of every case and print a line for each."""
    tallies, references = [], {}
    print(f"{'case':32} runs kills resumes  verdict    seconds  killed while")
    for number, case in enumerate(CASES):
        start = time.monotonic()
        share = kills // len(CASES) + (number < kills % len(CASES))
        tally = kill_case(root, case, share, seed)
        alike = references.setdefault(case.equals, tally.reference)
        if differing(alike, tally.reference):
            tally.problems.append("differs from the same with another number of loader processes")
        at = ", ".join(f"{name} {count}" for name, count in tally.at.most_common())
        left = sum(tally.survivors.values())
        print(
            f"{case!s:32} {tally.runs:4} {tally.kills:5} {tally.resumes:7}  {tally.verdict:9}  "
            f"{time.monotonic() - start:7.0f}  {at}; {tally.without} before any checkpoint"
            + (f"; {left} others did not end by themselves" if left else ""),
            flush=True,
        )
        tallies.append(tally)
    return tallies


def check_torchrun(root: Path, count: int, seed: int) -> list[dict]:
    """Kill and stop torchruns and print a line for each."""
    print(
        "signal   rank  case                             code  restarts  resumes  seconds  verdict"
    )
    rows = []
    for row in torchrun_rows(root, count, seed):
        verdict = "different" if row["problem"] else "equal" if row["hit"] else "not hit"
        print(
            f"{row['signal']}  {row['rank']!s:4}  {row['case']:32} {row['code']:4}  "
            f"{row['restarts']:8}  {row['resumes']:7}  {row['seconds']:7.1f}  {verdict}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> int:
    """Run, print tables, write the figures as JSON if asked to, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs that hit, over all cases")
    parser.add_argument("--torchrun", type=int, default=0, help="torchruns that lose a worker")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--output", type=Path, help="write the figures there")
    args = parser.parse_args()
    environment = versions() | {"commit": revision(), "seed": args.seed}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    with tempfile.TemporaryDirectory() as name, fork_server():
        root = Path(name)
        make_images(root)
        tallies = check_kills(root, args.kills, args.seed) if args.kills else []
        rows = check_torchrun(root, args.torchrun, args.seed) if args.torchrun else []
    problems = [problem for tally in tallies for problem in tally.problems]
    problems += [row["problem"] for row in rows if row["problem"]] + orphans()
    for problem in problems:
        print(problem)
    if args.output:
        figures = {"environment": environment, "kills": [vars(tally) for tally in tallies]}
        figures |= {"torchrun": rows, "problems": problems}
        write_text(args.output, json.dumps(figures, indent=1) + "\n")
    hits = sum(tally.kills for tally in tallies) + sum(row["hit"] for row in rows)
    print(f"{hits} kills, " + (f"{len(problems)} problems" if problems else "all equal"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
