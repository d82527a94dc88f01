"""Pack a folder of images into webdataset shards, or verify such shards.

    python make_shards.py /data/imagenet /data/shards
    python make_shards.py verify /data/shards

The same command again finishes what was interrupted. Exit codes: see vil/training/errors.py.
"""

import sys

SETTINGS_FIRST = True  # for vil, which then leaves importing torch to when the arguments are right

from vil.training.errors import run_script
from vil.training.options import MakeOptions, VerifyOptions
from vil.training.recipes import parse_arguments


def main() -> None:
    """Do what the command line says."""
    arguments = sys.argv[1:]
    verify = arguments[:1] == ["verify"]
    options = parse_arguments(
        VerifyOptions if verify else MakeOptions, arguments[1:] if verify else arguments
    )

    from vil.training.console import new_console
    from vil.training.data.shard_writer import make_shards, verify_shards

    (verify_shards if verify else make_shards)(options, new_console())


if __name__ == "__main__":
    sys.exit(run_script(main))
