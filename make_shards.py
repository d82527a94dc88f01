"""Pack a folder of images into webdataset shards, or verify such shards.

    python make_shards.py /data/imagenet /data/shards
    python make_shards.py verify /data/shards

The same command again finishes what was interrupted. Exit codes: see vil/training/errors.py.
"""

import sys

from vil.training.errors import run_script
from vil.training.recipes import parse_arguments
from vil.training.report import new_console
from vil.training.shard_writer import MakeOptions, VerifyOptions, make_shards, verify_shards


def main() -> None:
    """Do what the command line says."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["verify"]:
        verify_shards(parse_arguments(VerifyOptions, arguments[1:]), new_console())
    else:
        make_shards(parse_arguments(MakeOptions, arguments), new_console())


if __name__ == "__main__":
    sys.exit(run_script(main))
