"""Vision Longhorn: timm image backbones whose token mixer is a bidirectional Longhorn scan.

Importing this package registers its models with timm::

    import timm
    import vil

    model = timm.create_model("vil_tiny")
"""

import vil.registry  # noqa: F401  (registers the models)
from vil.backbone import VisionLonghorn
from vil.param_groups import param_groups
from vil.preprocess import create_transform
from vil.pyramid import VisionLonghornPyramid
from vil.weights.build import load

__version__ = "0.1.0"

__all__ = [
    "VisionLonghorn",
    "VisionLonghornPyramid",
    "__version__",
    "create_transform",
    "load",
    "param_groups",
]
