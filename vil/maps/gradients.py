"""Gradient maps for any timm model: the pixels that a class logit or a feature depends on."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.maps.evaluating import check_images, evaluating


def evidence(
    model: nn.Module,
    images: Tensor,
    target: int | Tensor,
    patch_size: int | tuple[int, int] | None = None,
    steps: int = 16,
    baseline: Tensor | float = 0.0,
) -> Tensor:
    """Return the contribution of each pixel to a class logit by integrated gradients.

    The map is gradient times (image - baseline), summed over channels. The gradient is averaged over points
    on the straight path from the baseline to the image (Sundararajan et al., 2017). All pixels sum to the
    difference of the logits at image and baseline, up to the error of a finite number of points.

    Args:
        model: Model that returns logits (B, classes); always run in evaluation mode.
        images: Normalised images (B, in_chans, height, width).
        target: Class index for all images, or int64 (B,), one per image.
        patch_size: Height and width of patches to sum over; the last patch may extend past the image.
            None returns single pixels.
        steps: Number of points on the path, each the midpoint of an equal part of it; 0 uses only the
            gradient at the image.
        baseline: Normalised baseline image of any shape that expands to the images; 0 is the data mean.

    Returns:
        Map (B, height, width), or one value per patch, in the dtype of the images. Positive values support the class.

    Raises:
        ValueError: If the model does not return logits or an argument is invalid.
    """
    check_images(images)
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    empty = torch.as_tensor(baseline, dtype=images.dtype, device=images.device)
    try:
        empty = empty.expand_as(images)
    except RuntimeError as error:
        raise ValueError(
            f"baseline must expand to {tuple(images.shape)}, got {tuple(empty.shape)}"
        ) from error
    shares = [(i + 0.5) / steps for i in range(steps)] or [1.0]
    with _differentiating(model):
        empty = empty.detach().clone()
        way, gradient = images.detach() - empty, torch.zeros_like(empty)
        for share in shares:
            point = (empty + share * way).requires_grad_()
            chosen = _logits_of(model(point), target, len(images)).sum()
            gradient += torch.autograd.grad(chosen, point)[0]
    found = (gradient / len(shares) * way).sum(1)
    return found if patch_size is None else _summed(found, patch_size)


def receptive_field(
    model: nn.Module,
    images: Tensor,
    position: tuple[int, int] | None = None,
    probes: int = 8,
    seed: int = 0,
) -> Tensor:
    """Return the effective receptive field of a feature in the deepest feature map.

    Each value is the Frobenius norm of the derivative of all channels of the feature with respect to all channels of
    the pixel. The norm is estimated as the root mean square gradient of a sum of channels with random signs
    (Hutchinson). The usual sum without signs (Luo et al., 2016) is nearly constant if features are normalised.

    Args:
        model: Model of timm or this package, ``features_only`` or not; always run in evaluation mode. Its
            deepest map is the last map of ``forward_intermediates`` or of a ``features_only`` model.
        images: Normalised images (B, in_chans, height, width).
        position: Row and column of the feature in the deepest map; None takes the centre.
        probes: Number of random sign vectors; the relative error falls with the square root of it.
        seed: Seed of the random signs.

    Returns:
        Non-negative map (B, height, width) in the dtype of the images.

    Raises:
        ValueError: If the model has no feature maps or an argument is invalid.
    """
    check_images(images)
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    generator = torch.Generator().manual_seed(seed)
    with _differentiating(model):
        images = images.detach().clone().requires_grad_()
        deepest = _deepest_map(model, images)
        H, W = deepest.shape[-2:]
        row, column = (H // 2, W // 2) if position is None else position
        if not (0 <= row < H and 0 <= column < W):
            raise ValueError(f"position must be in the map of {H} x {W}, got {(row, column)}")
        feature = deepest[:, :, row, column]
        squares = torch.zeros_like(images[:, 0])
        for _ in range(probes):
            signs = torch.randint(2, feature.shape[1:], generator=generator).to(feature) * 2 - 1
            sums = (feature @ signs).sum()  # summing over the batch is safe: images do not interact
            [gradient] = torch.autograd.grad(sums, images, retain_graph=True)
            squares += gradient.square().sum(1)
    return (squares / probes).sqrt()


@contextlib.contextmanager
def _differentiating(model: nn.Module) -> Iterator[None]:
    """Enable gradients and evaluation mode for a ``with`` block, even if the caller disabled gradients."""
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        yield


def _logits_of(logits: object, target: int | Tensor, B: int) -> Tensor:
    """Return the logit of the target class of each image, (B, 1)."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.shape[1]:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"model must return logits (B, classes), got {got}")
    target = torch.as_tensor(target, device=logits.device)
    if target.dtype != torch.int64 or tuple(target.shape) not in ((), (B,)):
        raise ValueError(
            f"target must be a number of a class or int64 ({B},), got {target.dtype} {tuple(target.shape)}"
        )
    classes = logits.shape[1]
    if not ((target >= 0) & (target < classes)).all():
        raise ValueError(f"target must be 0 to {classes - 1}, got {target.tolist()}")
    return logits.gather(1, target.expand(B)[:, None])


def _summed(pixels: Tensor, patch_size: int | tuple[int, int]) -> Tensor:
    """Sum a map (B, height, width) over patches."""
    height, width = (patch_size,) * 2 if isinstance(patch_size, int) else patch_size
    if min(height, width) < 1:
        raise ValueError(f"patch_size must be at least 1, got {patch_size}")
    whole = F.pad(pixels, [0, -pixels.shape[2] % width, 0, -pixels.shape[1] % height])
    return F.avg_pool2d(whole[:, None], (height, width))[:, 0] * (height * width)


def _deepest_map(model: nn.Module, images: Tensor) -> Tensor:
    """Return the deepest feature map (B, C, H, W) of a timm model."""
    if hasattr(model, "forward_intermediates"):
        maps = model.forward_intermediates(images, indices=1, intermediates_only=True)
    else:
        maps = model(images)
    deepest = maps[-1] if isinstance(maps, list | tuple) and maps else None
    if not isinstance(deepest, Tensor) or deepest.ndim != 4:
        raise ValueError(
            f"model must have timm's forward_intermediates or be features_only, {type(model).__name__} is not"
        )
    return deepest
