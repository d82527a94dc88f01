"""Train the exact form with the rounding of its GPU kernels, emulated token by token on a CPU.

    python -m lab.experiments.rounding recall --seeds 0 1 2
    python -m lab.experiments.rounding digits --seeds 0 1 2
    python -m lab.experiments.tables output/rounding_digits.json --by kernels --show top1:1 loss:3

Inputs are bfloat16. The kernels differ in what they round beyond that:

- ``unrounded``: nothing.
- ``chunks``: as ``vil/kernels/triton/exact.py``. Operands of products are TF32, and the backward pass starts each chunk
  of 16 tokens from a state in bfloat16.
- ``registers``: as ``exact_fragments.py``. C and eps W are bfloat16 before they change the state and its gradient, and
  the backward pass carries the state back by C. The state, its gradient and dY have two parts in bfloat16.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.benchmarks.budget import UNFINISHED, Budget, add_seconds
from lab.experiments import images, recall
from lab.experiments.records import Record, Row, product, run_all
from lab.experiments.recurrences import RECURRENCES, LonghornExact
from vil.kernels import backends, reference
from vil.kernels.interface import ScanArgs, ScanKey, ScanResult
from vil.kernels.plan import forget_plans

KERNELS = ("unrounded", "chunks", "registers")
CHUNK = 16


def bfloat16(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to bfloat16."""
    return x.to(torch.bfloat16).to(torch.float32)


def two_parts(x: Tensor) -> Tensor:
    """Return float32 numbers as the sum of two numbers of bfloat16."""
    first = bfloat16(x)
    return first + bfloat16(x - first)


def tf32(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to TF32, to the nearest."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def unchanged(x: Tensor) -> Tensor:
    """Return the numbers."""
    return x


# Roundings of C and eps W, and of other operands.
ROUNDINGS = {"unrounded": (unchanged, unchanged), "chunks": (tf32, tf32), "registers": (bfloat16, two_parts)}


class ExactScan(torch.autograd.Function):
    """The exact scan of one direction: x and v (B, L, D), q and k (B, L, M), float32 -> (B, L, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, q: Tensor, k: Tensor, kernels: str) -> Tensor:
        """Scan; v are the step sizes with their bias."""
        solution, operand = ROUNDINGS[kernels]
        eps = 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp(-v))
        state, outputs, kept, before = x.new_zeros(*x[:, 0].shape, k.shape[2]), [], [], []
        for t in range(x.shape[1]):
            if t % CHUNK == 0:
                before.append(state)
            recalled = (operand(state) @ k[:, t, :, None]).squeeze(-1)
            c = solution(eps[:, t] * (x[:, t] - recalled))
            state = state + c[..., None] * k[:, t, None]
            outputs.append((operand(state) @ q[:, t, :, None]).squeeze(-1))
            kept.append(c)
        ctx.save_for_backward(x, v, q, k, eps, state, torch.stack(kept, 1), torch.stack(before))
        ctx.kernels = kernels
        return torch.stack(outputs, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x, v, q and k."""
        x, v, q, k, eps, state, c, before = ctx.saved_tensors
        solution, operand = ROUNDINGS[ctx.kernels]
        if ctx.kernels == "chunks":
            c, states = _again(x, k, eps, bfloat16(before))
        dstate, grads = torch.zeros_like(state), [torch.empty_like(t) for t in (x, v, q, k)]
        dx, dv, dq, dk = grads
        exp_minus_v = torch.exp(-v)
        for t in reversed(range(x.shape[1])):
            after = states[t + 1] if ctx.kernels == "chunks" else state
            d = operand(dy[:, t])
            dstate = dstate + d[..., None] * q[:, t, None]
            dq[:, t] = (d[:, None] @ operand(after)).squeeze(1)
            exact = eps[:, t] * (operand(dstate) @ k[:, t, :, None]).squeeze(-1)
            w, here = solution(exact), c[:, t]
            dx[:, t] = exact if ctx.kernels == "registers" else w
            dv[:, t] = dx[:, t] * here * exp_minus_v[:, t]
            step = here[..., None] * k[:, t, None]
            state = states[t] if ctx.kernels == "chunks" else state - step
            by_norm = -2 * (w * here).sum(-1, keepdim=True) * k[:, t]
            dk[:, t] = (here[:, None] @ operand(dstate) - w[:, None] @ operand(state)).squeeze(1) + by_norm
            dstate = dstate - w[..., None] * k[:, t, None]
        return *grads, None


def _again(x: Tensor, k: Tensor, eps: Tensor, before: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return C and the states before all tokens and after the last, from the states before chunks."""
    kept, states, state = [], [], before[0]
    for t in range(x.shape[1]):
        state = before[t // CHUNK] if t % CHUNK == 0 else state
        states.append(state)
        kept.append(tf32(eps[:, t] * (x[:, t] - (tf32(state) @ k[:, t, :, None]).squeeze(-1))))
        state = state + kept[-1][..., None] * k[:, t, None]
    return torch.stack(kept, 1), [*states, state]


# ------------------------------------------------------------------------------------------- models


class Plan:
    """Scan in both directions with a gate, as ``interface.ScanPlan``."""

    writes_small = False

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels

    def _scan(self, args: ScanArgs) -> Tensor:
        args = args._replace(dt=reference.dt_proj(args.dt, args.dt_weight)).to(torch.float32)
        y = 0
        for n in (0, 1):
            x, v, q, k = args.x[n], args.dt[n] + args.bias[n], args.q[n], args.k[n]
            given = [t.flip(1) if n else t for t in (x, v, q, k)]
            own = ExactScan.apply(*given, self.kernels)
            y = y + (own.flip(1) if n else own) + args.D[n] * x
        return y * F.silu(args.z) / 2

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the output."""
        return self._scan(args).to(args.x.dtype), None, None, None

    def backward(self, args: ScanArgs, grad: Tensor, *_: Any) -> ScanArgs:
        """Return the gradients of ``forward``."""
        dt = reference.dt_proj(args.dt, args.dt_weight)
        leaves = [None if t is None else t.detach() for t in args._replace(dt=dt, dt_weight=None)]
        with torch.enable_grad():
            given = [t.requires_grad_() for t in leaves if t is not None]
            gradients = iter(torch.autograd.grad(self.forward(ScanArgs(*leaves))[0], given, grad))
        return ScanArgs(*(None if t is None else next(gradients) for t in leaves))


class Emulated:
    """Backend with the rounding of these kernels, as ``interface.Backend``."""

    writes_halves, arena = False, contextlib.nullcontext()
    conv_plan, small_weights = reference.conv_plan, staticmethod(reference.small_weights)

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels

    def scan_plan(self, key: ScanKey) -> Plan:
        """Return the plan of a scan."""
        return Plan(self.kernels)


@contextlib.contextmanager
def emulated(kernels: str) -> Iterator[None]:
    """Let models compute their exact scans with the rounding of these kernels."""
    forget_plans()
    with mock.patch.object(backends, "_module", return_value=Emulated(kernels)):
        yield
    forget_plans()


def rounded_recurrence(kernels: str) -> type[LonghornExact]:
    """Return the causal mixer of ``recurrences.py``, with bfloat16 inputs and the rounding of these kernels."""

    class Rounded(LonghornExact):
        def forward(self, x: Tensor) -> Tensor:
            beta, k, q = self.x_proj(x).split(self.splits, dim=-1)
            tensors = (t.to(torch.bfloat16).float() for t in (x, self.dt_proj(beta), q, k))
            return ExactScan.apply(*tensors, kernels).to(torch.bfloat16).float()

    return Rounded


# --------------------------------------------------------------------------------------------- runs


def run(data: str, kernels: str, seed: int) -> Row:
    """Train one model and return its figures."""
    if data == "recall":
        RECURRENCES[kernels] = rounded_recurrence(kernels)
        settings = dataclasses.asdict(recall.SETTINGS["short"])
        return recall.run(kernels, 64, 4.6e-3, seed, **settings)
    arguments = (*images.DATA[data].arguments, "--run.amp")
    chosen = dataclasses.replace(images.DATA[data], arguments=arguments)
    with emulated(kernels):
        return images.run(chosen, "ViL exact", 2e-3, seed)


def main() -> int:
    """Make the runs that the record lacks and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", choices=("recall", *images.DATA))
    add("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    add("--seeds", nargs="+", type=int, default=[0])
    add("--jobs", type=int, default=1, help="runs at a time")
    add_seconds(parser)
    args = parser.parse_args()
    if args.data in images.WRITE:
        images.WRITE[args.data]()
    path = Path("output", f"rounding_{args.data}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = Record(path, {"data": args.data})
    runs = product(kernels=args.kernels, seed=args.seeds)
    left = run_all(record, functools.partial(run, args.data), runs, args.jobs, Budget(args.seconds))
    return UNFINISHED if left else 0


if __name__ == "__main__":
    sys.exit(main())
