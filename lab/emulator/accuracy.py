"""Print how gradients of the exact form in bfloat16 err, relative to what rounding its inputs costs.

    python lab/emulator/accuracy.py

The kernels are compiled for sm_90 and emulated. Each number is the norm of an error, divided by the norm of the error
that the reference makes in float64 with bfloat16 inputs instead of unrounded ones. First the kernels in registers,
then those in chunks, for 2 sequences of 197 tokens, 64 channels and 16 states.
"""

import cases
import runtime
from vil.kernels.plan import forget_plans
from vil.kernels.triton.fragment_plan import FragmentPlan

CASE = cases.Case("exact", 2, 197, 64, M=16, dtype="bf16", strides="aligned")
EXACT = cases.Case("exact", 2, 197, 64, M=16, dtype="f32", strides="aligned")  # the same numbers, not rounded


def main() -> None:
    """Print a line for each kind of kernels."""
    runtime.install(90)
    runtime.install_project()
    inputs, dout, _ = cases.scan_inputs(CASE)
    _, truth = cases.scan_reference(CASE, inputs, dout, None)
    _, unrounded = cases.scan_reference(EXACT, cases.scan_inputs(EXACT)[0], dout, None)
    names = [name for name, tensor in inputs._asdict().items() if tensor is not None]
    for kernels in ("registers", "chunks"):
        _, found = cases.scan_run(CASE, inputs, dout, None)
        errors = {
            name: ((ours.double() - exact).norm() / (other - exact).norm()).item()
            for name, ours, exact, other in zip(names, found, truth, unrounded, strict=True)
        }
        shown = ", ".join(f"{name} {errors[name]:.2f}" for name in ("x", "dt", "q", "k", "bias"))
        print(f"in {kernels}: {shown}", flush=True)
        FragmentPlan.fits = staticmethod(lambda key: False)
        forget_plans()


if __name__ == "__main__":
    main()
