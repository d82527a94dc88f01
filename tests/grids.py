"""Grids for tests of kernels: layouts as a model makes them, and the convolution along them."""

from typing import NamedTuple

import torch
from torch import Tensor

from vil.kernels import reference
from vil.kernels.order import Order, conv_forward
from vil.sizes import Fitted, TokenLayout, fit, token_layout


class Grid(NamedTuple):
    """H x W patches of weights that were trained at another grid; sizes in pixels as (height, width)."""

    H: int
    W: int
    trained: tuple[int, int]
    patch: tuple[int, int] = (4, 4)
    stride: tuple[int, int] = (4, 4)
    class_token: int = 1
    scale_conv: bool = True

    @property
    def length(self) -> int:
        return self.H * self.W + self.class_token

    def layout(self, taps: int = 4, device: str = "cpu") -> TokenLayout | None:
        sizes = ([self.H, self.W], [*self.trained], [*self.patch], [*self.stride])
        like = torch.empty(0, device=device)
        return token_layout(*sizes, self.class_token, taps if self.scale_conv else 0, like)

    @property
    def tokens_per_ref(self) -> float:
        layout = self.layout()
        return 1.0 if layout is None else layout.tokens_per_ref[0] / layout.tokens_per_ref[1]


def mixer_arguments(tensors: list[Tensor | None], recurrence: str, grid: Grid | None) -> list:
    """Return the arguments of ``vil::mixer`` for a grid, given its tensors for the trained one."""
    xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D = tensors
    layout = None if grid is None else grid.layout(conv_weight.shape[2], str(xz.device))
    own: Fitted = fit(conv_weight, x_proj_weight, A, layout, recurrence, dt_weight.shape[2])
    return [
        *(xz, own.conv_weight, conv_bias, own.x_proj_weight, dt_weight, dt_bias, own.A, D),
        *(recurrence, True, own.cls_weight, own.order, own.cls_index, own.tokens_per_ref),
    ]


def convolve(x: Tensor, weight: Tensor, bias: Tensor, layout: TokenLayout | None) -> Tensor:
    """Convolve by the reference, with taps (2, D, K) that were learnt at the trained grid."""
    conv = reference.ConvPlan()
    if layout is None or layout.order is None:
        return conv.forward(x, weight, bias, None)
    shares = None if layout.cls_taps is None else (layout.cls_taps * 2.0**-30).to(weight) @ weight.mT
    order = Order(layout.order, layout.cls_index, layout.tokens_per_ref)
    weight = weight @ (layout.taps * 2.0**-30).to(weight).mT
    return conv_forward(conv, x, weight, bias, order, shares)
