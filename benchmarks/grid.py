"""Time other grids than the trained one: taps and steps measured in its patches against plain ones.

    python -m benchmarks.grid [--sizes 384 448 512] [--rounds 9] [--threads N] [--json FILE]

Everything is as trained at 224 px, 14 x 14 patches. Timed are the convolution of one block of vil_tiny and
whole models, forward, and forward and backward, with ``grid_aware`` on and off; on a GPU, where there is
one, in bfloat16 and with more images. The two take turns, as in ``vil.measuring``; a ratio is the median over
rounds of each round's.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import timm
import torch

import vil
from benchmarks.provenance import processor, revision
from vil.kernels import grid_conv
from vil.kernels.backends import backend_for
from vil.kernels.grid import Grid, layout_of
from vil.measuring import Step, in_turns
from vil.training.files import write_text

MODELS = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
CHANNELS, TAPS = 384, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE, BATCH = (torch.bfloat16, 32) if DEVICE.type == "cuda" else (torch.float32, 2)


def waited_for(step: Callable[[], object]) -> Step:
    """Return a step that ends when the device has."""

    def run() -> None:
        step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return run


def convolution(size: int, backward: bool) -> dict[bool, Step]:
    """Return what convolves the tokens of images, or takes the gradients back, by whether it is aware."""
    side = size // 16
    grid = Grid(side, side, 14, 14, 16, 16, 16, 16, 1)
    x = torch.randn(BATCH, grid.length, CHANNELS, device=DEVICE, dtype=DTYPE)
    weight, bias = (
        torch.randn(2, CHANNELS, TAPS, device=DEVICE),
        torch.randn(2, CHANNELS, device=DEVICE),
    )
    grad = torch.randn(2, *x.shape, device=DEVICE, dtype=DTYPE)
    backend = backend_for(x.device, x.dtype)

    def step(aware: bool) -> Step:
        layout = layout_of(grid if aware else None, TAPS, x.device)
        if backward:
            return waited_for(lambda: grid_conv.backward(backend, grad, x, weight, bias, layout))
        return waited_for(lambda: grid_conv.forward(backend, x, weight, bias, layout))

    return {aware: step(aware) for aware in (False, True)}


def model(name: str, size: int, backward: bool) -> dict[bool, Step]:
    """Return what runs a model on images, or also takes the gradients back, by whether it is aware."""
    images = torch.randn(BATCH, 3, size, size, device=DEVICE)

    def step(aware: bool) -> Step:
        network = timm.create_model(name, grid_aware=aware).to(DEVICE).train(backward)

        def run() -> None:
            low = torch.autocast(DEVICE.type, DTYPE, enabled=DEVICE.type == "cuda")
            with torch.set_grad_enabled(backward), low:
                loss = network(images).float().sum()
            if backward:
                network.zero_grad()
                loss.backward()

        return waited_for(run)

    return {aware: step(aware) for aware in (False, True)}


def main() -> None:
    """Run, print a Markdown table, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[384, 448, 512], help="in pixels")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "timm": timm.__version__, "vil": vil.__version__}
    place = {"processor": processor(), "threads": args.threads, "commit": revision()}
    if DEVICE.type == "cuda":
        place = {"device": torch.cuda.get_device_name()} | place
    environment = place | versions
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print("| size | what | pass | time relative to plain |")
    print("|---|---|---|---|")
    rows = []
    for size in args.sizes:
        for what in ("convolution", *MODELS):
            for backward in (False, True):
                make = convolution if what == "convolution" else lambda *a, n=what: model(n, *a)
                seconds = in_turns(make(size, backward), args.rounds)
                ratio = statistics.median(
                    aware / plain
                    for aware, plain in zip(seconds[True], seconds[False], strict=True)
                )
                name = "backward" if backward else "forward"
                rows.append({"size": size, "what": what, "pass": name, "ratio": ratio})
                print(f"| {size} | {what} | {name} | {ratio:.2f} |", flush=True)
    if args.json:
        write_text(
            args.json, json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
