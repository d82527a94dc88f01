"""Arguments of timm.create_model that do not identify a model."""

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
