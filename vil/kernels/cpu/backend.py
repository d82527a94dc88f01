"""The operations of ``reference.py`` in compiled, vectorised, multi-threaded loops for CPUs.

Functions and arguments are the same as there. Computes in float64 for float64 inputs and in float32
otherwise. The loops read and write large bfloat16 tensors directly. Work is cut into tasks, one per
batch element and vector (or group of vectors) of channels, and threads take one task after another.
A task writes only its own results, and sums over tasks have a fixed order, so results are
bit-identical for any number of threads.
Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``), K convolution width.
"""

import array
import concurrent.futures
import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from numba import types
from numba.core.ccallback import CFunc
from torch import Tensor

from vil.kernels import reference, workspace
from vil.kernels.cpu import loops
from vil.kernels.interface import ConvKey, ScanArgs, ScanKey, ScanResult
from vil.kernels.plan import plans

_TYPES = {
    torch.float64: types.float64,
    torch.float32: types.float32,
    torch.bfloat16: loops.BFLOAT16,
}
_RECURRENCES = {
    "longhorn": loops.LONGHORN,
    "longhorn_exact": loops.LONGHORN_EXACT,
    "mamba": loops.MAMBA,
}
# A second thread pays off from about 0.1 ms of work.
_UPDATES_PER_THREAD = 500_000
# Partial sums for dq and dk, over groups of channels: more groups are more parallel and take more
# memory.
_MAX_GROUPS = 8


# A process that has freed a large block keeps freed memory of that size, at most 32 MiB; glibc
# adapts its threshold. Before, it may return the memory of each layer to the system, and the next
# layer faults it in again, which can take half of the time of inference once more. Nothing writes
# to this block, so it takes no memory.
torch.empty((32 << 20) - (1 << 14), dtype=torch.uint8, device="cpu")


# ---------------------------------------------------------------------------------------- threads

_forked = False


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    # Starts a thread only when there is work for it; idle threads sleep.
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="vil")


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _openmp() -> Callable[[object, object, int, int], None] | None:
    """Return GOMP_parallel, which runs a function on the threads of torch's OpenMP, or None."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@functools.cache
def _compiled(kernel: Callable[..., None], dtype: torch.dtype) -> tuple[CFunc, Callable]:
    """Return a kernel compiled for a dtype, and a function that calls it without the GIL."""
    function = loops.compiled(kernel, _TYPES[dtype])
    return function, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)


_NOTHING = contextlib.nullcontext()


class _Loop:
    """A kernel prepared for tensors of given shapes: its table of integers without their addresses.

    Args:
        kernel: Kernel in ``loops``.
        dtype: Dtype of tensors with tokens and channels, one of ``_TYPES``. Other tensors have the
            compute dtype.
        tasks: Number of tasks.
        updates: Approximate multiply-adds of all tasks together, to keep small work on this thread.
        scratch: Number of scratch values per thread.
        scalars: Scalars of the kernel, in its order.
        views: Strides of three axes for every tensor, as returned by ``_view``.
    """

    def __init__(
        self,
        kernel: Callable[..., None],
        dtype: torch.dtype,
        tasks: int,
        updates: int,
        scratch: int,
        scalars: tuple[int, ...],
        views: Sequence[tuple[int, int, int]],
    ) -> None:
        self.name, self.compiled = kernel.__name__, _compiled(kernel, dtype)
        self.tasks, self.updates, self.scratch = tasks, updates, scratch
        self.dtype = _compute_dtype(dtype)
        header = (0, 0, tasks, 0, scratch * self.dtype.itemsize)
        filling = (0,) * (loops.SCALARS - len(scalars))
        strides = (number for view in views for number in (0, *view))
        self.table = array.array("q", (*header, *scalars, *filling, *strides))

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run all tasks on torch's number of threads.

        These are torch's own OpenMP threads where possible. After every torch operation, they keep
        their cores busy for milliseconds while they wait for the next, so other threads would wait
        for them. In a forked process OpenMP hangs and is not used. Numba's threads are not used:
        its threading layers abort on concurrent calls or after a fork.
        """
        threads = min(torch.get_num_threads(), self.tasks, self.updates // _UPDATES_PER_THREAD) or 1
        scratch = workspace.empty((threads * self.scratch,), self.dtype)
        table = self.table[:]  # calls can be concurrent
        table[3] = scratch.data_ptr()
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        table[loops.HEADER + loops.SCALARS :: 4] = array.array("q", addresses)
        (function, call), address = self.compiled, table.buffer_info()[0]
        record = _NOTHING
        if torch.autograd.profiler._is_profiler_enabled:
            record = torch.profiler.record_function(f"loops::{self.name}")
        with record:
            openmp = None if _forked or threads == 1 else _openmp()
            if threads == 1:
                call(address)
            elif openmp is not None:
                openmp(function.address, address, threads, 0)
            else:
                helpers = [_pool().submit(call, address) for _ in range(threads - 1)]
                call(address)
                # Cancel helpers that have not started; wait for the rest, which write to memory of
                # this call.
                concurrent.futures.wait([helper for helper in helpers if not helper.cancel()])


# ---------------------------------------------------------------------------------------- tensors


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the loops' dtype of tensors with tokens and channels; float16 becomes float32."""
    return torch.float32 if dtype == torch.float16 else dtype


def _compute_dtype(stored: torch.dtype) -> torch.dtype:
    return torch.float32 if stored == torch.bfloat16 else stored


def _padded(channels: int) -> int:
    return math.ceil(channels / loops.WIDTH) * loops.WIDTH


def _rows(tensor: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Return the tensor in a dtype, contiguous and zero-padded to a number of columns."""
    tensor = tensor.to(dtype)
    if columns > tensor.shape[-1]:
        tensor = F.pad(tensor, (0, columns - tensor.shape[-1]))
    return tensor.contiguous()


def _view(*shape: int, strides: Sequence[int] | None = None) -> tuple[int, int, int]:
    """Return the strides that the loops take for a tensor of four axes, contiguous by default.

    An axis of size 1 gets stride 0, so that it is valid for any index.
    """
    _, b, c, d = shape
    strides = (b * c * d, c * d, d) if strides is None else strides
    return tuple(0 if size == 1 else s for size, s in zip(shape[:3], strides, strict=False))


class _Form:
    """Form in which the loops take an argument of four axes: itself, or a copy by ``_rows``.

    Args:
        shape: Shape of the argument.
        strides: Strides of the argument.
        dtype: Dtype of the argument.
        loop_dtype: Dtype that the loops take.
        columns: Size that the loops take for the last axis.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        loop_dtype: torch.dtype,
        columns: int,
    ) -> None:
        adjacent = strides[-1] == 1 or shape[-1] == 1
        self.copies = not (dtype == loop_dtype and shape[-1] == columns and adjacent)
        self.dtype, self.columns = loop_dtype, columns
        self.view = _view(*shape[:3], columns, strides=None if self.copies else strides)


def _sum(partial: Tensor, axis: int) -> Tensor:
    # Use NumPy: its summation order does not depend on the number of torch threads.
    return torch.from_numpy(partial.numpy().sum(axis))


def _in_dtypes_of(inputs: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if t is None or g.dtype == t.dtype else g.to(t.dtype) for t, g in zip(inputs, grads, strict=True))


def _cut(tensor: Tensor, channels: int) -> Tensor:
    """Return the tensor without padding channels."""
    return tensor if tensor.shape[-1] == channels else tensor[..., :channels]


# ----------------------------------------------------------------------------------------- scans


class ScanPlan:
    """Scan prepared for given arguments; channels are padded to whole vectors.

    Args:
        key: Description of the arguments.

    Raises:
        NotImplementedError: If the loops lack the recurrence.
    """

    writes_small = False

    def __init__(self, key: ScanKey) -> None:
        if key.recurrence not in _RECURRENCES:
            raise NotImplementedError(
                f'backend "cpu" does not support the recurrence {key.recurrence}; use "reference"'
            )
        (N, B, L, D), M, P = key.shape, key.states, _padded(key.shape[3])
        self.key, self.shape = key, (N, B, L, P, M)
        self.stored = _stored_dtype(key.dtype)
        self.dtype = _compute_dtype(self.stored)
        x, dt, q, k, z = key.strides
        rows, keys = (N, B, L, D), (N, B, L, M)
        if key.rank is not None:
            dt = (B * L * D, L * D, D, 1)
        forms = [_Form(rows, s, key.dtype, self.stored, P) for s in (x, dt)]
        forms += [_Form(keys, s, key.dtype, self.dtype, M) for s in (q, k)]
        if z is not None:
            forms.append(_Form((1, *rows[1:]), (0, *z), key.dtype, self.stored, P))
        self.copied = [(i, form) for i, form in enumerate(forms) if form.copies]
        none = (0, 0, 0)
        self.zeros = torch.zeros(N * P, dtype=self.dtype, device="cpu")
        self.kappa_scale = torch.full((1,), key.kappa_scale, dtype=self.dtype, device="cpu")
        per_channel = _view(N, 1, 1, P)
        state, states = _view(1, B, M, P), _view(N, B, M, P)
        inputs = (
            *(forms[0].view, forms[1].view, _view(N, 1, M, P), forms[2].view, forms[3].view),
            *(per_channel, per_channel, none, state if key.started else none),
            none if z is None else forms[4].view,
        )
        out, both, sums = _view(1, B, L, P), _view(N, B, L, P), _view(N, B, 1, P)
        # Write the gradient for z directly to dz, if the loops can.
        self.dz = None
        if key.dz is not None:
            self.dz = _Form((1, B, L, D), (0, *key.dz), key.dtype, self.stored, P)
        dz = out if self.dz is None or self.dz.copies else self.dz.view
        scalars, blocks = (_RECURRENCES[key.recurrence], int(key.reverse)), P // loops.WIDTH
        self.groups, self.columns = min(blocks, _MAX_GROUPS), loops.num_columns(M)
        updates = N * B * L * P * M
        self._forward = _Loop(
            loops.scan_blocks, self.stored, B * blocks, updates, loops.scratch_size(L, M),
            (*scalars, blocks, *self.shape), (*inputs, out, state),
        )  # fmt: skip
        self._backward = _Loop(
            loops.scan_blocks_backward, self.stored, B * self.groups, 4 * updates,
            loops.backward_scratch_size(L, M), (*scalars, self.groups, *self.shape),
            (
                *(*inputs, out, none if N == 2 else state, both, both, states),
                *(_view(self.groups * N, B, L, self.columns), sums, sums, state, dz),
            ),
        )  # fmt: skip

    def _inputs(self, args: ScanArgs) -> tuple[Tensor | None, ...]:
        """Return the first tensors of both kernels."""
        P, A, state = self.shape[3], args.A, args.initial_state
        dt = args.dt
        if args.dt_weight is not None:  # of low rank
            dt = workspace.bmm(dt.flatten(1, 2), args.dt_weight.to(dt.dtype).mT)
            dt = dt.view(args.x.shape)
        rows = [args.x, dt, args.q, args.k, args.z]
        for i, form in self.copied:
            rows[i] = _rows(rows[i], form.dtype, form.columns)
        x, dt, q, k, z = rows
        # The loops compute powers of 2.
        A = None if A is None else _rows(A.mT, self.dtype, P) * math.log2(math.e)
        skip = self.zeros if args.D is None else _rows(args.D, self.dtype, P)
        bias = self.zeros if args.bias is None else _rows(args.bias, self.dtype, P)
        state = self.zeros if state is None else self._states(state)
        return x, dt, A, q, k, skip, bias, self.kappa_scale, state, z

    def _states(self, state: Tensor) -> Tensor:
        """Return a state (N, B, D, M) as (N, B, M, padded D)."""
        return _rows(state.mT, self.dtype, self.shape[3])

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the result of ``reference.scan``."""
        N, B, L, P, M = self.shape
        y = torch.empty((B, L, P), dtype=self.stored, device="cpu")
        final = torch.empty((1, B, M, P), dtype=self.dtype, device="cpu") if N == 1 else None
        self._forward(*self._inputs(args), y, final)
        D, dtype = self.key.shape[3], self.key.dtype
        if P != D or self.stored != dtype:
            y = y[..., :D].to(dtype).contiguous()
        return y, None if final is None else final[..., :D].mT, None, None

    def backward(
        self,
        args: ScanArgs,
        grad: Tensor,
        grad_final: Tensor | None,
        saved: None = None,
        dz: Tensor | None = None,
        small: None = None,
    ) -> ScanArgs:
        """Return the gradients of ``forward``; the gradient for dt has full rank, (N, B, L, D).

        The gradient for z is written to ``dz`` if given.
        """
        N, B, L, P, M = self.shape
        D = self.key.shape[3]
        dx, ddt = (workspace.empty((N, B, L, P), self.stored) for _ in range(2))
        dA = None if args.A is None else self._zeros(N, B, M, P)
        dqk = workspace.empty((self.groups * N, B, L, self.columns), self.dtype).zero_()
        sums = self._zeros(2, N, B, P)
        dstate = torch.empty((1, B, M, P), dtype=self.dtype, device="cpu") if N == 1 else None
        own_dz = dz
        if N == 2 and (self.dz is None or self.dz.copies):
            own_dz = workspace.empty((B, L, P), self.stored)
        self._backward(
            *self._inputs(args), _rows(grad, self.stored, P),
            self.zeros if N == 2 else self._states(grad_final),
            *(dx, ddt, dA, dqk, sums[0], sums[1], dstate, own_dz),
        )  # fmt: skip
        dqk = _sum(dqk.view(self.groups, N, B, L, self.columns), 0)
        dskip, dbias = _cut(_sum(sums, 2), D).unbind()
        grads = ScanArgs(
            x=_cut(dx, D),
            dt=_cut(ddt, D),
            A=None if dA is None else _cut(_sum(dA, 1), D).mT,
            q=dqk.narrow(3, 0, M),
            k=dqk.narrow(3, M, M),
            D=None if args.D is None else dskip,
            bias=None if args.bias is None else dbias,
            z=None if own_dz is None else _cut(own_dz, D),
            initial_state=None if args.initial_state is None else _cut(dstate, D).mT,
        )
        if dz is not None and own_dz is not dz:
            grads = grads._replace(z=dz.copy_(grads.z))
        return ScanArgs(*_in_dtypes_of(args._replace(dt_weight=None), grads))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device="cpu")


# ------------------------------------------------------------------------------------ convolution


class ConvPlan:
    """Convolution prepared for given arguments; channels are padded to whole vectors.

    Args:
        key: Description of the arguments.
    """

    def __init__(self, key: ConvKey) -> None:
        (B, L, D), K, P = key.shape, key.taps, _padded(key.shape[2])
        self.key, self.padded, self.stored = key, P, _stored_dtype(key.dtype)
        self.dtype = _compute_dtype(self.stored)
        self.x = _Form((1, B, L, D), (0, *key.strides), key.dtype, self.stored, P)
        positions = L if key.positions is None else key.positions
        self.missing = positions % 2  # the loops take pairs of positions
        positions += self.missing
        self.in_sequence = self._in_pairs(torch.arange(L, device="cpu"))
        order = _view(1, 1, 1, positions)
        inputs = (self.x.view, _view(2, 1, K, P), _view(2, 1, 1, P), _view(2, B, L, P))
        width = P if self.stored == key.dtype else D
        self.out_strides = (B * L * width, L * width, width, 1)
        # Write the gradient for x directly to dx, if the loops can.
        dx = key.dx or (L * D, D, 1)
        self.dx = _Form((1, B, L, D), (0, *dx), key.dtype, self.stored, P)
        sums = _view(2, B, K + 1, P)  # the last row is the bias
        blocks, values = P // loops.WIDTH, B * L * P
        scalars = (blocks, K, positions)
        scratch = (positions + 2 * K) * loops.WIDTH
        self._forward = _Loop(
            loops.conv_blocks, self.stored, B * blocks, 2 * K * values, scratch, scalars,
            (*inputs, order),
        )  # fmt: skip
        self._backward = _Loop(
            loops.conv_blocks_backward, self.stored, B * blocks, 6 * K * values, 3 * scratch,
            scalars, (*inputs, self.dx.view, sums, sums, order),
        )  # fmt: skip

    def _inputs(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = _rows(x, self.stored, self.padded) if self.x.copies else x
        return x, _rows(weight.mT, self.dtype, self.padded), _rows(bias, self.dtype, self.padded)

    def _in_pairs(self, order: Tensor | None) -> Tensor:
        """Return an order (P,), by default the sequence's, as int64 with positions in pairs."""
        if order is None:
            return self.in_sequence
        return F.pad(order.to(torch.int64), (0, self.missing), value=-1).contiguous()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None) -> Tensor:
        """Return the result of ``reference.causal_conv1d_bidirectional``."""
        B, L, D = self.key.shape
        y = workspace.empty((2, B, L, self.padded), self.stored)
        self._forward(*self._inputs(x, weight, bias), y, self._in_pairs(order))
        if self.padded != D or self.stored != x.dtype:
            y = y[..., :D].to(x.dtype)
        return y

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        order: Tensor | None,
        dx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``forward``, as described in ``interface.ConvPlan``."""
        (B, L, D), K, P = self.key.shape, self.key.taps, self.padded
        grad, own_dx = _rows(grad, self.stored, P), dx
        if dx is None or self.dx.copies:
            own_dx = workspace.empty((B, L, P), self.stored)
        sums = torch.zeros((2, B, K + 1, P), dtype=self.dtype, device="cpu")
        of_bias = sums.select(2, K)
        self._backward(*self._inputs(x, weight, bias), grad, own_dx, sums, of_bias, self._in_pairs(order))
        if dx is not None and own_dx is not dx:
            own_dx = dx.copy_(own_dx[..., :D])
        sums = _cut(_sum(sums, 1), D)
        grads = (_cut(own_dx, D), sums.narrow(1, 0, K).mT, sums.select(1, K))
        return _in_dtypes_of((x, weight, bias), grads)


# ------------------------------------------------------------------------ as ``interface.Backend``

scan_plan, conv_plan = plans(ScanPlan), plans(ConvPlan)
writes_halves, arena, small_weights = True, workspace.arena, reference.small_weights
