"""An optimiser's state across a change of its settings."""

from typing import Any

from torch.optim import Optimizer

_ABSENT = object()


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any], as_saved: Optimizer) -> None:
    """Load a saved state; settings that are others now stay as they are now.

    What an optimiser keeps beside its settings, also that in its groups, comes from the saved state. The
    groups may be others, as with and without optim.layer_decay.

    Args:
        optimizer: Receives the state.
        saved: State dict of one that had as_saved's settings.
        as_saved: A new optimiser of the same parameters that has those settings.
    """
    places, former = {}, {}
    for new, old in zip(as_saved.param_groups, saved["param_groups"], strict=True):
        for parameter, place in zip(new["params"], old["params"], strict=True):
            places[parameter] = place
            former[parameter] = (new, old)
    groups = []
    for group in optimizer.param_groups:
        new, old = former[group["params"][0]]
        kept = {key: value for key, value in old.items() if key in group or key not in new}
        changed = {key: value for key, value in group.items() if new.get(key, _ABSENT) != value}
        groups.append(kept | changed | {"params": [places[p] for p in group["params"]]})
    optimizer.load_state_dict(saved | {"param_groups": groups})
