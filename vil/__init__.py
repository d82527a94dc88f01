"""Vision Longhorn: timm image backbones whose token mixer is a bidirectional Longhorn scan.

Importing this package registers its models with timm::

    import timm
    import vil

    model = timm.create_model("vil_tiny")
"""

from pathlib import Path

__version__ = "0.1.0"

_repository = Path(__file__).resolve().parent.parent
if (_repository / "pyproject.toml").is_file():
    # In a source checkout kernels/ stands beside vil/; a wheel has it inside as vil/kernels/.
    __path__.append(str(_repository))

from vil.backbone import VisionLonghorn
from vil.loading import load
from vil.pyramid import VisionLonghornPyramid

__all__ = ["VisionLonghorn", "VisionLonghornPyramid", "__version__", "load"]
