"""Compile the Triton kernels of models before their first step: ``python -m vil.warmup MODEL``.

    python -m vil.warmup vil_tiny_exact [--img-size 224 384] [--trained-size 224] [--batch-size 128]
        [--dtype bfloat16]

Compiles the kernels of a training step and an evaluation step for the current GPU, several at a time,
into Triton's cache. Run it once per machine, before a job starts its processes. Give the image and
batch sizes that you will use. If batch and tokens are too few to fill the GPU, sequences are split,
which needs additional kernels; otherwise the kernels do not depend on the sizes. Weights used at a
size other than their training size need a different convolution kernel: pass the training size as
--trained-size.

Exit status: 0 if everything is compiled, 2 if this machine has no GPU that the kernels support.
"""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from vil.kernels import ops
from vil.kernels.backends import automatic_backend
from vil.kernels.triton.launch import Launch, recording
from vil.weights.files import is_own

_DTYPES = ("float32", "bfloat16", "float16")


class Specialization(NamedTuple):
    """A specialization of a kernel, which Triton compiles once.

    Attributes:
        module: Module of the kernel.
        name: Name of the kernel in its module.
        data: Types, constants and options in the format of ``triton.JITFunction.preload``.
    """

    module: str
    name: str
    data: str


def launches(
    model: nn.Module, batch_size: int, img_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, list[Launch]]:
    """Return the kernel launches of a step in each mode, "train" and "eval", without running them.

    Args:
        model: Model of this package, with its parameters on ``device``.
        batch_size: Number of images.
        img_size: Height and width in pixels.
        dtype: Dtype of the activations, set by autocast unless it is float32.
        device: Device that the kernels would run on.
    """
    images = torch.zeros(batch_size, 3, img_size, img_size, device=device)
    noted = {}
    for mode in ("train", "eval"):
        training = mode == "train"
        model.train(training)
        autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        with ops.use_backend("triton"), recording() as noted[mode]:
            with autocast, torch.set_grad_enabled(training):
                logits = model(images)
            if training:
                logits.float().sum().backward()
    return noted


def specializations(noted: Iterable[Launch]) -> list[Specialization]:
    """Return the distinct specializations that launches need on Triton's active device."""
    from triton import knobs

    found: dict[tuple[str, str, str], Specialization] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        data = compile["specialization_data"]
        key = (kernel.module, kernel.__name__, json.loads(data)["key"])
        found[key] = Specialization(kernel.module, kernel.__name__, data)
        return True  # do not compile

    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        for launch in noted:
            launch.kernel.warmup(**launch.arguments, grid=(1,))
    finally:
        knobs.runtime.jit_cache_hook = previous
    return list(found.values())


def compile_ahead(
    wanted: list[Specialization], jobs: int
) -> Iterator[tuple[Specialization, float]]:
    """Compile into Triton's cache, and yield each specialization when it is done with its seconds.

    Args:
        wanted: Specializations to compile.
        jobs: Number of parallel compilations, each in a separate process.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, max(len(wanted), 1)), context) as pool:
        futures = {pool.submit(_compile, one): one for one in wanted}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _compile(wanted: Specialization) -> float:
    start = time.perf_counter()
    getattr(importlib.import_module(wanted.module), wanted.name).preload(wanted.data)
    return time.perf_counter() - start


def _create(name: str, img_size: int, trained_size: int | None, device: torch.device) -> nn.Module:
    # One block is enough because all blocks launch the same kernels.
    model = timm.create_model(name, img_size=trained_size or img_size, depth=1)
    model.set_input_size(img_size)
    return model.to(device)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name in timm.create_model")
    parser.add_argument("--img-size", type=int, nargs="+", default=[224], help="pixels")
    parser.add_argument(
        "--trained-size", type=int, help="image size of the weights; default: --img-size"
    )
    parser.add_argument("--batch-size", type=int, nargs="+", default=[128], help="images per GPU")
    parser.add_argument("--dtype", choices=_DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="default: all cores")
    args = parser.parse_args(arguments)
    known = {name for name in timm.list_models() if is_own(name)}
    for name in args.models:
        if name not in known:
            parser.error(f"MODEL must be one of {', '.join(sorted(known))}, got {name}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Compile the kernels that the command line asks for and return the exit status."""
    args = _parse(arguments)
    if not torch.cuda.is_available() or automatic_backend("cuda", double=False) != "triton":
        print("vil.warmup compiles for the GPU at hand: it needs one and triton", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    noted: list[Launch] = []
    sizes = itertools.product(args.models, args.img_size, args.batch_size, args.dtype)
    for name, img_size, batch_size, dtype in sizes:
        model = _create(name, img_size, args.trained_size, device)
        modes = launches(model, batch_size, img_size, getattr(torch, dtype), device)
        noted += [launch for mode in modes.values() for launch in mode]
    wanted = specializations(noted)
    print(f"{len(wanted)} kernels for {torch.cuda.get_device_name()}", flush=True)
    start = time.perf_counter()
    for number, (one, seconds) in enumerate(compile_ahead(wanted, args.jobs), 1):
        kernel = f"{one.module.rpartition('.')[2]}.{one.name.strip('_')}"
        print(f"{number}/{len(wanted)}  {kernel:32} {seconds:5.1f} s", flush=True)
    print(f"ready after {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
