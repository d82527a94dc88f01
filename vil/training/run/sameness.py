"""What all processes must have in common; copies of the data that differ would train another model."""

import socket
from collections.abc import Mapping

from vil.messages import printable
from vil.training.config import TrainConfig
from vil.training.data.base import Source, fingerprint
from vil.training.distributed import World
from vil.training.errors import DataError
from vil.training.recipes import flat_dict
from vil.training.run.setup import versions

_OWN = ("data.path", "run.device", "run.num_threads", "run.output")
_MOST_TOLD = 3  # a class folder too many moves all classes after it


def described(sources: Mapping[str, Source], **settings: TrainConfig) -> dict[str, str]:
    """Describe versions, settings by their kind, and the splits of the data by name.

    Raises:
        DataError: If an image cannot be read.
    """
    seen = {f"version of {name}": v for name, v in versions().items() if name != "python"}
    for kind, config in settings.items():
        seen |= {f"{kind} {key}": v for key, v in flat_dict(config).items() if key not in _OWN}
    for split, source in sources.items():
        seen[f"number of {split} images"] = source.num_images
        seen[f"fingerprint of the {split} images"] = source.fingerprint
        seen |= {f"{split} class {i}": name for i, name in enumerate(source.classes or ())}
    return {name: printable(str(value)) for name, value in seen.items()}


def check_same(world: World, seen: Mapping[str, str]) -> None:
    """Compare what processes described; all must call it.

    Raises:
        DataError: If one differs from the main process; in all processes.
    """
    if len(set(world.gather(fingerprint(str(seen).encode())))) == 1:
        return
    told = world.gather((socket.gethostname(), seen))
    main, expected = told[0]
    rank, node, found = next((r, node, s) for r, (node, s) in enumerate(told) if s != expected)
    lines = [
        f"{name} is {found.get(name, 'missing')} instead of {expected.get(name, 'missing')}"
        for name in sorted(expected | found, key=lambda name: " class " in name)
        if found.get(name) != expected.get(name)
    ]
    raise DataError(
        f"rank {rank} on node {node} does not match rank 0 on node {main}. Differences ({len(lines)}): "
        f"{'; '.join(lines[:_MOST_TOLD])}"
    )
