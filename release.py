"""Write a checkpoint of train_imagenet.py as safetensors with the model's configuration.

    python release.py output/vil_tiny/best.pt vil_tiny_in1k

timm.create_model("local-dir:vil_tiny_in1k", pretrained=True) then loads it. You can push the folder to
a hub unchanged.
Exit codes: see vil/training/errors.py.
"""

import startup  # noqa: F401  before torch

import sys

from vil.training.program import run_script
from vil.training.recipes import parse
from vil.training.release import ReleaseConfig, release


def main() -> None:
    """Release as the command line says."""
    release(parse(ReleaseConfig, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
