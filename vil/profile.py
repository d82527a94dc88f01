"""Measure a model on this machine, beside another: ``python -m vil.profile MODEL [OTHER]``.

    python -m vil.profile vil_tiny deit_tiny_patch16_224 [--img-size 224] [--batch-size 8]
        [--device cpu] [--dtype float32] [--threads N] [--rounds 5] [--features-only]

Any model of timm, with random weights: parameters, multiply-adds of one image with scans counted
(``vil.complexity``), and of inference and training the images per second and the most memory.

    training    forward pass, cross-entropy, backward pass and AdamW
    images/s    both models in the same process, a step of each in turn; the median over rounds, and of the
                rounds' ratios
    MiB         the most at once of model, gradients, optimizer and a step, in a process of its own:
                allocated on a GPU, resident on a CPU beyond what it was before the model

Exit status 0, or 2 where something cannot be measured: an unknown model, a size that it does not take, a
device that is not there, too little memory.
"""

import argparse
import difflib
import multiprocessing
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import timm
import torch
from torch import nn

import vil
from vil.complexity import count_macs, count_parameters
from vil.measuring import PASSES, Step, in_turns, step_of, watch_memory
from vil.messages import first_line
from vil.weights.build import create

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Setting:
    """What all models are measured at.

    Attributes:
        img_size: Height and width in pixels.
        batch_size: Images of a step.
        device: "cpu" or "cuda".
        dtype: Name of float32, or of what autocast computes in.
        threads: Of PyTorch on the CPU.
        rounds: Counted rounds.
        features_only: Models give maps, and have no head.
    """

    img_size: int
    batch_size: int
    device: str
    dtype: str
    threads: int
    rounds: int
    features_only: bool = False


@dataclass
class Figures:
    """What was measured of a model; the dicts are by pass."""

    name: str
    parameters: int
    macs: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a step, in each round."""
    memory: dict[str, int | None] = field(default_factory=dict)
    """Bytes; None where the system does not tell."""


def profile(names: Sequence[str], setting: Setting) -> list[Figures]:
    """Measure models beside each other.

    Args:
        names: As of ``timm.create_model``.
        setting: What to measure at.

    Raises:
        ValueError: a name is unknown, a model does not take the images, or a step fails, naming both.
    """
    figures = [_size(name, setting) for name in names]
    for one in figures:
        _tell(f"memory of {one.name}")
        one.memory = _memory(one.name, setting)
    torch.set_num_threads(setting.threads)
    for pass_name in PASSES:
        with _named(f"{pass_name} of {' and '.join(names)}"):
            seconds = _in_turns(names, setting, pass_name)
        for one, times in zip(figures, seconds, strict=True):
            one.seconds[pass_name] = times
    return figures


def _in_turns(names: Sequence[str], setting: Setting, pass_name: str) -> list[list[float]]:
    steps = {i: _step(name, setting, pass_name, setting.batch_size) for i, name in enumerate(names)}
    tell = partial(_tell_round, pass_name, setting.rounds)
    return list(in_turns(steps, setting.rounds, setting.device, tell).values())


def check_name(name: str) -> None:
    """Raise ValueError with the names that are close unless timm has a model of a name."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; perhaps you meant {' or '.join(close)}" if close else ""
        raise ValueError(f"MODEL must be one of timm.list_models(), got {name}{hint}")
    with _named(f"MODEL {name}"):
        _input_size(name)


def _input_size(name: str) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model is configured for."""
    return timm.get_pretrained_cfg(name, allow_unregistered=False).input_size


def table(figures: Sequence[Figures], batch_size: int) -> str:
    """Return the figures as a Markdown table, of two models with the ratios of the first to the second."""
    rows = [
        ("parameters", [one.parameters for one in figures], ",d"),
        ("GMACs", [one.macs / 1e9 for one in figures], ",.2f"),
    ]
    for pass_name in PASSES:
        seconds = [one.seconds[pass_name] for one in figures]
        speeds = [batch_size / statistics.median(times) for times in seconds]
        rows.append((f"{pass_name}, images/s", speeds, ",.4g"))
        rows.append((f"{pass_name}, MiB", [_mib(one.memory[pass_name]) for one in figures], ",.0f"))
    lines = [["", *(one.name for one in figures)] + ["ratio"] * (len(figures) == 2)]
    for title, values, form in rows:
        cells = ["not told" if value is None else format(value, form) for value in values]
        lines.append([title, *cells])
        if len(figures) == 2:
            lines[-1].append(_ratio(title, values, [one.seconds for one in figures]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(_aligned(line, widths))} |" for line in lines)


def _aligned(line: list[str], widths: list[int]) -> Iterator[str]:
    yield line[0].ljust(widths[0])
    for cell, width in zip(line[1:], widths[1:], strict=True):
        yield cell.rjust(width)


def _ratio(
    title: str, values: Sequence[float | None], seconds: Sequence[dict[str, list[float]]]
) -> str:
    pass_name = title.partition(",")[0]
    if title.endswith("images/s"):
        rounds = zip(*(times[pass_name] for times in seconds), strict=True)
        return f"{statistics.median(other / mine for mine, other in rounds):.2f}"
    first, second = values
    return "" if not first or not second else f"{first / second:.2f}"


def _mib(number: int | None) -> float | None:
    return None if number is None else number / 2**20


# --------------------------------------------------------------------------------- models and steps


def _size(name: str, setting: Setting) -> Figures:
    """Count a model on shapes alone, which tells whether it takes the images."""
    size = setting.img_size
    with _named(f"{name} with images of {size} x {size} px"):
        model = _model(name, setting)
        shape = (_input_size(name)[0], size, size)
        return Figures(name, count_parameters(model), count_macs(model, shape))


def _model(name: str, setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    features = {"features_only": True} if setting.features_only else {}
    return create(name, img_size=setting.img_size, **features)


def _step(name: str, setting: Setting, pass_name: str, batch_size: int) -> Step:
    model = _model(name, setting).to(setting.device)
    shape = (batch_size, _input_size(name)[0], setting.img_size, setting.img_size)
    images = torch.randn(shape, device=setting.device)
    return step_of(model, images, pass_name, getattr(torch, setting.dtype))


def _memory(name: str, setting: Setting) -> dict[str, int | None]:
    """Return the bytes of each pass, measured where nothing else is."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_memory_here, name, setting).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{name}: its process was killed, as by a system without memory left"
            ) from error


def _memory_here(name: str, setting: Setting) -> dict[str, int | None]:
    torch.set_num_threads(setting.threads)
    return {pass_name: _most(name, setting, pass_name) for pass_name in PASSES}


def _most(name: str, setting: Setting, pass_name: str) -> int | None:
    with _named(f"{pass_name} of {name}"):
        # Compiles, and loads libraries.
        _step(name, setting, pass_name, min(2, setting.batch_size))()
        try:
            most = watch_memory(setting.device)
        except NotImplementedError:
            return None
        full = _step(name, setting, pass_name, setting.batch_size)
        for _ in range(2):  # the first has no state of the optimizer yet
            full()
        return most()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in a line what failed; timm and its models raise whatever they like."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError) as e:
        raise ValueError(f"{what}: {first_line(e)}") from e
    except MemoryError as error:
        raise ValueError(f"{what}: out of memory") from error


def _tell(what: str) -> None:
    """Say on a terminal what takes its time."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)


def _tell_round(pass_name: str, rounds: int, number: int) -> None:
    _tell(f"{pass_name}, round {number} of {rounds}" if number else f"{pass_name}, once before")


# ------------------------------------------------------------------------------------- command line


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


def _parse(arguments: Sequence[str] | None) -> tuple[list[str], Setting]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="as of timm.create_model")
    add("other", metavar="OTHER", nargs="?", help="the second; ratios are of the first to it")
    add("--img-size", type=_positive, help="pixels; default: what MODEL is configured for")
    add("--batch-size", type=_positive, help="images; default: 8 on a CPU, 128 on a GPU")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=_DTYPES, help="by autocast; default: bfloat16 on a GPU, else float32")
    add("--threads", type=_positive, default=torch.get_num_threads(), help="of the CPU")
    add("--rounds", type=_positive, default=5, help="counted rounds")
    add("--features-only", action="store_true", help="maps, as for a detector, without a head")
    args = parser.parse_args(arguments)
    names = [args.model] if args.other is None else [args.model, args.other]
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    try:
        for name in names:
            check_name(name)
    except ValueError as error:
        parser.error(str(error))
    setting = Setting(
        img_size=args.img_size or _input_size(names[0])[1],
        batch_size=args.batch_size or (128 if on_gpu else 8),
        device=args.device,
        dtype=args.dtype or ("bfloat16" if on_gpu else "float32"),
        threads=args.threads,
        rounds=args.rounds,
        features_only=args.features_only,
    )
    return names, setting


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for, print it, and return the exit status."""
    names, setting = _parse(arguments)
    where = f"{platform.machine()}, threads: {setting.threads}"
    if setting.device == "cuda":
        where = torch.cuda.get_device_name()
    packages = (("torch", torch), ("timm", timm), ("vil", vil))
    versions = ", ".join(f"{name} {package.__version__}" for name, package in packages)
    size = f"{setting.img_size} x {setting.img_size} px"
    print(f"{where}; {versions}")
    print(f"{size}, batch {setting.batch_size}, {setting.dtype}\n", flush=True)
    try:
        figures = profile(names, setting)
    except ValueError as error:
        print(f"cannot measure {error}", file=sys.stderr)
        return 2
    print(table(figures, setting.batch_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
