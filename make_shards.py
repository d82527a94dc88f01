"""Pack a folder of images into webdataset shards.

    python make_shards.py /data/imagenet /data/shards

To finish an interrupted command, repeat it. Exit codes: see vil/training/errors.py.
"""

import threads  # noqa: F401  before torch

import sys

from vil.training.make_shards import MakeOptions, make_shards
from vil.training.program import run_script
from vil.training.recipes import parse


def main() -> None:
    """Pack as the command line says."""
    make_shards(parse(MakeOptions, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
