"""Backbones with a pyramid of strides, for detection and segmentation.

Dense heads take maps at strides 4, 8, 16 and 32, but all blocks have one stride. Each level resizes the tokens
of one block, by transposed convolutions or by max pooling. There is no path from level to level.

Papers:
    Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet, ECCV 2022), Section 3, for the
    levels from the last block
    Vision Mamba (ICML 2024), whose segmentation makes them from four blocks

Letters: B batch, h w grid of patches, H W grid of a level, C channels (``embed_dim``).
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import LayerNorm2d, get_device_dtype
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vil.backbone import VisionLonghorn
from vil.convert import checkpoint_filter_fn
from vil.kernels.checks import is_exporting

__all__ = [
    "PyramidLevel",
    "VisionLonghornPyramid",
    "checkpoint_filter_fn",
]  # vil.load looks for the last here

STRIDES = (4, 8, 16, 32)  # of the levels, in pixels, as dense heads take them


class PyramidLevel(nn.Module):
    """One level of a pyramid: resizes a map of tokens to another stride and normalises it."""

    def __init__(
        self,
        dim: int,
        stride: int,
        to: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a level.

        Args:
            dim: Channels C of input and output.
            stride: Stride of the tokens in pixels.
            to: Stride of the level in pixels.
            device: Device of the parameters.
            dtype: Dtype of the parameters.

        Raises:
            ValueError: The larger stride is not the smaller one times a power of two.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        ratio = max(stride, to) / min(stride, to)
        if not ratio.is_integer() or int(ratio).bit_count() != 1:
            raise ValueError(
                f"a map of stride {to} px needs a patch_stride of {to} px, multiplied or divided "
                f"by a power of two, got {stride} px"
            )
        up: list[nn.Module] = []
        for _ in range(int(ratio).bit_length() - 1 if stride > to else 0):
            up += [LayerNorm2d(dim, **dd), nn.GELU()] if up else []
            up += [nn.ConvTranspose2d(dim, dim, 2, 2, **dd)]
        self.up = nn.Sequential(*up)
        pool = to // stride if to > stride else 1
        self.pool = nn.MaxPool2d(pool, ceil_mode=True) if pool > 1 else nn.Identity()
        self.norm = LayerNorm2d(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map (B, C, H, W) of tokens (B, C, h, w) in the same dtype; H and W are rounded up."""
        # Autocast lowers the dtype of convolutions, which only some levels have.
        return self.norm(self.pool(self.up(x)).to(x.dtype))


class VisionLonghornPyramid(VisionLonghorn):
    """Backbone whose ``features_only`` model returns maps at strides 4, 8, 16 and 32, for images of any size.

    It is a ``VisionLonghorn`` with levels in ``pyramid``, which only ``forward_intermediates`` uses. There, indices
    count levels, finest first. Maps are (B, C, H, W) with H = ceil(height / stride) and W = ceil(width / stride).
    Tokens and logits are the same as in the plain model. You can load weights of the plain model strictly; the levels
    are then new.
    """

    def __init__(
        self,
        *,
        pyramid_blocks: Sequence[int] | None = None,
        output_stride: Literal[8, 16, 32] = 32,
        dynamic_img_pad: bool = True,
        **kwargs: Any,
    ) -> None:
        """Create a backbone.

        Args:
            pyramid_blocks: Indices of the four blocks that the levels are made from, finest level first;
                negative indices count from the end. The official Vision Mamba's segmentation has
                (5, 11, 17, 23). Default: the last block for each level, as in ViTDet.
            output_stride: Largest stride of a level in pixels; coarser levels get this stride.
            dynamic_img_pad: Pad images to whole patches. Maps then have the size that a convolutional network
                gives, ceil(size / stride).
            **kwargs: Arguments of ``VisionLonghorn``.

        Raises:
            AssertionError: ``global_pool`` is unknown, or "token" without a class token.
            TypeError: Same as in ``VisionLonghorn``.
            ValueError: Another argument is out of its range, or ``patch_drop_rate`` is not 0. Also if patches are
                not square, their stride does not fit the levels, or they overlap with ``dynamic_img_size=False``.
        """
        super().__init__(dynamic_img_pad=dynamic_img_pad, **kwargs)
        if self.patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate must be 0 for a pyramid, whose maps have all patches, got {self.patch_drop_rate}"
            )
        if output_stride not in STRIDES[1:]:
            raise ValueError(f"output_stride must be 8, 16 or 32, got {output_stride}")
        stride, across = self.patch_embed.stride
        gap = self.patch_embed.patch_size[0] - stride
        if stride != across or gap != self.patch_embed.patch_size[1] - across:
            raise ValueError(
                f"a pyramid needs square patches and strides, got patch_size "
                f"{self.patch_embed.patch_size} and patch_stride {self.patch_embed.stride}"
            )
        if gap and not self.dynamic_img_size:
            raise ValueError(
                f"a pyramid with overlapping patches (patch_size {stride + gap}, patch_stride "
                f"{stride}) needs dynamic_img_size=True"
            )
        self._overlap = gap
        self.pyramid_blocks = self._checked_blocks(pyramid_blocks)
        strides = [min(to, output_stride) for to in STRIDES]
        self.pyramid = nn.ModuleList(
            PyramidLevel(self.embed_dim, stride, to, **get_device_dtype(self)) for to in strides
        )
        self.feature_info = [
            {"module": f"pyramid.{i}", "num_chs": self.embed_dim, "reduction": to} for i, to in enumerate(strides)
        ]

    def _checked_blocks(self, blocks: Sequence[int] | None) -> tuple[int, ...]:
        depth = len(self.blocks)
        blocks = (-1,) * len(STRIDES) if blocks is None else tuple(blocks)
        if len(blocks) != len(STRIDES) or not all(-depth <= block < depth for block in blocks):
            raise ValueError(
                f"pyramid_blocks must be {len(STRIDES)} indices from {-depth} to {depth - 1}, got {blocks}"
            )
        return tuple(block % depth for block in blocks)

    def _take_indices(self, indices: int | list[int] | None) -> tuple[list[int], list[int]]:
        levels, _ = feature_take_indices(len(self.pyramid), indices)
        return levels, [self.pyramid_blocks[level] for level in levels]

    def _intermediates(
        self, x: Tensor, blocks: list[int], num_blocks: int, norm: bool
    ) -> tuple[dict[int, Tensor], Tensor]:
        if self._overlap:  # pad, so that the centre of each patch is the centre of its cell
            before, after = self._overlap // 2, self._overlap - self._overlap // 2
            x = F.pad(x, [before, after, before, after])
        return super()._intermediates(x, blocks, num_blocks, norm)

    def _spatial(
        self, levels: list[int], patches: list[Tensor], img_size: tuple[int, int], output_fmt: str
    ) -> list[Tensor]:
        height, width = img_size
        H, W = self.patch_embed.dynamic_feat_size((height + self._overlap, width + self._overlap))
        maps = []
        for level, x in zip(levels, patches, strict=True):
            make, stride = self.pyramid[level], self.feature_info[level]["reduction"]
            x = rearrange(x, "b (h w) c -> b c h w", h=H, w=W).contiguous()
            made = _cut(make(x), -(-height // stride), -(-width // stride))
            maps.append(made if output_fmt == "NCHW" else made.flatten(2).transpose(1, 2))
        return maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove all but the chosen levels and the blocks after the last that these need, in place.

        Args:
            indices: The last n levels if an int, levels by index if a list; AssertionError if out of range.
            prune_norm: Remove the final normalisation.
            prune_head: Remove pooling and head.

        Returns:
            Absolute indices of the chosen levels.
        """
        levels, _ = feature_take_indices(len(self.pyramid), indices)
        for level in set(range(len(self.pyramid))) - set(levels):
            self.pyramid[level] = nn.Identity()
        last = max(self.pyramid_blocks[level] for level in levels)
        super().prune_intermediate_layers([last], prune_norm, prune_head)
        return levels


def _cut(x: Tensor, height: int, width: int) -> Tensor:
    """Return the first rows and columns of maps (B, C, H, W)."""
    if is_exporting():  # a slice compares sizes, which would specialise the program to the result
        return F.pad(x, [0, width - x.shape[-1], 0, height - x.shape[-2]])
    return x[..., :height, :width]
