"""Print how gradients of the exact form in bfloat16 err, relative to what rounding its inputs costs.

    python lab/emulator/accuracy.py

The kernels are compiled for sm_90 and emulated. Each number is the norm of an error, divided by the norm of the error
that the reference makes in float64 with bfloat16 inputs instead of unrounded ones. First the kernels in registers,
then those in chunks, for 2 sequences of 197 tokens, 64 channels and 16 states.
"""

import sys
from pathlib import Path

import torch

import runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kernels.scans import random_args, random_gradients, results_of
from vil.kernels import reference
from vil.kernels.plan import forget_plans
from vil.kernels.triton import backend
from vil.kernels.triton.fragment_plan import FragmentPlan

RECURRENCE, SHAPE = "longhorn_exact", (2, 197, 64, 16)


def main() -> None:
    """Print a line for each kind of kernels."""
    runtime.install(90)
    runtime.install_project()
    args = random_args(RECURRENCE, SHAPE, dtype=torch.float64)
    rounded = random_args(RECURRENCE, SHAPE, dtype=torch.bfloat16)
    grads = random_gradients(rounded)[0].double(), None
    truth = results_of(reference, rounded.to(torch.float64), RECURRENCE, grads=grads)
    unrounded = results_of(reference, args, RECURRENCE, grads=grads)
    for kernels in ("registers", "chunks"):
        found = results_of(backend, rounded, RECURRENCE)
        errors = {
            name: ((found[name].double() - truth[name]).norm() / (unrounded[name] - truth[name]).norm()).item()
            for name in ("x", "dt", "q", "k", "bias")
        }
        print(f"in {kernels}:", ", ".join(f"{name} {error:.2f}" for name, error in errors.items()), flush=True)
        FragmentPlan.fits = staticmethod(lambda key: False)
        forget_plans()


if __name__ == "__main__":
    main()
