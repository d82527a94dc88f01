"""The operations of ``reference.py`` in compiled, vectorised, multi-threaded loops for CPUs.

Same functions, same arguments, same meaning; computed in float64 for float64 inputs and in float32
otherwise. Where all that is large is bfloat16, the loops read and write it as it is. Work is cut into tasks, one per batch element and vector of channels, which threads take
in turn. Every task writes only what is its own and sums over tasks are taken in a fixed order, so
results are the same bits for any number of threads.
Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``), K convolution width.
"""

import array
import concurrent.futures
import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from numba import types
from numba.core.ccallback import CFunc
from torch import Tensor

from vil.kernels import workspace
from vil.kernels.args import ScanArgs
from vil.kernels.cpu import loops
from vil.kernels.reference import full_steps
from vil.kernels.workspace import lent  # noqa: F401  (what operators take memory from)

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
# A second thread pays from about 0.1 ms of work on.
_UPDATES_PER_THREAD = 500_000
# Partial sums for dq and dk, over groups of channels: more are more parallel and take more memory.
_MOST_GROUPS = 8


def _set_malloc() -> None:
    """Have glibc keep freed memory, but for large blocks, unless the environment says what it is to do.

    By default every layer gives its memory back and faults it in anew: 44 ms per image instead of 23
    for vil_tiny (batch 8, 224 px, 2 cores of a Zen 5). Large blocks that are kept leave gaps that
    others do not fit into: at 1024 px a training step took twice what was alive in it.
    """
    told = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    mallopt = None if any(name in os.environ for name in told) else _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        mallopt(_M_MMAP_THRESHOLD, 8 << 20)


def _libc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or of a library beside it, if there is one."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_set_malloc()


# ---------------------------------------------------------------------------------------- threads

_forked = False


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    # Starts a thread only when there is work for it; idle ones sleep.
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="vil")


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _openmp() -> Callable[[object, object, int, int], None] | None:
    """Return the function that runs another on all threads of torch's OpenMP, if there is one."""
    parallel = _libc_function("GOMP_parallel")
    if parallel is None:
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@functools.cache
def _compiled(kernel: Callable[..., None], dtype: torch.dtype) -> tuple[CFunc, Callable]:
    """Return a kernel compiled for a dtype, and how to call it without holding the GIL."""
    function = loops.compiled(kernel, _TYPES[dtype])
    return function, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)


def _run(
    kernel: Callable[..., None],
    tasks: int,
    updates: int,
    scratch_size: int,
    dtype: torch.dtype,
    scalars: tuple[int, ...],
    *tensors: Tensor | None,
) -> None:
    """Run all tasks of a kernel on torch's number of threads.

    These are torch's own OpenMP threads where possible, since after every operation of torch they
    keep their cores busy for milliseconds, waiting for the next, and threads of ours would wait for
    them. Not so in a forked process, where OpenMP hangs. Numba's threads are not used: its layers
    abort on concurrent calls or after a fork.

    Args:
        kernel: One of those in ``loops``.
        tasks: How many tasks there are.
        updates: Multiply-adds or so of all tasks together, to leave small work to this thread.
        scratch_size: Values of scratch memory per thread.
        dtype: One of ``_TYPES``: of tensors with tokens and channels, the others having what it is
            computed in.
        scalars: As the kernel takes them.
        *tensors: As the kernel takes them, of four axes.
    """
    function, call = _compiled(kernel, dtype)
    threads = max(1, min(torch.get_num_threads(), tasks, updates // _UPDATES_PER_THREAD))
    scratch = torch.empty(threads * scratch_size, dtype=_compute_dtype(dtype))
    header = (0, 0, tasks, scratch.data_ptr(), scratch_size * scratch.itemsize)
    filling = (0,) * (loops.SCALARS - len(scalars))
    views = itertools.chain.from_iterable(map(_view, tensors))
    table = array.array("q", [*header, *scalars, *filling, *views])
    address = table.buffer_info()[0]
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(f"loops::{kernel.__name__}"):
            _call(function, call, address, threads)
    else:
        _call(function, call, address, threads)


def _call(function: CFunc, call: Callable, address: int, threads: int) -> None:
    """Run a compiled kernel on several threads, each of which takes tasks until none is left."""
    openmp = None if _forked else _openmp()
    if threads == 1:
        call(address)
    elif openmp is not None:
        openmp(function.address, address, threads, 0)
    else:
        helpers = [_pool().submit(call, address) for _ in range(threads - 1)]
        call(address)
        # Those at work write to memory that this call owns; those that never started need not.
        concurrent.futures.wait([helper for helper in helpers if not helper.cancel()])


# ---------------------------------------------------------------------------------------- tensors


def _stored_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which the loops take tensors with tokens and channels: the first's, at least float32.

    It is bfloat16 where all of them are.
    """
    if all(tensor.dtype == torch.bfloat16 for tensor in tensors):
        return torch.bfloat16
    return torch.float64 if tensors[0].dtype == torch.float64 else torch.float32


def _compute_dtype(stored: torch.dtype) -> torch.dtype:
    return torch.float32 if stored == torch.bfloat16 else stored


def _padded(channels: int) -> int:
    return math.ceil(channels / loops.WIDTH) * loops.WIDTH


def _rows(tensor: Tensor, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """Return the tensor in a dtype, with a contiguous last axis, filled up with zeros to columns."""
    tensor = tensor.to(dtype)
    if columns is not None and columns > tensor.shape[-1]:
        tensor = F.pad(tensor, (0, columns - tensor.shape[-1]))  # which keeps channels_last strides
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _view(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """Return what the loops take of a tensor of four axes: its address and three strides.

    An axis of size 1 gets stride 0: it serves any index.
    """
    if tensor is None:
        return 0, 0, 0, 0
    sizes, strides = tensor.shape, tensor.stride()
    return (
        tensor.data_ptr(),
        0 if sizes[0] == 1 else strides[0],
        0 if sizes[1] == 1 else strides[1],
        0 if sizes[2] == 1 else strides[2],
    )


def _sum(partial: Tensor, axis: int) -> Tensor:
    # NumPy: its order of summation does not depend on the number of torch's threads.
    return torch.from_numpy(partial.numpy().sum(axis))


def _in_dtypes_of(
    inputs: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else g.to(t.dtype) for t, g in zip(inputs, grads, strict=True))


# ----------------------------------------------------------------------------------------- scans


class _Scan:
    """The inputs of a scan as the loops take them.

    Channels are padded to whole vectors, and every tensor has four axes: the direction, the batch
    element, the token or state, and last the channel (of q and k, the state).

    Args:
        args: What is scanned, the step sizes in full.
        recurrence: One of ``RECURRENCES``.
        reverse: Scan a single direction from the last token to the first.
        key_norm: Factor on |k|^2 in Longhorn's step size.
        *more: Another tensor with tokens and channels that ``run`` will be given.
    """

    def __init__(
        self,
        args: ScanArgs,
        recurrence: str,
        reverse: bool,
        key_norm: float,
        *more: Tensor,
    ):
        if recurrence not in _RECURRENCES:
            raise NotImplementedError(
                f'the backend "cpu" does not serve the recurrence {recurrence}; use "reference"'
            )
        more = more if args.z is None else (args.z, *more)
        self.stored = _stored_dtype(args.x, args.dt, *more)
        self.dtype = _compute_dtype(self.stored)
        self.channels = args.x.shape[-1]
        self.shape = (*args.x.shape[:3], _padded(self.channels), args.k.shape[-1])
        self.scalars = (_RECURRENCES[recurrence], int(reverse))
        # The loops take powers of 2.
        A = None if args.A is None else self.states(args.A[:, None]) * math.log2(math.e)
        skip, bias = (
            self.zeros(1, 1, 1, self.shape[3])
            if parameter is None
            else self.channels_last(parameter[:, None, None])
            for parameter in (args.D, args.bias)
        )
        key_norm = torch.full((1, 1, 1, 1), key_norm, dtype=self.dtype)
        q, k = _rows(args.q, self.dtype), _rows(args.k, self.dtype)
        initial = args.initial_state
        initial = self.zero_state() if initial is None else self.states(initial)
        z = None if args.z is None else self.tokens(args.z[None])
        x, dt = self.tokens(args.x), self.tokens(args.dt)
        self.inputs = (x, dt, A, q, k, skip, bias, key_norm, initial, z)

    def tokens(self, tensor: Tensor) -> Tensor:
        """Return a tensor (..., L, D) as the loops take it."""
        return _rows(tensor, self.stored, self.shape[3])

    def channels_last(self, tensor: Tensor) -> Tensor:
        """Return another tensor (..., D) as the loops take it."""
        return _rows(tensor, self.dtype, self.shape[3])

    def states(self, tensor: Tensor) -> Tensor:
        """Return a tensor (..., D, M) as (..., M, padded D)."""
        return self.channels_last(tensor.mT)

    def zero_state(self) -> Tensor:
        directions, B, _, D, M = self.shape
        return self.zeros(D).expand(directions, B, M, D)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def run(
        self,
        kernel: Callable[..., None],
        groups: int,
        scratch_size: int,
        passes: int,
        *tensors: Tensor | None,
    ) -> None:
        """Run a kernel with one task per batch element and group of channels.

        Args:
            kernel: ``scan_blocks`` or ``scan_blocks_backward``.
            groups: Into how many the channels are divided.
            scratch_size: Values of scratch memory that a thread needs.
            passes: How often the kernel goes over every state, roughly.
            *tensors: What the kernel takes after the inputs.
        """
        _run(
            kernel,
            self.shape[1] * groups,
            passes * math.prod(self.shape),
            scratch_size,
            self.stored,
            (*self.scalars, groups, *self.shape),
            *self.inputs,
            *tensors,
        )


def scan(
    args: ScanArgs,
    recurrence: str,
    reverse: bool = False,
    key_norm: float = 1.0,
    save: bool = False,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Scan; arguments and results as of ``reference.scan``."""
    args = args._replace(dt=full_steps(args.dt, args.dt_weight, workspace.bmm), dt_weight=None)
    s = _Scan(args, recurrence, reverse, key_norm)
    N, B, L, D, M = s.shape
    y = torch.empty((B, L, D), dtype=s.stored)
    final = torch.empty((1, B, M, D), dtype=s.dtype) if N == 1 else None
    s.run(loops.scan_blocks, D // loops.WIDTH, loops.scratch_size(L, M), 1, y[None], final)
    final = None if final is None else final[..., : s.channels].mT
    return y[..., : s.channels].to(args.x.dtype), final, None, None


def scan_backward(
    args: ScanArgs,
    grad: Tensor,
    grad_final: Tensor | None,
    recurrence: str,
    reverse: bool = False,
    key_norm: float = 1.0,
    saved: None = None,
) -> ScanArgs:
    """Return the gradients of ``scan``; arguments as of ``reference.scan_backward``."""
    s = _Scan(args, recurrence, reverse, key_norm, grad)
    N, B, L, D, M = s.shape
    groups = min(D // loops.WIDTH, _MOST_GROUPS)
    columns = loops.num_columns(M)
    dx, ddt = (workspace.empty((N, B, L, D), s.stored) for _ in range(2))
    dA = None if args.A is None else s.zeros(N, B, M, D)
    dqk = workspace.empty((groups * N, B, L, columns), s.dtype).zero_()
    dskip, dbias = s.zeros(N, B, 1, D), s.zeros(N, B, 1, D)
    dstate = None if args.z is not None else torch.empty((1, B, M, D), dtype=s.dtype)
    dz = None if args.z is None else workspace.empty((1, B, L, D), s.stored)
    s.run(
        loops.scan_blocks_backward,
        groups,
        loops.backward_scratch_size(L, M),
        4,
        s.tokens(grad[None]),
        s.zero_state() if args.z is not None else s.states(grad_final),
        *(dx, ddt, dA, dqk, dskip, dbias, dstate, dz),
    )
    dqk = _sum(dqk.view(groups, N, B, L, columns), 0)
    grads = ScanArgs(
        dx[..., : s.channels],
        ddt[..., : s.channels],
        None if dA is None else _sum(dA, 1)[..., : s.channels].mT,
        dqk[..., :M],
        dqk[..., M : 2 * M],
        _sum(dskip, 1)[:, 0, : s.channels],
        _sum(dbias, 1)[:, 0, : s.channels],
        None if dz is None else dz[0, ..., : s.channels],
        None if dstate is None else dstate[..., : s.channels].mT,
    )
    return ScanArgs(*_in_dtypes_of(args, grads))


def saved(x: Tensor, k: Tensor, recurrence: str) -> None:
    """Return None: nothing is saved, the backward pass scans again."""


# ------------------------------------------------------------------------------------ convolution


def _conv_inputs(
    stored: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (1, B, L, D), weight (2, 1, K, D) and bias (2, 1, 1, D) with channels padded."""
    dtype, padded = _compute_dtype(stored), _padded(x.shape[-1])
    parameters = (_rows(t, dtype, padded) for t in (weight.mT[:, None], bias[:, None, None]))
    return _rows(x[None], stored, padded), *parameters


def _order_rows(order: Tensor | None) -> Tensor | None:
    """Return an order (B, P) as the loops take it, (1, B, 1, P)."""
    return None if order is None else _rows(order[None, :, None], torch.int64)


def causal_conv1d_bidirectional(
    x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> Tensor:
    """Convolve both ways, then SiLU; as ``reference.causal_conv1d_bidirectional``."""
    rows, taps, offset = _conv_inputs(_stored_dtype(x), x, weight, bias)
    (_, B, L, D), K = rows.shape, weight.shape[-1]
    P = 0 if order is None else order.shape[1]
    y = workspace.empty((2, B, L, D), rows.dtype)
    _run(
        loops.conv_blocks,
        B * (D // loops.WIDTH),
        2 * K * rows.numel(),
        loops.conv_rows(L, K, P) * loops.WIDTH,
        rows.dtype,
        (D // loops.WIDTH, L, K, P),
        *(rows, taps, offset, y, _order_rows(order)),
    )
    return y[..., : x.shape[-1]].to(x.dtype)


def causal_conv1d_bidirectional_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``causal_conv1d_bidirectional`` for x, weight and bias."""
    rows, taps, offset = _conv_inputs(_stored_dtype(x, grad), x, weight, bias)
    (_, B, L, D), K = rows.shape, weight.shape[-1]
    P = 0 if order is None else order.shape[1]
    grad = _rows(grad, rows.dtype, D)
    dx = workspace.empty(tuple(rows.shape), rows.dtype)
    dweight, dbias = (torch.zeros((2, B, n, D), dtype=taps.dtype) for n in (K, 1))
    _run(
        loops.conv_blocks_backward,
        B * (D // loops.WIDTH),
        6 * K * rows.numel(),
        3 * loops.conv_rows(L, K, P) * loops.WIDTH,
        rows.dtype,
        (D // loops.WIDTH, L, K, P),
        *(rows, taps, offset, grad, dx, dweight, dbias, _order_rows(order)),
    )
    channels = x.shape[-1]
    return _in_dtypes_of(
        (x, weight, bias),
        (
            dx[0, ..., :channels],
            _sum(dweight, 1)[..., :channels].mT,
            _sum(dbias, 1)[:, 0, :channels],
        ),
    )
