"""The grid that the weights of a backbone were trained at, and the tokens of images that have another.

Letters: B batch, H W grid of patches, N = H W patches, L = N + 1 tokens, C channels.
"""

import math
import operator
from typing import Any, Literal

import torch
from einops import rearrange
from timm.layers import is_exportable
from torch import Tensor, nn

from vil.kernels.checks import is_exporting
from vil.kernels.grid import TokenLayout
from vil.kernels.registration import token_layout
from vil.tokens import class_token_first, resize_tokens
from vil.weights.adapt import grid_from

torch.fx.wrap("resize_tokens")  # FX cannot follow its branches


class GridAware(nn.Module):
    """Part of a backbone that measures distances and step sizes in patches of the grid ``ref_feat_shape``."""

    def _set_grid(
        self,
        ref_feat_shape: tuple[int, int] | None,
        grid_aware: bool | Literal["dt"],
        resize_below_scale: float,
        device: torch.device | str | None,
    ) -> None:
        """Set everything below, once ``patch_embed`` exists; arguments and errors are those of ``VisionLonghorn``."""
        if grid_aware not in (True, False, "dt"):
            raise ValueError(f'grid_aware must be True, False or "dt", got {grid_aware!r}')
        if not 0 <= resize_below_scale < math.inf:
            raise ValueError(
                f"resize_below_scale must be finite and at least 0, got {resize_below_scale}"
            )
        if ref_feat_shape is None:
            sizes = zip(self.patch_embed.img_size, self.patch_embed.patch_size, strict=True)
            ref_feat_shape = tuple(-(size // -patch) for size, patch in sizes)
        if len(ref_feat_shape) != 2 or any(operator.index(size) < 1 for size in ref_feat_shape):
            raise ValueError(
                f"ref_feat_shape must be (rows, columns), each at least 1, got {ref_feat_shape}"
            )
        self.exportable = is_exportable()
        self.grid_aware = bool(grid_aware)
        self.scale_conv = self.grid_aware and grid_aware != "dt"
        self.resize_below_scale = float(resize_below_scale) if self.scale_conv else 0.0
        self._ref_grid = (ref_feat_shape[0], ref_feat_shape[1])
        shape = torch.tensor(self._ref_grid, device=device) if grid_aware else None
        self.register_buffer("ref_feat_shape", shape)
        self._ref_read = (shape, 0)  # the tensor of ``_ref_grid``, and its version

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], *args: Any) -> None:
        super()._load_from_state_dict(state_dict, *args)
        self._ref_read = (None, 0)  # read it again: an inference tensor does not tell of the copy

    def _reference(self) -> tuple[int, int]:
        """Return ``ref_feat_shape`` as numbers."""
        if not torch.jit.is_scripting():
            self._follow_ref_feat_shape()
        return self._ref_grid

    @torch.jit.unused
    def _follow_ref_feat_shape(self) -> None:
        """Read ``ref_feat_shape`` if it is another tensor than before, or if something wrote into it.

        Reading waits for the GPU. Only loading writes it, but some programs load without ``load_state_dict``.
        """
        if torch.compiler.is_compiling() or self.ref_feat_shape is None:
            return
        shape, (last, version) = self.ref_feat_shape, self._ref_read
        now = 0 if shape.is_inference() else shape._version  # inference tensors count no writes
        if shape is last and now == version:
            return
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        if type(shape) is Tensor and not shape.is_meta and not in_transform:
            self._ref_grid, self._ref_read = grid_from(shape), (shape, now)

    @torch.jit.ignore
    def grid_inside(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid (H, W) that images of (height, width) pixels have inside the blocks.

        A side that ``resize_below_scale`` resizes has as many patches as in ``ref_feat_shape``.
        """
        H, W = self.patch_embed.dynamic_feat_size(img_size)
        trained_H, trained_W = self._reference()
        return (
            trained_H if self.resize_below_scale * trained_H > H else H,
            trained_W if self.resize_below_scale * trained_W > W else W,
        )

    def _layout(self, grid: list[int], x: Tensor) -> TokenLayout:
        """Return the layout of the tokens of a grid (H, W), for patches (B, N, C)."""
        reference = self._reference()
        trained = [reference[0], reference[1]] if self.grid_aware else grid
        patch = [self.patch_embed.patch_size[0], self.patch_embed.patch_size[1]]
        stride = [self.patch_embed.stride[0], self.patch_embed.stride[1]]
        numbers = grid + trained + patch + stride + [self.num_prefix_tokens, int(self.scale_conv)]
        if not torch.jit.is_scripting():
            return self._layout_of(numbers, x)
        order, taps, reads, shares = torch.ops.vil.token_layout(numbers, self.d_conv, x.detach())
        return TokenLayout(numbers, order, taps, reads, shares)

    @torch.jit.unused
    def _layout_of(self, numbers: list[int], x: Tensor) -> TokenLayout:
        if self.exportable and is_exporting() and not self.training:  # each mixer makes its own
            nothing = x.new_empty(0)
            return TokenLayout(numbers, nothing, nothing, nothing, nothing)
        return token_layout(numbers, self.d_conv, x)

    def check_patches_can_drop(self, grid: list[int]) -> None:
        """Raise ValueError if patches of a grid (H, W) cannot be left out.

        On a grid other than the trained one, the kernels find neighbours by rows and columns, which only a
        complete grid has.
        """
        trained = self._reference()
        if self.grid_aware and (grid[0] != trained[0] or grid[1] != trained[1]):
            raise ValueError(
                f"patch_drop_rate and keep need a grid of {trained[0]} x {trained[1]} patches "
                f"(ref_feat_shape), got {grid[0]} x {grid[1]}; grid_aware=False allows any grid"
            )

    def _own_tokens(self, x: Tensor, layout: TokenLayout | None, feat_shape: list[int]) -> Tensor:
        """Return tokens (B, L, C) with the class token first, resized to the image's own grid.

        Without a layout, patches are missing and there is no grid to resize.
        """
        x = class_token_first(x, self.num_prefix_tokens)
        if layout is None:
            return x
        grid = [layout.grid[0], layout.grid[1]]
        return resize_tokens(x, grid, feat_shape, self.num_prefix_tokens)

    @torch.jit.ignore
    def reshape_transform(
        self, tokens: Tensor, height: int | None = None, width: int | None = None
    ) -> Tensor:
        """Arrange the tokens inside the blocks as a feature map, for hooks and pytorch-grad-cam.

        Args:
            tokens: Output of a block or of its norm, (B, L, C), any dtype, class token in the middle.
            height: Rows H of the grid inside the model (``grid_inside``). Default: for ``img_size`` images.
            width: Columns W of that grid. Default: for ``img_size`` images.

        Returns:
            Map of the patches, (B, C, H, W), in the same dtype.

        Raises:
            ValueError: L is not the number of patches plus that of the class token.
        """
        own_height, own_width = self.grid_inside(self.patch_embed.img_size)
        H = own_height if height is None else height
        W = own_width if width is None else width
        if tokens.ndim != 3 or tokens.shape[1] != H * W + self.num_prefix_tokens:
            raise ValueError(
                f"tokens must be (B, {H * W + self.num_prefix_tokens}, C) for a grid of {(H, W)}, "
                f"got {tuple(tokens.shape)}; give height and width for another grid"
            )
        tokens = class_token_first(tokens, self.num_prefix_tokens)
        patches = tokens[:, self.num_prefix_tokens :]
        return rearrange(patches, "b (h w) c -> b c h w", h=H, w=W)
