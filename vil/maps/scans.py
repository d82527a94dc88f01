"""What the tokens of a block read from each other, write and forget.

A mixer's scan is linear in its values: for given keys, queries and step sizes it is a matrix of L x L for each
channel. The matrix is what the scan itself makes of unit values, a source at a time, so that no recurrence is
written down a second time. What stands before it in the mixer, the input projection and the convolution with
its SiLU, is in the values; what stands behind it, the skip, the mean of both directions and the gate, is in
the matrix; the output projection mixes channels and is left out.

Everywhere the class token comes first, as models hand out tokens. Models are evaluated whatever mode they are
in, and nothing has a gradient. Letters: B images, H W grid of patches, L tokens, E channels of the scan, M
states of each.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.backbone import VisionLonghorn
from vil.kernels import reference
from vil.kernels.args import ScanArgs, compute_dtype
from vil.kernels.backends import backend_for
from vil.kernels.layout import TokenLayout
from vil.kernels.mixer import mixer_plan, scan_args
from vil.kernels.plan import scan_key
from vil.maps.evaluating import check_images, evaluating
from vil.tokens import class_token_first

_MOST_NUMBERS = 2**22  # of a tensor of unit values and of what is read of them: 16 MiB each


class _Scan(NamedTuple):
    """What a mixer scans, step sizes in full."""

    args: ScanArgs
    recurrence: str
    kappa_scale: float
    grid: list[int]
    """The numbers of ``kernels.layout.GridSpec``."""


def channel_matrices(model: nn.Module, images: Tensor, block: int = -1) -> tuple[Tensor, Tensor]:
    """Return what each token reads from every other in each channel of a block, exactly, and the values.

    ``(matrices @ values[..., None]).sum(0)`` is what the mixer hands to its output projection.

    Args:
        model: One of this package, or a module with one of its backbones in it.
        images: (B, in_chans, height, width), of any size that the model takes.
        block: Number of the block; a negative one counts from the end.

    Returns:
        Matrices (2, B, E, L, L) of the direction from the first token to the last and of that back, rows
        read and columns are read, and values (2, B, E, L): float64 if the model is, else float32.

    Raises:
        ValueError: there is not one backbone in the model, or an argument is not as above.
    """
    backbone = _backbone_of(model)
    [scan] = _scans(backbone, images, [block])
    x = scan.args.x
    _, B, L, E = x.shape
    matrices = x.new_empty(2, B, E, L, L)
    for direction in (0, 1):
        for sources, read in _reads(scan, (direction,)):
            matrices[direction][..., sources] = read.permute(1, 3, 2, 0)
    order = _class_token_first(backbone, L, images.device)
    values = x.mT[..., order]
    return matrices[..., order, :][..., order], values


def token_matrix(model: nn.Module, images: Tensor, block: int = -1) -> Tensor:
    """Return how much each token reads from every other in a block: mean over channels of |matrix|.

    Args:
        model: As of ``channel_matrices``.
        images: As of ``channel_matrices``.
        block: As of ``channel_matrices``.

    Returns:
        (B, L, L), the sum of both directions, rows read and columns are read, dtype as there.

    Raises:
        ValueError: as of ``channel_matrices``.
    """
    backbone = _backbone_of(model)
    [scan] = _scans(backbone, images, [block])
    return _mean_matrix(backbone, scan)


def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Return how much each token at the end rests on every token at the beginning, through all blocks.

    The product over blocks of the mean of the residual, which is the identity, and of ``token_matrix`` with
    the sum of each row 1 (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020).

    Args:
        model: As of ``channel_matrices``.
        images: As of ``channel_matrices``.

    Returns:
        (B, L, L), the sum of each row 1, dtype as of ``channel_matrices``.

    Raises:
        ValueError: as of ``channel_matrices``.
    """
    backbone = _backbone_of(model)
    total = None
    for scan in _scans(backbone, images, range(len(backbone.blocks))):
        matrix = _mean_matrix(backbone, scan)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        mixed = (eye + matrix / matrix.sum(-1, keepdim=True)) / 2
        with torch.autocast(matrix.device.type, enabled=False):
            total = mixed if total is None else mixed @ total
    return total


def pooled_reads(model: nn.Module, images: Tensor, matrix: Tensor) -> Tensor:
    """Return what the tokens that the head pools read from each patch.

    Args:
        model: As of ``channel_matrices``.
        images: As of ``channel_matrices``; only their size counts.
        matrix: Of these images, (B, L, L), by ``token_matrix`` or ``rollout``.

    Returns:
        (B, H, W), dtype of the matrix: the row of the class token where that is pooled, else the mean of the
        rows of all patches.

    Raises:
        ValueError: there is not one backbone in the model, or the matrix is of another size.
    """
    backbone = _backbone_of(model)
    H, W = backbone.grid_inside(tuple(images.shape[-2:]))
    prefix = backbone.num_prefix_tokens
    expected = (len(images), *(H * W + prefix,) * 2)
    if tuple(matrix.shape) != expected:
        raise ValueError(
            f"matrix must be (B, L, L) = {expected} for these images, got {tuple(matrix.shape)}"
        )
    pools_class_token = backbone.global_pool == "token"
    row = matrix[:, 0] if pools_class_token else matrix[:, prefix:].mean(1)
    return row[:, prefix:].unflatten(1, (H, W))


def step_size(model: nn.Module, images: Tensor, block: int = -1) -> Tensor:
    """Return how much of a patch's values is written: the step size, a mean over channels and directions.

    eps of Longhorn (paper, Theorem 3.1), in [0, 1), or Mamba's dt after its softplus. At another grid than the
    trained one, where a step is divided by the tokens for each of that, it is the step before the division.

    Args:
        model: As of ``channel_matrices``.
        images: As of ``channel_matrices``.
        block: As of ``channel_matrices``.

    Returns:
        (B, H, W), dtype as of ``channel_matrices``.

    Raises:
        ValueError: as of ``channel_matrices``.
    """
    [scan] = _scans(_backbone_of(model), images, [block])
    return _image_of(scan, _steps(scan))


def decay(model: nn.Module, images: Tensor, block: int = -1) -> Tensor:
    """Return how much of a state a patch makes the block forget, a mean over channels and directions.

    1 - trace(T) / M, where T (M x M) takes the state before the patch to what is left of it after: for the
    diagonal forms the mean over states of what each loses, for the exact one, which forgets along its key
    alone, eps |k|^2 / M.

    Args:
        model: As of ``channel_matrices``.
        images: As of ``channel_matrices``.
        block: As of ``channel_matrices``.

    Returns:
        (B, H, W), in [0, 1), dtype as of ``channel_matrices``.

    Raises:
        ValueError: as of ``channel_matrices``.
    """
    [scan] = _scans(_backbone_of(model), images, [block])
    x, _, A, q, k, *_ = scan.args
    steps, nothing = _steps(scan), torch.zeros_like(x)
    A = None if A is None else A[:, None, None]
    M, trace = k.shape[-1], 0.0
    for j in range(M):
        unit = F.one_hot(torch.tensor(j, device=k.device), M).to(k)
        state = unit.expand(*x.shape, M)
        left, _ = reference.advance(state, nothing, steps, A, q, k, scan.recurrence)
        trace = trace + left[..., j]
    return _image_of(scan, 1 - trace / M)


def _backbone_of(model: nn.Module) -> VisionLonghorn:
    """Return the backbone of this package that a model is, or has in it."""
    found = [part for part in model.modules() if isinstance(part, VisionLonghorn)]
    if len(found) != 1:
        raise ValueError(
            f"model must be one of this package (vil_*, vim_*) or have one in it, {type(model).__name__} "
            f"has {len(found)}; evidence and receptive_field take any model of timm"
        )
    return found[0]


@torch.no_grad()
def _scans(backbone: VisionLonghorn, images: Tensor, blocks: range | list[int]) -> Iterator[_Scan]:
    """Yield what chosen blocks scan, the tokens in their order within: the class token in the middle."""
    check_images(images)
    count = len(backbone.blocks)
    for block in blocks:
        if not -count <= block < count:
            raise ValueError(f"block must be a number of the {count} blocks, got {block}")
    inputs: list[tuple] = []
    mixers = [backbone.blocks[block].mixer for block in blocks]
    hooks = [
        mixer.register_forward_pre_hook(lambda _, args: inputs.append(args)) for mixer in mixers
    ]
    try:
        with evaluating(backbone):
            backbone.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
    for mixer, (tokens, layout, *_) in zip(mixers, inputs, strict=True):
        yield _scan_of(mixer, tokens, layout)


def _scan_of(mixer: nn.Module, tokens: Tensor, layout: TokenLayout) -> _Scan:
    xz = mixer.in_proj(tokens)
    A = None if mixer.A_log is None else -torch.exp(mixer.A_log)
    with torch.autocast(xz.device.type, enabled=False):
        params = mixer._params(A)
        plan = mixer_plan(xz, params, mixer.recurrence, layout, backend=reference)
        args, _ = scan_args(plan, xz, params, layout)
        dt = reference.dt_proj(args.dt, args.dt_weight)
    args = args._replace(dt=dt, dt_weight=None).to(compute_dtype(args.x))
    return _Scan(args, mixer.recurrence, plan.scan.key.kappa_scale, layout.grid)


@torch.no_grad()
def _reads(scan: _Scan, directions: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sources, int64 (n,), and what all tokens read where these alone have the value 1, (n, B, L, E)."""
    x = scan.args.x
    _, B, L, E = x.shape
    size = max(_MOST_NUMBERS // (2 * B * L * E), 1)
    backend = backend_for(x.device, x.dtype)
    for sources in torch.arange(L, device=x.device).split(size):
        n = len(sources)
        unit = x.new_zeros(2, n, B, L, E)
        for direction in directions:
            unit[direction] = F.one_hot(sources, L).to(unit)[:, None, :, None]
        repeated = {
            name: tensor.unsqueeze(-4)
            .expand(*tensor.shape[:-3], n, *tensor.shape[-3:])
            .flatten(-4, -3)
            for name in ("dt", "q", "k", "z")
            for tensor in [getattr(scan.args, name)]
        }
        args = scan.args._replace(x=unit.flatten(1, 2), **repeated)
        key = scan_key(args, scan.recurrence, False, scan.kappa_scale)
        read, *_ = backend.scan_plan(key).forward(args)
        yield sources, read.unflatten(0, (n, B))


def _mean_matrix(backbone: VisionLonghorn, scan: _Scan) -> Tensor:
    """Return (B, L, L), the mean over channels of absolute values, class token first."""
    columns = torch.cat([read.abs().mean(-1) for _, read in _reads(scan, (0, 1))])  # (L, B, L)
    order = _class_token_first(backbone, len(columns), columns.device)
    return columns.permute(1, 2, 0)[:, order][:, :, order]


def _class_token_first(backbone: VisionLonghorn, length: int, device: torch.device) -> Tensor:
    """Return which places of the sequence within blocks tokens have, class token first, (L,)."""
    places = torch.arange(length, device=device)[None, :, None]
    return class_token_first(places, backbone.num_prefix_tokens).flatten()


def _steps(scan: _Scan) -> Tensor:
    bias = scan.args.bias[:, None, None]
    return reference.step_size(scan.args.dt, scan.args.k, bias, scan.recurrence, scan.kappa_scale)


def _image_of(scan: _Scan, numbers: Tensor) -> Tensor:
    """Return the mean over directions and channels of (2, B, L, E) at the patches, (B, H, W)."""
    H, W, *_, class_token, _ = scan.grid
    mean, middle = numbers.mean((0, 3)), H * W // 2
    patches = torch.cat([mean[:, :middle], mean[:, middle + class_token :]], 1)
    return patches.unflatten(1, (H, W))
