"""Time the kernels of a block, and scans next to other implementations, on a GPU; or compile kernels without one.

    python -m lab.benchmarks.gpu_kernels blocks FILE.json    # kernels of a block at 224 px, batch 128
    python -m lab.benchmarks.gpu_kernels scans FILE.json     # both directions with the gate
    python -m lab.benchmarks.gpu_kernels fill 90             # compile for an architecture into Triton's cache

Times are the GPU's, by PyTorch's profiler. If Nsight Compute (``ncu``) is installed, ``blocks`` adds how each kernel
uses the processor. ``scans`` includes the kernels of Longhorn's and Mamba's authors if their modules can be imported.
These scan in one direction, so they get the second one as flipped copies, as in Vision Mamba's code. Without a GPU, the
first two commands run tiny sizes, whose times mean nothing.
"""

import argparse
import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lab.benchmarks import kernels as compiled
from lab.benchmarks import traffic
from lab.benchmarks.steps import PASSES, Step, step_of
from vil import selfcheck
from vil.kernels import ops
from vil.kernels.triton.launch import Launch, compile_together, recording
from vil.training.files import write_text

GPU = torch.cuda.is_available()
DEVICE, BATCH, SIZE, REPEATS = ("cuda", 128, 224, 3) if GPU else ("cpu", 1, 32, 1)
BLOCKS = 3  # whose times are averaged
SHAPES = ((128, 197, 384), (64, 197, 768), (8, 4097, 384), (1, 4097, 384)) if GPU else ((1, 17, 64),)
TINY = ((128, 224, 224), (32, 512, 512), (8, 1024, 1024), (2, 2048, 2048))
SMALL = ((64, 224, 224), (4, 1024, 1024))
ISSUED = "smsp__issue_active.avg.pct_of_peak_sustained_active"
WAITED = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"
MOVED = "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"
RECURRENCES = {"diagonal": "longhorn", "exact": "longhorn_exact", "Mamba": "mamba"}
OFFICIAL = {"longhorn_cuda": "diagonal", "mamba-ssm": "Mamba"}
TOLERANCE = 0.02  # of the norm of an output in bfloat16, between two implementations
Row = dict[str, Any]
Scan = tuple[Callable[..., Tensor], list[Tensor | None]]  # a function and its arguments


def microseconds(step: Step) -> dict[str, float]:
    """Return the time of a step on the device, by name of the kernel; on a CPU, of the operator."""
    for _ in range(REPEATS):
        step()
    kind = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        for _ in range(REPEATS):
            step()
        if GPU:
            torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if not GPU:
            times[event.name] += event.self_cpu_time_total / REPEATS
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / REPEATS
    return times


# ------------------------------------------------------------------------------ kernels of a block


def blocks() -> Iterator[Row]:
    """Yield the kernels of a block of each tiny model, in training and inference."""
    large = torch.ones(1 << (28 if GPU else 20), device=DEVICE)
    bytes_per_us = 2 * large.nbytes / sum(microseconds(large.clone).values())
    for name in compiled.MODELS:
        _, moved, _ = traffic.count(name, SIZE)
        for pass_name in PASSES:
            used = _used(name) if pass_name == "training" else {}
            of_pass = moved["inference" if pass_name == "inference" else "forward + backward"]
            for kernel, us in _block_times(name, pass_name).items():
                row = {"model": name, "pass": pass_name, "kernel": kernel.removesuffix("_kernel")}
                least = sum(k.bytes for k in of_pass if k.name == kernel) / bytes_per_us
                share = {"bytes": round(100 * least / us)} if least and us > 0 else {}
                yield row | {"us": round(us, 1)} | share | used.get(kernel, {})


def _block_times(name: str, pass_name: str) -> dict[str, float]:
    """Return the microseconds of a block by kernel; PyTorch's are summed as products and others."""
    few, many = (microseconds(_step(name, pass_name, depth)) for depth in (1, 1 + BLOCKS))
    times: dict[str, float] = defaultdict(float)
    for kernel, us in many.items():
        product = re.search("gemm|cutlass|nvjet|xmma|addmm|bmm", kernel, re.IGNORECASE)
        group = kernel if kernel in traffic.TOUCHES else "matrix products" if product else "other of PyTorch"
        times[group] += (us - few.get(kernel, 0.0)) / BLOCKS
    return times


def _step(name: str, pass_name: str, depth: int) -> Step:
    torch.manual_seed(0)
    model = timm.create_model(name, depth=depth, img_size=SIZE).to(DEVICE)
    images = torch.randn(BATCH, 3, SIZE, SIZE, device=DEVICE)
    return step_of(model, images, pass_name, torch.bfloat16)


def _used(name: str) -> dict[str, Row]:
    """Return percentages of issue slots, waiting and the data path by kernel, by Nsight Compute; empty without it."""
    if not GPU or shutil.which("ncu") is None:
        return {}
    done = subprocess.run(
        ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off",
         "--kernel-name", "regex:_kernel$", "--metrics", ",".join((ISSUED, WAITED, LATENCY, MOVED)),
         sys.executable, "-m", "lab.benchmarks.gpu_kernels", "step", name],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    units, *table = csv.DictReader(line for line in done.stdout.splitlines() if line[:1] == '"')
    found = {}
    for row in table:
        issued, waited, latency, moved = (float(row[key]) for key in (ISSUED, WAITED, LATENCY, MOVED))
        waits = round(100 * waited / latency)
        found[row["Kernel Name"]] = {
            "issue_slots": round(issued),
            "waits_for_loads": waits,
            "data_path": round(moved),
        }
    return found


def profiled_step(name: str) -> None:
    """Run a training step of one block for Nsight Compute."""
    step = _step(name, "training", 1)
    step()
    with torch.cuda.profiler.profile():
        step()
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------- scans


def scans() -> Iterator[Row]:
    """Yield inference and training times of every implementation at every shape."""
    for shape in SHAPES:
        inputs, outputs = _inputs(*shape), {}
        for name, (run, tensors) in _contestants(inputs).items():
            row = {"name": name, "shape": list(shape)}
            try:
                passes = _passes(run, tensors)
                outputs[name] = passes[0]().float()
                if name in OFFICIAL:
                    ours = outputs[OFFICIAL[name]].mT
                    error = float((outputs[name] - ours).norm() / ours.norm())
                    if not error <= TOLERANCE:
                        raise ValueError(f"differs from ours by {error:.2g} of the norm")
                times = (round(sum(microseconds(step).values()), 1) for step in passes)
                row |= zip(("inference_us", "training_us"), times, strict=True)
            except (RuntimeError, TypeError, ValueError) as error:  # a module of another version
                row["error"] = str(error).splitlines()[0]
            yield row


def _passes(run: Callable[..., Tensor], tensors: list[Tensor | None]) -> tuple[Callable, Callable]:
    """Return functions for inference, and for forward and backward pass."""
    own = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    leaves = [t for t in own if t is not None]
    infer = torch.no_grad()(lambda: run(*own))
    gradient = torch.randn_like(infer())
    return infer, lambda: torch.autograd.grad(run(*own), leaves, gradient)


def _inputs(B: int, L: int, D: int, M: int = 16) -> list[Tensor]:
    """Return random arguments of ``bidirectional_scan``."""
    torch.manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE).bfloat16()

    A = -torch.rand(2, D, M, device=DEVICE) - 0.5
    keys = randn(2, B, L, M) / 2, randn(2, B, L, M) / 2
    skip, bias = torch.ones(2, D, device=DEVICE), torch.randn(2, D, device=DEVICE)
    return [randn(2, B, L, D), randn(2, B, L, D), A, *keys, skip, bias, randn(B, L, D)]


def _contestants(inputs: list[Tensor]) -> dict[str, Scan]:
    """Return all scans that can run here, and DeiT's attention, which has half of a scan's channels."""
    found: dict[str, Scan] = {}
    for name, recurrence in RECURRENCES.items():
        own = [t if i != 2 or recurrence == "mamba" else None for i, t in enumerate(inputs)]
        found[name] = (lambda *own, r=recurrence: ops.bidirectional_scan(*own, r)), own
    modules = ("online_selective_scan_cuda", Longhorn), ("selective_scan_cuda", Mamba)
    for name, (module, single) in zip(OFFICIAL, modules, strict=True):
        try:
            single.module = importlib.import_module(module)
        except ImportError:
            continue
        found[name] = _both_directions(single, inputs)
    heads = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (*inputs[0], inputs[-1]))
    halves = [t[:, : (t.shape[1] + 1) // 2].contiguous() for t in heads]
    return found | {"attention": (F.scaled_dot_product_attention, halves)}


def _both_directions(single: type[torch.autograd.Function], inputs: list[Tensor]) -> Scan:
    """Return a scan by a kernel of one direction; its tensors and its result are (B, D, L)."""
    x, dt, A, q, k, skip, bias, z = inputs
    given = []
    for i, turn in enumerate((lambda t: t, lambda t: t.flip(-1))):
        given += [turn(dt[i].mT), turn(q[i].mT), turn(k[i].mT), skip[i], bias[i]]
        given += [A[i]] if single is Mamba else []
    half = len(given) // 2

    def run(x: Tensor, x_b: Tensor, z: Tensor, *rest: Tensor) -> Tensor:
        y = single.apply(x, z, *rest[:half])
        y_b = single.apply(x_b.flip(-1), z.flip(-1), *rest[half:])
        return (y + y_b.flip(-1)) / 2

    return run, [t.contiguous() for t in (x[0].mT, x[1].mT, z.mT, *given)]


class Longhorn(torch.autograd.Function):
    """One direction, with gate, by the module of https://github.com/Cranial-XIX/longhorn_cuda."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, *rest: Tensor) -> Tensor:
        dt, q, k, skip, bias = rest
        q, k = q.unsqueeze(1), k.unsqueeze(1)
        out, states, gated = Longhorn.module.online_fwd(x, q, k, dt, skip, bias, z)
        ctx.save_for_backward(x, q, k, dt, skip, bias, z, states, out)
        return gated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        *inputs, states, out = ctx.saved_tensors
        k, gradient = inputs[2], gradient.contiguous()
        dx, dq, dk, ddt, dskip, dz, dbias, dkk = Longhorn.module.online_bwd(*inputs, gradient, states, out, None)
        dk = (dk + dkk.sum(1, keepdim=True).unsqueeze(1) * 2.0 * k).to(k)
        return dx, dz, ddt, dq.squeeze(1), dk.squeeze(1), dskip, dbias


class Mamba(torch.autograd.Function):
    """One direction, with gate, by the module of https://github.com/state-spaces/mamba."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, *rest: Tensor) -> Tensor:
        dt, q, k, skip, bias, A = rest
        inputs = x, dt, A, k.unsqueeze(1), q.unsqueeze(1), skip, z, bias
        out, states, gated = Mamba.module.fwd(*inputs, True)
        ctx.save_for_backward(*inputs, states, out)
        return gated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        *inputs, states, out = ctx.saved_tensors
        dx, ddt, dA, dk, dq, dskip, dbias, dz = Mamba.module.bwd(
            *inputs, gradient.contiguous(), states, out, None, True, False
        )
        return dx, dz, ddt, dq.squeeze(1), dk.squeeze(1), dskip, dbias, dA


# ------------------------------------------------------------------------------------------ compile


def fill(arch: str) -> None:
    """Compile into Triton's cache what models, scans and ``vil.selfcheck`` launch; needs no GPU."""
    compiled.target(arch)
    compile_together(_launches())
    selfcheck.compile_kernels("cpu")


def _launches() -> Iterator[Launch]:
    """Yield the launches of the models and scans that ``lab.benchmarks.gpu`` times."""
    for size, shapes in (("tiny", TINY), ("small", SMALL)):
        for name in (f"vil_{size}_exact", f"vil_{size}", f"vim_{size}"):
            for shape in shapes:
                for noted in compiled.launches(name, *shape).values():
                    yield from noted
    with ops.use_backend("triton"):
        for shape in ((128, 197, 384), (8, 4097, 384)):
            for name in RECURRENCES:
                with recording() as noted:
                    for step in _passes(*_contestants(_inputs(*shape))[name]):
                        step()
                yield from noted


def main() -> None:
    """Run one of the three commands, or the step that Nsight Compute watches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("blocks", "scans", "fill", "step"))
    parser.add_argument("argument", help="the record to write, the architecture, or a model")
    args, rows = parser.parse_args(), []
    if args.what in ("fill", "step"):
        {"fill": fill, "step": profiled_step}[args.what](args.argument)
        return
    for row in {"blocks": blocks, "scans": scans}[args.what]():
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_text(Path(args.argument), json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
