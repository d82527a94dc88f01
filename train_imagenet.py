"""Train a Vision Longhorn, or any timm model, on images.

Without arguments: a small ViL on handwritten digits, about a minute on two CPU cores.

    python train_imagenet.py
    python train_imagenet.py --config configs/vil_tiny.yaml --data.path /data/imagenet
    torchrun --nproc-per-node 8 --max-restarts 5 train_imagenet.py --config configs/vil_tiny.yaml \
        --data.path /data/imagenet

The same command again, with the --run.output of a run, continues it where it was.
Exit codes: see vil/training/errors.py.
"""

import sys
from pathlib import Path

SETTINGS_FIRST = True  # for vil, which then leaves importing torch to when the settings are right

from vil.training.errors import run_script
from vil.training.launcher import world_size
from vil.training.recipes import load_config
from vil.training.run.preflight import check_settings

DEFAULT_RECIPE = Path(__file__).parent / "configs" / "digits.yaml"


def main() -> None:
    """Train as the command line says."""
    config = load_config(sys.argv[1:], DEFAULT_RECIPE)
    listed = check_settings(config, world_size())

    from vil.training.run.train import train

    train(config, listed)


if __name__ == "__main__":
    sys.exit(run_script(main))
