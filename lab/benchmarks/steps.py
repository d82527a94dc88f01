"""Build inference and training steps, time them in turns, and measure their memory."""

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
STEPS = 2  # timed steps of each model per round

Step = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)


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
    fused = images.device.type == "cuda"  # as in the trainer
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, capturable=capturable, fused=fused)
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
    """Start tracking memory; return a function that gives the peak so far minus the memory at the start.

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
        raise NotImplementedError(f"this system does not report the peak memory of a process: {error}") from error
    before = _resident("VmRSS")
    return lambda: _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
