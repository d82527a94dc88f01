"""From images to patches: checked, padded or resized (``sizes.py``) in pixels, then embedded.

Patches may overlap, for Vision Mamba's finer granularity.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, register_notrace_function, to_2tuple
from timm.layers.trace_utils import _assert
from torch import Tensor

from vil.kernels.checks import is_exporting
from vil.sizes import is_undecided, resize_images

torch.fx.wrap("resize_images")  # FX cannot follow its branches


@torch.fx.wrap
@register_notrace_function
def _of_whole_patches(images: Tensor, patch_size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Return the images (B, in_chans, height, width); raise AssertionError unless whole patches cover them.

    Raise ValueError in an ONNX export of dynamic sizes, whose program could not raise an error. Returning the images
    keeps FX from removing the check as dead code. ``_assert`` is not used, because it always formats its message, which
    would specialise a compiled program to the size.
    """
    exporting = not torch.jit.is_scripting() and is_exporting()
    for i, name in ((0, "height"), (1, "width")):
        size, patch = images.shape[i + 2], patch_size[i]
        rest = (size - patch) % stride[i]
        if exporting:
            _check_onnx_drops_none(rest, name)
        if size < patch or rest != 0:
            raise AssertionError(
                f"Input {name} ({size}) is not covered by whole patches of {patch} px with stride "
                f"{stride[i]} px; create the model with dynamic_img_pad=True to pad images."
            )
    return images


@torch.jit.unused
def _check_onnx_drops_none(rest: int, name: str) -> None:
    if torch.onnx.is_in_onnx_export() and is_undecided(rest, 1):
        reason = "because an ONNX program would drop pixels after the last whole patch, got a dynamic one"
        cure = "create the model with dynamic_img_pad=True to pad images"
        raise ValueError(f"Input {name} must be static, {reason}; {cure}")


@torch.fx.wrap  # FX cannot follow its branches
@register_notrace_function
def _lacking(size: int, patch: int, stride: int) -> int:
    """Return by how many pixels a side must be padded so that whole patches cover all of it."""
    if stride == patch:  # exporters of any size take twice as long for the general form
        return (size + patch - 1) // patch * patch - size
    if not torch.jit.is_scripting() and is_exporting() and is_undecided(size, patch):
        # A branch would specialise the exported program to one of the two cases. Constants need it: PyTorch 2.11
        # cannot export ``torch.sym_max`` of them.
        return torch.sym_max(patch - size, (patch - size) % stride)
    return max(patch - size, (patch - size) % stride)


class OverlapPatchEmbed(PatchEmbed):
    """timm's patch embedding with a separate stride and without silent cropping of odd image sizes."""

    def __init__(self, patch_size: int | tuple[int, int], stride: int | tuple[int, int] | None, **kwargs: Any) -> None:
        """Create the embedding.

        Args:
            patch_size: Height and width of a patch in pixels.
            stride: Distance of neighbouring patches in pixels, ``patch_size`` if None.
            **kwargs: Arguments of ``timm.layers.PatchEmbed``, except for the output format, which is NHWC.

        Raises:
            ValueError: Whole patches do not cover ``img_size``, or ``stride`` is not 1 to ``patch_size``.
        """
        self.stride = to_2tuple(patch_size if stride is None else stride)  # _init_img_size reads it
        self.dynamic_img_pad = kwargs.get("dynamic_img_pad", False)  # and this
        for s, p in zip(self.stride, to_2tuple(patch_size), strict=True):
            if not 1 <= s <= p:
                raise ValueError(f"patch_stride must be from 1 to patch_size ({p}), got {s}")
        super().__init__(patch_size=patch_size, output_fmt="NHWC", **kwargs)
        self.proj.stride = self.stride

    def _init_img_size(
        self, img_size: int | tuple[int, int] | None
    ) -> tuple[tuple[int, int] | None, tuple[int, int] | None, int | None]:
        if img_size is None:
            return None, None, None
        img_size = to_2tuple(img_size)
        for size, patch, stride in zip(img_size, self.patch_size, self.stride, strict=True):
            if size < patch or ((size - patch) % stride and not self.dynamic_img_pad):
                raise ValueError(
                    f"img_size must be covered by whole patches of {patch} px with stride {stride} "
                    f"px, got {img_size}; pass dynamic_img_pad=True to pad images"
                )
        grid_size = self.dynamic_feat_size(img_size)
        return img_size, grid_size, grid_size[0] * grid_size[1]

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change image or patch size as timm does; overlapping patches keep their size.

        Raises:
            ValueError: ``patch_size`` changes although patches overlap, or whole patches do not cover ``img_size``.
        """
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            if self.stride != self.patch_size:
                raise ValueError(
                    f"patch_size cannot change from {self.patch_size} to {patch_size}: the patches "
                    f"overlap (patch_stride = {self.stride})"
                )
            self.stride = to_2tuple(patch_size)
        super().set_input_size(
            None if img_size is None else to_2tuple(img_size),
            None if patch_size is None else to_2tuple(patch_size),
        )

    def forward(
        self,
        x: Tensor,
        ref_feat_shape: tuple[int, int] | None = None,
        resize_below_scale: float = 0.0,
    ) -> Tensor:
        """Embed images (B, in_chans, height, width) as patches (B, H, W, C) of the weights' dtype.

        Args:
            x: The images.
            ref_feat_shape: Grid (rows, columns) to which images near or below it are resized; None resizes none.
            resize_below_scale: Same as in ``VisionLonghorn``.

        Raises:
            AssertionError: The images do not have ``img_size`` although ``strict_img_size`` is set, or
                whole patches do not cover them and ``dynamic_img_pad`` is not set.
        """
        x = self._covered(x)
        if ref_feat_shape is not None:
            x = resize_images(x, ref_feat_shape, self.patch_size, self.stride, resize_below_scale)
        return self.norm(self.proj(x).permute(0, 2, 3, 1))

    def _covered(self, x: Tensor) -> Tensor:
        """Return the images, zero-padded below and to the right if ``dynamic_img_pad``; same errors as ``forward``."""
        height, width = x.shape[-2], x.shape[-1]
        if self.strict_img_size:
            _assert(
                height == self.img_size[0],
                f"Input height ({height}) doesn't match model ({self.img_size[0]}).",
            )
            _assert(
                width == self.img_size[1],
                f"Input width ({width}) doesn't match model ({self.img_size[1]}).",
            )
        if self.dynamic_img_pad:
            below = _lacking(height, self.patch_size[0], self.stride[0])
            beside = _lacking(width, self.patch_size[1], self.stride[1])
            return F.pad(x, [0, beside, 0, below])
        return _of_whole_patches(x, self.patch_size, self.stride)

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Return the stride in pixels: the larger one as a number, or (height, width)."""
        return max(self.stride) if as_scalar else self.stride

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid (H, W) of an image of (height, width) pixels."""
        height, width = img_size
        if self.dynamic_img_pad:
            height += _lacking(height, self.patch_size[0], self.stride[0])
            width += _lacking(width, self.patch_size[1], self.stride[1])
        return (
            (height - self.patch_size[0]) // self.stride[0] + 1,
            (width - self.patch_size[1]) // self.stride[1] + 1,
        )
