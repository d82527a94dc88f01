"""Let every call of a training run about its files fail, one run for each, and tell what became of it.

    python -m tools.faults.disk_sweep [--every N] [--jobs N] [--only NAME ...] [--output FILE]

A library is put between Python and the C library (disk_faults.c). It counts the calls about files below the
folder of the data and the folder of the run, by kind, and lets the n-th one fail, once or from then on, with
what a disk says: no space left, no locks, an error of input or output, or half of the bytes. Each n of each
kind is a run of train_imagenet.py on the CPU with a minuscule model, and another one after it without the
fault where that was not the end. Ends with status 1 if anything was lost. All of it takes hours on one core;
--every 1000, one call of each function about each file, 20 minutes.

A line about a loss has five words, of which the first is 0 for the disk of the data and 1 for that of the
run. --fault takes them, to see that run alone:

    python -m tools.faults.disk_sweep --only "going on" --fault 1 read EIO once 40
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.provenance import revision
from tools.faults.disk_faults import COMPILER, KINDS, DiskFault
from tools.faults.disk_scenarios import DISKS, SCENARIOS
from tools.faults.disk_sweep_runs import Point, Sweep, faulty_server
from vil.training.distributed import versions
from vil.training.files import write_text

_ENDS = ("went on", "warned", "stopped", "lost")

_HEAD = """\
# Disk faults

`python -m tools.faults.disk_sweep {arguments}` lets the calls that small runs of
`train_imagenet.py` make about their files fail, one at a time or all from one on, and writes this page. The
runs train on images in folders and on shards without indexes, continue from checkpoints, and load by another
process. A row is a kind of call on the disk of the data or of the run; "all" is a disk that is gone.
Each run has ended in one of these ways:

- **went on**: exit 0, with the same bits as a run left alone;
- **warned**: exit 0 and a warning about a file that was not written; the same command again writes it;
- **stopped**: exit 3 (data) or 5 (run) and one line that names the place; the same command, when the
  fault is gone, ends with the same bits as a run left alone;
- **lost**: anything else.

In none of these ways is a temporary file left, a good checkpoint put aside, or a file of the user touched.

"""


def table(points: list[Point], calls: Counter) -> str:
    """Count the ends, by disk and kind of call.

    Args:
        points: All of them.
        calls: Of the runs left alone, by disk and kind.
    """
    ends = Counter((p.fault.disk, p.fault.kind, p.verdict.end) for p in points)
    lines = [
        f"| disk | call | calls | runs | {' | '.join(_ENDS)} |",
        f"|---|---|{'---|' * (len(_ENDS) + 2)}",
    ]
    for disk in range(len(DISKS)):
        for kind in KINDS:
            row = [ends[disk, kind, end] for end in _ENDS]
            if sum(row):
                numbers = [calls[disk, kind], sum(row), *row]
                lines.append(f"| {DISKS[disk]} | {kind} | {' | '.join(map(str, numbers))} |")
    total = [sum(end == p.verdict.end for p in points) for end in _ENDS]
    lines.append(f"| | | | {sum(total)} | {' | '.join(map(str, total))} |")
    return "\n".join(lines) + "\n"


def messages(points: list[Point]) -> str:
    """List what was said, and how often, to be judged by a reader."""
    said = Counter((p.verdict.end, p.verdict.why) for p in points if p.verdict.why)
    return "\n".join(f"{count:5}  {end:8}  {why}" for (end, why), count in sorted(said.items()))


def main() -> int:
    """Print what was lost and the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of calls alike every N-th only")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="runs, drawn among all")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="+", help=f"of {', '.join(s.name for s in SCENARIOS)}")
    parser.add_argument("--fault", nargs=5, help="only this one, and what the run printed")
    parser.add_argument("--messages", action="store_true", help="list what the runs said")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    if args.output and (args.fault or args.only):
        parser.error("--output is for all of it, without --fault and --only")
    if COMPILER is None:
        parser.error("a C compiler named cc is needed")
    points, calls, start = [], Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        root = Path(name).resolve()
        with faulty_server(root):
            for number, scenario in enumerate(SCENARIOS):
                if args.only and scenario.name not in args.only:
                    continue
                sweep = Sweep(root / str(number), scenario)
                calls.update((call.disk, call.kind) for call in sweep.calls)
                calls.update((call.disk, "all") for call in sweep.calls)
                faults = list(sweep.faults(args.every * scenario.coarse))
                if args.fault:
                    faults = [DiskFault.parse(*args.fault)]
                if len(faults) > args.most:
                    faults = random.Random(0).sample(faults, args.most)
                print(f"{scenario.name}: {len(faults)} faults", flush=True)
                for point in pool.map(sweep.inject, faults):
                    points.append(point)
                    if args.fault:
                        print(point.printed)
                    if args.fault or point.verdict.end in ("lost", "not reached"):
                        print(point, flush=True)
    text = table(points, calls)
    how = "" if args.every == 1 else f" (of calls alike every {args.every}th, and at least one)"
    environment = ", ".join(f"{k} {v}" for k, v in (versions() | {"commit": revision()}).items())
    lost = sum(p.verdict.end == "lost" for p in points)
    tail = f"\n{len(points)} runs{how}, {lost} of them with a loss. {environment}.\n"
    if args.messages:
        print(messages(points))
    print(f"{text}{tail}{time.monotonic() - start:.0f} s")
    if args.output:
        args.output.parent.mkdir(exist_ok=True)
        write_text(args.output, _HEAD.format(arguments=" ".join(sys.argv[1:])) + text + tail)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
