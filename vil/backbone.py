"""Vision Longhorn (ViL) and Vision Mamba (ViM): one backbone around a bidirectional scan.

Papers:
    Longhorn: State Space Models are Amortized Online Learners (ICLR 2025), for the recurrence
    Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model
    (ICML 2024), for the architecture, the initial values and the recipe

Letters: B batch, H W grid of patches, N = H W patches, L = N + 1 tokens, C channels (``embed_dim``).
"""

import operator
from functools import partial
from typing import Any, Final, Literal

import torch
from einops import rearrange
from timm.layers import (
    PatchDropout,
    RmsNorm,
    calculate_drop_path_rates,
    get_device_dtype,
    get_norm_layer,
    global_pool_nlc,
    lecun_normal_,
    resample_abs_pos_embed,
    trunc_normal_,
)
from timm.layers.trace_utils import _assert
from timm.models import checkpoint, named_apply
from timm.models._features import feature_take_indices
from timm.models._input import update_model_args, update_model_input_size
from torch import Tensor, nn

from vil.block import Block, Recurrence
from vil.convert import adapt_inside, checkpoint_filter_fn
from vil.kernels.checks import check_not_onnx
from vil.patch_embed import OverlapPatchEmbed
from vil.sizes import GridAware, TokenLayout, bits_of, resample_pos_embed, resize_tokens
from vil.timm_models import state_images
from vil.tokens import check_keep, class_token_first, class_token_to_middle, packed_intermediates

__all__ = ["VisionLonghorn", "checkpoint_filter_fn"]  # vil.load looks for the last here

_POOLS = ("", "avg", "avgmax", "max", "token")
torch.fx.wrap("resample_pos_embed")  # FX cannot follow their branches
torch.fx.wrap("resize_tokens")


def only_backbone(module: nn.Module) -> "VisionLonghorn":
    """Return the only backbone of this package in a module, which may be the module itself.

    Raises:
        ValueError: The module has no backbone of this package, or several.
    """
    backbones = [part for part in module.modules() if isinstance(part, VisionLonghorn)]
    if len(backbones) != 1:
        raise ValueError(
            f"model must be or contain exactly one model of this package (vil_*, vim_*), but "
            f"{type(module).__name__} contains {len(backbones)}"
        )
    return backbones[0]


def _norm_layer(norm_layer: str | type[nn.Module] | None) -> type[nn.Module] | partial:
    try:
        return get_norm_layer(norm_layer) or partial(RmsNorm, eps=1e-5)
    except (AssertionError, KeyError) as error:
        raise ValueError(
            "norm_layer must be None, a class, or a name that timm.layers.get_norm_layer knows, such as "
            f"layernorm or rmsnorm; got {norm_layer!r}"
        ) from error


class VisionLonghorn(GridAware):
    """Image backbone of bidirectional scans with a class token in the middle of the sequence.

    The class token stands in the middle only inside the blocks. Every method returns tokens as timm
    expects them, class token first.
    """

    dynamic_img_size: Final[bool]
    grid_aware: Final[bool]
    scale_conv: Final[bool]
    patch_drop_rate: Final[float]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        patch_stride: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["", "avg", "avgmax", "max", "token"] = "token",
        embed_dim: int = 192,
        depth: int = 24,
        recurrence: Recurrence = "longhorn",
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        class_token: bool = True,
        fc_norm: bool | None = None,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        ref_feat_shape: tuple[int, int] | None = None,
        grid_aware: bool | Literal["dt"] = True,
        resize_below_scale: float = 1.3,
        checkpoint_min_tokens: int | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: str | type[nn.Module] | None = None,
        weight_init: Literal["", "skip"] = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a backbone.

        Args:
            img_size: Height and width in pixels of the images that the position embedding is for.
            patch_size: Height and width of a patch in pixels.
            patch_stride: Distance of neighbouring patches in pixels; ``patch_size`` if None.
            in_chans: Channels of the images.
            num_classes: Classes of the head; 0 for none.
            global_pool: How the head pools tokens.
            embed_dim: Channels C of the residual stream.
            depth: Number of blocks.
            recurrence: "longhorn" (ViL, paper Eq. 7), "longhorn_exact" (Eq. 6) or "mamba" (ViM).
            d_state: State size per channel.
            d_conv: Taps of the depthwise convolution.
            expand: Channels of the scan per channel of the residual stream.
            dt_rank: Rank of the step size's projection; ceil(embed_dim / 16) if None.
            class_token: Whether the sequence has a class token, in its middle.
            fc_norm: Normalise after pooling instead of before; None does so for avg, avgmax and max pooling.
            dynamic_img_size: Accept images of any size that whole patches cover, and resample the position
                embedding for other sizes than ``img_size``. False raises AssertionError for other sizes.
            dynamic_img_pad: Pad images to whole patches, with zeros below and to the right.
            ref_feat_shape: Reference grid, (rows, columns): tap distances and step sizes are measured in its
                patches. Default: the grid of ``img_size`` without overlap. With ``grid_aware`` it belongs to the
                weights, which have it as a buffer (``ref_feat_bits``): loading weights sets it to theirs.
            grid_aware: How to adapt to grids other than ``ref_feat_shape``. False does not. True measures tap
                distances and step sizes in its patches; use it for images that show the same things enlarged. "dt"
                measures only step sizes and resizes nothing; use it for images that show more at the same scale.
            resize_below_scale: With ``grid_aware=True``, a side with fewer than this many times the patches of
                ``ref_feat_shape`` is resized to it inside the model. The tokens are resized back to the
                image's own grid. 0 never resizes; use it to train at such sizes.
            checkpoint_min_tokens: Above this many tokens, recompute each block's inner activations in the
                backward pass to save memory. None never recomputes.
            drop_rate: Dropout rate before the head.
            pos_drop_rate: Dropout rate after the position embedding.
            patch_drop_rate: Fraction of the patches that training drops from each image, at random every time.
                Only at the grid ``ref_feat_shape``, or with ``grid_aware=False``.
            drop_path_rate: Drop-path rate of the last block; it rises linearly from 0 at the first.
            norm_layer: Normalisation, as a class or timm's name of one; RMSNorm with eps 1e-5 if None.
            weight_init: "skip" does not call ``init_weights``: position embedding and class token are uninitialised.
            device: Device of the parameters.
            dtype: Dtype of the parameters.

        Raises:
            AssertionError: ``global_pool`` is unknown, or "token" without a class token.
            TypeError: ``checkpoint_min_tokens`` or a side of ``ref_feat_shape`` is not an integer.
            ValueError: Another argument is out of its range.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        if weight_init not in ("", "skip"):
            raise ValueError(f'weight_init must be "" or "skip", got {weight_init!r}')
        if in_chans < 1:
            raise ValueError(f"in_chans must be at least 1, got {in_chans}")
        if checkpoint_min_tokens is not None and operator.index(checkpoint_min_tokens) < 0:
            raise ValueError(f"checkpoint_min_tokens must be None or at least 0, got {checkpoint_min_tokens}")
        if not 0 <= patch_drop_rate < 1:
            raise ValueError(f"patch_drop_rate must be at least 0 and below 1, got {patch_drop_rate}")
        norm_layer = _norm_layer(norm_layer)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1 if class_token else 0
        self.has_class_token = class_token
        self.global_pool = self._checked_pool(global_pool)
        self.d_conv = d_conv
        self.depth = depth  # prune_intermediate_layers leaves fewer blocks
        self.dynamic_img_size = dynamic_img_size
        self.checkpoint_min_tokens = checkpoint_min_tokens
        self.grad_checkpointing = False

        self.patch_embed = OverlapPatchEmbed(
            patch_size,
            patch_stride,
            img_size=img_size,
            in_chans=in_chans,
            embed_dim=embed_dim,
            dynamic_img_pad=dynamic_img_pad,
            strict_img_size=not dynamic_img_size,
            **dd,
        )
        self._set_grid(ref_feat_shape, grid_aware, resize_below_scale, device)
        num_tokens = self.patch_embed.num_patches + self.num_prefix_tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if class_token else None
        if not class_token:
            # Packages such as lightly build a ViT's sequence from these parts. They put the class token
            # first, which would be another function here, so with a class token they must fail.
            self.reg_token, self.no_embed_class, self.norm_pre = None, False, nn.Identity()
        self.pos_embed = nn.Parameter(torch.empty(1, num_tokens, embed_dim, **dd))
        self.patch_drop_rate = patch_drop_rate
        self.patch_drop = (
            PatchDropout(patch_drop_rate, num_prefix_tokens=0, ordered=True) if patch_drop_rate > 0 else nn.Identity()
        )
        self.pos_drop = nn.Dropout(p=pos_drop_rate)
        self.blocks = nn.Sequential(
            *[
                Block(
                    embed_dim,
                    norm_layer,
                    drop_path=rate,
                    checkpoint_min_tokens=checkpoint_min_tokens,
                    recurrence=recurrence,
                    d_state=d_state,
                    d_conv=d_conv,
                    expand=expand,
                    dt_rank=dt_rank,
                    depth=depth,
                    **dd,
                )
                for rate in calculate_drop_path_rates(drop_path_rate, depth)
            ]
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": reduction} for i in range(depth)
        ]
        use_fc_norm = global_pool in ("avg", "avgmax", "max") if fc_norm is None else fc_norm
        self.norm = nn.Identity() if use_fc_norm else norm_layer(embed_dim, **dd)
        self.fc_norm = norm_layer(embed_dim, **dd) if use_fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in _POOLS:
            raise AssertionError(f"global_pool must be one of {_POOLS}, got {global_pool!r}")
        if global_pool == "token" and not self.has_class_token:
            raise AssertionError('global_pool="token" needs class_token=True')
        return global_pool

    @torch.jit.ignore
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Draw the initial values of Vision Mamba (``segm_init_weights`` and ``_init_weights``).

        Args:
            mode: Must be "", because there is only one scheme.
            needs_reset: Also call ``reset_parameters`` of all submodules; not needed right after construction.

        Raises:
            ValueError: ``mode`` is unknown.
        """
        if mode:
            raise ValueError(f'mode must be "", got {mode!r}')

        def reset(module: nn.Module, name: str) -> None:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

        if needs_reset:
            named_apply(reset, self)
            self.init_non_persistent_buffers()
        trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(self.patch_embed.proj.bias)
        if isinstance(self.head, nn.Linear):
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @torch.jit.ignore
    def init_non_persistent_buffers(self) -> None:
        """Write ``ref_feat_bits`` again if transformers, which calls this after loading, has not loaded it."""
        bits = self.ref_feat_bits
        loaded = getattr(bits, "_is_hf_initialized", False)  # set by transformers
        if bits is not None and not loaded:
            self.ref_feat_bits = bits_of(self._ref_grid).to(bits.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes) of images.

        Args:
            x: Images, (B, in_chans, height, width).

        Raises:
            AssertionError: The model does not support the channels or the size of the images.
            ValueError: Training drops patches, at a grid that does not allow it.
        """
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalised tokens (B, L, C) of images, class token first; same arguments as ``forward``."""
        x, layout, grid, feat_shape = self._embed(x)
        return self._final_tokens(x, layout, grid, feat_shape)

    def _embed(self, x: Tensor) -> tuple[Tensor, TokenLayout | None, list[int], list[int]]:
        """Return the results of ``_sequence`` for images (B, in_chans, height, width), their grid inside the model and
        their own.
        """
        if torch.jit.is_tracing():
            check_not_onnx("mixer")  # now, because the conversion of a traced program prints all of it
        _assert(
            x.shape[1] == self.in_chans,
            f"Input channels ({x.shape[1]}) don't match model ({self.in_chans}).",
        )
        if torch.jit.is_tracing():  # sizes become constants; a split refuses images of other sizes
            x = x.split([int(x.shape[-2])], -2)[0].split([int(x.shape[-1])], -1)[0]
        height, width = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        x = self.patch_embed(x, self._reference(), self.resize_below_scale)
        grid, feat_shape = [x.shape[1], x.shape[2]], [height, width]
        if torch.jit.is_tracing():  # sizes are tensors, which lists of an operator cannot contain
            grid = [int(grid[0]), int(grid[1])]
            feat_shape = [int(feat_shape[0]), int(feat_shape[1])]
        x, layout = self._sequence(x.flatten(1, 2), grid)
        return x, layout, grid, feat_shape

    def _sequence(self, x: Tensor, grid: list[int], keep: Tensor | None = None) -> tuple[Tensor, TokenLayout | None]:
        """Add positions to patches (B, N, C) of a grid, and insert the class token in the middle.

        ``keep``, ascending indices (B, n), selects the patches that stay. Without it, training drops patches at
        random if ``patch_drop_rate`` is set.

        Returns:
            The tokens, and their layout; None on the trained grid, which patches may be missing from.
        """
        pos_embed = self.pos_embed
        if self.dynamic_img_size or self.resize_below_scale > 0:
            own_grid = self.patch_embed.grid_size
            pos_embed = resample_pos_embed(pos_embed, grid, [own_grid[0], own_grid[1]], self.num_prefix_tokens)
        layout: TokenLayout | None = self._layout(grid, x)
        x = x + pos_embed[:, self.num_prefix_tokens :]
        if keep is not None or (self.training and self.patch_drop_rate > 0):
            self.check_patches_can_drop(grid)
            x = self.patch_drop(x) if keep is None else x.take_along_dim(keep[:, :, None], 1)
        if self.cls_token is not None:
            x = class_token_to_middle(x, self.cls_token + pos_embed[:, :1])
        return self.pos_drop(x), layout

    def _final_tokens(self, x: Tensor, layout: TokenLayout | None, grid: list[int], feat_shape: list[int]) -> Tensor:
        """Return the result of ``forward_features``, given the results of ``_embed``."""
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, layout)
            else:
                x = block(x, layout)
        return self.norm(self._own_tokens(x, grid, feat_shape))

    def _own_tokens(self, x: Tensor, grid: list[int], feat_shape: list[int]) -> Tensor:
        """Return tokens (B, L, C) with the class token first, resized to the image's own grid."""
        x = class_token_first(x, self.num_prefix_tokens)
        if self.training and self.patch_drop_rate > 0:  # patches are missing
            return x
        return resize_tokens(x, grid, feat_shape, self.num_prefix_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits (B, num_classes) for tokens (B, L, C), or the input of the head.

        Args:
            x: Tokens, class token first.
            pre_logits: Leave out the head.
        """
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Pool tokens (B, L, C) to (B, C), or return them if the pooling is "".

        Args:
            x: Tokens, class token first.
            pool_type: Pooling instead of ``global_pool``; an unknown one raises AssertionError.
        """
        pool_type = self.global_pool if pool_type is None else pool_type
        return global_pool_nlc(x, pool_type, self.num_prefix_tokens)

    def forward_patches(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the normalised tokens of patches, class token first.

        ``forward_features(images)`` is ``forward_patches(patch_embed(images))``, except for images that
        ``resize_below_scale`` resizes. For training without labels, you can change the patches in between:
        replace some by a mask token, or leave some out.

        Args:
            x: Patches from ``patch_embed``, without positions, (B, H, W, C).
            keep: Indices, row by row, of the patches that go through the blocks, int64 (B, n), none of them twice
                in an image; None for all. Only at the grid ``ref_feat_shape``, or with ``grid_aware=False``.

        Returns:
            (B, num_prefix_tokens + n, C), patches in the order of ``keep``; without it, n = H W. Inside the
            blocks they have the order of the image.

        Raises:
            ValueError: The patches have another shape, ``keep`` is invalid, or patches cannot be left out.
            RuntimeError: On a GPU or in a compiled program, an index in ``keep`` is invalid.
        """
        grids = "any" if self.dynamic_img_size else self.patch_embed.grid_size
        if x.ndim != 4 or x.shape[3] != self.embed_dim or grids not in ("any", tuple(x.shape[1:3])):
            raise ValueError(f"patches must be (B, H, W, {self.embed_dim}) of {grids} grid, got {tuple(x.shape)}")
        grid = [x.shape[1], x.shape[2]]
        if keep is None:
            return self._final_tokens(*self._sequence(x.flatten(1, 2), grid), grid, grid)
        if self.training and self.patch_drop_rate > 0:
            raise ValueError(f"keep must be None while patches are dropped, patch_drop_rate = {self.patch_drop_rate}")
        check_keep(keep, x)
        ascending, order = keep.sort(1)
        x = self._final_tokens(*self._sequence(x.flatten(1, 2), grid, ascending), grid, grid)
        prefix, patches = x.split([self.num_prefix_tokens, keep.shape[1]], 1)
        return torch.cat([prefix, patches.take_along_dim(order.argsort(1)[..., None], 1)], 1)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
        """Return the residual stream after chosen blocks, and the final tokens.

        Args:
            x: Images, (B, in_chans, height, width).
            indices: The last n blocks if an int, blocks by index if a list, all blocks if None.
            return_prefix_tokens: Return each intermediate as (spatial, prefix tokens).
            norm: Apply the final normalisation to the intermediates.
            stop_early: Leave out the blocks after the last chosen one.
            output_fmt: Format of the intermediates, "NCHW" (B, C, H, W) or "NLC" (B, N, C).
            intermediates_only: Return only the list of intermediates.
            output_dict: Return a dict with image_intermediates, image_intermediates_prefix (with
                return_prefix_tokens) and image_features (unless intermediates_only).

        Returns:
            Final tokens (B, L, C) and the list of intermediates. The final tokens are normalised and come after the
            last block that ran; without ``stop_early`` they are those of ``forward_features``.

        Raises:
            AssertionError: ``output_fmt`` or an index is unknown; or as in ``forward``.
            ValueError: "NCHW" maps are requested while training drops patches; or as in ``forward``.
        """
        if output_fmt == "NCHW" and self.training and self.patch_drop_rate > 0:
            raise ValueError(
                f'output_fmt="NCHW" needs all patches: in training, patch_drop_rate must be 0, got '
                f'{self.patch_drop_rate}; call eval(), or use output_fmt="NLC"'
            )
        if output_fmt not in ("NCHW", "NLC"):
            raise AssertionError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        numbers, blocks = self._take_indices(indices)
        num_blocks = max(blocks) + 1 if stop_early else len(self.blocks)
        img_size, prefix = (x.shape[-2], x.shape[-1]), self.num_prefix_tokens
        taps, x = self._intermediates(x, sorted({*blocks}), num_blocks, norm)
        patches = [taps[block][:, prefix:] for block in blocks]
        final = None if intermediates_only else self.norm(x)
        spatial = self._spatial(numbers, patches, img_size, output_fmt)
        with_prefix = return_prefix_tokens and prefix > 0
        prefixes = [taps[block][:, :prefix] for block in blocks] if with_prefix else None
        return packed_intermediates(spatial, prefixes, final, output_dict)

    def _take_indices(self, indices: int | list[int] | None) -> tuple[list[int], list[int]]:
        """Return the indices of the intermediates, and of the blocks that they are made from."""
        blocks = sorted({*feature_take_indices(len(self.blocks), indices)[0]})
        return blocks, blocks

    def _intermediates(
        self, x: Tensor, blocks: list[int], num_blocks: int, norm: bool
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return tokens (B, L, C) after chosen blocks, by block, and after the last, class token first."""
        x, layout, grid, feat_shape = self._embed(x)
        taps = {}
        for i, block in enumerate(self.blocks[:num_blocks]):
            x = checkpoint(block, x, layout) if self.grad_checkpointing else block(x, layout)
            if i in blocks:
                tap = self._own_tokens(x, grid, feat_shape)
                taps[i] = self.norm(tap) if norm else tap
        return taps, self._own_tokens(x, grid, feat_shape)

    def _spatial(
        self, numbers: list[int], patches: list[Tensor], img_size: tuple[int, int], output_fmt: str
    ) -> list[Tensor]:
        """Return intermediates in a format, made from patches (B, N, C); the pyramid uses the other arguments."""
        if output_fmt == "NLC":
            return patches
        H, W = self.patch_embed.dynamic_feat_size(img_size)
        return [rearrange(x, "b (h w) c -> b c h w", h=H, w=W).contiguous() for x in patches]

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """Return a list of intermediates, by DINO's interface; same errors as ``forward_intermediates``.

        Args:
            x: Images, (B, in_chans, height, width).
            n: The last n blocks if an int, blocks by index if a list.
            reshape: Return maps (B, C, H, W) instead of sequences (B, N, C).
            return_prefix_tokens: Return each intermediate as (spatial, prefix tokens).
            norm: Apply the final normalisation.
        """
        return self.forward_intermediates(
            x,
            n,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last chosen one, in place; on request also norm and head.

        Args:
            indices: The last n blocks if an int, blocks by index if a list; AssertionError if out of range.
            prune_norm: Remove the final normalisation.
            prune_head: Remove pooling and head.

        Returns:
            Absolute indices of the chosen blocks.
        """
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max_index + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take_indices

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one.

        Args:
            num_classes: Classes of the new head; 0 for none.
            global_pool: New pooling; None keeps it.

        Raises:
            AssertionError: ``global_pool`` is unknown, or "token" without a class token.
        """
        dd = get_device_dtype(self)
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
            # Construction derives the norm's place from the pooling: keep it for a rebuild.
            update_model_args(self, fc_norm=not isinstance(self.fc_norm, nn.Identity))
        self.num_classes = num_classes
        self.head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        if num_classes > 0:
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        self.head.train(self.training)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change the size of images or patches, resampling the embeddings.

        Args:
            img_size: Height and width in pixels; None keeps it.
            patch_size: Height and width in pixels; None keeps it.

        Raises:
            ValueError: Whole patches do not cover the image, or ``patch_size`` changes although patches overlap.
        """
        previous = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        if self.patch_embed.grid_size != previous:
            resampled = resample_abs_pos_embed(
                self.pos_embed,
                new_size=self.patch_embed.grid_size,
                old_size=previous,
                num_prefix_tokens=self.num_prefix_tokens,
                verbose=True,
            )
            self.pos_embed = nn.Parameter(resampled, requires_grad=self.pos_embed.requires_grad)
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)
        # Keep the reference grid: construction would derive it from the new size.
        update_model_args(self, ref_feat_shape=self._reference())
        if hasattr(self, "pretrained_cfg"):  # created by timm
            state_images(self)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable
        for block in self.blocks:  # recompute a block as a whole, not its inner part a second time
            block.checkpoint_min_tokens = None if enable else self.checkpoint_min_tokens

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that the published recipe does not decay.

        The vectors of the two directions are stacked into matrices here, which would otherwise be decayed.
        A_log is decayed, as in Vision Mamba's training, which never reads the attribute that exempts it.
        """
        vectors = tuple(f".mixer.{name}" for name in ("conv_bias", "dt_bias", "D"))
        names = (name for name, _ in self.named_parameters())
        return {n for n in names if n in ("pos_embed", "cls_token") or n.endswith(vectors)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth, for layer-wise learning rates; ``coarse`` has no effect."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # only present when PyTorch created `destination`
            destination._metadata[prefix[:-1]]["grid_size"] = self.patch_embed.grid_size

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        adapt_inside(state_dict, self, prefix, local_metadata)  # state_dict is PyTorch's copy
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
