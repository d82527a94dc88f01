"""The processes of a run: who they are, how they start together and what they agree on.

One process per device, started by torchrun, srun or any launcher that sets RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a single one needs nothing.
"""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vil.messages import first_line
from vil.training.errors import ConfigError, LostProcessError

_LOST = re.compile(
    "closed by peer|reset by peer|Broken pipe|remote process exited|Timed out waiting"
)
_MEETING = 300.0  # seconds; processes start together, and one that has died would be waited for
_LOOK = 0.05  # seconds between two looks
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

    Args:
        world: The processes.
        device: What this one computes on.

    Raises:
        ConfigError: the launcher does not say where they meet, or the main process cannot listen there.
        LostProcessError: another process did not come, or ended in the middle of the run.
    """
    if world.size == 1:
        yield
        return
    store = _meet(world)
    arguments = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=_TIMEOUT,
        **arguments,
    )
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise LostProcessError("another process of the run is gone") from error
    finally:
        dist.destroy_process_group()


def _meet(world: World) -> dist.Store:
    """Wait until all processes are there, and return where they find each other.

    torchrun keeps one store over its restarts, in which a new attempt would find the addresses of
    dead processes; on one node each attempt therefore gets keys of its own. Over several nodes, whose
    counts of restarts may differ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 serves instead.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = world.is_main and not shared
    host, port = _meeting_place()
    deadline = time.monotonic() + _MEETING
    if not is_host:
        _await_host(host, port, "torchrun" if shared else "the main process", deadline)
    try:
        store: dist.Store = dist.TCPStore(
            host, port, is_master=is_host, wait_for_workers=False, multi_tenant=is_host
        )
    except RuntimeError as error:
        raise ConfigError(f"cannot meet at {host}:{port}: {first_line(error)}") from error
    if shared and os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt{attempt}", store)
    try:
        came = store.add("came", 1)
        while came < world.size and time.monotonic() < deadline:
            time.sleep(_LOOK)
            came = store.add("came", 0)
    except RuntimeError as error:
        raise LostProcessError("another process of the run is gone") from error
    if came < world.size:
        raise LostProcessError(
            f"{came} of {world.size} processes came within {_MEETING / 60:g} minutes; the others' own "
            f"errors say why"
        )
    return store


def _meeting_place() -> tuple[str, int]:
    """Read from the launcher's environment variables where processes meet."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        message = f"RANK is set but MASTER_ADDR or MASTER_PORT is missing or wrong: {error}"
        raise ConfigError(message) from error
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT must be a port, got {port}")
    return host, port


def _await_host(host: str, port: int, name: str, deadline: float) -> None:
    """Wait until somebody listens; PyTorch would, too, and say in pages that nobody does."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_MEETING).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostProcessError(
                    f"{name} was not at {host}:{port} within {_MEETING / 60:g} minutes: {error}"
                ) from error
        time.sleep(_LOOK)
