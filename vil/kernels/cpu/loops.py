"""The compiled loops of the CPU backend: explicit vectors over channels, in numba.

A value of type ``Vector`` holds WIDTH neighbouring channels. LLVM splits it into the registers of
the machine (4 of AVX-512, 8 of AVX2, 16 of NEON for WIDTH 64 in float32). The loops below are thus
the formulas of ``reference.py`` with no loop over channels. Letters as there; i direction, b batch
element, c first channel of a block, t token.

A kernel is a C function of one pointer, to a table of integers. The table holds HEADER entries (see
``_begin``), SCALARS scalars, and the views of all tensors. A ``view`` is the address of a tensor
with four axes and the strides of the first three; the last axis is contiguous. Several threads call
a kernel with the same table, and each takes tasks until none is left.

The pointer's type only gives the type of values, ``like``, for tensors with tokens and channels and
for their gradients. All other tensors and all computations use the type of ``wide``, which differs
only for bfloat16: float32. Bfloat16 is BFLOAT16 here, because neither numba nor numpy supports it.
``rows`` are a pair: pointer to the first row, distance between two rows.

Products and sums may be contracted into fused multiply-adds. Otherwise they are taken in the order
written, and subnormal numbers are zeros. Results do not depend on the number of threads or on a
thread's floating-point settings, and NaN stays NaN.

All compiled code is in this one file: numba's disk cache compares only the time stamp of the file
that a compiled function is in.
"""

import logging
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import (
    intrinsic,
    lower_builtin,
    lower_cast,
    overload,
    register_jitable,
    register_model,
)

_logger = logging.getLogger(__name__)
_warned: set[str] = set()  # advice on numba's cache

WIDTH = 64  # channels per vector; channels are padded to a multiple of WIDTH
LANES = 16  # rows and columns of the transposing sum, divides WIDTH
CHUNK = 16  # tokens between two states kept for the backward pass
HEADER, SCALARS = 5, 8  # entries of a kernel's table before its views
LONGHORN, LONGHORN_EXACT, MAMBA = 0, 1, 2
BFLOAT16 = types.uint16  # holds the bits, which are the upper half of a float32

# ----------------------------------------------------------------------------------------- vectors


class Vector(types.Type):
    """Numba type of ``lanes`` floats that are processed at once."""

    def __init__(self, dtype: types.Float, lanes: int):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector: Vector):
        scalar = ir.FloatType() if vector.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, vector, ir.VectorType(scalar, vector.lanes))


@lower_cast(types.Number, Vector)
def _splat(context, builder, source, vector, value):
    scalar = context.cast(builder, value, source, vector.dtype)
    empty = ir.Constant(context.get_value_type(vector), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.IntType(32)(0))
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), None)
    return builder.shuffle_vector(first, empty, everywhere)


def _define_operator(function, instruction: str) -> None:
    @infer_global(function)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            vectors = [a for a in args if isinstance(a, Vector)]
            if vectors and all(a == vectors[0] or isinstance(a, types.Number) for a in args):
                return signature(vectors[0], vectors[0], vectors[0])
            return None

    @lower_builtin(function, Vector, Vector)
    def lower(context, builder, signature, args):
        return getattr(builder, instruction)(*args, flags=("contract",))


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


def _as_vector_pointer(builder, pointer, lanes):
    return builder.bitcast(pointer, ir.VectorType(pointer.type.pointee, lanes).as_pointer())


@intrinsic
def pointer(typingctx, address, like):
    """Return an address as a pointer of the type of ``like``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(like))

    return like(types.intp, like), codegen


def _wide(dtype):
    """Return the compute type for values of a type."""
    return types.float32 if dtype == BFLOAT16 else dtype


@intrinsic
def wide(typingctx, like):
    """Return a pointer, cast to the compute type."""
    result = types.CPointer(_wide(like.dtype))

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(like), codegen


@intrinsic
def integers(typingctx, like):
    """Return a pointer, cast to int64."""
    result = types.CPointer(types.int64)

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(like), codegen


@intrinsic
def take(typingctx, counter):
    """Return ``counter[0]`` and increment it atomically."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.IntType(64)(1), "monotonic")

    return types.int64(counter), codegen


_IS_X86 = binding.get_process_triple().startswith(("x86_64", "i386", "i686", "amd64"))
_FLUSHED = 0x8040  # x86 control bits: subnormal results and operands are zero


def _control(builder, action: str, slot) -> None:
    byte = ir.IntType(8).as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte])
    intrinsic = builder.module.declare_intrinsic(f"llvm.x86.sse.{action}mxcsr", (), function)
    builder.call(intrinsic, [builder.bitcast(slot, byte)])


@intrinsic
def flush_subnormals(typingctx):
    """Let this thread treat subnormal numbers as zeros, and return its previous setting.

    Each subnormal takes a hundred times as long on Intel's processors only. Nothing changes on
    processors that are not x86. Gradients of Mamba's states decay over many tokens, to many
    subnormals.
    """

    def codegen(context, builder, signature, args):
        number = ir.IntType(32)
        if not _IS_X86:
            return number(0)
        slot = cgutils.alloca_once(builder, number)
        _control(builder, "st", slot)
        before = builder.load(slot)
        builder.store(builder.or_(before, number(_FLUSHED)), slot)
        _control(builder, "ld", slot)
        return before

    return types.uint32(), codegen


@intrinsic
def restore(typingctx, before):
    """Restore the setting that ``flush_subnormals`` returned."""

    def codegen(context, builder, signature, args):
        if _IS_X86:
            slot = cgutils.alloca_once_value(builder, args[0])
            _control(builder, "ld", slot)
        return context.get_dummy_value()

    return types.void(before), codegen


@intrinsic
def shift(typingctx, pointer, n):
    """Return the pointer to ``pointer[n]``."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), codegen


@intrinsic
def load(typingctx, pointer):
    """Return the vector of WIDTH values at a pointer."""
    vector = Vector(_wide(pointer.dtype), WIDTH)

    def codegen(context, builder, signature, args):
        where = _as_vector_pointer(builder, args[0], WIDTH)
        values = builder.load(where, align=pointer.dtype.bitwidth // 8)
        if pointer.dtype != BFLOAT16:
            return values
        integers = ir.VectorType(ir.IntType(32), WIDTH)
        bits = builder.shl(builder.zext(values, integers), ir.Constant(integers, [16] * WIDTH))
        return builder.bitcast(bits, context.get_value_type(vector))

    return vector(pointer), codegen


@intrinsic
def store(typingctx, pointer, vector):
    """Write a vector to a pointer, rounded to the nearest value of its type."""

    def codegen(context, builder, signature, args):
        values = _upper_halves(builder, args[1]) if pointer.dtype == BFLOAT16 else args[1]
        where = _as_vector_pointer(builder, args[0], vector.lanes)
        builder.store(values, where, align=pointer.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, vector), codegen


def _upper_halves(builder, values):
    """Return a float32 vector as bfloat16: round to nearest, ties to even; NaN stays NaN."""
    lanes = values.type.count
    integers, halves = (ir.VectorType(ir.IntType(bits), lanes) for bits in (32, 16))

    def all_of(number):
        return ir.Constant(integers, [number] * lanes)

    bits = builder.bitcast(values, integers)
    upper = builder.lshr(bits, all_of(16))
    carry = builder.add(builder.and_(upper, all_of(1)), all_of(0x7FFF))
    rounded = builder.lshr(builder.add(bits, carry), all_of(16))
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.trunc(builder.select(is_nan, all_of(0x7FC0), rounded), halves)


@intrinsic
def zeros(typingctx, like):
    """Return a vector of WIDTH zeros of the compute type for a pointer."""
    vector = Vector(_wide(like.dtype), WIDTH)

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(vector), None)

    return vector(like), codegen


def _selector(comparison: str):
    @intrinsic
    def select(typingctx, a, b):
        def codegen(context, builder, signature, args):
            a, b = args
            return builder.select(builder.fcmp_ordered(comparison, b, a), b, a)

        return a(a, a), codegen

    return select


# Where a is NaN, the result is NaN.
lesser = _selector("<")
greater = _selector(">")


def _pick(builder, a, b, lanes):
    """Return the given lanes of two concatenated vectors."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), [ir.IntType(32)(n) for n in lanes])
    return builder.shuffle_vector(a, b, mask)


@intrinsic
def fold(typingctx, vector):
    """Return LANES partial sums of a vector."""
    result = Vector(vector.dtype, LANES)

    def codegen(context, builder, signature, args):
        v = args[0]
        partial = _pick(builder, v, v, range(LANES))
        for start in range(LANES, vector.lanes, LANES):
            part = _pick(builder, v, v, range(start, start + LANES))
            partial = builder.fadd(partial, part, flags=("contract",))
        return partial

    return result(vector), codegen


@intrinsic
def total(typingctx, vector):
    """Return the sum of a vector."""

    def codegen(context, builder, signature, args):
        v, lanes = args[0], vector.lanes
        while lanes > 1:
            lanes //= 2
            low, high = range(lanes), range(lanes, 2 * lanes)
            v = builder.fadd(_pick(builder, v, v, low), _pick(builder, v, v, high))
        return builder.extract_element(v, ir.IntType(32)(0))

    return vector.dtype(vector), codegen


@intrinsic
def add_row_sums(typingctx, rows, sums):
    """Add the sums of LANES rows of LANES values to ``sums[0]`` ... ``sums[LANES - 1]``.

    Transposes while it adds: each step halves every row and puts two rows into one vector. This
    takes about a third of the instructions of separate sums.
    """
    align = rows.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        def row_at(n):
            start = builder.gep(args[0], [ir.IntType(64)(n * LANES)])
            return _as_vector_pointer(builder, start, LANES)

        level = [builder.load(row_at(n), align=align) for n in range(LANES)]
        left = LANES
        while left > 1:
            left //= 2
            starts = range(0, 2 * LANES, 2 * left)
            low = [start + n for start in starts for n in range(left)]
            high = [lane + left for lane in low]
            level = [
                builder.fadd(_pick(builder, a, b, low), _pick(builder, a, b, high))
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
        where = _as_vector_pointer(builder, args[1], LANES)
        builder.store(builder.fadd(builder.load(where, align=align), level[0]), where, align=align)
        return context.get_dummy_value()

    return types.void(rows, sums), codegen


# ----------------------------------------------------------------------------- elementary functions

_LOG2_E, _LN_2 = 1 / float(np.log(2)), float(np.log(2))
_MANTISSA_BITS = {types.float32: 23, types.float64: 52}
_LARGEST_EXPONENT = {types.float32: 127, types.float64: 1023}


def _polynomial(coefficients: dict):
    """Return the intrinsic that evaluates a polynomial by Horner's rule."""

    @intrinsic
    def evaluate(typingctx, x):
        def codegen(context, builder, signature, args):
            *rest, result = (
                _splat(context, builder, types.float64, x, ir.DoubleType()(c)) for c in coefficients[x.dtype]
            )
            for c in reversed(rest):
                result = builder.fmul(result, args[0], flags=("contract",))
                result = builder.fadd(result, c, flags=("contract",))
            return result

        return x(x), codegen

    return evaluate


def _exp2_coefficients(degree: int) -> list[float]:
    """Return a polynomial of even degree for 2^f on [-1/2, 1/2].

    It is exact at 0, so decays close to 1, in slow channels, are as exact as floats can be.
    """

    def quotient(f: np.ndarray) -> np.ndarray:
        return np.expm1(f * _LN_2) / f  # an even number of nodes, so none is 0

    fit = np.polynomial.Chebyshev.interpolate(quotient, degree - 1, domain=[-0.5, 0.5])
    return [1.0, *fit.convert(kind=np.polynomial.Polynomial).coef.tolist()]


_exp2_of_fraction = _polynomial({types.float32: _exp2_coefficients(6), types.float64: _exp2_coefficients(12)})
# 2 atanh(s) / s as a polynomial in s^2 <= 1/9
_atanh_series = _polynomial(
    {
        types.float32: [2 / (2 * n + 1) for n in range(8)],
        types.float64: [2 / (2 * n + 1) for n in range(17)],
    }
)


@intrinsic
def _power_of_2(typingctx, shifted):
    """Return 2^n, given n + 1.5 * 2^mantissa_bits, which holds the integer n in its lowest bits."""

    def codegen(context, builder, signature, args):
        integers = ir.VectorType(ir.IntType(shifted.dtype.bitwidth), shifted.lanes)
        mantissa = _MANTISSA_BITS[shifted.dtype]
        one = _LARGEST_EXPONENT[shifted.dtype] << mantissa
        exponent = builder.shl(builder.bitcast(args[0], integers), ir.Constant(integers, [mantissa] * shifted.lanes))
        bits = builder.add(exponent, ir.Constant(integers, [one] * shifted.lanes))
        return builder.bitcast(bits, args[0].type)

    return shifted(shifted), codegen


def exp2(t):
    """Return 2^t to about 1 ulp, with t clamped so that the result is a normal number."""


@overload(exp2)
def _exp2(t):
    largest, rounder = _LARGEST_EXPONENT[t.dtype], 1.5 * 2.0 ** _MANTISSA_BITS[t.dtype]

    def implementation(t):
        t = lesser(greater(t, 1 - largest), largest)
        shifted = t + rounder  # the addition rounds t to an integer
        return _exp2_of_fraction(t - (shifted - rounder)) * _power_of_2(shifted)

    return implementation


@njit
def exp_minus(v):
    """Return exp(-v), finite unless v is NaN."""
    return exp2(v * -_LOG2_E)


@njit
def softplus(v):
    """Return log(1 + exp(v)) = max(v, 0) + log1p(exp(-|v|))."""
    e = exp_minus(greater(v, 0 - v))
    s = e / (2 + e)
    return greater(v, 0) + s * _atanh_series(s * s)


@njit
def sigmoid(v):
    return 1 / (1 + exp_minus(v))


@njit
def silu(v):
    return v * sigmoid(v)


@njit
def silu_gradient(v):
    s = sigmoid(v)
    return s * (1 + v * (1 - s))


# ------------------------------------------------------------------------------------ recurrences


def compiled(kernel: Callable[..., None], dtype: types.Number) -> CFunc:
    """Return a kernel compiled for values of a type, from numba's disk cache if possible.

    Args:
        kernel: Kernel in this file.
        dtype: float32, float64 or BFLOAT16.
    """
    signature = types.void(types.CPointer(dtype))
    try:
        return cfunc(signature, cache=True, error_model="numpy")(kernel)
    except Exception as error:
        # Unpickling raises any error. One of the kernel itself is raised again here.
        function = cfunc(signature, error_model="numpy")(kernel)
        _warn_of_cache(kernel, error)
        return function


def _warn_of_cache(kernel: Callable[..., None], error: Exception) -> None:
    """Warn that numba's cache cannot be used for a kernel, once per process and advice."""
    try:
        folder = FunctionCache(kernel).cache_path
        advice = f"delete or make writable {folder}/loops.{kernel.__name__}-*"
    except Exception:  # numba finds no folder that it can write to
        advice = "set NUMBA_CACHE_DIR to a folder that can be written"
    if advice not in _warned:
        _warned.add(advice)
        _logger.warning(
            "numba's cache cannot be used, so kernels are compiled again in every process (%s: %s); %s",
            type(error).__name__,
            " ".join(str(error).split()),
            advice,
        )


@njit
def _begin(like):
    """Return the table, the counter of tasks, the number of tasks and this thread's scratch memory.

    A table starts with the counters of threads and tasks, the number of tasks, the address of the
    scratch memory and its bytes per thread.
    """
    table = integers(like)
    thread = take(table)
    scratch = pointer(table[3] + thread * table[4], wide(like))
    return table, shift(table, 1), table[2], scratch


@njit
def scalar(table, n):
    return table[HEADER + n]


@njit
def view(table, n):
    return shift(table, HEADER + SCALARS + 4 * n)


@njit
def rows_of(view, like, i, b, c):
    """Return the rows that start at channel c of batch element b and direction i."""
    return shift(pointer(view[0], like), i * view[1] + b * view[2] + c), view[3]


@njit
def at(rows, n):
    return shift(rows[0], n * rows[1])


@njit
def rows_after(start, n):
    """Return rows of WIDTH values that begin n rows after a pointer."""
    return shift(start, n * WIDTH), WIDTH


@njit
def state_at(states, n, M):
    """Return the n-th of a series of states, as rows."""
    return at(states, n * M), WIDTH


@register_jitable
def num_chunks(L: int) -> int:
    """Return the number of states kept for a scan of L tokens."""
    return (L - 1) // CHUNK + 1


@register_jitable
def num_columns(M: int) -> int:
    """Return the columns of dqk: M for q, M for k, padded to whole vectors of LANES."""
    return (2 * M + LANES - 1) // LANES * LANES


@njit
def token(n, L, backwards):
    """Return the n-th token in scan order."""
    return L - 1 - n if backwards else n


@njit
def copy(source, target, count):
    for n in range(count):
        store(at(target, n), load(at(source, n)))


@njit(forceinline=True)
def step_size(recurrence, M, v, k, kappa_scale):
    """Return eps, with |k|^2 times kappa_scale (Longhorn), or softplus(v); v is dt + bias."""
    if recurrence == MAMBA:
        return softplus(v)
    kappa = k[0] * k[0]
    for j in range(1, M):
        kappa += k[j] * k[j]
    return 1 / (1 + kappa_scale * kappa + exp_minus(v))


@njit(forceinline=True)
def step_size_gradient(recurrence, v, step):
    """Return the derivative of the step size with respect to v."""
    if recurrence == MAMBA:
        return sigmoid(v)
    # Not step^2 exp(-v): where exp(-v) is huge, step^2 underflows.
    return step * (step * exp_minus(v))


@njit(forceinline=True)
def recall(M, state, k):
    """Return k.S, in two sums because the additions of one sum would wait for each other."""
    even, odd = zeros(state[0]), zeros(state[0])
    for j in range(0, M - 1, 2):
        even = even + k[j] * load(at(state, j))
        odd = odd + k[j + 1] * load(at(state, j + 1))
    if M % 2 == 1:
        even = even + k[M - 1] * load(at(state, M - 1))
    return even + odd


@njit
def advance(recurrence, M, before, after, x, step, A, k, q):
    """Update the state with one token (rows before -> rows after) and return the query's result."""
    y = zeros(before[0])
    if recurrence == LONGHORN:
        for j in range(M):
            s = load(at(before, j))
            s = s + (step * k[j]) * (x - k[j] * s)
            store(at(after, j), s)
            y = y + q[j] * s
    elif recurrence == LONGHORN_EXACT:
        correction = step * (x - recall(M, before, k))
        for j in range(M):
            s = load(at(before, j)) + correction * k[j]
            store(at(after, j), s)
            y = y + q[j] * s
    else:
        write = step * x
        for j in range(M):
            s = exp2(step * load(at(A, j))) * load(at(before, j)) + write * k[j]
            store(at(after, j), s)
            y = y + q[j] * s
    return y


@njit(forceinline=True)
def advance_backward(recurrence, M, before, after, adjoint, x, step, g, A, k, q, dq, dk, dA):
    """Backpropagate through one token.

    g is the gradient for y. Leaves LANES partial sums of the gradients for q and k in dq and dk,
    and adds to dA. The sums for k exclude the part that passes through the step size.

    Returns:
        Gradients for x, without the skip, and for the step size.
    """
    dx, dstep = zeros(before[0]), zeros(before[0])
    if recurrence == LONGHORN:
        for j in range(M):
            G = load(at(adjoint, j)) + g * q[j]
            error = x - k[j] * load(at(before, j))
            step_G = step * G
            dx = dx + step_G * k[j]
            dstep = dstep + (G * k[j]) * error
            store(at(dq, j), fold(g * load(at(after, j))))
            store(at(dk, j), fold(step_G * (error + (error - x))))
            store(at(adjoint, j), G - step_G * (k[j] * k[j]))
    elif recurrence == LONGHORN_EXACT:
        k_G = zeros(before[0])
        for j in range(M):
            G = load(at(adjoint, j)) + g * q[j]
            k_G = k_G + G * k[j]
            store(at(adjoint, j), G)
            store(at(dq, j), fold(g * load(at(after, j))))
        error = x - recall(M, before, k)
        dx, dstep, correction = step * k_G, error * k_G, step * error
        for j in range(M):
            G = load(at(adjoint, j))
            store(at(dk, j), fold(correction * G - dx * load(at(before, j))))
            store(at(adjoint, j), G - dx * k[j])
    else:
        write, k_G = step * x, zeros(before[0])
        for j in range(M):
            A_j = load(at(A, j))
            G = load(at(adjoint, j)) + g * q[j]
            k_G = k_G + G * k[j]
            store(at(dq, j), fold(g * load(at(after, j))))
            store(at(dk, j), fold(G * write))
            G = exp2(step * A_j) * G
            store(at(adjoint, j), G)
            G_s = G * load(at(before, j))
            dstep = dstep + G_s * A_j
            store(at(dA, j), load(at(dA, j)) + G_s * step)
        dx, dstep = step * k_G, dstep * _LN_2 + x * k_G
    return dx, dstep


# ------------------------------------------------------------------------------------------- scans


class Direction(NamedTuple):
    """Inputs of a scan for one direction, batch element and vector of channels."""

    x: tuple
    dt: tuple
    A: tuple  # decay rates times log2(e), a row per state
    q: tuple
    k: tuple
    skip: tuple
    bias: tuple
    kappa_scale: float


@njit
def direction_of(table, like, i, b, c):
    return Direction(
        rows_of(view(table, 0), like, i, b, c),
        rows_of(view(table, 1), like, i, b, c),
        rows_of(view(table, 2), wide(like), i, b, c),
        rows_of(view(table, 3), wide(like), i, b, 0),
        rows_of(view(table, 4), wide(like), i, b, 0),
        rows_of(view(table, 5), wide(like), i, b, c),
        rows_of(view(table, 6), wide(like), i, b, c),
        rows_of(view(table, 7), wide(like), 0, 0, 0)[0][0],
    )


@njit
def scan_direction(recurrence, M, L, backwards, inputs, state, y, add, steps, checkpoints, keep):
    """Scan; ``state`` becomes the final state, outputs are written or, with ``add``, added to y.

    With ``keep``, also store every step size in ``steps`` and the state before each chunk of CHUNK
    tokens in ``checkpoints``.
    """
    skip, bias = load(inputs.skip[0]), load(inputs.bias[0])
    for n in range(L):
        t = token(n, L, backwards)
        x, k, q = load(at(inputs.x, t)), at(inputs.k, t), at(inputs.q, t)
        step = step_size(recurrence, M, load(at(inputs.dt, t)) + bias, k, inputs.kappa_scale)
        if keep:
            store(at(steps, t), step)
            if n % CHUNK == 0:
                copy(state, state_at(checkpoints, n // CHUNK, M), M)
        y_t = advance(recurrence, M, state, state, x, step, inputs.A, k, q) + skip * x
        if add:
            y_t = y_t + load(at(y, t))
        store(at(y, t), y_t)


def scan_blocks(like):
    """Scan. A task is all directions of one vector of channels.

    Two directions are averaged and gated by z. A single direction has no gate, but a final state.
    Scalars: recurrence, reverse, vectors of channels, directions, B, L, D, M. Views: fields of
    ``Direction``, initial state, z, y, final state.
    """
    before = flush_subnormals()
    table, counter, tasks, scratch = _begin(like)
    recurrence, reverse, blocks = scalar(table, 0), scalar(table, 1), scalar(table, 2)
    directions, L, M = scalar(table, 3), scalar(table, 5), scalar(table, 7)
    state, y = rows_after(scratch, 0), rows_after(scratch, M)
    task = take(counter)
    while task < tasks:
        b, c = task // blocks, task % blocks * WIDTH
        for i in range(directions):
            copy(rows_of(view(table, 8), wide(like), i, b, c), state, M)
            inputs, backwards = direction_of(table, like, i, b, c), reverse == 1 or i == 1
            scan_direction(recurrence, M, L, backwards, inputs, state, y, i == 1, y, state, False)
        out = rows_of(view(table, 10), like, 0, b, c)
        if directions == 1:
            copy(state, rows_of(view(table, 11), wide(like), 0, b, c), M)
            copy(y, out, L)
        else:
            z = rows_of(view(table, 9), like, 0, b, c)
            for t in range(L):
                store(at(out, t), load(at(y, t)) * (silu(load(at(z, t))) * 0.5))
        task = take(counter)
    restore(before)


def scratch_size(L: int, M: int) -> int:
    """Return the scratch values per thread of ``scan_blocks``."""
    return (L + M) * WIDTH


@register_jitable
def backward_scratch_rows(L: int, M: int) -> int:
    """Return the rows of WIDTH values before the sums in the scratch of ``scan_block_backward``."""
    return 3 * L + (num_chunks(L) + CHUNK + 2) * M


def backward_scratch_size(L: int, M: int) -> int:
    """Return the scratch values per thread of ``scan_blocks_backward``."""
    return backward_scratch_rows(L, M) * WIDTH + num_columns(M) * LANES


@njit
def scan_direction_backward(recurrence, M, L, backwards, inputs, kept, g, adjoint, gradients):
    """Backpropagate the gradients g (L rows) through a scan that kept its steps and checkpoints.

    ``adjoint`` is the gradient for the final state and becomes the gradient for the initial state.
    Writes the gradients for x and dt, and adds to all others. The gradients for q and k are the
    first 2 M columns of one tensor.
    """
    dx, ddt, dA, dqk, dskip, dbias = gradients
    steps, checkpoints, states, sums = kept
    dq, dk = (sums, LANES), (shift(sums, M * LANES), LANES)
    skip, bias = load(inputs.skip[0]), load(inputs.bias[0])
    for chunk in range((L - 1) // CHUNK, -1, -1):
        begin, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, L)
        copy(state_at(checkpoints, chunk, M), states, M)
        for n in range(begin, end):
            t = token(n, L, backwards)
            before, after = state_at(states, n - begin, M), state_at(states, n - begin + 1, M)
            x, step = load(at(inputs.x, t)), load(at(steps, t))
            k, q = at(inputs.k, t), at(inputs.q, t)
            advance(recurrence, M, before, after, x, step, inputs.A, k, q)
        for n in range(end - 1, begin - 1, -1):
            t = token(n, L, backwards)
            before, after = state_at(states, n - begin, M), state_at(states, n - begin + 1, M)
            x, step, g_t = load(at(inputs.x, t)), load(at(steps, t)), load(at(g, t))
            k, q = at(inputs.k, t), at(inputs.q, t)
            dx_t, dstep = advance_backward(
                recurrence, M, before, after, adjoint, x, step, g_t, inputs.A, k, q, dq, dk, dA
            )
            v = load(at(inputs.dt, t)) + bias
            dv = dstep * step_size_gradient(recurrence, v, step)
            store(at(dx, t), dx_t + skip * g_t)
            store(at(ddt, t), dv)
            store(dskip[0], load(dskip[0]) + g_t * x)
            store(dbias[0], load(dbias[0]) + dv)
            minus_dkappa = inputs.kappa_scale * (step * step * dstep)
            add_sums_over_channels(recurrence, M, sums, minus_dkappa, k, dqk, t)


@njit
def add_sums_over_channels(recurrence, M, sums, minus_dkappa, k, dqk, t):
    """Add the contribution of one vector of channels at token t to dqk; kappa is |k|^2."""
    dqk_t = at(dqk, t)
    for row in range(0, num_columns(M), LANES):
        add_row_sums(shift(sums, row * LANES), shift(dqk_t, row))
    if recurrence != MAMBA:
        through_kappa = 2 * total(minus_dkappa)
        for j in range(M):
            dqk_t[M + j] -= through_kappa * k[j]


@njit
def scan_block_backward(like, table, scratch, group, b, c):
    """Backpropagate all directions of a vector of channels; see ``scan_blocks_backward``."""
    recurrence, reverse = scalar(table, 0), scalar(table, 1)
    directions, L, M = scalar(table, 3), scalar(table, 5), scalar(table, 7)
    g, y, steps = rows_after(scratch, 0), rows_after(scratch, L), rows_after(scratch, 2 * L)
    checkpoints = rows_after(scratch, 3 * L)
    states = rows_after(scratch, 3 * L + num_chunks(L) * M)
    adjoint = state_at(states, CHUNK + 1, M)
    sums = at(adjoint, M)
    z, grad = rows_of(view(table, 9), like, 0, b, c), rows_of(view(table, 10), like, 0, b, c)
    gate_gradients(directions, L, grad, z, g)
    for i in range(directions):
        backwards = reverse == 1 or i == 1
        inputs = direction_of(table, like, i, b, c)
        copy(rows_of(view(table, 8), wide(like), i, b, c), adjoint, M)
        scan_direction(recurrence, M, L, backwards, inputs, adjoint, y, i == 1, steps, checkpoints, True)
        copy(rows_of(view(table, 11), wide(like), i, b, c), adjoint, M)
        gradients = (
            rows_of(view(table, 12), like, i, b, c),
            rows_of(view(table, 13), like, i, b, c),
            rows_of(view(table, 14), wide(like), i, b, c),
            rows_of(view(table, 15), wide(like), group * directions + i, b, 0),
            rows_of(view(table, 16), wide(like), i, b, c),
            rows_of(view(table, 17), wide(like), i, b, c),
        )
        kept = steps, checkpoints, states, sums
        scan_direction_backward(recurrence, M, L, backwards, inputs, kept, g, adjoint, gradients)
    if directions == 1:
        copy(adjoint, rows_of(view(table, 18), wide(like), 0, b, c), M)
    else:
        dz = rows_of(view(table, 19), like, 0, b, c)
        for t in range(L):
            dgate = load(at(grad, t)) * load(at(y, t)) * 0.5
            store(at(dz, t), dgate * silu_gradient(load(at(z, t))))


def scan_blocks_backward(like):
    """Backpropagate through a scan. A task is all directions of a group of vectors of channels.

    Scalars: recurrence, reverse, groups, directions, B, L, D, M. Views: fields of ``Direction``,
    initial state, z, gradients for y and the final state; then the gradients for x, dt, A, (q, k),
    skip, bias, initial state and z. The gradients that are sums (A, skip, bias) are per batch
    element. The gradients for q and k are per group, with group * directions + direction on the
    leading axis. All of these are zero at the start.
    """
    before = flush_subnormals()
    table, counter, tasks, scratch = _begin(like)
    groups, L, M = scalar(table, 2), scalar(table, 5), scalar(table, 7)
    blocks = scalar(table, 6) // WIDTH
    sums = rows_after(scratch, backward_scratch_rows(L, M))[0]
    for n in range(num_columns(M) * LANES):
        sums[n] = 0  # the columns after q and k stay 0
    task = take(counter)
    while task < tasks:
        b, group = task // groups, task % groups
        for block in range(blocks * group // groups, blocks * (group + 1) // groups):
            scan_block_backward(like, table, scratch, group, b, block * WIDTH)
        task = take(counter)
    restore(before)


@njit
def gate_gradients(directions, L, grad, z, g):
    """Write the gradient for the output of every direction to g."""
    for t in range(L):
        g_t = load(at(grad, t))
        if directions == 2:
            g_t = g_t * (silu(load(at(z, t))) * 0.5)
        store(at(g, t), g_t)


# ------------------------------------------------------------------------------------ convolution
#
# An order names the token at each of P positions, -1 if there is none. Rows are copied to scratch
# memory in this order. Empty positions and K rows at both ends are zeros, so that no tap needs a
# check.
# Rows and taps are processed in pairs: loads, not products, take the time, and a pair shares its
# loads.


@njit
def positions_after(start, n, K, P):
    """Return the n-th series of P rows after a pointer, with K rows of zeros at both ends."""
    rows = rows_after(start, n * (P + 2 * K) + K)
    for back in range(1, K + 1):
        store(at(rows, -back), zeros(start))
        store(at(rows, P - 1 + back), zeros(start))
    return rows


@njit(forceinline=True)
def load_token(tokens, n, rows):
    """Return the row of the token at a position, zeros if there is none."""
    return load(at(rows, tokens[n])) if tokens[n] >= 0 else zeros(rows[0])


@njit(forceinline=True)
def store_token(tokens, n, rows, value):
    """Write a row to the token at a position, if there is one."""
    if tokens[n] >= 0:
        store(at(rows, tokens[n]), value)


@njit
def gather(tokens, P, source, target):
    """Copy the rows of tokens to their positions."""
    for n in range(P):
        store(at(target, n), load_token(tokens, n, source))


@njit(forceinline=True)
def add_taps(step, begin, end, K, n, rows, weight, first, second):
    """Add the taps that meet rows ``begin`` to ``end`` steps away to two results."""
    for back in range(begin, end):
        tap = load(at(weight, K - 1 - back))
        first = first + tap * load(at(rows, n + step * back))
        second = second + tap * load(at(rows, n + 1 + step * back))
    return first, second


@njit(forceinline=True)
def add_all_taps(step, K, n, rows, weight, first, second):
    """Add all taps to the results of positions n and n + 1; tap K - 1 meets the row itself."""
    if K < 4:
        return add_taps(step, 0, K, K, n, rows, weight, first, second)
    # LLVM unrolls only loops of a known length; this saves a tenth of the whole convolution.
    first, second = add_taps(step, 0, 4, K, n, rows, weight, first, second)
    return add_taps(step, 4, K, K, n, rows, weight, first, second)


@njit(forceinline=True)
def convolve(step, K, P, x, weight, bias, y, tokens):
    """Write the result of the direction whose taps are ``step`` rows apart."""
    for n in range(0, P, 2):
        first, second = add_all_taps(step, K, n, x, weight, bias, bias)
        store_token(tokens, n, y, silu(first))
        store_token(tokens, n + 1, y, silu(second))


def conv_blocks(like):
    """Convolve. A task is both directions of one vector of channels.

    Scalars: vectors of channels, K, and P, which is even. Views: x, weight, bias, y, and the order
    in int64.
    """
    before = flush_subnormals()
    table, counter, tasks, scratch = _begin(like)
    blocks, K, P = scalar(table, 0), scalar(table, 1), scalar(table, 2)
    tokens, x = integers(pointer(view(table, 4)[0], like)), positions_after(scratch, 0, K, P)
    task = take(counter)
    while task < tasks:
        b, c = task // blocks, task % blocks * WIDTH
        gather(tokens, P, rows_of(view(table, 0), like, 0, b, c), x)
        for i in range(2):
            weight = rows_of(view(table, 1), wide(like), i, b, c)
            bias = load(rows_of(view(table, 2), wide(like), i, b, c)[0])
            y = rows_of(view(table, 3), like, i, b, c)
            if i == 1:
                convolve(1, K, P, x, weight, bias, y, tokens)
            else:
                convolve(-1, K, P, x, weight, bias, y, tokens)
        task = take(counter)
    restore(before)


@njit(forceinline=True)
def conv_activation_gradient(step, K, P, x, weight, bias, grad, dv, tokens):
    """Write the gradient before the activation and return its sum over tokens."""
    dbias = zeros(dv[0])
    for n in range(0, P, 2):
        first, second = add_all_taps(step, K, n, x, weight, bias, bias)
        first = load_token(tokens, n, grad) * silu_gradient(first)
        second = load_token(tokens, n + 1, grad) * silu_gradient(second)
        store(at(dv, n), first)
        store(at(dv, n + 1), second)  # zeros after the last position
        dbias = dbias + first + second
    return dbias


@njit(forceinline=True)
def conv_weight_gradient(step, K, P, x, dv, dweight):
    """Write the gradient for the taps, given dv, the gradient before the activation."""
    for back in range(0, K, 2):
        first, second = zeros(dv[0]), zeros(dv[0])
        for n in range(P):
            dv_n = load(at(dv, n))
            first = first + dv_n * load(at(x, n + step * back))
            second = second + dv_n * load(at(x, n + step * (back + 1)))
        store(at(dweight, K - 1 - back), first)
        if back + 1 < K:
            store(at(dweight, K - 2 - back), second)


@njit(forceinline=True)
def conv_direction_backward(step, i, table, like, b, c, x, dv, P, tokens):
    """Write the gradients of one direction before the activation, and for its taps and bias."""
    K = scalar(table, 1)
    weight = rows_of(view(table, 1), wide(like), i, b, c)
    bias = load(rows_of(view(table, 2), wide(like), i, b, c)[0])
    grad = rows_of(view(table, 3), like, i, b, c)
    dbias = conv_activation_gradient(step, K, P, x, weight, bias, grad, dv, tokens)
    store(rows_of(view(table, 6), wide(like), i, b, c)[0], dbias)
    conv_weight_gradient(step, K, P, x, dv, rows_of(view(table, 5), wide(like), i, b, c))


@njit
def conv_input_gradient(table, like, b, c, dv_0, dv_1, P, tokens):
    """Write the gradient for x, given the gradients before the activation of both directions."""
    K = scalar(table, 1)
    weight_0 = rows_of(view(table, 1), wide(like), 0, b, c)
    weight_1 = rows_of(view(table, 1), wide(like), 1, b, c)
    dx, zero = rows_of(view(table, 4), like, 0, b, c), zeros(dv_0[0])
    for n in range(0, P, 2):
        first, second = add_all_taps(1, K, n, dv_0, weight_0, zero, zero)
        first, second = add_all_taps(-1, K, n, dv_1, weight_1, first, second)
        store_token(tokens, n, dx, first)
        store_token(tokens, n + 1, dx, second)


def conv_blocks_backward(like):
    """Backpropagate through the convolution. A task is both directions of one vector of channels.

    Scalars: same as in ``conv_blocks``. Views: x, weight, bias, gradient for y; then the gradients
    for x, weight and bias; then the order. The gradients for weight and bias are per batch element
    and zero at the start.
    """
    before = flush_subnormals()
    table, counter, tasks, scratch = _begin(like)
    blocks, K, P = scalar(table, 0), scalar(table, 1), scalar(table, 2)
    tokens, x = integers(pointer(view(table, 7)[0], like)), positions_after(scratch, 0, K, P)
    dv_0, dv_1 = positions_after(scratch, 1, K, P), positions_after(scratch, 2, K, P)
    task = take(counter)
    while task < tasks:
        b, c = task // blocks, task % blocks * WIDTH
        gather(tokens, P, rows_of(view(table, 0), like, 0, b, c), x)
        conv_direction_backward(-1, 0, table, like, b, c, x, dv_0, P, tokens)
        conv_direction_backward(1, 1, table, like, b, c, x, dv_1, P, tokens)
        conv_input_gradient(table, like, b, c, dv_0, dv_1, P, tokens)
        task = take(counter)
    restore(before)
