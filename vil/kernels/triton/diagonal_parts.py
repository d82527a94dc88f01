"""Building blocks of scans token by token: places, states, token updates, packed rows.

``longhorn.py`` and ``mamba.py`` define the token update of each recurrence. Letters as in
``diagonal.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton import longhorn, mamba
from vil.kernels.triton.tiles import (
    LANES_NEXT,
    columns,
    exp_and_eps,
    join_columns,
    load_quads,
    longhorn_eps,
    no_lane,
    round_tf32,
    sigmoid,
)

ROW_TAIL = 4  # floats of a packed row after k and q: 1 + kappa_scale |k|^2, and padding to 128 bits

# Arguments that vary between calls but need no separate compilation.
RUN_TIME = (
    *("B", "L", "num_splits", "split_tokens", "kappa_scale"),
    *(f"{name}_stride_{axis}" for name in ("x", "dt", "z", "q", "k") for axis in ("dir", "b", "l")),
    *(f"{name}_ptr" for name in ("x", "dt", "z", "q", "k", "y", "out")),
    *(f"{name}_ptr" for name in ("dout", "dx", "ddt", "dz", "skip", "bias")),
)


@triton.jit
def load_broadcast_row(pointer, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load M consecutive float32, a multiple of 4, into a tuple of M columns [BLOCK_D]."""
    row, lanes = (), no_lane(BLOCK_D)
    SIZE: tl.constexpr = min(M & -M, 16)
    for first in tl.static_range(0, M, SIZE):
        row += load_quads(pointer + first + lanes, 4, SIZE)
    return row


@triton.jit
def load_group(pointer, step, tokens, count, d, D: tl.constexpr):
    """Load the rows of tokens as float32, [tokens, BLOCK_D], zero where there is no token."""
    mask = ((tokens >= 0) & (tokens < count))[:, None] & (d < D)[None, :]
    rows = pointer + (tokens.to(tl.int64) * step)[:, None] + d[None, :]
    return tl.load(rows, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _state_rows(pointer, channel, SIZE: tl.constexpr, D: tl.constexpr):
    """Return pointers [SIZE / 4, BLOCK_D, 4] to SIZE states of channels in (M / 4, D, 4)."""
    quad, j = tl.arange(0, SIZE // 4)[:, None, None], tl.arange(0, 4)[None, None, :]
    pointers = pointer + (channel * 4)[None, :, None] + (quad * (4 * D) + j)
    return tl.max_contiguous(pointers, [1, LANES_NEXT, 4])


@triton.jit
def load_states(pointer, channel, mask, D: tl.constexpr, M: tl.constexpr):
    """Load a tuple of M states of channels in float32 from (M / 4, D, 4), 16, 8 or 4 at a time."""
    SIZE: tl.constexpr = min(M & -M, 16)
    states = ()
    for first in tl.static_range(0, M, SIZE):
        rows = _state_rows(pointer + first * D, channel, SIZE, D)
        tile = tl.load(rows, mask=mask[None, :, None], other=0.0).to(tl.float32)
        tile = tl.permute(tile, (1, 0, 2))
        states += columns(tl.reshape(tile, (channel.shape[0], SIZE)), SIZE)
    return states


@triton.jit
def store_states(pointer, states, channel, mask, D: tl.constexpr, M: tl.constexpr):
    """Store a tuple of M states of channels to (M / 4, D, 4), 16, 8 or 4 at a time."""
    SIZE: tl.constexpr = min(M & -M, 16)
    for first in tl.static_range(0, M, SIZE):
        tile = join_columns(states[first : first + SIZE], SIZE)
        tile = tl.permute(tl.reshape(tile, (channel.shape[0], SIZE // 4, 4)), (1, 0, 2))
        rows = _state_rows(pointer + first * D, channel, SIZE, D)
        tl.store(rows, tile.to(pointer.dtype.element_ty), mask=mask[None, :, None])


@triton.jit
def full_states(value, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a tuple of M columns [BLOCK_D] filled with one value."""
    states = ()
    for _ in tl.static_range(M):
        states += (tl.full((BLOCK_D,), value, tl.float32),)
    return states


@triton.jit
def first_states(
    split_states_ptr, lane, channel, mask, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Return the tuple of M states that a split starts from, zeros if none are given."""
    if split_states_ptr is None:
        return full_states(0.0, M, BLOCK_D)
    else:
        return load_states(split_states_ptr + lane * (M * D), channel, mask, D, M)


@triton.jit
def load_rates(rates_ptr, direction, channel, mask, D: tl.constexpr, M: tl.constexpr, MAMBA: tl.constexpr):
    """Load the tuple of a direction's M decay rates, for Mamba only."""
    if MAMBA:
        return load_states(rates_ptr + direction * M * D, channel, mask, D, M)
    else:
        return ()


def _ptx_of_warp_sums() -> str:
    """Return PTX that sums 32 values of each lane over the lanes; operand 1 is the sum's index.

    Operands A of eight products are the lanes' values, four each. B has ones in column 2 i for the
    first four columns of A, in column 2 i + 1 for the others. The i-th product so adds up its
    values over four lanes, and its results go to other lanes than those of products before it.
    Lanes then exchange halves of what is left, three times.
    """
    ones, sums = ([f"{name}{i}" for i in range(8)] for name in ("one", "s"))
    lines = [
        f".reg .b32 lane, n, {', '.join(ones)};",
        f".reg .f32 t, {', '.join(sums)};",
        ".reg .pred p;",
        "mov.u32 lane, %laneid;",
        "shr.u32 n, lane, 2;",
    ]
    for i in range(8):
        lines += [f"setp.eq.u32 p, n, {i};", f"selp.b32 {ones[i]}, 0x3F800000, 0, p;"]
        lines += [f"mov.f32 {sums[i]}, 0f00000000;"]
    for i in range(8):
        into = ", ".join(sums[i // 4 * 4 + j] for j in (0, 2, 1, 3))
        values = ", ".join(f"${2 + 4 * i + j}" for j in range(4))
        columns_of_four = ", ".join(ones[2 * i % 8 : 2 * i % 8 + 2])
        product = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
        lines += [f"{product} {{{into}}}, {{{values}}}, {{{columns_of_four}}}, {{{into}}};"]
    for distance, left in ((16, 4), (8, 2), (4, 1)):
        lines += [f"and.b32 n, lane, {distance};", "setp.ne.u32 p, n, 0;"]
        for lower, upper in zip(sums[:left], sums[left : 2 * left], strict=True):
            lines += [
                f"selp.f32 t, {lower}, {upper}, p;",
                f"selp.f32 {lower}, {upper}, {lower}, p;",
            ]
            lines += [
                f"shfl.sync.bfly.b32 t, t, {distance}, 31, -1;",
                f"add.f32 {lower}, {lower}, t;",
            ]
    lines += ["mov.f32 $0, s0;", "and.b32 $1, lane, 16;"]
    # Of the sums of 16 values, bits 1 and 0 of the lane are the product, bits 3 and 2 the value
    # within it.
    lines += ["and.b32 n, lane, 3;", "shl.b32 n, n, 2;", "add.u32 $1, $1, n;"]
    lines += ["shr.u32 n, lane, 2;", "and.b32 n, n, 3;", "add.u32 $1, $1, n;"]
    return "{\n" + "\n".join(lines) + "\n}"


_WARP_SUMS = tl.constexpr(_ptx_of_warp_sums())
_WARP_OPERANDS = tl.constexpr("=f,=r" + ",r" * 32)


@triton.jit
def _warp_sums(v):
    """Return a sum over the channels of a warp, of one of 32 columns, and the column."""
    return tl.inline_asm_elementwise(
        _WARP_SUMS,
        _WARP_OPERANDS,
        [
            v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13],
            v[14], v[15], v[16], v[17], v[18], v[19], v[20], v[21], v[22], v[23], v[24], v[25],
            v[26], v[27], v[28], v[29], v[30], v[31],
        ],
        dtype=(tl.float32, tl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def store_sums_over_channels(
    pointer, values, count, N: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store the first ``count`` of the sums of N columns [BLOCK_D], next to each other.

    On NVIDIA GPUs from sm_80 on, a program is one warp, and tensor cores add up what the lanes have
    in registers. A product with a matrix of ones, which other GPUs take, reads its operand from
    shared memory: half of what the kernel reads and writes there and in the L1 cache, its busiest
    unit. A butterfly of shuffles per column would cost more than the scan itself.
    """
    if FAST >= 80:
        for _ in tl.static_range(N, (N + 31) // 32 * 32):
            values += (tl.zeros((BLOCK_D,), tl.float32),)
        for first in tl.static_range(0, N, 32):
            rounded, rest = (), ()
            for i in tl.static_range(first, first + 32):
                value = values[i] if PRECISION == "tf32" else round_tf32(values[i], "tf32", FAST)
                rounded += (value,)
                rest += (values[i] - value,)
            total, index = _warp_sums(rounded)
            if PRECISION != "tf32":
                total += _warp_sums(rest)[0]
            tl.store(pointer + first + index, total, mask=first + index < count)
    else:
        for _ in tl.static_range(N, 2**BITS):
            values += (tl.zeros((BLOCK_D,), tl.float32),)
        tile = round_tf32(join_columns(values, 2**BITS), PRECISION, FAST)
        sums = tl.dot(tl.full((16, BLOCK_D), 1.0, tl.float32), tile, input_precision=PRECISION)
        copy, n = tl.arange(0, 16), tl.arange(0, 2**BITS)
        once = (copy == 0)[:, None] & (n < count)[None, :]
        tl.store(pointer + 0 * copy[:, None] + n[None, :], sums, mask=once)


@triton.jit
def step_size(v, kappa_1_ptr, mask, MAMBA: tl.constexpr, FAST: tl.constexpr):
    if MAMBA:  # a missing token must not fade the state: its step is zero
        return tl.where(mask, mamba.softplus(v), 0.0)
    return longhorn_eps(v, tl.load(kappa_1_ptr), FAST)


@triton.jit
def step_size_and_slope(v, kappa_1_ptr, mask, MAMBA: tl.constexpr, FAST: tl.constexpr):
    """Return the step size, and the ratio of ddt to the step gradient from ``advance_backward``."""
    if MAMBA:
        return tl.where(mask, mamba.softplus(v), 0.0), tl.where(mask, mamba.sigmoid(v), 0.0)
    exp_minus_v, eps = exp_and_eps(v, tl.zeros_like(v), tl.load(kappa_1_ptr), FAST)
    return eps, eps * (eps * exp_minus_v)


@triton.jit
def advance(state, x, step, k, rates, M: tl.constexpr, MAMBA: tl.constexpr, FAST: tl.constexpr):
    if MAMBA:
        return mamba.advance(state, x, step, k, rates, M, FAST)
    return longhorn.advance(state, x, step, k, M)


@triton.jit
def apply_decay(weights, step, k, rates, M: tl.constexpr, MAMBA: tl.constexpr, FAST: tl.constexpr):
    if MAMBA:
        return mamba.apply_decay(weights, step, rates, M, FAST)
    return longhorn.apply_decay(weights, step, k, M)


@triton.jit
def advance_backward(
    grad, drates, state, x, step, k, q, dy, rates, kappa_scale,
    SCALE: tl.constexpr, M: tl.constexpr, MAMBA: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if MAMBA:
        return mamba.advance_backward(grad, drates, state, x, step, k, q, dy, rates, SCALE, M, FAST)
    before, recalled, dstep, dk, dq = longhorn.advance_backward(grad, state, x, step, k, q, dy, kappa_scale, SCALE, M)
    return before, drates, recalled, dstep, dk, dq


@triton.jit
def gate_backward(dout, z, y, FAST: tl.constexpr):
    """Return the gradients of silu(z) y / 2 for y and z, given the gradient of the result."""
    s = sigmoid(z, 2.0, FAST)
    return dout * z * s, dout * y * s * (1.0 + z * (1.0 - 2.0 * s))


@triton.jit(do_not_specialize=RUN_TIME)
def pack_kernel(
    q_ptr, k_ptr, kq_ptr, B, L, kappa_scale,
    q_stride_dir, q_stride_b, q_stride_l, k_stride_dir, k_stride_b, k_stride_l,
    STATES: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Pack keys and queries of TOKENS tokens into float32 rows: k, q, 1 + kappa_scale |k|^2.

    rows (N, B, L rounded up, 2 M + 4), zero beyond L and STATES.
    """
    blocks = tl.cdiv(L, TOKENS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    direction, b = sequence // B, sequence % B
    first, m = (tl.program_id(0) % blocks).to(tl.int64) * TOKENS, tl.arange(0, BLOCK_M)
    token = first + tl.arange(0, TOKENS)
    mask = (token < L)[:, None] & (m < STATES)[None, :]
    q_base = q_ptr + direction * q_stride_dir + b * q_stride_b
    k_base = k_ptr + direction * k_stride_dir + b * k_stride_b
    q_tile = q_base + token[:, None] * q_stride_l + m[None, :]
    k_tile = k_base + token[:, None] * k_stride_l + m[None, :]
    q = tl.load(q_tile, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_tile, mask=mask, other=0.0).to(tl.float32)
    row = kq_ptr + (sequence * (blocks * TOKENS) + token) * (2 * M + 4)
    inside = (m < M)[None, :]
    tl.store(row[:, None] + m[None, :], k, mask=inside)
    tl.store(row[:, None] + M + m[None, :], q, mask=inside)
    tl.store(row + 2 * M, 1.0 + kappa_scale * tl.sum(k * k, 1))


@triton.jit
def place_of_program(num_splits, B, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the block, split, direction and batch element of this program.

    Programs are all on one grid axis: the other axes end at 65,535.
    """
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    rest = tl.program_id(0) // blocks
    sequence = rest // num_splits
    direction = sequence // B
    block, split = tl.program_id(0) - rest * blocks, rest - sequence * num_splits
    return block, split, direction, (sequence - direction * B).to(tl.int64)
