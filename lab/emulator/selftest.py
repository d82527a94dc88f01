"""Check that the emulator computes kernels right and reports planted faults."""

import re
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

import cases
import runtime


@triton.jit
def matmul(
    a,
    b,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PREC: tl.constexpr,
    ROWS: tl.constexpr,
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    if ROWS:
        y = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision=PREC))


@triton.jit
def reductions(x, rows, columns, sums, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R), tl.arange(0, C)
    t = tl.load(x + r[:, None] * C + c[None, :])
    tl.store(rows + r, tl.sum(t, 1))
    tl.store(columns + c, tl.max(t, 0))
    tl.store(sums + r[:, None] * C + c[None, :], tl.cumsum(t, 1))


@triton.jit
def elementwise(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y + i, tl.exp(v) / (1 + tl.exp(v)) + tl.log(1 + v * v), mask=i < n)


@triton.jit
def racy(x, y, n: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + i, tl.load(y + (n - 1 - i)) + 1.0)


@triton.jit
def out_of_bounds(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0), mask=i <= n)  # one too many


@triton.jit
def across_programs(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + tl.program_id(0) * (n // 2) + i, i + tl.program_id(0))


@triton.jit
def uninitialised(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i))


EXCHANGES = {"RACE_RAW_S", "RACE_WAR_S", "RACE_WAW_S", "ORDER", "UNINIT_SHARED", "ASYNC_RACE"}
FENCE = "fence.proxy.async.shared::cta;"
_failures = 0


def expect(name: str, ok: bool, detail: object = "") -> None:
    """Print whether a check passed, and count failed checks."""
    global _failures
    _failures += not ok
    print(f"{'ok  ' if ok else 'FAIL'} sm_{runtime.STATE.arch} {name} {detail}", flush=True)


def failing() -> set[str]:
    """Return the kinds of findings that count as failures."""
    return {f["kind"] for _, f in runtime.faults()}


def is_right(name: str, error: float, tolerance: float, least: float = 0) -> None:
    """Expect an error in [least, tolerance) and no failures."""
    ok = least <= error < tolerance and not failing()
    expect(f"{name} is right", ok, f"error {error:.1e} {failing() or ''}")


def is_reported(name: str, *expected: str) -> None:
    """Expect a planted fault to have been found."""
    expect(f"{name} is reported", bool(runtime.kinds() & set(expected)), runtime.kinds())


def multiply(
    m: int,
    n: int,
    k: int,
    precision="ieee",
    dtype=torch.float32,
    warps: int = 4,
    rows: bool = False,
) -> float:
    """Return the error of a product, with columns or with rows, relative to its largest value."""
    runtime.clear()
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.empty(m, n)
    given = b.mT.contiguous() if rows else b
    matmul[(1,)](a, given, c, M=m, N=n, K=k, PREC=precision, ROWS=rows, num_warps=warps)
    return cases.relative(c, a.double() @ b.double())


def reduce() -> float:
    """Return the largest error of sums, maxima and cumulative sums."""
    runtime.clear()
    x = torch.randn(64, 128)
    rows, columns, sums = torch.empty(64), torch.empty(128), torch.empty(64, 128)
    reductions[(1,)](x, rows, columns, sums, R=64, C=128, num_warps=4)
    x = x.double()
    pairs = ((rows, x.sum(1)), (columns, x.amax(0)), (sums, x.cumsum(1)))
    return max(float((a - b).abs().max()) for a, b in pairs)


def arithmetic(arch: int) -> None:
    """Check the results of kernels."""
    for precision, n, k, warps, tolerance in (
        ("ieee", 32, 16, 4, 1e-6),
        ("tf32", 64, 32, 4, 2e-3),
        ("tf32x3", 64, 32, 4, 2e-6),
        ("tf32", 16, 16, 1, 2e-3),
        ("tf32", 128, 32, 8, 2e-3),
    ):
        error = multiply(n, n, k, precision, warps=warps)
        least = 2e-5 if precision == "tf32" else 0  # TF32 must show, or it is not emulated
        is_right(f"matmul {precision} {n}x{k} {warps} warps", error, tolerance, least)
    for dtype in (torch.float16, torch.bfloat16):
        if arch < 90:
            is_right(f"matmul {dtype}", multiply(64, 64, 32, dtype=dtype), 1e-6)
        for m, n, k in ((128, 16, 16), (64, 16, 64)):
            error = multiply(m, n, k, dtype=dtype, rows=True)
            is_right(f"matmul of rows {dtype} {m}x{n}x{k}", error, 1e-6)
    is_right("a kernel of reductions and cumulative sums", reduce(), 1e-4)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        runtime.clear()
        x, y = torch.randn(1000).to(dtype), torch.empty(1000)
        elementwise[(4,)](x, y, 1000, BLOCK=256, num_warps=4)
        v = x.double()
        error = float((y - v.sigmoid() - (1 + v * v).log()).abs().max())
        is_right(f"elementwise {dtype}", error, 1e-5)


def memory() -> None:
    """Plant faulty memory accesses; check that they are reported, and correct ones are not."""
    runtime.clear()
    x, y = torch.randn(256), torch.empty(256)
    racy[(1,)](x.clone(), y, n=256, BARRIER=True, num_warps=4)
    clean = not failing()
    expect("exchange through global memory with a barrier is clean", clean, failing() or "")
    runtime.clear()
    racy[(1,)](x.clone(), y, n=256, BARRIER=False, num_warps=4)
    is_reported("planted race through global memory", "RACE_RAW_G", "RACE_WAR_G")
    runtime.clear()
    y = torch.empty(100)
    out_of_bounds[(1,)](torch.randn(100), y, 100, BLOCK=128, num_warps=4)
    is_reported("planted out-of-bounds store", "OOB_GLOBAL")
    runtime.clear()
    out_of_bounds[(1,)](torch.randn(100), torch.randn(200)[:100], 100, BLOCK=128, num_warps=4)
    is_reported("planted store outside of a view", "OUT_OF_VIEW")
    runtime.clear()
    across_programs[(2,)](torch.empty(256, dtype=torch.int32), n=128, num_warps=4)
    is_reported("planted race between programs", "CTA_RACE")
    runtime.clear()
    uninitialised[(1,)](torch.empty(128), torch.empty(128), n=128, num_warps=4)
    is_reported("planted read of unwritten memory", "UNINIT_GLOBAL")
    misaligned()


def misaligned() -> None:
    """Pass an unaligned pointer to a kernel compiled for aligned pointers."""
    runtime.clear()
    uninitialised[(1,)](torch.randn(512), torch.empty(512), n=512, num_warps=4)
    expect("aligned copy is clean", not failing(), failing() or "")
    launcher = runtime.launch

    def launch(src, metadata, grid, text, args):
        launcher(src, metadata, grid, text, (torch.randn(520)[1:513], *args[1:]))

    runtime.clear()
    runtime.launch = launch
    uninitialised[(1,)](torch.randn(512), torch.empty(512), n=512, num_warps=4)
    runtime.launch = launcher
    is_reported("planted misaligned vector load", "MISALIGNED")


def run_edited(call: Callable, edit: Callable[[str], str]) -> None:
    """Run kernels with edited PTX."""
    runtime.STATE.edit = edit
    call()
    runtime.STATE.edit = None


def barriers(name: str, call: Callable) -> None:
    """Delete each bar.sync of a kernel, one at a time, and expect a report."""
    texts = []
    run_edited(call, lambda text: texts.append(text) or text)
    parts = re.split(r"(?=\tbar\.sync)", texts[0])
    missed, lanes = [], []
    for i in range(1, len(parts)):
        broken = "".join([*parts[:i], parts[i].replace("bar.sync", "// bar.sync", 1), *parts[i + 1 :]])
        run_edited(call, lambda text, broken=broken: broken)
        if not failing() & EXCHANGES:
            # a barrier that only separates lanes of a warp is reported as LANE_*
            (lanes if any(k.startswith("LANE_") for k in runtime.kinds()) else missed).append(i)
    count = len(parts) - 1
    note = f"{len(lanes)} of them between lanes of one warp only" if lanes else ""
    expect(
        f"{name}: each of {count} deleted barriers is reported",
        len(lanes) < count and not missed,
        f"missed {missed}" if missed else note,
    )


def main(archs: list[int]) -> int:
    """Return how many checks failed on the given architectures."""
    global _failures
    _failures = 0
    for arch in archs:
        runtime.install(arch).raise_on_error = False
        torch.manual_seed(0)
        arithmetic(arch)
        memory()
        barriers("reductions", reduce)
        barriers("matmul", lambda: multiply(64, 64, 32, "tf32"))
        if arch == 90:  # newer GPUs have no wgmma
            run_edited(lambda: multiply(64, 64, 32, "tf32"), lambda text: text.replace(FENCE, "// fence"))
            is_reported("deleted proxy fence before wgmma", "PROXY_FENCE")
        runtime.clear()
    return _failures


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:]] or [80, 90]) > 0)
