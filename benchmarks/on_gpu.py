"""Run on a GPU all that this repository wants to know of one, within a time.

    python -m benchmarks.on_gpu --minutes 25 [--output DIR] [--parts ...] [--wheels FOLDER]
    python -m benchmarks.on_gpu --report [--output DIR]
    python -m benchmarks.on_gpu --prepare FOLDER
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

For a machine without a network, ``--prepare`` collects the wheels that it may lack into a folder; brought
along and named by ``--wheels`` (the default is wheels/, if there is such a folder) those that are missing
or too old are used by the parts, without being installed. ``--build-mamba-ssm`` builds its kernel from
the source among them while the checks run, and leaves the wheel there. A copy without its history takes
the commit that records name from VIL_COMMIT. ``--toy`` runs every part tiny, on the CPU, to see that it
would run; its records are kept apart and marked.
"""

import argparse
import sys
import tempfile
from pathlib import Path

SETTINGS_FIRST = True  # for vil: the parts import torch, this only starts them

if not __package__:
    sys.exit("from the root of the checkout, run it as a module: python -m benchmarks.on_gpu")

from benchmarks import on_gpu_report, wheels
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
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", metavar="FOLDER")
    parser.add_argument("--build-mamba-ssm", action="store_true", help="while the checks run")
    parser.add_argument("--toy", action="store_true", help="tiny, without a GPU")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--report", action="store_true", help="print what the records say")
    other.add_argument("--prepare", type=Path, metavar="FOLDER", help="collect wheels")
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
    if args.prepare:
        for path in wheels.collect(args.prepare):
            print(f"{path.stat().st_size / 1e6:7.1f} MB  {path.name}")
        return 0
    with tempfile.TemporaryDirectory(prefix="on_gpu-") as site:
        used = wheels.use(args.wheels, Path(site))
        if used:
            print(f"carried: {', '.join(used)}", flush=True)
        sys.path[:0] = [site, str(ROOT)]
        from benchmarks import on_gpu_run  # imports the library, which needs what was carried

        folder = args.output
        facts = on_gpu_run.facts(Path(site))
        if facts["device"] is None and not args.toy:
            print("benchmarks.on_gpu needs a GPU; --toy tries it without one", file=sys.stderr)
            return 2
        slug = "toy" if args.toy else on_gpu_run.slug(facts["device"])
        folder = folder or (WORK / "toy" / "records" if args.toy else RESULTS / slug)
        session = on_gpu_run.Session(
            folder, WORK / slug, facts, args.minutes, toy=args.toy, site=Path(site)
        )
        chosen = [part for part in PARTS if part.name in args.parts]
        source = args.wheels if args.build_mamba_ssm and not args.toy else None
        passed = session.run(chosen, again=args.again, build_from=source)
    print(on_gpu_report.report(folder))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
