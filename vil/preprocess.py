"""Open images and prepare them for a model as in its training: decode, turn upright, put on a background, resize."""

import io
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import RandomResizedCropAndInterpolation, resolve_data_config
from timm.data import create_transform as create_timm_transform
from timm.data.transforms import ResizeKeepRatio
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision import transforms
from torchvision.io import ImageReadMode
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import get_image_size
from torchvision.transforms.v2 import functional as F

from vil.messages import one_line
from vil.timm_models import image_cfg

MAX_PIXELS = 89_478_485
# Other formats run external programs (EPS) or hold no pixels. TGA is last because it has no signature.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "AVIF", "BMP", "DIB"),
    *("GIF", "TIFF", "PPM", "JPEG2000", "TGA"),
)
_MODES = {1: "L", 3: "RGB"}
# Pillow expands these pixels to 8 bits, but not the level that is transparent.
_TO_EIGHT_BITS: dict[str, Callable[[int], int]] = {
    "L;2": lambda level: level * 85,
    "L;4": lambda level: level * 17,
    "RGB;16B": lambda level: level >> 8,
}
_TORCHVISION_MODES = {"L": ImageReadMode.GRAY, "RGB": ImageReadMode.RGB}
# torchvision 0.29 deprecates its function for this operator, in favour of a package that it does not install. Without
# the operator, Pillow decodes to the same pixels in 1.2 times the time.
_decode_jpeg = getattr(torch.ops.image, "decode_jpeg", None)
_AnyImage = str | Path | bytes | bytearray | memoryview | BinaryIO | Image.Image | np.ndarray
_ON_TENSORS = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)  # for uint8
_ORIENTATION = 274  # number of the EXIF tag
# Notes in pretrained_cfg, where timm refuses fields that it does not know.
_BACKGROUND = "transparent pixels on "
_UPRIGHT = "photographs turned by their EXIF orientation"
_BY_TORCHVISION = "JPEG files decoded and resized by torchvision"
_HELD_OUT = "share of the images held out of training by hash: "


def create_transform(
    model: nn.Module, *, max_pixels: int = MAX_PIXELS, **timm_arguments: Any
) -> Callable[[_AnyImage], Tensor]:
    """Return the function that prepares an image for a model as its training and ``eval.py`` do for validation.

    It does what ``timm.data.create_transform`` does with the preprocessing in ``model.pretrained_cfg``, at the size and
    with the channels of the model. Before that, it opens the image, turns photographs by their EXIF orientation and
    puts transparent pixels on a background, if these were options of the training.

    Args:
        model: A model from ``vil.load``, ``timm.create_model`` or a feature extractor of timm, of 1 or 3 channels.
        max_pixels: Maximum pixels of an image, as it is stored and as it is resized before the crop. A thin image of a
            few bytes can claim, or be enlarged to, any number.
        **timm_arguments: Arguments of ``timm.data.create_transform`` that override ``model.pretrained_cfg``, such as
            ``input_size=(3, 384, 384)`` or ``crop_pct=1.0``.

    Returns:
        A function from an image to a normalised float32 tensor (C, H, W). The image is a path, the bytes of a file (any
        bytes-like object), a file opened in binary mode, a Pillow image or a NumPy array. An array is uint8: grey
        (H, W), RGB (H, W, 3) or RGBA (H, W, 4). The function raises OSError if it cannot read a file, TypeError for
        other objects, and ValueError if the file or the array is no image that training accepts.

    Raises:
        ValueError: If the model has another number of channels.
    """
    cfg = model.pretrained_cfg
    data = resolve_data_config(pretrained_cfg=cfg | image_cfg(model)) | timm_arguments
    transform = accepting_tensors(create_timm_transform(**data), max_pixels)
    options, mode = image_options(cfg), image_mode(data["input_size"][0])

    def prepare(image: _AnyImage) -> Tensor:
        try:
            return transform(decode(_content(image), mode, max_pixels=max_pixels, **options))
        except ValueError as error:
            if isinstance(image, str | os.PathLike):
                raise ValueError(f"{image}: {error}") from error
            raise

    return prepare


def _content(image: _AnyImage) -> bytes | Image.Image:
    """Return the bytes of a file, or a Pillow image; raise OSError, ValueError or TypeError if it is neither."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, np.ndarray):
        return _of_array(image)
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if hasattr(image, "read"):
        return image.read()
    try:
        return bytes(memoryview(image))
    except TypeError as error:
        raise TypeError(
            "image must be a path, bytes, a file opened in binary mode, a Pillow image or a NumPy array, got "
            f"{type(image).__name__}"
        ) from error


def _of_array(pixels: np.ndarray) -> Image.Image:
    """Return an array (H, W), (H, W, 3) or (H, W, 4), uint8, as a Pillow image; raise ValueError for others."""
    channels = pixels.shape[2:]
    is_image = pixels.ndim in (2, 3) and channels in ((), (3,), (4,)) and pixels.size
    if pixels.dtype != np.uint8 or not is_image:
        raise ValueError(
            f"an image array must be uint8 of shape (H, W), (H, W, 3) or (H, W, 4), got {pixels.dtype} of shape "
            f"{pixels.shape}"
        )
    return Image.fromarray(pixels)


def decode(
    content: bytes | Image.Image,
    mode: str,
    exif_rotation: bool = False,
    background: str = "none",
    max_pixels: int = MAX_PIXELS,
    decoder: str = "pillow",
) -> Image.Image | Tensor:
    """Decode an image file by its content, regardless of its extension.

    Animations and stacks give their first image. 16-bit pixels keep their upper byte.

    Args:
        content: Bytes of the file, or what Pillow made of it.
        mode: Pillow mode to convert to, RGB or L.
        exif_rotation: Whether to apply the EXIF orientation; damaged EXIF data is ignored.
        background: Colour behind transparent pixels; "none" keeps the colours that are stored there.
        max_pixels: Maximum number of pixels to decode; a file of a few kilobytes can claim any number.
        decoder: With "torchvision", the result is a uint8 tensor (C, H, W) if the file is a JPEG that torchvision
            decodes to the same pixels as Pillow.

    Raises:
        ValueError: If the file is not an image, is truncated, has no pixels or too many, or has 32-bit pixels
            without a defined range.
    """
    try:
        is_file = not isinstance(content, Image.Image)
        image = open_image(io.BytesIO(content)) if is_file else content
        _check_size(image.width, image.height, 1.0, max_pixels)
        if decoder == "torchvision" and _decode_jpeg is not None and is_file:
            if _is_plain_jpeg(image, mode, exif_rotation):
                with suppress(RuntimeError):  # Pillow decides what is damaged
                    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                    return _decode_jpeg(data, _TORCHVISION_MODES[mode].value)
            decoder = "pillow"
        return _opened(image, mode, exif_rotation, background, decoder)
    except Exception as error:  # decoders raise many types for broken files
        raise ValueError(one_line(error) if content else "the file is empty") from error


def open_image(file: BinaryIO) -> Image.Image:
    """Identify an image file by its content, like ``Image.open`` but without its limit on pixels, a global.

    Raises an exception of any type if the file is damaged or not an image.
    """
    prefix = file.read(16)
    for reader, accept in _readers():
        accepted = accept is None or accept(prefix)
        if isinstance(accepted, str):  # what this build of Pillow lacks
            raise ValueError(accepted)
        if accepted:
            file.seek(0)
            with suppress(SyntaxError, IndexError, TypeError, struct.error):  # as in Image.open
                return reader(file, "")
    raise ValueError("cannot identify image file")


def _check_size(width: int, height: int, factor: float, max_pixels: int) -> None:
    """Raise ValueError if an image has no pixels, or too many, when its sides are multiplied by a factor."""
    has = "it has" if factor == 1 else f"resized from {width} x {height} px, it would have"
    if min(round(width * factor), round(height * factor)) < 1:
        raise ValueError(f"{has} no pixels")
    if (pixels := width * height * factor**2) > max_pixels:
        raise ValueError(f"{has} {pixels:,.0f} pixels, which exceeds max_pixels {max_pixels:,}")


def _opened(
    image: Image.Image, mode: str, exif_rotation: bool, background: str, decoder: str
) -> Image.Image | Tensor:
    """Return what ``decode`` returns for the file of an image; same arguments."""
    plain = decoder == "torchvision" and _is_plain_jpeg(image, mode, exif_rotation)
    image = _prepared(image, mode, exif_rotation, background)
    if not plain:
        return image
    return torch.from_numpy(np.array(image).reshape(image.height, image.width, -1)).permute(2, 0, 1)


def _is_plain_jpeg(image: Image.Image, mode: str, exif_rotation: bool) -> bool:
    """Return whether an image is a JPEG file whose pixels need no conversion and no turn."""
    if image.format != "JPEG" or image.mode not in ("L", mode):
        return False
    return not exif_rotation or image.getexif().get(_ORIENTATION, 1) == 1


def _prepared(image: Image.Image, mode: str, exif_rotation: bool, background: str) -> Image.Image:
    """Return an image in another mode, upright and on a background if asked; arguments as in ``decode``."""
    pixels = image.tile[0][3] if getattr(image, "tile", None) else None  # known until it is loaded
    image.load()
    form, level = image.format, image.info.get("transparency")
    if exif_rotation:
        with suppress(Exception):
            image = ImageOps.exif_transpose(image)
    if level is not None:
        image = image.copy()  # keeps the caller's image unchanged
        if form == "PNG" and pixels in _TO_EIGHT_BITS:
            expand = _TO_EIGHT_BITS[pixels]
            level = tuple(map(expand, level)) if isinstance(level, tuple) else expand(level)
        image.info["transparency"] = level
    if image.mode[0] in "IF":
        image = _of_eight_bits(image, form)
    transparent = "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa")
    if background != "none" and transparent:
        below = Image.new("RGBA", image.size, background)
        below.alpha_composite(image.convert("RGBA"))
        image = below.convert("RGB")
    # Transparency has no effect on RGB or L, and Pillow would warn about it.
    image.info.pop("transparency", None)
    return image if image.mode == mode else image.convert(mode)


def image_mode(in_chans: int) -> str:
    """Return the Pillow mode for a model with 1 or 3 channels; raise ValueError for others."""
    if in_chans not in _MODES:
        raise ValueError(f"images can be prepared for 1 or 3 channels, got a model of {in_chans}")
    return _MODES[in_chans]


def image_notes(
    exif_rotation: bool, background: str, decoder: str, val_fraction: float
) -> list[str]:
    """Return notes for ``pretrained_cfg`` on how images are opened, and on the share that training held out."""
    notes = [] if background == "none" else [_BACKGROUND + background]
    notes += [_UPRIGHT] * exif_rotation + [_BY_TORCHVISION] * (decoder == "torchvision")
    return notes + ([_HELD_OUT + repr(val_fraction)] if val_fraction else [])


def image_options(pretrained_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the notes of a ``pretrained_cfg`` say that images are opened, as arguments of ``decode``."""
    notes = pretrained_cfg.get("notes") or ()
    known = [colour for colour in ("white", "black") if _BACKGROUND + colour in notes]
    return {
        "exif_rotation": _UPRIGHT in notes,
        "background": known[0] if known else "none",
        "decoder": "torchvision" if _BY_TORCHVISION in notes else "pillow",
    }


def held_out_fraction(pretrained_cfg: Mapping[str, Any]) -> float:
    """Return the share of images held out of training that the notes of a ``pretrained_cfg`` state, or 0."""
    stated = [note for note in pretrained_cfg.get("notes") or () if note.startswith(_HELD_OUT)]
    with suppress(ValueError):
        return float(stated[0].removeprefix(_HELD_OUT)) if stated else 0.0
    return 0.0


def accepting_tensors(
    recipe: transforms.Compose, max_pixels: int = MAX_PIXELS
) -> transforms.Compose:
    """Make a recipe of timm take results of ``decode``, and raise ValueError instead of enlarging above max_pixels.

    Its first step resizes tensors by torchvision.
    """
    recipe.transforms[0] = _Resize(recipe.transforms[0], max_pixels)
    return recipe


class _Resize:
    """A step of timm that crops or resizes; of a tensor (C, H, W) it makes a Pillow image, for the later steps."""

    def __init__(self, step: Callable[[Image.Image], Image.Image], max_pixels: int) -> None:
        self.step, self.max_pixels = step, max_pixels
        # Least height and width, of steps that keep the ratio. The side that a later step crops may become very long.
        self.least: tuple[int, int] | None = None
        if isinstance(step, ResizeKeepRatio):
            self.least = step.size
        elif isinstance(step, transforms.Resize) and isinstance(step.size, int):
            self.least = (step.size, step.size)

    def __call__(self, image: Image.Image | Tensor) -> Image.Image:
        step = self.step
        if self.least is not None:
            width, height = get_image_size(image)
            scales = self.least[0] / height, self.least[1] / width
            longest = getattr(step, "longest", 0.0)  # 1 fits both sides into the target
            factor = 1 / (longest / min(scales) + (1 - longest) / max(scales))
            _check_size(width, height, factor, self.max_pixels)
        if not isinstance(image, Tensor):
            return step(image)
        if getattr(step, "interpolation", None) not in _ON_TENSORS:
            return step(_pillow(image))
        if isinstance(step, RandomResizedCropAndInterpolation):
            top, left, height, width = step.get_params(image, step.scale, step.ratio)
            part = image[:, top : top + height, left : left + width]
            return _pillow(_resized(part, list(step.size), step.interpolation))
        if isinstance(step, transforms.Resize):
            size = F.resize(image[:0], step.size, step.interpolation).shape[1:]
            return _pillow(_resized(image, list(size), step.interpolation))
        return step(_pillow(image))


def _resized(image: Tensor, size: list[int], interpolation: InterpolationMode) -> Tensor:
    """Return what torchvision's resize returns. With the colours of a pixel together, it takes half of the time."""
    image = image[None].contiguous(memory_format=torch.channels_last)
    return interpolate(image, size, mode=interpolation.value, antialias=True)[0]


def _pillow(image: Tensor) -> Image.Image:
    pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    return Image.fromarray(pixels.contiguous().numpy())


@cache
def _readers() -> list[tuple[Callable[[BinaryIO, str], Image.Image], Callable | None]]:
    """Return a class or function that opens files of a format, and one that recognises them, for each format."""
    Image.init()
    return [Image.OPEN[name] for name in _FORMATS if name in Image.OPEN]  # AVIF is optional


def _of_eight_bits(image: Image.Image, form: str | None) -> Image.Image:
    """Convert 16-bit grey to L by its upper byte, like OpenCV and libpng; Pillow's conversion would clip.

    With a transparent level, the result is LA.
    """
    # Pillow reads 16-bit PPM as 32-bit; older versions also read 16-bit PNG this way.
    if not (image.mode.startswith("I;16") or (image.mode == "I" and form in ("PNG", "PPM"))):
        raise ValueError(
            f"{form} has pixels of mode {image.mode}, which has no defined range; "
            f"expected 8 or 16 bits"
        )
    values, transparent = np.asarray(image), image.info.get("transparency")
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if transparent is None:
        return grey
    opaque = Image.fromarray((values != transparent).astype(np.uint8) * 255)
    return Image.merge("LA", (grey, opaque))
