"""Scans token by token, cut in segments: what one call's kernels have in common.

A segment is some chunks of INTERVAL tokens: all of them, unless there are too few channels to fill
the GPU. Then the segments run side by side, from states that the kernels here have found before: a
scan is linear in its state, and what a segment makes of one is a product and a sum per channel and
state. Triton kernels, then how a call is spread over the device. Letters are as in ``sequential.py``.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.triton import tuning
from vil.kernels.triton.launch import launch
from vil.kernels.triton.layout import adjacent_channels
from vil.kernels.triton.sequential_tokens import (
    INTERVAL,
    RUN_TIME,
    advance,
    broadcast_row,
    by_quads,
    fade,
    full_states,
    load_rates,
    pack_rows,
    padded_states,
    place_of_program,
    step_size,
    store_states,
)
from vil.kernels.triton.tiles import alive_row, half_silu, load_row

# How many times the work a scan in segments takes: the summary costs about as much as the scan.
_SEGMENTS_OVERHEAD = 2.0


@triton.jit(do_not_specialize=RUN_TIME)
def _summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, rows_ptr, rates_ptr, bias_ptr, ends_ptr, products_ptr,
    B, L, segments, segment_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, MAMBA: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Find what a segment makes of a state: products s + ends, both (N, B, S, M / 4, D, 4).

    With ADJOINT, of the gradient of the state after the segment, on the way back.
    """
    block, segment, direction, b = place_of_program(segments, B, D, BLOCK_D)
    sequence = direction * B + b
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)
    rates = load_rates(rates_ptr, direction, d, mask, D, M, MAMBA)
    start = segment * segment_tokens
    count = tl.minimum(L - start, segment_tokens)
    back = (direction if N == 2 else REVERSE) ^ ADJOINT
    sign = 1 - 2 * back
    first = (start + back * (count - 1)).to(tl.int64)
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l
    if ADJOINT:
        dout_row = dout_ptr + (b * L + first) * D
        if N == 2:
            z_row = z_ptr + b * z_stride_b + first * z_stride_l
    else:
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l
    row = rows_ptr + (sequence * tl.cdiv(L, INTERVAL) * INTERVAL + first) * (2 * M + 4)
    end = full_states(0.0, M, BLOCK_D)
    product = full_states(1.0, M, BLOCK_D)
    for _ in range(count):
        k = broadcast_row(row, M, BLOCK_D)
        v = load_row(dt_row + d, mask) + bias
        step = step_size(v, row + 2 * M, mask, MAMBA, FAST)
        if ADJOINT:
            dy = load_row(dout_row + d, mask)
            dout_row += sign * D
            if N == 2:
                dy *= half_silu(load_row(z_row + d, mask), FAST)
                z_row += sign * z_stride_l
            q = broadcast_row(row + M, M, BLOCK_D)
            read = ()
            for j in tl.static_range(M):
                read += (end[j] + dy * q[j],)
            end = fade(read, step, k, rates, M, MAMBA, FAST)
        else:
            x = load_row(x_row + d, mask)
            x_row += sign * x_stride_l
            end = advance(end, x, step, k, rates, M, MAMBA, FAST)
        product = fade(product, step, k, rates, M, MAMBA, FAST)
        dt_row += sign * dt_stride_l
        row += sign * (2 * M + 4)
    offset = (sequence * segments + segment) * (M * D)
    store_states(ends_ptr + offset, end, d, mask, D, M)
    store_states(products_ptr + offset, product, d, mask, D, M)


@triton.jit(do_not_specialize=RUN_TIME)
def _carry_kernel(
    ends_ptr, products_ptr, initial_ptr, B, segments,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, INITIAL: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the ends of segments by the states that they start from, in place.

    ends, products (N, B, S, SIZE), initial (N, B, SIZE): of the first segment, zero unless INITIAL.
    """
    blocks = tl.cdiv(SIZE, BLOCK)
    sequence = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    back = (sequence // B if N == 2 else REVERSE) ^ ADJOINT
    sequence = sequence.to(tl.int64)
    state = tl.zeros((BLOCK,), tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + sequence * SIZE + i, mask=i < SIZE, other=0.0)
    for s in range(segments):
        segment = tl.where(back == 1, segments - 1 - s, s)
        offset = (sequence * segments + segment) * SIZE + i
        end = tl.load(ends_ptr + offset, mask=i < SIZE, other=0.0)
        product = tl.load(products_ptr + offset, mask=i < SIZE, other=0.0)
        tl.store(ends_ptr + offset, state, mask=i < SIZE)
        state = product * state + end


# -------------------------------------------------------------------------------------- launchers


def _rates(A: Tensor | None, padded: int) -> Tensor | None:
    """Return A / ln 2 as (N, M' / 4, D, 4) float32, zero beyond M."""
    return None if A is None else by_quads(A.float() / math.log(2.0), padded)


class Scan:
    """What the kernels of one scan have in common: packed inputs, strides, segments, options."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor | None,
        q: Tensor,
        k: Tensor,
        bias: Tensor,
        z: Tensor | None,
        reverse: bool,
        key_norm: float,
    ) -> None:
        self.N, self.B, self.L, self.D = x.shape
        self.rows = pack_rows(q, k, key_norm)
        self.M = padded_states(k.shape[-1])
        self.rates = _rates(A, self.M)
        self.x, self.dt = adjacent_channels(x), adjacent_channels(dt)
        self.z = None if z is None else adjacent_channels(z)
        z_strides = (0, 0) if z is None else self.z.stride()[:2]
        self.arguments = {
            f"{name}_stride_{axis}": stride
            for name, axes, strides in (
                ("x", ("dir", "b", "l"), self.x.stride()),
                ("dt", ("dir", "b", "l"), self.dt.stride()),
                ("z", ("b", "l"), z_strides),
            )
            for axis, stride in zip(axes, strides, strict=False)
        }
        block_d, warps = tuning.blocks("sequential_forward", self.D, x.device)
        self.segments, chunks = tuning.segments(
            self.B * triton.cdiv(self.D, block_d) * warps,
            triton.cdiv(self.L, INTERVAL),
            x.device,
            _SEGMENTS_OVERHEAD,
        )
        self.reverse, self.fast = int(reverse), tuning.fast(x.device)
        self.arguments |= {
            "x_ptr": self.x, "dt_ptr": self.dt, "z_ptr": self.z, "rows_ptr": self.rows,
            "rates_ptr": self.rates, "bias_ptr": bias.contiguous(), "B": self.B, "L": self.L,
            "segments": self.segments, "segment_tokens": chunks * INTERVAL, "N": self.N,
            "REVERSE": self.reverse, "MAMBA": A is not None, "D": self.D, "M": self.M,
            "INTERVAL": INTERVAL, "FAST": self.fast,
        }  # fmt: skip

    def programs(self, block_d: int, sequences: int) -> int:
        """Return the number of programs for ``sequences`` scans in blocks of channels."""
        return triton.cdiv(self.D, block_d) * self.segments * sequences

    def empty_states(self, *shape: int) -> Tensor:
        """Return room for float32 states, (*shape, M / 4, D, 4)."""
        return torch.empty(*shape, self.M // 4, self.D, 4, device=self.x.device)

    def entry(self, initial: Tensor | None, dout: Tensor | None) -> Tensor | None:
        """Return the states that segments start from, (N, B, S, M / 4, D, 4), or None if all are zero.

        Given dout, the gradients of the states after them.

        Args:
            initial: State before the first token, or gradient of the one after the last, (B, M / 4, D, 4).
            dout: Gradient of the output, (B, L, D).
        """
        if self.segments == 1:
            return initial
        block_d, warps = tuning.blocks("sequential_forward", self.D, self.x.device)
        ends = self.empty_states(self.N, self.B, self.segments)
        products = torch.empty_like(ends)
        adjoint = int(dout is not None)
        launch(
            _summary_kernel, self.programs(block_d, self.N * self.B), self.x, num_warps=warps,
            **self.arguments, dout_ptr=dout, ends_ptr=ends, products_ptr=products, ADJOINT=adjoint,
            BLOCK_D=block_d,
        )  # fmt: skip
        size, block = self.M * self.D, 256
        launch(
            _carry_kernel, triton.cdiv(size, block) * self.N * self.B, self.x, num_warps=4,
            ends_ptr=ends, products_ptr=products, initial_ptr=initial, B=self.B,
            segments=self.segments, N=self.N, REVERSE=self.reverse, ADJOINT=adjoint,
            INITIAL=initial is not None, SIZE=size, BLOCK=block,
        )  # fmt: skip
        return ends
