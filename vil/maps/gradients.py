"""What a feature or a class rests on, by gradients with respect to the pixels, of any model of timm."""

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
    """Return what each pixel adds to the logit of a class: gradient times input, summed over channels.

    The gradient is the mean of those on the way from an empty image to the image (integrated gradients,
    Sundararajan et al., 2017), and the input is counted from the empty one: all pixels together add up to the
    logit of the image less that of the empty one, but for the error of so many points.

    Args:
        model: Returns logits (B, classes); evaluated, whatever mode it is in.
        images: Normalised as the model takes them, (B, in_chans, height, width).
        target: Number of the class, for all images or for each, int64 (B,).
        patch_size: Sum over patches of this height and width, of which the last may stand over; None for
            single pixels.
        steps: Points of the way, in the middles of as many parts of it; 0 takes the gradient at the image alone.
        baseline: The empty image, normalised, of any shape that expands to that of the images; 0 is the mean
            of the data.

    Returns:
        (B, height, width), or of the patches, in the dtype of the images; positive is for the class.

    Raises:
        ValueError: the model does not return logits, or an argument is not as above.
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
    """Return which pixels a feature in the deepest map depends on: its effective receptive field.

    The Frobenius norm of the derivative of the feature, all of its channels, by the pixel, all of its: its
    square is the mean square of the gradient of a sum of channels with random signs (Hutchinson). A sum
    without signs, as is usual since Luo et al. (2016), is nearly constant where features were normalised.

    Args:
        model: One of timm or of this package, ``features_only`` or not; evaluated, whatever mode it is in.
            Its deepest map is the last of ``forward_intermediates``, or of what ``features_only`` gives.
        images: Normalised as the model takes them, (B, in_chans, height, width).
        position: Row and column of the feature in that map; its centre if None.
        probes: Draws of signs; the relative error falls with the root of their number.
        seed: Of these.

    Returns:
        (B, height, width), in the dtype of the images, not negative.

    Raises:
        ValueError: the model gives no maps, or an argument is not as above.
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
            sums = (feature @ signs).sum()  # of images that do not see each other
            [gradient] = torch.autograd.grad(sums, images, retain_graph=True)
            squares += gradient.square().sum(1)
    return (squares / probes).sqrt()


@contextlib.contextmanager
def _differentiating(model: nn.Module) -> Iterator[None]:
    """Take derivatives within a ``with`` block, also where a caller had switched them off."""
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        yield


def _logits_of(logits: object, target: int | Tensor, B: int) -> Tensor:
    """Return the logit of a class of each image, (B,)."""
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
    """Sum (B, height, width) over patches."""
    height, width = (patch_size,) * 2 if isinstance(patch_size, int) else patch_size
    if min(height, width) < 1:
        raise ValueError(f"patch_size must be at least 1, got {patch_size}")
    whole = F.pad(pixels, [0, -pixels.shape[2] % width, 0, -pixels.shape[1] % height])
    return F.avg_pool2d(whole[:, None], (height, width))[:, 0] * (height * width)


def _deepest_map(model: nn.Module, images: Tensor) -> Tensor:
    """Return the last map (B, C, H, W) that a model of timm has."""
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
