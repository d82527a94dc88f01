"""Train a Vision Longhorn, or any timm model, on images.

Without arguments: a small ViL on handwritten digits, about a minute on two CPU cores.

    python train_imagenet.py
    python train_imagenet.py --config configs/vil_tiny.yaml --data.path /data/imagenet
    torchrun --nproc-per-node 8 --max-restarts 5 train_imagenet.py --config configs/vil_tiny.yaml \
        --data.path /data/imagenet

To resume a run, repeat its command with the same --run.output.
Exit codes: see vil/training/errors.py.
"""

import startup  # noqa: F401  before torch

import sys
from pathlib import Path

from vil.training.program import run_script
from vil.training.recipes import load_config
from vil.training.train import train

DEFAULT_RECIPE = Path(__file__).parent / "configs" / "digits.yaml"


def main() -> None:
    """Train as the command line says."""
    train(load_config(sys.argv[1:], DEFAULT_RECIPE))


if __name__ == "__main__":
    sys.exit(run_script(main))
