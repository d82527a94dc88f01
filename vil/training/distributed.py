"""The processes of a run: who they are, how they start together and what they agree on.

One process per device, started by torchrun, srun or any launcher that sets RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a single one needs nothing.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vil.training.errors import ConfigError, LostProcessError

_LOST = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited")
_TIMEOUT = timedelta(minutes=30)  # opening the data of a slow disk must not exceed it


@dataclass(frozen=True)
class World:
    """The processes of a run and this one's place among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank; all must call it."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value; all must call it, the others with anything."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor over all processes, in place; all must call it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process through before the others, which then find what it wrote."""
        if self.size > 1 and not self.is_main:
            dist.barrier()
        yield
        if self.size > 1 and self.is_main:
            dist.barrier()


def world_from_environment() -> World:
    """Read this process's place from the launcher's environment variables.

    Raises:
        ConfigError: they are incomplete or not numbers.
    """
    if "RANK" not in os.environ:
        return World()
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return World(rank, size, int(os.environ.get("LOCAL_RANK", "0")))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"RANK is set but WORLD_SIZE is missing or wrong: {error}") from error


@contextmanager
def process_group(world: World, device: torch.device) -> Iterator[None]:
    """Connect the processes for the duration of a run: gloo between CPUs, NCCL between GPUs.

    torchrun keeps one store over its restarts, in which a new attempt would find the addresses of
    dead processes; on one node each attempt therefore gets keys of its own. Over several nodes, whose
    counts of restarts may differ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 serves instead.

    Args:
        world: The processes.
        device: What this one computes on.

    Raises:
        LostProcessError: another process ended in the middle of the run.
    """
    if world.size == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    arguments: dict[str, Any] = {}
    if shared and os.environ.get("GROUP_WORLD_SIZE") == "1":
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        arguments["store"] = dist.PrefixStore(f"attempt{attempt}", store)
        arguments |= {"rank": world.rank, "world_size": world.size}
    if device.type == "cuda":
        arguments["device_id"] = device
    dist.init_process_group(backend, timeout=_TIMEOUT, **arguments)
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise LostProcessError("another process of the run is gone") from error
    finally:
        dist.destroy_process_group()
