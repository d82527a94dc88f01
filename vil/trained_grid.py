"""The grid that the weights of a backbone were trained at, and the tokens of images that have another.

Letters: B batch, H W grid of patches, N = H W patches, L = N + 1 tokens, C channels.
"""

import math
import operator
from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from timm.layers import is_exportable
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from vil.kernels.checks import is_exporting
from vil.kernels.grid import TokenLayout
from vil.kernels.registration import assert_grid, token_layout
from vil.tokens import class_token_first, resize_tokens

torch.fx.wrap("resize_tokens")  # FX cannot follow its branches
_BITS = 16


def bits_of(grid: tuple[int, int]) -> Tensor:
    """Return the binary digits of a grid, the lowest first, float32 (2, 16).

    Averages and copies in any dtype leave digits near 0 and 1, except averages of different grids.
    """
    return torch.tensor([[(n >> i) % 2 for i in range(_BITS)] for n in grid], dtype=torch.float32)


def grid_of(bits: Tensor) -> tuple[int, int]:
    """Return the grid of a ``ref_feat_bits``; raise ValueError if it is an average of different grids, or none."""
    digits = bits.tolist() if bits.shape == (2, _BITS) and not bits.is_complex() else []
    near = all(min(abs(digit), abs(digit - 1)) < 0.03 for side in digits for digit in side)
    grid = [sum(round(d) << i for i, d in enumerate(side)) for side in digits] if near else []
    if len(grid) != 2 or min(grid) < 1:
        raise ValueError(
            f"ref_feat_bits must be the binary digits of one grid, (2, {_BITS}), got "
            f"{digits or tuple(bits.shape)}; weights of different grids cannot be averaged"
        )
    return grid[0], grid[1]


def _unwrapped(bits: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func; of stacked modules (vmap) all together."""
    while _functorch.is_functorch_wrapped_tensor(bits):
        axis, bits = _functorch.maybe_get_bdim(bits), _functorch.get_unwrapped(bits)
        bits = bits if axis < 0 else bits.movedim(axis, 0)
    return bits


class GridAware(nn.Module):
    """Part of a backbone that measures distances and step sizes in patches of the grid ``ref_feat_shape``.

    Weights have it as the buffer ``ref_feat_bits``. Reading a tensor waits for the GPU, so its numbers are kept. They
    are read again only after something has written the buffer.
    """

    __jit_unused_properties__: ClassVar = ["ref_feat_shape"]

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
        if len(ref_feat_shape) != 2 or not all(
            1 <= operator.index(size) < 1 << _BITS for size in ref_feat_shape
        ):
            raise ValueError(
                f"ref_feat_shape must be (rows, columns), each from 1 to {(1 << _BITS) - 1}, got {ref_feat_shape}"
            )
        self.exportable = is_exportable()
        self.grid_aware = bool(grid_aware)
        self.scale_conv = self.grid_aware and grid_aware != "dt"
        self.resize_below_scale = float(resize_below_scale) if self.scale_conv else 0.0
        self._ref_grid = (ref_feat_shape[0], ref_feat_shape[1])
        bits = bits_of(self._ref_grid).to(device) if grid_aware else None
        self.register_buffer("ref_feat_bits", bits)
        # The tensor that _ref_grid was read from, its version then, and whether DDP was running.
        self._ref_read = (bits, 0, False)

    @property
    def ref_feat_shape(self) -> tuple[int, int]:
        """The grid (rows, columns) in whose patches tap distances and step sizes are measured."""
        return self._reference()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new ``ref_feat_bits`` is read at once, because exporters only see fake tensors."""
        super().__setattr__(name, value)
        if name == "ref_feat_bits":
            with suppress(ValueError):  # uninitialised memory, which the caller will fill
                self._follow_ref_feat_bits()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ref_read = (None, 0, False)  # an inference tensor does not tell that it was written
        if prefix + "ref_feat_bits" in state_dict:
            self._follow_ref_feat_bits()

    def _reference(self) -> tuple[int, int]:
        """Return ``ref_feat_shape``."""
        if not torch.jit.is_scripting():
            self._follow_ref_feat_bits()
        return self._ref_grid

    # Compilers call it while they compile, with the real module; torch.export does so with fake tensors in it.
    @torch.compiler.assume_constant_result
    @torch.jit.unused
    def _follow_ref_feat_bits(self) -> None:
        """Read ``ref_feat_bits`` if it is another tensor than before, or if something wrote into it.

        DDP copies the buffers of rank 0 in every step. There, the device compares, and nothing waits for it.
        """
        last, version, in_ddp = self._ref_read
        bits = self.ref_feat_bits if type(self.ref_feat_bits) is Tensor else last
        if bits is None or bits.is_meta:
            return
        bits = _unwrapped(bits)
        now = 0 if bits.is_inference() else bits._version  # inference tensors count no writes
        if bits is last and now == version:
            return
        by_ddp = DistributedDataParallel._active_ddp_module is not None
        if bits is last and in_ddp and by_ddp:
            assert_grid(self._ref_grid, bits)
        else:
            with _disable_current_modes():
                grids = {grid_of(one) for one in bits.detach().reshape(-1, *bits.shape[-2:])}
            if len(grids) > 1:
                raise ValueError(
                    f"modules of different ref_feat_shape need a call each, got {grids}"
                )
            (self._ref_grid,) = grids
        self._ref_read = (bits, now, by_ddp)

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
        order, taps, reads, shares = torch.ops.vil.token_layout(
            numbers, self.d_conv, x.detach(), self.ref_feat_bits
        )
        return TokenLayout(numbers, order, taps, reads, shares)

    @torch.jit.unused
    def _layout_of(self, numbers: list[int], x: Tensor) -> TokenLayout:
        if self.exportable and is_exporting() and not self.training:  # each mixer makes its own
            nothing = x.new_empty(0)
            return TokenLayout(numbers, nothing, nothing, nothing, nothing)
        return token_layout(numbers, self.d_conv, x, self.ref_feat_bits)

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
