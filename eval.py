"""Evaluate a checkpoint of train_imagenet.py, or a timm model by name.

    python eval.py output/digits/best.pt
    python eval.py output/vil_tiny/best.pt --data.path /data/imagenet --ema
    python eval.py deit_tiny_patch16_224 --data.path /data/imagenet
    python eval.py vim_t_midclstok_76p1acc.pth --data.path /data/imagenet --per-class
    torchrun --nproc-per-node 8 eval.py output/vil_tiny/best.pt --data.path /data/imagenet

Exit codes: see vil/training/errors.py.
"""

import startup  # noqa: F401  before torch

import sys

from vil.training.evaluation import EvalConfig, evaluate_as
from vil.training.program import run_script
from vil.training.recipes import parse


def main() -> None:
    """Evaluate as the command line says."""
    evaluate_as(parse(EvalConfig, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
