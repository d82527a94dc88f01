"""Let each file call of a training run fail, one run per call, and report how each run ends.

    python -m tools.faults.disk_sweep [--every N] [--jobs N] [--only NAME ...]

A preloaded library (disk_faults.c) sits between Python and the C library. It counts the calls on files in the data
folder and the run folder, by kind. It lets the n-th call fail, once or from then on, as a disk would: no space left,
no locks, an I/O error, or half of the bytes. Each n of each kind is a run of train_imagenet.py on the CPU with a tiny
model. If it does not end as an undisturbed run does, a second run without the fault follows. The whole sweep takes
hours on one core. With --every 1000, one call of each function on each file, it takes 15 minutes. A run ends in one of
these ways:

- went on: exit 0, bit-identical to an undisturbed run;
- warned: exit 0 and a warning about a file that was not written. Repeating the command writes it, except for rows of
  steps.csv and the weights of a finished epoch;
- stopped: exit 3 (data) or 5 (run) and one line that names the place. Without the fault, repeating the command ends
  bit-identical to an undisturbed run, with the same exceptions for files that the line names;
- lost: anything else. It is printed and makes the exit status 1.

The first three leave no temporary file, set aside no good checkpoint and change no file of the user. In the line of a
loss, five words name the fault, the first 0 (data disk) or 1 (run disk). Pass them to --fault to repeat that run:

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
    """Print losses and the number of runs per ending; return the exit status."""
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
