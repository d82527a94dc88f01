"""Write a model as ONNX, checked in ONNX Runtime, and how its images are prepared as JSON.

``preprocess.json`` says in numbers what ``ImageSpec.transform`` does, for programs without Python or timm.
"""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vil.backbone import VisionLonghorn
from vil.messages import one_line
from vil.preprocess import ImageSpec
from vil.training.errors import ConfigError, OutputError
from vil.weights.build import model_with
from vil.weights.sources import Weights

_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_TOLERANCE = 1e-4
"""Largest error of a logit, relative to the largest logit."""
_ANY_SIZE = {"grid_aware": False, "dynamic_img_pad": True}


def check_packages() -> None:
    """Raise ConfigError if a package that an export needs is absent."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--onnx needs {', '.join(missing)}; run pip install {' '.join(missing)}")


def write(folder: Path, weights: Weights, any_size: bool) -> None:
    """Write ``model.onnx``, ``model.onnx.data`` and ``preprocess.json``.

    The program takes "images", (B, C, H, W), float32, and returns "logits", (B, classes). It is compared with the model
    for two shapes: at the size of the weights, and for another batch or, with ``any_size``, another size.

    Args:
        folder: Folder that exists.
        weights: Weights of the model.
        any_size: Also allow other image sizes. The model then takes them as images at the scale of training
            (``grid_aware=False``), and fills up incomplete patches with zeros.

    Raises:
        ConfigError: If ``any_size`` is asked of another library's model.
        OutputError: If the model cannot be exported, or the program differs from it.
    """
    model, _ = model_with(weights, exportable=True)
    spec = ImageSpec.of(weights.pretrained_cfg)
    if any_size:
        if not isinstance(model, VisionLonghorn):
            raise ConfigError(f"--onnx any supports this library's models, got {weights.architecture}; use --onnx own")
        model, _ = model_with(weights, exportable=True, **_ANY_SIZE)
    model = model.eval()
    height, width = spec.img_size
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, spec.in_chans, height, width), (3, spec.in_chans, height, width)]
    if any_size:
        shapes[1] = (1, spec.in_chans, height + height // 2 + 1, width * 2)
    first, second = (torch.randn(shape, generator=generator) for shape in shapes)
    axes = (0, 2, 3) if any_size else (0,)
    path = folder / "model.onnx"
    try:
        torch.onnx.export(
            model, (first,), path, dynamo=True, verbose=False, external_data=True,
            dynamic_shapes=(dict.fromkeys(axes, torch.export.Dim.DYNAMIC),),
            input_names=["images"], output_names=["logits"],
        )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        raise OutputError(f"cannot export {weights.architecture} to ONNX: {one_line(error)}") from error
    _check(path, model, (first, second))
    labels = {} if weights.label_names is None else {"label_names": list(weights.label_names)}
    described = json.dumps(description(spec, any_size) | labels, indent=2, allow_nan=False)
    (folder / "preprocess.json").write_text(described + "\n", encoding="utf-8")


def _check(path: Path, model: nn.Module, batches: tuple[Tensor, ...]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    for images in batches:
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.inference_mode():
            expected = model(images)
        error = (torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()
        if not error <= _TOLERANCE:
            raise OutputError(
                f"{path.name} differs from the model by {error:.1e} of the largest logit for images "
                f"{tuple(images.shape)}; at most {_TOLERANCE:.0e} is allowed"
            )


def description(spec: ImageSpec, any_size: bool = False) -> dict[str, Any]:
    """Return how images are prepared, in the order of the steps, with sizes as (height, width) in pixels.

    The resized image covers a size with its ratio kept, is contained in it, or is stretched to it. Colours are in 0 to
    255 until they are normalized: divided by 255, minus mean, divided by std.
    """
    rules = {"center": "cover", "border": "contain", "squash": "stretch"}
    crop: dict[str, Any] = {"size": list(spec.img_size), "place": "center"}
    if spec.crop_mode == "border":
        crop["fill"] = [round(255 * value) for value in spec.mean]
    sides = ["height", "width"] if any_size else list(spec.img_size)
    return {
        "input": {"name": "images", "shape": ["batch", spec.in_chans, *sides], "dtype": "float32"},
        "output": {"name": "logits"},
        "decode": {
            "channels": "RGB" if spec.in_chans == 3 else "grey",
            "exif_rotation": spec.exif_rotation,
            "behind_transparent": spec.background,
        },
        "resize": {
            "size": [math.floor(size / spec.crop_pct) for size in spec.img_size],
            "rule": rules[spec.crop_mode],
            "interpolation": spec.interpolation,
            "antialias": True,
        },
        "crop": crop,
        "normalize": {"mean": list(spec.mean), "std": list(spec.std)},
    }
