"""A residual block and its token mixer: projections, depthwise convolution, bidirectional scan and gate.

The mixer of Vision Mamba ("bimamba v2" with divided output) around any of the recurrences. The
parameters of the two directions are stacked on a leading axis of size 2: index 0 scans from the
first token to the last, index 1 from the last to the first.

Letters: B batch, L tokens, C channels of the block, E = expand * C channels of the scan, M state size,
R rank of the step size.
"""

import math
from functools import partial
from typing import Any, Final, Literal

import torch
from timm.layers import DropPath, is_exportable
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import vil.kernels.ops  # noqa: F401  (registers torch.ops.vil)
from vil.kernels import func_transforms, mixer, onnx, reference
from vil.kernels.checks import check_not_onnx, in_forward_mode, in_transform, is_eager, is_exporting
from vil.kernels.order import Order
from vil.sizes import Fitted, TokenLayout, fit

Recurrence = Literal["longhorn", "longhorn_exact", "mamba"]
torch.fx.wrap("fit")  # FX cannot follow its branches


class BidirectionalMixer(nn.Module):
    """Mix the tokens of a sequence by a gated scan in both directions."""

    recurrence: Final[str]
    d_state: Final[int]
    dt_rank: Final[int]
    exportable: Final[bool]

    def __init__(
        self,
        dim: int,
        recurrence: Recurrence = "longhorn",
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        depth: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a mixer with Vision Mamba's initial values.

        Args:
            dim: Channels C of input and output.
            recurrence: "longhorn" (paper, Eq. 7), "longhorn_exact" (Eq. 6) or "mamba".
            d_state: State size M per channel.
            d_conv: Taps of the depthwise convolution.
            expand: Channels of the scan per channel of the block.
            dt_rank: Rank of the projection that gives the step size; ceil(dim / 16) if None.
            depth: Number of mixers in the residual stack; the initial output projection is divided by
                its square root, as in GPT-2 and Mamba.
            device: Device of the parameters.
            dtype: Dtype of the parameters.

        Raises:
            ValueError: ``recurrence`` is unknown, or d_state, d_conv, expand or dt_rank is below 1.
        """
        super().__init__()
        if recurrence not in reference.RECURRENCES:
            raise ValueError(f"recurrence must be one of {reference.RECURRENCES}, got {recurrence!r}")
        dt_rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        sizes = {"d_state": d_state, "d_conv": d_conv, "expand": expand, "dt_rank": dt_rank}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        dd = {"device": device, "dtype": dtype}
        inner = expand * dim
        self.recurrence = recurrence
        self.d_state = d_state
        self.dt_rank = dt_rank
        self.depth = depth
        self.exportable = is_exportable()

        self.in_proj = nn.Linear(dim, 2 * inner, bias=False, **dd)
        self.conv_weight = nn.Parameter(torch.empty(2, inner, d_conv, **dd))
        self.conv_bias = nn.Parameter(torch.empty(2, inner, **dd))
        self.x_proj_weight = nn.Parameter(torch.empty(2, dt_rank + 2 * d_state, inner, **dd))
        self.dt_weight = nn.Parameter(torch.empty(2, inner, dt_rank, **dd))
        self.dt_bias = nn.Parameter(torch.empty(2, inner, **dd))
        if recurrence == "mamba":
            self.A_log = nn.Parameter(torch.empty(2, inner, d_state, **dd))
        else:
            self.register_parameter("A_log", None)
        self.D = nn.Parameter(torch.empty(2, inner, **dd))
        self.proj = nn.Linear(inner, dim, bias=False, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw Vision Mamba's initial values, quirks included.

        For Mamba, the step size of the forward direction starts in [0.001, 0.1]. All other step-size
        biases start at zero: Mamba's backward direction and both directions of Longhorn.
        """
        self.in_proj.reset_parameters()
        for weight, fan_in in (
            (self.conv_weight, self.conv_weight.shape[-1]),
            (self.conv_bias, self.conv_weight.shape[-1]),
            (self.x_proj_weight, self.x_proj_weight.shape[-1]),
            (self.dt_weight, self.dt_rank),
        ):
            nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)
        nn.init.zeros_(self.dt_bias)
        nn.init.ones_(self.D)
        if self.A_log is not None:
            dt = torch.empty_like(self.dt_bias[0], dtype=torch.float32)
            dt.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
            self.dt_bias[0].copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
            rates = torch.arange(1, self.d_state + 1, device=dt.device, dtype=torch.float32)
            self.A_log.copy_(rates.log().expand_as(self.A_log))
        self.proj.reset_parameters()
        self.proj.weight.div_(math.sqrt(self.depth))

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # only present when PyTorch created `destination`
            destination._metadata[prefix[:-1]]["recurrence"] = self.recurrence

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        # The two Longhorn recurrences have the same names and shapes, so PyTorch would load the wrong
        # weights. Raise at once: a collected error would be repeated for every mixer.
        recurrence = local_metadata.get("recurrence", self.recurrence)
        if recurrence != self.recurrence:
            raise RuntimeError(
                f"{prefix[:-1]} has recurrence {self.recurrence!r}, but the state dict has weights "
                f"of {recurrence!r}; create the model with recurrence={recurrence!r}"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout | None = None,
        save: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Mix tokens (B, L, C) -> (B, L, C).

        Args:
            x: Tokens, (B, L, C).
            layout: Layout of the tokens of a grid other than the trained one; None on the trained grid.
            save: While training, keep the scan's states for the backward pass instead of recomputing them.
            attn_mask: Must be None; timm's blocks pass it to their attention, which a mixer can replace.
            is_causal: Must be False, as ``attn_mask``.

        Raises:
            ValueError: A mask is given, or ``is_causal`` is set.
            RuntimeError: An ONNX export is running, but the model lacks ``exportable=True`` or is in training mode. Or
                the export has ``dynamo=False``.
        """
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask must be None and is_causal False: both directions of the scan read all tokens")
        xz = self.in_proj(x)  # (B, L, 2E): values x and the gate z
        A = None if self.A_log is None else -torch.exp(self.A_log)
        own = fit(self.conv_weight, self.x_proj_weight, A, layout, self.recurrence, self.dt_rank)
        save = save and self.training  # in evaluation mode, a backward pass recomputes the states
        if not torch.jit.is_scripting():
            params, order = self.arguments(own)
            if is_eager(xz, params):
                return self.proj(mixer.run(xz, params, self.recurrence, save, order))
            y = self._without_operator(xz, params, order)
            if y is not None:
                return self.proj(y)
        y = torch.ops.vil.mixer(
            xz,
            own.conv_weight,
            self.conv_bias,
            own.x_proj_weight,
            self.dt_weight,
            self.dt_bias,
            own.A,
            self.D,
            self.recurrence,
            save,
            own.cls_weight,
            own.order,
            own.cls_index,
            own.tokens_per_ref,
        )[0]
        return self.proj(y)

    @torch.jit.unused
    def arguments(self, own: Fitted) -> tuple[mixer.MixerParams, Order]:
        """Return all parameters of the mixer between its outer projections, and the order of the tokens."""
        params = mixer.MixerParams(
            *(own.conv_weight, self.conv_bias, own.x_proj_weight, self.dt_weight),
            *(self.dt_bias, own.A, self.D, own.cls_weight),
        )
        return params, Order(own.order, own.cls_index, own.tokens_per_ref)

    @torch.jit.unused
    def _without_operator(self, xz: Tensor, params: mixer.MixerParams, order: Order) -> Tensor | None:
        """Return the first output of ``vil::mixer`` for transforms and exporters that take no operator, else None."""
        if in_forward_mode():
            *tensors, cls_weight = params
            arguments = (xz, *tensors, self.recurrence, False, cls_weight, *order)
            return func_transforms.mixer(*arguments)[0]
        if self.exportable and is_exporting() and not self.training:
            return onnx.mixer(xz, params, self.recurrence, order)
        if torch.jit.is_tracing():
            check_not_onnx("mixer")
        return None


class Block(nn.Module):
    """Pre-norm residual block, x + mixer(norm(x)); the same function as Vision Mamba's add, norm, mixer."""

    def __init__(
        self,
        dim: int,
        norm_layer: type[nn.Module] | partial,
        drop_path: float = 0.0,
        checkpoint_min_tokens: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **mixer_args: Any,
    ) -> None:
        """Create a block.

        Args:
            dim: Channels C.
            norm_layer: Class or function that makes the normalisation from the number of channels.
            drop_path: Probability of dropping the mixer's output for a sample while training.
            checkpoint_min_tokens: Same as in ``VisionLonghorn``.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
            **mixer_args: Arguments of ``BidirectionalMixer``, which raises ValueError for invalid ones.
        """
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm = norm_layer(dim, **dd)
        self.mixer = BidirectionalMixer(dim, **mixer_args, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.checkpoint_min_tokens = checkpoint_min_tokens

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Add the mixer's output to tokens (B, L, C); ``layout`` is the same as in the mixer."""
        if not torch.jit.is_scripting() and self.training and self._recomputes(x):
            return x + self.drop_path(self._recomputed(x, layout))
        return x + self.drop_path(self.mixer(self.norm(x), layout))

    @torch.jit.unused
    def _recomputes(self, x: Tensor) -> bool:
        above = self.checkpoint_min_tokens
        if above is None or isinstance(x, torch.fx.Proxy) or not torch.is_grad_enabled():
            return False
        # Tracers have no backward pass, and torch.func has no hooks for saved tensors.
        traced = torch.jit.is_tracing() or is_exporting()
        return not (traced or in_transform()) and x.shape[1] > above

    @torch.jit.unused
    def _recomputed(self, x: Tensor, layout: TokenLayout | None) -> Tensor:
        """Keep the block's input and the mixer's output for the backward pass, and recompute the rest there.

        This is PyTorch's selective checkpointing, which torch.compile supports. It saves nearly as much memory as full
        gradient checkpointing and takes less time. The backward pass recomputes the norm, the input projection and
        the operator's intermediate results, but does not run the operator's forward pass twice.
        """

        def mixed(x: Tensor) -> Tensor:
            return self.mixer(self.norm(x), layout, save=False)

        return checkpoint(mixed, x, use_reentrant=False, context_fn=_contexts)


def _keep_mixer(context: object, op: object, *arguments: Any, **options: Any) -> CheckpointPolicy:
    if op == torch.ops.vil.mixer.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _keep_mixer)
