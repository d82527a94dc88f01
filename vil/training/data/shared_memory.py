"""Shared memory, in which loader processes hand over their batches: how much there must be."""

import os
import shutil
from pathlib import Path

from vil.training.distributed import World
from vil.training.errors import ConfigError

_PLACE = Path("/dev/shm")  # not on macOS, where nothing limits it
CURE = "give the container more, by docker run --shm-size 8g or --ipc host, say, or lower data.num_workers"


def check_shared_memory(wanted: int, world: World) -> None:
    """Check that what loader processes hold at most fits; all processes must call it before any loads.

    Docker gives containers 64 MiB, in which such a run would end somewhere in its midst.

    Args:
        wanted: Bytes, for this process of the run.
        world: The processes; those of a node share the memory.

    Raises:
        ConfigError: it does not fit, on some node.
    """
    wanted *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = shutil.disk_usage(_PLACE).free if _PLACE.is_dir() else wanted
    wanted, free = min(world.gather((wanted, free)), key=lambda node: node[1] - node[0])
    if free < wanted:
        raise ConfigError(
            f"loader processes hold up to {wanted / 2**20:.3g} MiB in {_PLACE}, which has "
            f"{free / 2**20:.3g} MiB free: {CURE}"
        )


def is_full(error: Exception) -> bool:
    """Tell whether that is what a loader process, or the loader, says when shared memory is full."""
    told = str(error)
    return "unable to allocate shared memory" in told or "out of shared memory" in told
