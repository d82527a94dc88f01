"""The exact Longhorn scan in chunks, cut in segments: what one call's kernels have in common.

Sequences too few to fill the device are cut in segments of whole chunks that run side by side: the
scan is linear in its state, so a summary of every segment gives the states that the segments start
from. Triton kernels, then how a call is spread over the device. What is computed, and the letters,
are in ``longhorn_exact.py``.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.reference import full_steps
from vil.kernels.triton import tuning
from vil.kernels.triton.exact_chunks import (
    RUN_TIME,
    backward_substitution,
    forward_substitution,
    padded_states,
    place_of_program,
    store_states,
)
from vil.kernels.triton.exact_keys import pack
from vil.kernels.triton.launch import launch
from vil.kernels.triton.layout import adjacent_channels
from vil.kernels.triton.tiles import (
    alive_row,
    alive_rows,
    broadcast_rows,
    columns,
    for_product,
    from_columns,
    half_silu,
    load_row,
    load_rows,
    longhorn_eps,
    to_rows,
)


@triton.jit
def _summary_direction(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, summary_ptr,
    B, L, b, segment, segments, segment_chunks, d, j,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, OWN: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take unit state j, or if OWN zeros under the inputs given, through one segment.

    With dout given, what is taken through is the gradient of the state, against the scan.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    DESCENDING: tl.constexpr = (dout_ptr is not None) != REVERSE
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    state = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    if not OWN:
        state += tl.where(m == j, 1.0, 0.0)[None, :]
    segment += 1 if DESCENDING else 0  # the last one on the way needs no summary
    chunks, begin = tl.cdiv(L, T), segment * segment_chunks
    end = tl.minimum(begin + segment_chunks, chunks)
    mask = alive_row(0, 1, d, D, BLOCK_D)
    channel = mask[None, :]
    bias = load_row(bias_ptr + direction * D + d, mask)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    rounded = for_product(state, PRECISION, FAST)
    for i in range(begin, end):
        n = (begin + end - 1 - i) if DESCENDING else i
        chunk = (direction * B + b) * chunks + n
        keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t16[:, None] * (2 * BLOCK_M) + m[None, :]
        k = tl.load(keys)
        gram = gram_ptr + chunk * (2 * T * T)
        first = tl.cast(tl.minimum(n * T, L - T) + ((T - 1) if REVERSE else 0), tl.int64)
        kappa = broadcast_rows(kappa_ptr + chunk * (2 * T), BLOCK_D)
        dt = load_rows(dt_row + first * dt_stride_l, sign * dt_stride_l, channel)
        eps = longhorn_eps(dt + bias[None, :], kappa, FAST)
        recalled = tl.dot(rounded, tl.trans(k), input_precision=PRECISION)
        if dout_ptr is None:
            rest = -to_rows(recalled, BLOCK_D)
            if OWN:
                rest += load_rows(x_row + first * x_stride_l, sign * x_stride_l, channel)
            taken = forward_substitution(rest, eps, gram, BLOCK_D, PRECISION, FAST)
        else:
            if OWN:
                alive = alive_rows(L - n * T, d, not REVERSE, D, BLOCK_D)
                dy = load_rows(dout_ptr + (b * L + first) * D + d, sign * D, alive)
                if z_ptr is not None:
                    z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
                    dy *= half_silu(load_rows(z_row, sign * z_stride_l, channel), FAST)
                read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
                dy = for_product(dy, PRECISION, FAST)
                dy = from_columns(columns(tl.trans(dy), 16), BLOCK_D)
                recalled = tl.dot(dy, tl.trans(read), recalled, input_precision=PRECISION)
                state = tl.dot(dy, tl.load(keys + BLOCK_M), state, input_precision=PRECISION)
            taken = backward_substitution(
                to_rows(recalled, BLOCK_D), eps, gram, BLOCK_D, PRECISION, FAST
            )
            k = -k
        state = tl.dot(taken, k, state, input_precision=PRECISION)
        rounded = for_product(state, PRECISION, FAST)
    lane = (((direction * B + b) * segments + segment) * (M + 1) + j) * D + d
    store_states(summary_ptr, lane, state, d, D, BLOCK_M)


@triton.jit(do_not_specialize=RUN_TIME)
def _summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, summary_ptr,
    B, L, segments, segment_chunks, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
    z_stride_b, REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise what a segment does to a state, or against the scan to a gradient of one.

    summary (N, B, S, M + 1, D, BLOCK_M): j < M is where unit state j ends if nothing is given, M
    where zeros end under what is given: x, or the gradient of y.
    """
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    b, segment, place, block = place_of_program(segments - 1, DIRECTIONS, (M + 1) * BLOCKS)
    j = block // BLOCKS
    d = (block - j * BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(DIRECTIONS):
        for own in tl.static_range(2):
            if place == direction and (j == M) == (own == 1):
                _summary_direction(
                    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr,
                    summary_ptr, B, L, b, segment, segments, segment_chunks, d, j,
                    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
                    direction, REVERSE or direction == 1, own == 1, x_stride_l, dt_stride_l,
                    z_stride_l, D, BLOCK_D, M, BLOCK_M, FAST, PRECISION,
                )  # fmt: skip


@triton.jit(do_not_specialize=RUN_TIME)
def _carry_kernel(
    summary_ptr, start_ptr, entry_ptr, B, segments,
    DESCENDING: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Carry the state of one channel over the segments: entry (N, B, S, D, BLOCK_M).

    DESCENDING is the way of direction 0; direction 1 goes the other way.
    """
    j = tl.arange(0, BLOCK_M)
    d, rest = tl.program_id(0) % D, (tl.program_id(0) // D).to(tl.int64)
    b, direction = rest % B, rest // B
    if start_ptr is None:
        state = tl.zeros((BLOCK_M,), tl.float32)
    else:
        state = tl.load(start_ptr + (b * D + d) * BLOCK_M + j)
    descending = direction == (0 if DESCENDING else 1)
    # A step is short: load three segments ahead, as far as shared memory holds them.
    for i in tl.range(segments - 1, num_stages=4 if BLOCK_M <= 32 else 1):
        place = rest * segments + tl.where(descending, segments - 1 - i, i)
        summary = summary_ptr + (place * ((M + 1) * D) + d) * BLOCK_M + j
        unit = summary[None, :] + j[:, None] * (D * BLOCK_M)
        transition = tl.load(unit, mask=(j < M)[:, None], other=0.0)
        own = tl.load(summary + M * D * BLOCK_M)
        tl.store(entry_ptr + (place * D + d) * BLOCK_M + j, state)
        state = own + tl.sum(transition * state[:, None], 0)
    place = rest * segments + tl.where(descending, 0, segments - 1)
    tl.store(entry_ptr + (place * D + d) * BLOCK_M + j, state)


# -------------------------------------------------------------------------------------- launchers

# Of step sizes that the forward kernel makes; twice that would take its shared memory.
_MOST_RANK = 64
# What the summary takes for each state started from, as a share of what the kernel takes.
_SUMMARY_SHARE = {"exact_forward": 0.6, "exact_backward": 0.3, "exact_backward_float32": 0.3}


class Scan:
    """One call: how it is spread over the device, and what all its kernels over segments take.

    Args:
        kernel: Name of the main kernel in ``tuning``.
        rows: Programs that it has for a block of channels, if sequences are not cut.
        x: Values, (N, B, L, D).
        dt: Raw step sizes, (N, B, L, D).
        q: Queries, (N, B, L, M).
        k: Keys, (N, B, L, M).
        bias: Added to dt, (N, D).
        z: Gate before its SiLU, (B, L, D), of two directions.
        reverse: Which way a single direction goes.
        key_norm: What |k|^2 is multiplied by in the step size.
        dt_weight: If dt is of rank R, (N, B, L, R), its products with this are the step sizes, (N, D, R).

    Attributes:
        block_m: States of a channel as the kernels see them, a power of two.
        block_d: Channels of a block.
        blocks: Blocks of channels.
        segments: S.
        programs: Of the main kernel.
        num_warps: Of each of these.
        arguments: That all kernels take, by name.
        low_rank: What the forward kernel takes besides where it makes the step sizes. In segments they
            are made before: a summary would make them once for every state.
    """

    def __init__(
        self,
        kernel: str,
        rows: int,
        x: Tensor,
        dt: Tensor,
        q: Tensor,
        k: Tensor,
        bias: Tensor,
        z: Tensor | None,
        reverse: bool,
        key_norm: float,
        dt_weight: Tensor | None = None,
    ) -> None:
        _, B, L, channels = x.shape
        self.x = adjacent_channels(x)
        z = None if z is None else adjacent_channels(z)
        self.M, self.block_m = k.shape[3], padded_states(k.shape[3])
        self.reverse = reverse and z is None

        self.block_d, self.num_warps = tuning.blocks(kernel, channels, x.device)
        self.blocks = triton.cdiv(channels, self.block_d)
        programs = rows * self.blocks
        self.segments, segment_chunks = tuning.segments(
            programs * self.num_warps,
            triton.cdiv(L, tuning.CHUNK),
            x.device,
            overhead=1 + _SUMMARY_SHARE[kernel] * (self.M + 1),
        )
        self.programs = programs * self.segments
        if self.segments > 1 or (dt_weight is not None and dt_weight.shape[2] > _MOST_RANK):
            dt, dt_weight = full_steps(dt, dt_weight), None
        self.low_rank = {"dt_weight_ptr": None, "RANK": 0}
        if dt_weight is not None:
            weight = dt_weight.to(dt.dtype).contiguous()
            self.low_rank = {"dt_weight_ptr": weight, "RANK": weight.shape[2]}
        dt = adjacent_channels(dt)
        self.arguments = {
            "x_ptr": self.x, "dt_ptr": dt, "z_ptr": z, "bias_ptr": bias.contiguous(),
            **pack(q, k, self.block_m, self.reverse, key_norm),
            "B": B, "L": L, "segments": self.segments, "segment_chunks": segment_chunks,
            "x_stride_dir": self.x.stride(0), "x_stride_b": self.x.stride(1),
            "x_stride_l": self.x.stride(2),
            "dt_stride_dir": dt.stride(0), "dt_stride_b": dt.stride(1), "dt_stride_l": dt.stride(2),
            "z_stride_b": 0 if z is None else z.stride(0),
            "z_stride_l": 0 if z is None else z.stride(1),
            "REVERSE": self.reverse, "D": channels, "BLOCK_M": self.block_m,
            "FAST": tuning.fast(x.device), "PRECISION": tuning.dot_precision(x.dtype),
        }  # fmt: skip

    def entries(self, start: Tensor | None, dout: Tensor | None) -> Tensor | None:
        """Return the state before every segment, (N, B, S, D, BLOCK_M), None for a zero state.

        With dout (B, L, D), that is the gradient of the state after every segment.

        Args:
            start: State (or its gradient) before the first segment on the way, (B, D, M).
            dout: Gradient of the output.
        """
        if start is not None:
            start = F.pad(start, (0, self.block_m - self.M)).contiguous()
        if self.segments == 1:
            return start
        directions, B, _, channels = self.x.shape
        lead, starts = (directions, B, self.segments), self.M + 1
        summary = torch.empty(*lead, starts, channels, self.block_m, device=self.x.device)
        block, num_warps = tuning.blocks("exact_summary", channels, self.x.device)
        programs = directions * B * (self.segments - 1) * starts * triton.cdiv(channels, block)
        launch(
            _summary_kernel, programs, self.x, num_warps=num_warps, **self.arguments, dout_ptr=dout,
            summary_ptr=summary, M=self.M, BLOCK_D=block,
        )  # fmt: skip
        entry = torch.empty(*lead, channels, self.block_m, device=self.x.device)
        launch(
            _carry_kernel, directions * B * channels, self.x, num_warps=self.block_m // 16,
            summary_ptr=summary, start_ptr=start, entry_ptr=entry, B=B, segments=self.segments,
            DESCENDING=self.reverse != (dout is not None), D=channels, M=self.M,
            BLOCK_M=self.block_m,
        )  # fmt: skip
        return entry

    def unpad(self, state: Tensor | None) -> Tensor | None:
        """Return (B, D, M) of (B, D, BLOCK_M)."""
        return None if state is None else state[..., : self.M].contiguous()
