"""Start a program of downstream/ with heads of few channels that look at few boxes.

torchrun --nproc-per-node 2 tests/downstream/small_heads.py coco --generated 4 ...
"""

import importlib
import sys

import torch

from downstream import cascade
from vil.training.program import run_script

SIZES = {"CHANNELS": 16, "_HIDDEN": 32, "_SAMPLES": 16}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, value in SIZES.items():
        setattr(cascade, name, value)
    program = importlib.import_module(f"downstream.{sys.argv.pop(1)}")
    sys.exit(run_script(program.main))
