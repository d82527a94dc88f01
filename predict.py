"""Predict the classes of photographs with a release, a checkpoint, or a timm model by name.

    python predict.py my_model photo.jpg
    python predict.py output/finetune/best.pt photos --output predictions.csv

Exit codes: see vil/training/errors.py.
"""

import startup  # noqa: F401  before torch

import sys

from vil.training.prediction import PredictConfig, predict_as
from vil.training.program import run_script
from vil.training.recipes import parse


def main() -> None:
    """Predict as the command line says."""
    predict_as(parse(PredictConfig, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
