"""Measure models: ``python -m vil.profile [MODEL [OTHER]]``.

    python -m vil.profile vil_tiny deit_tiny_patch16_224 [--img-size 224] [--batch-size 8]
        [--device cpu] [--dtype float32] [--threads N] [--rounds 5] [--features-only]

Works for any timm model, with random weights. Reports parameters, multiply-adds of one image (scans
included), and for inference and training the images per second and the peak memory. Without a model,
lists parameters and multiply-adds of this package's models.

    training    forward pass, cross-entropy, backward pass and AdamW
    images/s    both models in the same process, alternating steps; the median over rounds, and the
                median of the rounds' ratios
    MiB         peak memory of model, gradients, optimizer and a step, in a separate process:
                allocated on a GPU; on a CPU, resident memory beyond what it was before the model

PyTorch's FlopCounterMode supports the operators as soon as ``vil`` is imported. ``fvcore_handles`` and
``calflops_hooks`` return what those packages need to count them.

Exit status: 0, or 2 if something cannot be measured: an unknown model, an unsupported size, a missing
device, too little memory.
"""

import argparse
import ctypes
import difflib
import gc
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import vil
from vil.block import BidirectionalMixer
from vil.messages import first_line
from vil.weights.build import create
from vil.weights.files import is_own

PASSES = ("inference", "training")
STEPS = 2  # timed steps of each model per round
_ALIKE = ("*_exact_pyramid", "vim_*_pyramid")  # they add the same levels as the vil_* pyramids

Step = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)

# ---------------------------------------------------------------------- parameters and multiply-adds


def count_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Count the multiply-adds of one forward pass of one image, scans and convolutions included.

    Matrix products and convolutions are counted as in torch's FlopCounterMode. A scan counts, per
    direction, token, channel and state, 4 for diagonal Longhorn and Mamba and 3 for exact Longhorn,
    plus skip and gate. Exponentials, divisions, norms and activations are not counted. Nothing is
    computed: the model runs on meta tensors.

    Args:
        model: Any image model.
        input_size: (channels, height, width) of the image.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    dtype = next(model.parameters()).dtype
    image = torch.empty(1, *input_size, device="meta", dtype=dtype)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            functional_call(model, shapes, (image,))
    finally:
        model.train(training)
    return counter.get_total_flops() // 2


def count_parameters(model: nn.Module) -> int:
    """Count all parameters, trainable or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def fvcore_handles() -> dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]:
    """Return the handles with which fvcore counts the operators, by operator name: ::

        FlopCountAnalysis(model, images).set_op_handle(**vil.profile.fvcore_handles())

    They count multiply-adds, which fvcore calls flops. Together with convolutions and linear layers, the
    total equals that of ``count_macs``. fvcore may count more layers, such as norms other than RMSNorm.
    """
    names = {str(operator).replace(".", "::"): count for operator, count in flop_registry.items()}

    def handle(count: Callable[..., int]) -> Callable[[Sequence[Any], Sequence[Any]], int]:
        return lambda inputs, outputs: count(*map(_traced, inputs), out_val=None) // 2

    return {name: handle(count) for name, count in names.items() if name.startswith("vil::")}


def _traced(value: Any) -> Any:
    """Return the shape of a tensor in a traced graph, or the value of a number, string or None."""
    return tuple(value.type().sizes()) if value.isCompleteTensor() else value.toIValue()


def calflops_hooks() -> dict[type[nn.Module], Callable[[nn.Module, tuple, Any], None]]:
    """Return the hooks with which calflops counts the mixers, by module type: ::

        calflops.pytorch_ops.MODULE_HOOK_MAPPING.update(vil.profile.calflops_hooks())

    calflops replaces functions to count their calls, and needs hooks for modules that call other
    functions. Operators called outside of a model are not counted.
    """
    return {BidirectionalMixer: _count_mixer}


def _count_mixer(mixer: BidirectionalMixer, inputs: tuple[Tensor, ...], output: Any) -> None:
    # calflops counts the projections of the mixer separately because they are modules.
    xz = (*inputs[0].shape[:2], mixer.in_proj.out_features)
    flops = flop_registry[torch.ops.vil.mixer](
        xz, *mixer._params(mixer.A_log), mixer.recurrence, out_val=None
    )
    mixer.__flops__ += flops
    mixer.__macs__ += flops // 2


def table_of_models() -> str:
    """Return a Markdown table of this package's models at their default image size.

    Pyramids are counted with ``features_only=True``, without a head.
    """
    rows = []
    for name in filter(is_own, timm.list_models(("vil_*", "vim_*"), exclude_filters=list(_ALIKE))):
        only = {"features_only": True} if name.endswith("_pyramid") else {}
        model = timm.create_model(name, device="meta", **only)
        backbone = model.model if only else model
        macs = count_macs(model, model.default_cfg["input_size"])
        recurrence = backbone.blocks[0].mixer.recurrence
        size = f"{backbone.embed_dim} | {count_parameters(model):,} | {macs / 1e9:.2f}"
        rows.append((backbone.embed_dim, f"| `{name}` | {recurrence} | {size} |"))
    rows = [row for _, row in sorted(rows, key=lambda item: item[0])]
    head = ["| model | recurrence | channels | parameters | GMACs |", "|---|---|---|---|---|"]
    return "\n".join(head + rows)


# ---------------------------------------------------------------------------- steps, time and memory


def step_of(
    model: nn.Module,
    images: Tensor,
    pass_name: str,
    dtype: torch.dtype = torch.float32,
    capturable: bool = False,
) -> Step:
    """Put the model into training or evaluation mode and return a function that runs one step.

    Args:
        model: Any image model; it must stay in this mode while the step is used.
        images: Images (B, in_chans, height, width) on the model's device.
        pass_name: "inference" for a forward pass, or "training" for forward pass, loss, backward pass
            and AdamW. The loss is cross-entropy if the output is logits, else the mean of squares.
        dtype: float32, or the autocast dtype.
        capturable: Allow a CUDA graph to capture the training step.
    """
    if pass_name not in PASSES:
        raise ValueError(f"pass_name must be one of {PASSES}, got {pass_name!r}")
    model.train(pass_name == "training")
    autocast = torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32)

    def infer() -> None:
        with torch.inference_mode(), autocast:
            model(images)

    if pass_name == "inference":
        return infer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def train() -> None:
        with autocast:
            loss = _loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def _loss(output: Any, labels: Tensor) -> Tensor:
    if isinstance(output, Tensor) and output.ndim == 2:
        return F.cross_entropy(output, labels)
    return sum(tensor.float().square().mean() for tensor in _tensors(output))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    else:
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part)


def in_turns(
    steps: Mapping[Key, Step],
    rounds: int,
    device: str = "cpu",
    clock: Callable[[], float] | None = None,
) -> dict[Key, list[float]]:
    """Return the seconds per step of each function in every timed round.

    A round runs all functions in turn, so a drift of the machine's speed affects them equally. In a
    round, each function runs one untimed step, because the caches hold another function's data, and
    then two timed steps. An additional first round, which compiles, is not timed.

    Args:
        steps: Functions to time, by key.
        rounds: Number of timed rounds.
        device: Device of the steps, "cpu" or "cuda".
        clock: Function that returns seconds; None waits for the device and reads ``time.perf_counter``.
    """
    now = clock or partial(_clock, device)
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(rounds + 1):
        for key, step in steps.items():
            step()
            start = now()
            for _ in range(STEPS):
                step()
            if number:
                seconds[key].append((now() - start) / STEPS)
    return seconds


def _clock(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def watch_memory(device: str) -> Callable[[], int]:
    """Start to track memory; the returned function gives the peak since then minus the current usage.

    Bytes: memory allocated by PyTorch on a GPU, or resident memory of this process on a CPU. Other
    threads of the process should be idle.

    Raises:
        NotImplementedError: If the system does not report peak memory; Linux does.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before
    try:
        # Return freed memory to the system; otherwise reusing it would not raise resident memory.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the kernel's peak
    except (OSError, AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"the most memory of a process is not told by this system: {error}"
        ) from error
    before = _resident("VmRSS")
    return lambda: _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# --------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Setting:
    """Measurement settings shared by all models; ``dtype`` is float32 or the autocast dtype."""

    img_size: int
    batch_size: int
    device: str
    dtype: str
    threads: int
    rounds: int
    features_only: bool = False


@dataclass
class Figures:
    """Measurements of a model; the dictionaries are keyed by pass."""

    name: str
    parameters: int
    macs: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per step in each round."""
    memory: dict[str, int | None] = field(default_factory=dict)
    """Bytes; None if the system does not report them."""


def profile(names: Sequence[str], setting: Setting) -> list[Figures]:
    """Measure timm models side by side.

    Raises:
        ValueError: If a model does not accept the images or a step fails; the message names the models.
    """
    figures = [_size(name, setting) for name in names]
    for one in figures:
        one.memory = _memory(one.name, setting)
    torch.set_num_threads(setting.threads)
    for pass_name in PASSES:
        with _named(f"{pass_name} of {' and '.join(names)}"):
            steps = {
                i: _step(name, setting, pass_name, setting.batch_size)
                for i, name in enumerate(names)
            }
            seconds = in_turns(steps, setting.rounds, setting.device)
        for i, one in enumerate(figures):
            one.seconds[pass_name] = seconds[i]
    return figures


def table(figures: Sequence[Figures], batch_size: int) -> str:
    """Return the measurements as a Markdown table; two models get a column with the ratio first / second."""
    rows = [
        ("parameters", [one.parameters for one in figures], ",d"),
        ("GMACs", [one.macs / 1e9 for one in figures], ",.2f"),
    ]
    for pass_name in PASSES:
        seconds = [one.seconds[pass_name] for one in figures]
        speeds = [batch_size / statistics.median(times) for times in seconds]
        memory = [one.memory[pass_name] for one in figures]
        mib = [None if number is None else number / 2**20 for number in memory]
        rows.append((f"{pass_name}, images/s", speeds, ",.4g"))
        rows.append((f"{pass_name}, MiB", mib, ",.0f"))
    lines = [["", *(one.name for one in figures)] + ["ratio"] * (len(figures) == 2)]
    for title, values, form in rows:
        cells = ["not told" if value is None else format(value, form) for value in values]
        lines.append([title, *cells])
        if len(figures) == 2:
            lines[-1].append(_ratio(title, values, [one.seconds for one in figures]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    aligned = (
        [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])] for first, *rest in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)


def _ratio(
    title: str, values: Sequence[float | None], seconds: Sequence[dict[str, list[float]]]
) -> str:
    if title.endswith("images/s"):
        rounds = zip(*(times[title.partition(",")[0]] for times in seconds), strict=True)
        return f"{statistics.median(other / mine for mine, other in rounds):.2f}"
    first, second = values
    return "" if not first or not second else f"{first / second:.2f}"


def _input_size(name: str) -> tuple[int, int, int]:
    """Return the (channels, height, width) that a model is configured for."""
    return timm.get_pretrained_cfg(name, allow_unregistered=False).input_size


def _size(name: str, setting: Setting) -> Figures:
    """Count parameters and multiply-adds on shapes alone, which also checks that the model accepts the images."""
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
    """Return the peak memory of each pass in bytes, measured in a separate process."""
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
        # Compile and load libraries before memory is tracked.
        _step(name, setting, pass_name, min(2, setting.batch_size))()
        try:
            most = watch_memory(setting.device)
        except NotImplementedError:
            return None
        full = _step(name, setting, pass_name, setting.batch_size)
        for _ in range(2):  # the first step creates the optimizer state
            full()
        return most()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Re-raise errors as a one-line ValueError that names what failed; timm models raise many types."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError) as e:
        raise ValueError(f"{what}: {first_line(e)}") from e
    except MemoryError as error:
        raise ValueError(f"{what}: out of memory") from error


def _check_name(name: str) -> None:
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; perhaps you meant {' or '.join(close)}" if close else ""
        raise ValueError(f"MODEL must be one of timm.list_models(), got {name}{hint}")
    with _named(f"MODEL {name}"):
        _input_size(name)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


def _parse(arguments: Sequence[str] | None) -> tuple[list[str], Setting | None]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="*", help="name in timm.create_model; at most two")
    add("--img-size", type=_positive, help="pixels; default: what MODEL is configured for")
    add("--batch-size", type=_positive, help="images; default: 8 on a CPU, 128 on a GPU")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    add("--threads", type=_positive, default=torch.get_num_threads(), help="of the CPU")
    add("--rounds", type=_positive, default=5, help="counted rounds")
    add("--features-only", action="store_true", help="maps, as for a detector, without a head")
    args = parser.parse_args(arguments)
    names, on_gpu = args.models, args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    if not names and any(
        value != parser.get_default(key) for key, value in vars(args).items() if key != "models"
    ):
        parser.error("options need a MODEL")
    if len(names) > 2:
        parser.error(f"MODEL must be at most two names, got {' '.join(names)}")
    try:
        for name in names:
            _check_name(name)
    except ValueError as error:
        parser.error(str(error))
    if not names:
        return [], None
    return names, Setting(
        img_size=args.img_size or _input_size(names[0])[1],
        batch_size=args.batch_size or (128 if on_gpu else 8),
        device=args.device,
        dtype=args.dtype or ("bfloat16" if on_gpu else "float32"),
        threads=args.threads,
        rounds=args.rounds,
        features_only=args.features_only,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that the command line asks for, print them, and return the exit status."""
    names, setting = _parse(arguments)
    if setting is None:
        print(table_of_models())
        return 0
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
