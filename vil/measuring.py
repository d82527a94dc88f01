"""Time and memory that a step of a model takes on this machine, in inference and in training."""

import ctypes
import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PASSES = ("inference", "training")
STEPS = 2  # counted steps of each in a round

Step = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)


def step_of(
    model: nn.Module,
    images: Tensor,
    pass_name: str,
    dtype: torch.dtype = torch.float32,
    capturable: bool = False,
) -> Step:
    """Return a function that does one step, and put the model into its mode.

    Args:
        model: Any that takes images; it stays in the mode, which a step of the other pass must not meet.
        images: (B, in_chans, height, width), on the model's device.
        pass_name: "inference", a forward pass; or "training": forward pass, cross-entropy where the
            output is logits and else the mean of squares, backward pass and AdamW.
        dtype: float32, or what autocast computes in.
        capturable: Let a CUDA graph capture the step of training.
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
    begin: Callable[[int], object] = lambda number: None,
    clock: Callable[[], float] | None = None,
) -> dict[Key, list[float]]:
    """Return the seconds per step in every counted round for each function.

    A round runs all in turn, so that a drift of the machine's speed hits them alike: a step that is not
    counted, since it finds another's data in the caches, then two that are. The first round, which
    compiles, is not counted.

    Args:
        steps: What to time.
        rounds: How many are counted.
        device: Where the steps compute, "cpu" or "cuda".
        begin: Called with the number of each round, 0 for the one that is not counted.
        clock: Returns seconds; the time of day, once all work on the device is done, if None.
    """
    now = clock or partial(_clock, device)
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(rounds + 1):
        begin(number)
        for key, step in steps.items():
            step()
            start = now()
            for _ in range(STEPS):
                step()
            if number:
                seconds[key].append((now() - start) / STEPS)
    return seconds


def _clock(device: str) -> float:
    """Return the seconds of a clock when all that was started on a device is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def watch_memory(device: str) -> Callable[[], int]:
    """Start to watch the memory; the function returned tells its most since, beyond what is now.

    Bytes: allocated by PyTorch on a GPU, and resident of this process on a CPU, whose other threads
    should rest.

    Raises:
        NotImplementedError: the system does not tell, which Linux does.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before
    try:
        # Or what was freed before would take no memory when it is used.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's mark of the most
    except (OSError, AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"the most memory of a process is not told by this system: {error}"
        ) from error
    before = _resident("VmRSS")
    return lambda: _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
