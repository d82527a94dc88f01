"""Evaluate a checkpoint of train_imagenet.py, or a timm model by name.

    python eval.py output/digits/best.pt
    python eval.py output/vil_tiny/best.pt --data.path /data/imagenet --ema
    python eval.py deit_tiny_patch16_224 --data.path /data/imagenet
    python eval.py vim_t_midclstok_76p1acc.pth --data.path /data/imagenet --per-class
    torchrun --nproc-per-node 8 eval.py output/vil_tiny/best.pt --data.path /data/imagenet

Exit codes: see vil/training/errors.py.
"""

import sys

SETTINGS_FIRST = True  # for vil, which then leaves importing torch to when the arguments are right

from vil.training.errors import run_script
from vil.training.options import EvalConfig
from vil.training.recipes import parse_arguments


def main() -> None:
    """Evaluate as the command line says."""
    options = parse_arguments(EvalConfig, sys.argv[1:])

    from vil.training.run.evaluation import evaluate_as

    evaluate_as(options)


if __name__ == "__main__":
    sys.exit(run_script(main))
