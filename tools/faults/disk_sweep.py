"""Let every call of a training run about its files fail, one run for each, and tell what became of it.

    python -m tools.faults.disk_sweep [--every N] [--jobs N] [--only NAME ...]

A library is put between Python and the C library (disk_faults.c). It counts the calls about files below the
folder of the data and the folder of the run, by kind, and lets the n-th one fail, once or from then on, with
what a disk says: no space left, no locks, an error of input or output, or half of the bytes. Each n of each
kind is a run of train_imagenet.py on the CPU with a minuscule model, and another one after it without the
fault where that was not the end. All of it takes hours on one core; --every 1000, one call of each function about
each file, takes 15 minutes. Each run ends in one of these ways:

- went on: exit 0, with the same bits as a run left alone;
- warned: exit 0 and a warning about a file that was not written; the same command again writes it, but for rows of
  steps.csv and the weights of an epoch that is over;
- stopped: exit 3 (data) or 5 (run) and one line that names the place; the same command, when the fault is gone, ends
  with the same bits as a run left alone;
- lost: anything else, which is printed, and makes the exit status 1.

In the first three no temporary file is left, no good checkpoint put aside, and no file of the user touched. A line
about a loss has five words, of which the first is 0 for the disk of the data and 1 for that of the run. --fault takes
them, to see that run alone:

    python -m tools.faults.disk_sweep --only "going on" --fault 1 read EIO once 40
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.faults.disk_faults import COMPILER, DiskFault
from tools.faults.disk_scenarios import SCENARIOS
from tools.faults.disk_sweep_runs import Sweep, faulty_server


def main() -> int:
    """Print what was lost, and how many runs ended how; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of calls alike every N-th only")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="runs, drawn among all")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="+", help=f"of {', '.join(s.name for s in SCENARIOS)}")
    parser.add_argument("--fault", nargs=5, help="only this one, and what the run printed")
    args = parser.parse_args()
    if COMPILER is None:
        parser.error("a C compiler named cc is needed")
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        root = Path(name).resolve()
        with faulty_server(root):
            for number, scenario in enumerate(SCENARIOS):
                if args.only and scenario.name not in args.only:
                    continue
                sweep = Sweep(root / str(number), scenario)
                faults = list(sweep.faults(args.every * scenario.coarse))
                if args.fault:
                    faults = [DiskFault.parse(*args.fault)]
                if len(faults) > args.most:
                    faults = random.Random(0).sample(faults, args.most)
                print(f"{scenario.name}: {len(faults)} faults", flush=True)
                for point in pool.map(sweep.inject, faults):
                    ends[point.verdict.end] += 1
                    if args.fault:
                        print(point.printed)
                    if args.fault or point.verdict.end in ("lost", "not reached"):
                        print(point, flush=True)
    print(f"{ends.total()} runs: {', '.join(f'{n} {end}' for end, n in ends.most_common())}")
    return 1 if ends["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
