"""Inject faults into training runs, and tell what became of each and what was lost.

    python -m tools.faults.faults [--only NAME ...] [--output tools/faults/FAULTS.md]

Each fault is injected into train_imagenet.py, run in a process of its own on the CPU with a minuscule
model, and into nothing else. Ends with status 1 if anything was lost.
"""

import argparse
import re
import socket
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.provenance import revision
from tools.faults.fault_cases import FAULTS, Fault
from tools.faults.fault_runs import Laboratory, Verdict
from tools.faults.kills_runs import fork_server
from vil.training.files import write_text
from vil.training.run.setup import versions

_HEAD = """\
# Faults

`python -m tools.faults.faults --output tools/faults/FAULTS.md` injects each of these faults into a small run of
`train_imagenet.py` and writes this page. "The same bits" are those of the weights, their average, the
optimiser's state, the log and the best checkpoint.

| fault | what happens | what is lost |
|---|---|---|
"""


_DISKS = Path(__file__).resolve().parent / "DISK_FAULTS.md"


def of_disks() -> str:
    """Return a line with the number of injection points that disk_sweep.py has last written down."""
    found = re.search(
        r"^(\d+) runs.*?, (\d+) of them with a loss", _DISKS.read_text(), re.MULTILINE
    )
    return (
        f"[{_DISKS.name}]({_DISKS.name}) has {found[1]} more injection points, calls about files that "
        f"failed one by one, {found[2]} of them with a loss.\n"
    )


def name_of(fault: Fault) -> str:
    """Return a fault's name in the table."""
    return fault.__doc__.strip()


def row(fault: Fault, verdict: Verdict, root: Path) -> str:
    """Return a row of the table, without this run's temporary paths."""
    happened = " ".join(verdict.happened.replace(str(root), "").split())
    happened = re.sub(r"/(data|run)-\d+/?", r"/\1/", happened).replace("|", "\\|")
    happened = happened.replace(f"node {socket.gethostname()}", "node host")
    happened = re.sub(r"process \d+ on \S+", "process 1234 on host", happened)
    return f"| {name_of(fault)} | {happened} | {verdict.lost} |"


def judge(fault: Fault, lab: Laboratory) -> Verdict:
    """Inject a fault; what the injection itself did not expect counts as a loss."""
    try:
        return fault(lab)
    except Exception as error:
        return Verdict(f"{type(error).__name__}: {error}", "unknown")


def main() -> int:
    """Print and write the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of functions of faults_of_*.py")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.only or fault.__name__ in args.only]
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as name, fork_server():
        lab = Laboratory(Path(name))
        for fault in chosen:
            start = time.monotonic()
            verdict = judge(fault, lab)
            bad += not verdict.nothing_lost
            rows.append(row(fault, verdict, lab.root))
            print(f"{time.monotonic() - start:5.1f} s  {rows[-1]}", flush=True)
    environment = ", ".join(f"{k} {v}" for k, v in (versions() | {"commit": revision()}).items())
    tail = f"\n{len(chosen)} faults, {bad} of them with a loss. {environment}.\n"
    print(tail.strip())
    if args.output:
        args.output.parent.mkdir(exist_ok=True)
        write_text(args.output, _HEAD + "\n".join(rows) + "\n" + tail + "\n" + of_disks())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
