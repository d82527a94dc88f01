"""Train a Vision Longhorn, or any timm model, on images.

Without arguments: a small ViL on handwritten digits, about a minute on two CPU cores.

    python train_imagenet.py
    python train_imagenet.py --config configs/vil_tiny.yaml --data.path /data/imagenet
    python train_imagenet.py --config output/vil_tiny-.../config.yaml --run.resume

Exit codes: see vil/training/errors.py.
"""

import sys
from pathlib import Path

from timm.utils import random_seed

from vil.training.checkpoint import start_or_resume
from vil.training.data import TrainData, ValData, check_same_classes
from vil.training.errors import run_script
from vil.training.files import open_run_folder
from vil.training.loop import fit
from vil.training.recipes import load_config
from vil.training.report import Report, new_console, print_banner
from vil.training.setup import build_training

DEFAULT_RECIPE = Path(__file__).parent / "configs" / "digits.yaml"


def main() -> None:
    """Train as the command line says."""
    config, recipe = load_config(sys.argv[1:], DEFAULT_RECIPE)
    random_seed(config.run.seed)
    training = build_training(config)
    train_data = TrainData(config, training.device)
    val_data = ValData(config, training.device)
    check_same_classes(train_data, val_data)
    folder = open_run_folder(config.run, recipe)
    config, history = start_or_resume(folder, training, config)
    console = new_console()
    print_banner(console, training, train_data, val_data, config, folder)
    with Report(console, folder, config, train_data.batches_per_epoch, history) as report:
        fit(training, train_data, val_data, config, folder, report)
    report.summarize(config.model.name, val_data.num_images)


if __name__ == "__main__":
    sys.exit(run_script(main))
