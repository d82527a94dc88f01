"""Run on a GPU all that this repository wants to know of one, within a time.

    python -m benchmarks.on_gpu --minutes 25 [--output DIR] [--parts ...]
    python -m benchmarks.on_gpu --report [--output DIR]
    python -m benchmarks.on_gpu --toy

In this order: the checks against the reference, the scans against the roofline and their rivals, whole
models against DeiT, 1,000 bfloat16 steps, block sizes, recall at 512 tokens, and training on fractals
for as long as is left (``on_gpu_parts.py``). Every part is a process of its own with a share of the
time; what one leaves is the later ones'. One that crashes or hangs is told, and the rest goes on. Records
and the outcome of every part are written to DIR as they come: benchmarks/results/<name of the GPU> if it
is not named, and logs to output/on_gpu.

The same command again continues: --minutes are those of all calls together, parts that are done are
not run again as long as their files, the GPU and the versions are the same, and whoever was stopped
loses no more than the part, or the row of it, that was running. Parts that ran out of their time take
another turn after the rest. ``--again`` runs parts anew. Exit status 0 if every part is done and passed.
Compiled kernels are in output/on_gpu, too: whoever continues on another machine brings that along.

For a machine without a network, bring what it lacks as wheels, and put them on the path without installing them:

    pip download -d wheels tyro webdataset einops pydantic   # here
    pip install --no-index --find-links wheels --target site tyro webdataset einops pydantic  # there
    PYTHONPATH=site python -m benchmarks.on_gpu --minutes 25

A copy without its history takes the commit that records name from VIL_COMMIT. ``--toy`` runs every part tiny, on the CPU, to see that it
would run; its records are kept apart and marked.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.exit("from the root of the checkout, run it as a module: python -m benchmarks.on_gpu")

from benchmarks import on_gpu_report
from benchmarks.on_gpu_parts import PARTS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "output" / "on_gpu"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="of all calls together")
    parser.add_argument("--output", type=Path, help="where records go")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--again", action="store_true", help="run the parts anew")
    parser.add_argument("--toy", action="store_true", help="tiny, without a GPU")
    parser.add_argument("--report", action="store_true", help="print what the records say")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    return args


def report(output: Path | None) -> None:
    """Print the tables of one folder, or of every folder of results."""
    folders = [output] if output else sorted(path.parent for path in RESULTS.glob("*/on_gpu.json"))
    for folder in folders:
        print(on_gpu_report.report(folder))
    if not folders:
        print(f"no records of a GPU in {RESULTS}: run python -m benchmarks.on_gpu --minutes 25")


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says and return the exit status."""
    args = parse(arguments)
    if args.report:
        report(args.output)
        return 0
    from benchmarks import on_gpu_run  # imports the library, which may be missing for a report

    facts = on_gpu_run.facts()
    if facts["device"] is None and not args.toy:
        print("benchmarks.on_gpu needs a GPU; --toy tries it without one", file=sys.stderr)
        return 2
    slug = "toy" if args.toy else on_gpu_run.slug(facts["device"])
    folder = args.output or (WORK / "toy" / "records" if args.toy else RESULTS / slug)
    session = on_gpu_run.Session(folder, WORK / slug, facts, args.minutes, toy=args.toy)
    chosen = [part for part in PARTS if part.name in args.parts]
    passed = session.run(chosen, again=args.again)
    print(on_gpu_report.report(folder))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
