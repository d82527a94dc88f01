"""Maps of what the tokens of a block read from each other; see docs/inspect.md.

A mixer's scan is linear in its values. For given keys, queries and step sizes, it is an L x L matrix per
channel. The matrix is computed by running the scan on unit values, one source token at a time, so no
recurrence is implemented twice. The values include input projection, convolution and SiLU. The matrix
includes skip, mean of both directions and gate. The output projection is left out because it mixes channels.

In all results the class token comes first, the order in which models return tokens. Models always run in evaluation
mode, and results have no gradient. Shapes: B images, H x W patches, L tokens, E scan channels, M states per channel.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.backbone import VisionLonghorn, only_backbone
from vil.kernels import reference
from vil.kernels.backends import backend_for
from vil.kernels.interface import ScanArgs, compute_dtype, scan_key
from vil.kernels.mixer import mixer_plan, scan_args
from vil.sizes import fit
from vil.timm_models import evaluating
from vil.tokens import class_token_first

MAX_NUMBERS = 2**22  # size of the tensor of unit values, and of the tensor of reads: 16 MiB each


class _Scan(NamedTuple):
    """Inputs of a mixer's scan, with step sizes after their low-rank projection."""

    args: ScanArgs
    recurrence: str
    kappa_scale: float


def channel_matrices(model: nn.Module, images: Tensor, block: int = -1) -> tuple[Tensor, Tensor]:
    """Return the exact token-to-token matrices of a block, one per channel, and the values.

    ``(matrices @ values[..., None]).sum(0)`` is the input of the mixer's output projection.

    Args:
        model: Model of this package, or a module that contains one backbone of this package.
        images: Images (B, in_chans, height, width) of any size that the model supports.
        block: Index of the block; negative indices count from the end.

    Returns:
        Matrices (2, B, E, L, L) and values (2, B, E, L). The first dimension is the direction: first token
        to last, then last to first. Row tokens read from column tokens. The dtype is float64 if the model
        is float64, else float32. For vil_tiny at 224 px, the matrices take 119 MB per image.

    Raises:
        ValueError: If the model does not contain exactly one backbone, or an argument is invalid.
    """
    backbone = only_backbone(model)
    scan = _scan(backbone, images, block)
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
    """Return how much each token reads from every other in a block, over all channels.

    Args:
        model: Same as in ``channel_matrices``.
        images: Same as in ``channel_matrices``.
        block: Same as in ``channel_matrices``.

    Returns:
        Matrix (B, L, L): mean over channels of the absolute sum of both directions. Rows read from columns. Dtype as in
            ``channel_matrices``.

    Raises:
        ValueError: Same as in ``channel_matrices``.
    """
    backbone = only_backbone(model)
    scan = _scan(backbone, images, block)
    columns = torch.cat([read.abs().mean(-1) for _, read in _reads(scan, (0, 1))])  # (L, B, L)
    order = _class_token_first(backbone, len(columns), columns.device)
    return columns.permute(1, 2, 0)[:, order][:, :, order]


def pooled_reads(model: nn.Module, images: Tensor, matrix: Tensor) -> Tensor:
    """Return how much the tokens that the head pools read from each patch.

    Args:
        model: Same as in ``channel_matrices``.
        images: Same as in ``channel_matrices``; only their shape matters.
        matrix: Result (B, L, L) of ``token_matrix`` for these images.

    Returns:
        Map (B, H, W) in the dtype of the matrix: the class token's row if the head pools the class token,
        else the mean of the rows of all patches.

    Raises:
        ValueError: If the model does not contain exactly one backbone, or the matrix has the wrong shape.
    """
    backbone = only_backbone(model)
    H, W = backbone.grid_inside(tuple(images.shape[-2:]))
    prefix = backbone.num_prefix_tokens
    expected = (len(images), *(H * W + prefix,) * 2)
    if tuple(matrix.shape) != expected:
        raise ValueError(f"matrix must be (B, L, L) = {expected} for these images, got {tuple(matrix.shape)}")
    pools_class_token = backbone.global_pool == "token"
    row = matrix[:, 0] if pools_class_token else matrix[:, prefix:].mean(1)
    return row[:, prefix:].unflatten(1, (H, W))


@torch.no_grad()
def _scan(backbone: VisionLonghorn, images: Tensor, block: int) -> _Scan:
    """Return the scan inputs of a block, whose class token is in the middle."""
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            "images must be floating-point numbers (B, in_chans, height, width), got "
            f"{images.dtype} {tuple(images.shape)}"
        )
    count = len(backbone.blocks)
    if not -count <= block < count:
        raise ValueError(f"block must be from {-count} to {count - 1}, got {block}")
    with evaluating(backbone):
        x, layout, _, _ = backbone._embed(images)
        for before in backbone.blocks[: block % count]:
            x = before(x, layout)
        tokens = backbone.blocks[block].norm(x)
    mixer = backbone.blocks[block].mixer
    xz = mixer.in_proj(tokens)
    with torch.autocast(xz.device.type, enabled=False):
        A = None if mixer.A_log is None else -torch.exp(mixer.A_log)
        own = fit(mixer.conv_weight, mixer.x_proj_weight, A, layout, mixer.recurrence, mixer.dt_rank)
        params, order = mixer.arguments(own)
        plan = mixer_plan(xz, params, mixer.recurrence, order, backend=reference)
        args, *_ = scan_args(plan, xz, params, order)
        dt = reference.dt_proj(args.dt, args.dt_weight)
    args = args._replace(dt=dt, dt_weight=None).to(compute_dtype(args.x))
    return _Scan(args, mixer.recurrence, plan.kappa_scale)


@torch.no_grad()
def _reads(scan: _Scan, directions: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield source indices, int64 (n,), and the reads (n, B, L, E) of all tokens if only that source has value 1."""
    x = scan.args.x
    _, B, L, E = x.shape
    size = max(MAX_NUMBERS // max(2 * B * L * E, 1), 1)
    backend = backend_for(x.device, x.dtype)
    for sources in torch.arange(L, device=x.device).split(size):
        n = len(sources)
        unit = x.new_zeros(2, n, B, L, E)
        for direction in directions:
            unit[direction] = F.one_hot(sources, L).to(unit)[:, None, :, None]
        repeated = {
            name: tensor.unsqueeze(-4).expand(*tensor.shape[:-3], n, *tensor.shape[-3:]).flatten(-4, -3)
            for name in ("dt", "q", "k", "z")
            for tensor in [getattr(scan.args, name)]
        }
        args = scan.args._replace(x=unit.flatten(1, 2), **repeated)
        key = scan_key(args, scan.recurrence, False, scan.kappa_scale)
        read, *_ = backend.scan_plan(key).forward(args)
        yield sources, read.unflatten(0, (n, B))


def _class_token_first(backbone: VisionLonghorn, length: int, device: torch.device) -> Tensor:
    """Return the position of each token in the sequence inside blocks, (L,), class token first."""
    places = torch.arange(length, device=device)[None, :, None]
    return class_token_first(places, backbone.num_prefix_tokens).flatten()
