"""Arguments of timm.create_model that do not say which model it is."""

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
