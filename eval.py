"""Evaluate a checkpoint of train_imagenet.py, or a timm model by name.

    python eval.py output/digits/best.pt
    python eval.py output/vil_tiny/best.pt --data.path /data/imagenet --ema
    python eval.py deit_tiny_patch16_224 --data.path /data/imagenet
    python eval.py vim_t_midclstok_76p1acc.pth --model vim_tiny --data.path /data/imagenet

Exit codes: see vil/training/errors.py.
"""

import sys

from vil.training.errors import run_script
from vil.training.evaluation import (
    EvalConfig,
    describe,
    json_path,
    load_subject,
    run_evaluation,
    write_result,
)
from vil.training.recipes import parse_arguments
from vil.training.report import new_console


def main() -> None:
    """Evaluate as the command line says."""
    options = parse_arguments(EvalConfig, sys.argv[1:])
    path = json_path(options)
    subject = load_subject(options)
    result = run_evaluation(subject, options)
    console = new_console()
    console.print(describe(result))
    if path is not None:
        write_result(path, result)
        console.print(f"written  {path}")


if __name__ == "__main__":
    sys.exit(run_script(main))
