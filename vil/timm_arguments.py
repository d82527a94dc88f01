"""Arguments of timm.create_model: those that do not say which model it is, and former names of those that do."""

from typing import Any

OTHER_WEIGHTS = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args"),
    *("pretrained_strict", "checkpoint_path", "cache_dir"),
)
"""Those that fetch weights, or describe what is fetched."""
FEATURES = ("features_only", "out_indices", "feature_cls")
"""Those that make a model give features."""
NOT_OF_A_MODEL = (
    *(*OTHER_WEIGHTS, *FEATURES),
    *("feature_cfg", "scriptable", "exportable", "no_jit", "device", "dtype"),
)
"""All of these, which neither settings nor a file of weights may give."""

FORMER = {
    "trained_grid": "ref_feat_shape",
    "resize_below": "resize_below_scale",
    "recompute_above": "checkpoint_min_tokens",
}
"""Former name of an argument -> its name."""


def with_current_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a model with their names and values of today; files keep former ones for good."""
    current = {FORMER.get(name, name): value for name, value in arguments.items()}
    return current | ({"grid_aware": "dt"} if current.get("grid_aware") == "steps" else {})
