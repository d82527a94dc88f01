"""Run another program's script with this package's models registered: ``python -m vil.run SCRIPT ARGS``.

    python -m vil.run train.py --model vil_tiny --data-dir photos
    torchrun --nproc-per-node 4 -m vil.run train.py --model vil_tiny --data-dir photos

The script runs as with ``python SCRIPT ARGS``: it is ``__main__``, its folder comes first in ``sys.path``, and its exit
status is returned. Use it for timm's scripts train.py, validate.py, inference.py and benchmark.py.

Exit status: the script's, or 2 if SCRIPT is missing or not a file. ``--help`` instead of SCRIPT prints this text.
"""

import runpy
import sys
from pathlib import Path

import vil  # noqa: F401  registers the models


def main() -> int:
    """Run the script that the command line names; return the exit status."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        got = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        print(
            f"usage: python -m vil.run SCRIPT ARGS; SCRIPT must be a file, got {got}",
            file=sys.stderr,
        )
        return 2
    del sys.argv[0]  # leaves SCRIPT and ARGS
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # it was the current folder
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
