"""Time the work of Python and PyTorch around the kernels: one of our blocks next to one of DeiT, on few tokens.

    python -m benchmarks.host_time [--models vil_tiny vil_tiny_exact vim_tiny] [--routes cpu triton] [--dim 192]
        [--size 32] [--rounds 200] [--output FILE.json]

Images are so small that kernels take little time: 4 patches and a class token at 32 px. Times are CPU seconds of
one thread: medians over rounds in which all parts take turns. Ratios are to DeiT's block, round by round.

    block      norm, mixer and residual; for DeiT, attention and MLP
    operator   the part that this library adds: the mixer without its two outer projections, which PyTorch does
    routes     cpu: the compiled loops run. triton: kernels are compiled for an H100 and launched, but Triton's
               launcher, written in C, only counts. This leaves the time of Python. "each" is that of one launch.
"""

import argparse
import contextlib
import copy
import json
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor, nn

import vil  # noqa: F401  (registers the models)
from benchmarks.provenance import environment
from benchmarks.steps import in_turns
from vil.kernels import backends
from vil.kernels.plan import forget_plans
from vil.training.files import write_text

ROUTES, PASSES = ("cpu", "triton"), ("inference", "forward", "forward + backward")
CALLS = 10  # of a part in a step, since reading the clock takes a tenth of a microsecond


class Launcher:
    """Count launches, in place of Triton's launcher."""

    count = 0

    def __init__(self, *_: object) -> None:
        """Take what Triton gives its launcher."""

    def __call__(self, *_: object) -> None:
        """Count a launch."""
        Launcher.count += 1


@contextlib.contextmanager
def routed(route: str) -> Iterator[None]:
    """Use one backend within a ``with`` block; "triton" acts as on an H100 but launches nothing."""
    with contextlib.ExitStack() as stack:
        if route == "triton":
            from triton.runtime import driver

            from benchmarks.kernels import Driver
            from vil.kernels.triton import tuning

            class NoGPU(Driver):
                launcher_cls, utils = Launcher, mock.Mock()

            NoGPU.utils.load_binary.return_value = (None, None, 0, 0, 1024)
            NoGPU.utils.get_device_properties.return_value = {"max_shared_mem": 232448}
            driver.set_active(NoGPU("90"))
            for owner, name, value in (
                (backends, "_check_serves", lambda *_: None),
                (tuning, "architecture", lambda device: "sm_90"),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            forget_plans()
            stack.callback(forget_plans)
        stack.enter_context(backends.use_backend(route))
        yield


def parts(name: str, dim: int, size: int) -> dict[str, tuple[Callable[[], Tensor], nn.Module]]:
    """Return each part to time: a call on inputs that require gradients, and its module."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, embed_dim=dim, depth=2)
    deit = timm.create_model("deit_tiny_patch16_224", img_size=size, embed_dim=dim, depth=2)
    tokens = model.patch_embed.num_patches + 1
    x = torch.randn(1, tokens, dim, requires_grad=True)
    xz = torch.randn(1, tokens, model.blocks[1].mixer.in_proj.out_features, requires_grad=True)
    block, core = model.blocks[1], copy.deepcopy(model.blocks[1].mixer)
    core.in_proj = core.proj = nn.Identity()
    return {
        "DeiT's block": (lambda: deit.blocks[1](x), deit),
        "block": (lambda: block(x), model),
        "operator": (lambda: core(xz), core),
    }


def step_of(call: Callable[[], Tensor], module: nn.Module, pass_name: str) -> Callable[[], None]:
    """Return a function that makes ``CALLS`` calls in the mode of one of ``PASSES``."""
    grad = torch.ones_like(call())

    def step() -> None:
        module.train(pass_name != "inference")
        with torch.inference_mode(pass_name == "inference"):
            for _ in range(CALLS):
                out = call()
                if pass_name == "forward + backward":
                    out.backward(grad)

    return step


def launch_times(step: Callable[[], None]) -> list[float]:
    """Return the microseconds of Python in each launch of a step, each the least of 20 rounds."""
    from vil.kernels.triton.launch import Kernel

    launches, original = [], Kernel.__call__

    def noted(kernel: Kernel, on: Tensor, **tensors: Tensor | None) -> None:
        launches.append(lambda: original(kernel, on, **tensors))
        launches[-1]()

    with mock.patch.object(Kernel, "__call__", noted):
        step()
    return [1e4 * min(timeit.repeat(again, number=100, repeat=20)) for again in launches]


def measure(route: str, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each part and pass."""
    with routed(route):
        timed = parts(name, args.dim, args.size)
        steps = {
            (part, pass_name): step_of(call, module, pass_name)
            for part, (call, module) in timed.items()
            for pass_name in PASSES
        }
        seconds = in_turns(steps, args.rounds, clock=time.process_time)
        rows = []
        for (part, pass_name), times in seconds.items():
            base = seconds["DeiT's block", pass_name]
            Launcher.count = 0
            steps[part, pass_name]()
            launches, each = Launcher.count // CALLS, []
            if launches:
                each = launch_times(steps[part, pass_name])[:launches]
            rows.append(
                {
                    "route": route,
                    "model": name,
                    "part": part,
                    "pass": pass_name,
                    "microseconds": 1e6 * statistics.median(times) / CALLS,
                    "ratio": statistics.median(t / b for t, b in zip(times, base, strict=True)),
                    "launches": launches,
                    "launch_microseconds": each,
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table: microseconds, and the ratio to DeiT's block in brackets."""
    heads = ("route", "model", "part", *PASSES, "launches", "each")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in heads[:3])
        groups.setdefault(key, {})[row["pass"]] = row
    for key, passes in groups.items():
        cells = [f"{passes[p]['microseconds']:.0f} ({passes[p]['ratio']:.2f})" for p in PASSES]
        launches = ", ".join(str(passes[p]["launches"]) for p in PASSES)
        each = passes[PASSES[-1]].get("launch_microseconds")
        span = f"{min(each):.1f} to {max(each):.1f}" if each else ""
        lines.append(f"| {' | '.join((*key, *cells, launches, span))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["vil_tiny", "vil_tiny_exact", "vim_tiny"])
    add("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    add("--dim", type=int, default=192, help="channels of a token")
    add("--size", type=int, default=32, help="height and width of images in pixels")
    add("--rounds", type=int, default=200)
    add("--output", type=Path, help="the record, JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for r in args.routes for name in args.models for row in measure(r, name, args)]
    if args.output:
        settings = {key: getattr(args, key) for key in ("dim", "size", "rounds")}
        record = {"environment": environment() | settings, "rows": rows}
        write_text(args.output, json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
