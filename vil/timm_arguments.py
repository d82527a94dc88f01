"""Arguments of timm.create_model that do not identify a model, and former names of arguments that do."""

from typing import Any

OTHER_WEIGHTS = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args"),
    *("pretrained_strict", "checkpoint_path", "cache_dir"),
)
"""Arguments that fetch weights or describe fetched weights."""
FEATURES = ("features_only", "out_indices", "feature_cls")
"""Arguments that make a model return features instead of logits."""
NOT_OF_A_MODEL = (
    *(*OTHER_WEIGHTS, *FEATURES),
    *("feature_cfg", "scriptable", "exportable", "no_jit", "device", "dtype"),
)
"""Arguments that do not identify a model; neither model.args nor a weights file may contain them."""

FORMER = {
    "trained_grid": "ref_feat_shape",
    "resize_below": "resize_below_scale",
    "recompute_above": "checkpoint_min_tokens",
}
"""Former name of an argument -> its current name."""


def with_current_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return model arguments with their current names and values; old files contain former ones."""
    current = {FORMER.get(name, name): value for name, value in arguments.items()}
    return current | ({"grid_aware": "dt"} if current.get("grid_aware") == "steps" else {})
