"""Generated inputs: odd tensors for weight files, images, damaged bytes, and memory layouts."""

import io
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# What a file may hold instead of a weight of the right shape and dtype

ODD_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": lambda v: v.to(torch.int8),
    "int64": lambda v: v.to(torch.int64),
    "bool": lambda v: v > 0,
    "complex64": lambda v: v.to(torch.complex64),
    "float64": lambda v: v.double(),
    "1e300": lambda v: torch.full_like(v, 1e300, dtype=torch.float64),
    "one 1e300": lambda v: v.double().flatten().index_fill(0, torch.tensor([0]), 1e300).view(v.shape),
    "bfloat16": lambda v: v.bfloat16(),
    "float8": lambda v: v.to(torch.float8_e4m3fn),
    "nan": lambda v: v * math.nan,
    "inf": lambda v: torch.full_like(v, -math.inf),
    "sparse": lambda v: v.to_sparse(),
    "meta": lambda v: v.to("meta"),
    "no dimension": lambda v: v.flatten()[0].clone(),
    "one more dimension": lambda v: v[None].clone(),
    "one less": lambda v: v.flatten()[:-1].clone(),
    "empty": lambda v: v.flatten()[:0].clone(),
    "expanded": lambda v: torch.zeros(1).expand(1 << 44),
    "transposed": lambda v: v.mT.contiguous() if v.ndim > 1 else v,
    "twice as long": lambda v: torch.cat([v, v], -1) if v.ndim else v,
}


# Images


def encoded(image: Image.Image, form: str, **arguments: object) -> bytes:
    """Return an image encoded as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, form, **arguments)
    return file.getvalue()


def transparent(seed: int) -> Iterator[tuple[bytes, np.ndarray, np.ndarray]]:
    """Yield files of every kind that can be transparent, their colours (H, W, 3) and alpha (H, W)."""
    rng = np.random.default_rng(seed)
    size = tuple(rng.integers(1, 9, 2))
    colours = rng.integers(0, 256, (*size, 3), np.uint8)
    alpha = rng.integers(0, 256, size, np.uint8)
    alpha.flat[0] = 0
    rgba = Image.fromarray(np.dstack([colours, alpha]))
    for form, options in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True, "exact": True})):
        yield encoded(rgba, form, **options), colours, alpha
    grey = np.repeat(colours[..., :1], 3, 2)
    yield encoded(Image.fromarray(np.dstack([grey[..., 0], alpha])), "PNG"), grey, alpha
    palette = rng.integers(0, 256, (4, 3), np.uint8)
    opacity, places = rng.integers(0, 256, 4, np.uint8), rng.integers(0, 4, size, np.uint8)
    indexed = Image.fromarray(places).convert("P")
    indexed.putpalette(palette.tobytes())
    file = encoded(indexed, "PNG", transparency=opacity.tobytes())
    yield file, palette[places], opacity[places]
    for form, one in (("PNG", "L"), ("PNG", "RGB"), ("GIF", "P")):
        image = {"L": Image.fromarray(grey[..., 0]), "RGB": Image.fromarray(colours), "P": indexed}[one]
        through = {"L": int(grey.flat[0]), "RGB": tuple(map(int, colours[0, 0])), "P": 2}[one]
        seen = {"L": grey, "RGB": colours, "P": palette[places]}[one]
        hidden = places == 2 if one == "P" else (seen == seen[0, 0]).all(2)
        yield encoded(image, form, transparency=through), seen, np.where(hidden, 0, 255)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return a file whose bytes are overwritten, removed, repeated or cut off at random."""
    found = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found))
        length = draw.randint(1, 8)
        part = found[at : at + length]
        kind = draw.choice(["bits", "values", "removed", "repeated", "cut off"])
        if kind == "bits":
            found[at] ^= 1 << draw.randrange(8)
        elif kind == "values":
            found[at : at + length] = draw.choice([b"\0", b"\xff"]) * len(part)
        elif kind == "repeated":
            found[at:at] = part * draw.randint(1, 3)
        elif kind == "removed" or at > len(found) // 2:
            del found[at : (at + length if kind == "removed" else None)]
    return bytes(found)


# Memory


def laid_out(tensor: Tensor, rng: random.Random, expandable: bool = True) -> Tensor:
    """Return a tensor with a random memory layout: order of axes, gaps, offset, axes of stride 0.

    Gaps hold NaN, or 1 for integers. An expanded axis repeats its first value everywhere.
    """
    axes = range(tensor.ndim)
    expanded = [expandable and rng.random() < 0.1 for _ in axes]
    core = tensor
    for axis in axes:
        core = core.narrow(axis, 0, 1) if expanded[axis] else core
    channels_last = [0, *range(2, tensor.ndim), *([1] if tensor.ndim > 1 else [])]
    slowest_first = rng.choice([[*axes], channels_last, rng.sample(axes, len(axes))])
    steps = [rng.choice([1, 1, 1, 2, 3]) for _ in axes]
    sizes = [core.shape[axis] * steps[axis] for axis in slowest_first]
    offset = rng.choice([0, 0, 1, 2, 5])
    gap = torch.nan if tensor.is_floating_point() else 1
    memory = torch.full((offset + math.prod(sizes),), gap, dtype=tensor.dtype, device=tensor.device)
    view = memory[offset:].view(sizes).permute([slowest_first.index(axis) for axis in axes])
    view = view[tuple(slice(None, None, step) for step in steps)]
    view.copy_(core)
    return view.expand(tensor.shape)
