"""The compiled CPU backend matches the float64 reference for inputs of every kind."""

import array
import concurrent.futures
import ctypes
import errno
import os
import pickle
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.scans import (
    Results,
    assert_right,
    assert_same_bits,
    conv_results,
    plan_of,
    random_args,
    random_gradients,
    results_of,
)
from vil.kernels import reference
from vil.kernels.interface import ScanArgs
from vil.kernels.reference import RECURRENCES

pytest.importorskip("numba")

import numba
from numba.core.caching import FunctionCache

from vil.kernels.cpu import backend as cpu
from vil.kernels.cpu import loops

# Relative to the largest value; the compiled loops add in a different order than the reference.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# (B, L, D, M): one token, odd sizes, channels that do not fill vectors, several blocks and chunks.
SHAPES = [(1, 1, 1, 1), (2, 37, 70, 7), (1, 50, 192, 16), (2, 17, 64, 4)]


def assert_matches(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    """Compare with the reference's float64 result, relative to its largest value."""
    assert (actual is None) == (expected is None)
    if actual is not None:
        assert actual.shape == expected.shape
        bound = TOLERANCE[dtype] * expected.abs().max().item() + 1e-24  # for underflow
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


def assert_scan_matches(args: ScanArgs, recurrence: str, **options: object) -> None:
    assert_right(cpu, args, recurrence, TOLERANCE[args.x.dtype], **options)


def all_results(shape: tuple[int, int, int, int], recurrence: str, dtype: torch.dtype = torch.float32) -> Results:
    """Return the results of every function of the backend on the same random inputs."""
    x, weight, bias, grad = conv_inputs(shape[:3], 4, dtype)
    conv = {}
    for name, order in (("conv", None), ("conv in an order", scattered(shape[1]))):
        conv |= {f"{name} {i}": t for i, t in enumerate(conv_results(cpu, x, weight, bias, grad, order))}
    one, both = (random_args(recurrence, shape, N, dtype) for N in (1, 2))
    scans = {
        "one": results_of(cpu, one, recurrence, True),
        "both": results_of(cpu, both, recurrence),
        "factor": results_of(cpu, both, recurrence, False, 2.0),
    }
    return conv | {f"{way} {n}": t for way, found in scans.items() for n, t in found.items()}


def conv_inputs(
    shape: tuple[int, int, int], K: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a random x, weight, bias and gradient of the result of the convolution."""
    generator = torch.Generator().manual_seed(sum(shape) + K)
    sizes = shape, (2, shape[2], K), (2, shape[2]), (2, *shape)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes)


@pytest.mark.pairs
@pytest.mark.parametrize("way", ["both", "forward", "reverse"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_matches_reference(shape, dtype, recurrence, way):
    args = random_args(recurrence, shape, 2 if way == "both" else 1, dtype)
    assert_scan_matches(args, recurrence, reverse=way == "reverse")


@pytest.mark.pairs
@pytest.mark.parametrize("kappa_scale", [0.25, 4.0, 1e3])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_factor_on_the_norm_of_keys(dtype, recurrence, kappa_scale):
    args = random_args(recurrence, (2, 21, 70, 7), dtype=dtype)
    if recurrence != "mamba" and kappa_scale < 1:
        args = args._replace(k=args.k / 2)  # states may grow where k.k eps exceeds 2
    assert_scan_matches(args, recurrence, kappa_scale=kappa_scale)


def phases(rows: int, columns: int, gap: int) -> Tensor:
    """Return the order (P,) of a grid split into four grids of every other patch.

    ``gap`` empty positions follow each of the four. A token after the grid has no position.
    """
    grid, empty = torch.arange(rows * columns).view(rows, columns), torch.full((gap,), -1)
    parts = (t for i in (0, 1) for j in (0, 1) for t in (grid[i::2, j::2].flatten(), empty))
    return torch.cat([*parts]).int()


def scattered(L: int) -> Tensor:
    """Return an order (P,) of about three quarters of the tokens, with gaps of any length."""
    generator = torch.Generator().manual_seed(L)
    order = torch.full((2 * L + 3,), -1)
    tokens = torch.randperm(L, generator=generator)[: L - L // 4]
    positions = torch.randperm(len(order), generator=generator)[: len(tokens)].sort().values
    order[positions] = tokens
    return order.int()


@pytest.mark.pairs
@pytest.mark.parametrize("K", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 25, 130), (1, 25, 64)], ids=str)
def test_conv_matches_reference(shape, dtype, K):
    inputs = conv_inputs(shape, K, dtype)
    orders = [None] if shape[1] == 1 else [None, phases(4, 6, K - 1), phases(4, 6, 0), scattered(25)]
    for order in orders:
        expected = conv_results(reference, *(t.double() for t in inputs), order)
        for found, truth in zip(conv_results(cpu, *inputs, order), expected, strict=True):
            assert found.dtype == dtype
            assert_matches(found, truth, dtype)


@pytest.mark.parametrize("K", [4, 5])
def test_tokens_without_a_position_are_not_read(K):
    x, weight, bias, grad = conv_inputs((3, 25, 70), K)
    order = scattered(25)
    absent = torch.ones(25, dtype=torch.bool)
    absent[order[order >= 0].long()] = False
    assert absent.any()
    expected = conv_results(cpu, x, weight, bias, grad, order)
    x[:, absent], grad[:, :, absent] = torch.nan, torch.nan
    assert_same_bits(*(dict(enumerate(r)) for r in (conv_results(cpu, x, weight, bias, grad, order), expected)))


@pytest.mark.ci
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_bfloat16_is_rounded_once(recurrence):
    """Results equal the float32 results for the same numbers, rounded."""
    for N in (1, 2):
        low = random_args(recurrence, (2, 37, 70, 7), N, torch.bfloat16)
        given = random_gradients(low)
        high = (given[0].float(), given[1])
        found = results_of(cpu, low, recurrence, N == 1, grads=given)
        expected = results_of(cpu, low.to(torch.float32), recurrence, N == 1, grads=high)
        assert_same_bits(found, {n: t.to(found[n].dtype) for n, t in expected.items()})
    conv = conv_inputs((2, 37, 70), 4, torch.bfloat16)
    for order in (None, scattered(37)):
        found = conv_results(cpu, *conv, order)
        expected = conv_results(cpu, *(t.float() for t in conv), order)
        assert all(a.equal(e.to(a.dtype)) for a, e in zip(found, expected, strict=True))


@pytest.mark.ci
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="others keep them")
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_subnormal_numbers_are_zeros_within_the_loops_alone(recurrence):
    """The thread's own treatment of subnormal numbers has no effect and is restored afterwards."""
    args = random_args(recurrence, (1, 21, 70, 16))
    args, subnormal = args._replace(x=args.x * 1e-38), torch.tensor([1e-40])
    results = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            y, *_ = plan_of(cpu, args, recurrence).forward(args)
            results.append(results_of(cpu, args, recurrence, grads=(y, None)))
            assert (subnormal * 1 == 0).item() is flush
        finally:
            torch.set_flush_denormal(False)
    assert_same_bits(*results)
    y = results[0]["out"]
    assert y.any()
    assert y[y != 0].abs().min() >= torch.finfo(y.dtype).tiny


@pytest.mark.parametrize("given", ["D", "bias", "initial_state", None])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_optional_inputs(recurrence, given):
    args = random_args(recurrence, (2, 5, 70, 4), N=1)
    absent = {"D", "bias", "initial_state"} - {given}
    assert_scan_matches(args._replace(**dict.fromkeys(absent)), recurrence, reverse=True)


@pytest.mark.parametrize("dt", [-1e4, -60.0, 60.0, 1e4])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_extreme_step_sizes_and_keys(recurrence, dt):
    args = random_args(recurrence, (1, 20, 64, 16))
    args = args._replace(dt=args.dt.sign() * 0.5 + dt)
    if recurrence != "mamba":
        args = args._replace(k=args.k * 1e3)
    found = results_of(cpu, args, recurrence)
    assert all(tensor.isfinite().all() for tensor in found.values())
    expected, *_ = reference.scan(args.to(torch.float64), recurrence)
    assert_matches(found["out"], expected, torch.float32)


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("name", ["x", "dt", "q", "k", "z"])
def test_nan_is_passed_on(recurrence, name):
    args = random_args(recurrence, (1, 6, 64, 4))
    getattr(args, name)[..., 3, :1] = torch.nan
    expected = reference.scan(args, recurrence)[0].isnan()
    assert expected.any()
    assert plan_of(cpu, args, recurrence).forward(args)[0].isnan().equal(expected)


@pytest.fixture
def threads():
    """Yield ``torch.set_num_threads``, and restore the number of threads at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LARGE = (4, 197, 384, 16)  # enough work for several threads


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_bits_do_not_depend_on_threads(recurrence, threads):
    threads(1)
    expected = all_results(LARGE, recurrence)
    for count in (2, 5):
        threads(count)
        assert_same_bits(all_results(LARGE, recurrence), expected)
    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: all_results(LARGE, recurrence), range(8)):
            assert_same_bits(found, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_concurrent_calls_in_a_forked_process(threads):
    """OpenMP hangs there, as it is missing on some platforms."""
    args = random_args("longhorn", (2, 100, 64, 64))
    plan = plan_of(cpu, args, "longhorn")
    threads(1)
    expected = results_of(cpu, args, "longhorn")
    threads(3)
    assert plan.forward(args)[0].equal(expected["out"])
    child = os.fork()
    if child == 0:
        with concurrent.futures.ThreadPoolExecutor(4) as callers:
            calls = callers.map(lambda _: plan.forward(args)[0].equal(expected["out"]), range(16))
            right = all(calls)
        threads(1)  # for PyTorch's own operations, which hang as well
        found = results_of(cpu, args, "longhorn")
        right = right and all(found[name].equal(expected[name]) for name in expected)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_all_memory_is_written(recurrence, request):
    expected = all_results((2, 21, 70, 7), recurrence)
    request.getfixturevalue("nan_where_nothing_is_written")
    assert_same_bits(all_results((2, 21, 70, 7), recurrence), expected)


def small_kernel(like):  # a kernel has no result
    like[0] = 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-9],
    "empty": lambda content: b"",
    "foreign": lambda content: pickle.dumps(numba.__version__) + b"cno_such_module\nname\n.",
}


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_told_of_and_not_used(
    kind: str,
    damage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    loops.compiled(small_kernel, numba.types.float32)
    (path,) = (tmp_path / "cache").rglob(f"*.{kind}")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    caplog.clear()
    values = array.array("f", [0.0])
    function = loops.compiled(small_kernel, numba.types.float32)
    function.ctypes(ctypes.cast(values.buffer_info()[0], ctypes.POINTER(ctypes.c_float)))
    assert values[0] == 1
    (line,) = caplog.messages
    assert "numba's cache cannot be used, so kernels are compiled again in every process" in line
    assert f"{path.parent}/loops.small_kernel-*" in line


def test_a_full_disk_and_no_folder_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "_save_data", full)
    assert loops.compiled(small_kernel, numba.types.float32).address
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])
    monkeypatch.setattr(loops, "_warned", set())
    for dtype in (numba.types.float32, numba.types.float64):
        assert loops.compiled(small_kernel, dtype).address
    assert caplog.text.count("set NUMBA_CACHE_DIR to a folder that can be written") == 1
