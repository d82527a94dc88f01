"""Vision Longhorn: timm image backbones whose token mixer is a bidirectional Longhorn scan.

Importing this package registers its models with timm::

    import timm
    import vil

    model = timm.create_model("vil_tiny")
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

__version__ = "0.1.0"

_kernels = Path(__file__).resolve().parent.parent / "kernels"
if (_kernels.parent / "pyproject.toml").is_file():
    # In a source checkout kernels/ stands beside vil/; a wheel has it inside as vil/kernels/.
    _spec = ModuleSpec("vil.kernels", None, is_package=True)
    _spec.submodule_search_locations = [str(_kernels)]
    kernels = sys.modules["vil.kernels"] = module_from_spec(_spec)

import vil.registry  # noqa: F401  (registers the models)
from vil.backbone import VisionLonghorn
from vil.preprocess import create_transform
from vil.pyramid import VisionLonghornPyramid
from vil.weights.build import load

__all__ = [
    "VisionLonghorn",
    "VisionLonghornPyramid",
    "__version__",
    "create_transform",
    "load",
]
