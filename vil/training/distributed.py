"""The distributed workers of a run: ranks, devices and communication.

Start one process per device with torchrun, srun or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. A single process needs no launcher.
"""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

import vil
from vil.messages import first_line
from vil.training.errors import ConfigError, LostProcessError, is_dead_loader
from vil.training.settings import RunConfig

_LOST = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|Timed out waiting|timeout")
_MEETING = timedelta(minutes=5)  # all ranks start together, so a missing rank has died
_TIMEOUT = timedelta(minutes=30)  # must be longer than opening the data on a slow disk


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The process group of a run, and the rank and device of this process."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which logs and writes files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank; every rank must call this."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; every rank must call this, other ranks with any value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def share(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of rank 0 to all ranks in place; every rank must call this."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks in place; every rank must call this."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run a block on rank 0 first, then on the other ranks, which can read the files it wrote."""
        if not self.is_main:
            self.gather(None)
        yield
        if self.is_main:
            self.gather(None)


@contextmanager
def connect(run: RunConfig) -> Iterator[World]:
    """Initialise the process group for the duration of a run: gloo between CPUs, NCCL between GPUs.

    Raises ConfigError if the device does not exist, the launcher's variables are invalid, or the rendezvous fails.
    Raises LostProcessError if another process does not join, or dies during the run.
    """
    world = _world(run)
    if world.size == 1:
        yield world
        return
    on_gpu = world.device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=_store(),
            rank=world.rank,
            world_size=world.size,
            timeout=_TIMEOUT,
            **({"device_id": world.device} if on_gpu else {}),
        )
        yield world
    except RuntimeError as error:
        if not _LOST.search(str(error)) or is_dead_loader(error):
            raise
        raise LostProcessError("another process of the run died; see its own error message") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def versions() -> dict[str, str]:
    """Return the package versions that a result may depend on; they must match on all ranks."""
    packages = ("torch", "timm", "pillow")
    return {
        "vil": vil.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def _store() -> dist.Store:
    """Return the rendezvous store, through which the ranks exchange their addresses.

    torchrun keeps one store across restarts, where a new attempt would find the addresses of dead
    processes. On a single node, each attempt therefore uses its own key prefix. The restart counts of
    several nodes may differ; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there instead.
    """
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=_MEETING))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the processes cannot connect at MASTER_ADDR:MASTER_PORT: {first_line(error)}") from error
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt{attempt}", store)
    return store


def _world(run: RunConfig) -> World:
    """Return the rank, size and device, from the launcher's environment variables and the options."""
    try:
        if "RANK" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            rank, size = 0, 1
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE or LOCAL_RANK is missing or not an integer: {error}; use torchrun"
        ) from error
    return World(rank, size, _device(run, local_rank))


def _device(run: RunConfig, local_rank: int) -> torch.device:
    """Return the device of this process, and set the number of CPU threads.

    "auto" uses CUDA if available. With several GPUs, each process of a node uses the GPU of its local rank.
    """
    if run.num_threads is not None:
        torch.set_num_threads(run.num_threads)
    name = run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"run.device {name} is not available: {first_line(error)}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
