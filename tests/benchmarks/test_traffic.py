"""The count of bytes moved: of a block, and of the kernels as they access memory in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

traffic = pytest.importorskip("benchmarks.traffic")

from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from vil.kernels import ops  # noqa: E402
from vil.kernels.triton import (  # noqa: E402
    conv,
    exact_keys,
    longhorn_exact,
    sequential,
    sequential_tokens,
)
from vil.kernels.triton.launch import Launch, launch  # noqa: E402

BOTH_WAYS = (sequential_tokens, sequential, exact_keys, longhorn_exact, conv)


def bytes_by_tensor(kernel: traffic.Kernel, tokens: int) -> dict[tuple[str, bool], int]:
    """Return bytes per token, rounded, by name and whether written."""
    return {(move.what, move.written): round(move.bytes / tokens) for move in kernel.moves}


@pytest.fixture(scope="module")
def counted() -> tuple[int, dict[str, list[traffic.Kernel]]]:
    return traffic.count("vil_tiny", 64)


def one(kernels: list[traffic.Kernel], name: str) -> traffic.Kernel:
    (found,) = (kernel for kernel in kernels if kernel.name == name)
    return found


def test_a_scan_moves_its_inputs_and_results(counted) -> None:
    tokens, passes = counted
    E, L = 384, 17
    for name, sums in (("inference", 1), ("training forward", 2)):
        scan = bytes_by_tensor(one(passes[name], "sequential._forward_kernel"), tokens)
        assert scan["x", False] == 2 * 2 * E
        assert scan["z", False] == scan["out", True] == 2 * E
        assert scan["y", True] == sums * scan["y", False]
        # Every 16 tokens, 16 states of 4 bytes in both directions.
        states = round(2 * E * 16 * 4 * math.ceil(L / 16) / L)
        assert scan.get(("states", True), 0) == (states if sums == 2 else 0)


def test_forward_comes_first_and_backward_with_it(counted) -> None:
    _, passes = counted
    forward = passes["training forward"]
    assert passes["forward + backward"][: len(forward)] == forward
    one(passes["forward + backward"], "sequential._backward_kernel")
    assert not any("backward" in kernel.name for kernel in forward)


def test_the_peer_attends_in_one_kernel() -> None:
    tokens, passes = traffic.count(traffic.PEER, 64)
    (attention,) = (k for k in passes["inference"] if "attention" in k.name)
    queries, keys, values, result = [move for move in attention.moves if move.bytes == tokens * 384]
    assert [move.written for move in (queries, keys, values, result)] == [False] * 3 + [True]


def test_every_kernel_has_instructions_counted_for_it(counted) -> None:
    from benchmarks.kernel_variants import VARIANTS

    names = {variant.name for variant in VARIANTS}
    for model in ("vil_tiny", "vil_tiny_exact", "vim_tiny"):
        _, passes = counted if model == "vil_tiny" else traffic.count(model, 64)
        launches = [k.launch for kernels in passes.values() for k in kernels if k.launch]
        assert len(launches) >= 8
        assert {traffic.variant_name(noted) for noted in launches} <= names


def test_the_tables_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    traffic.main(["vil_tiny_exact", "--img-size", "64", "--every-kernel"])
    parts = capsys.readouterr().out.split("vil_tiny_exact, ")[1:]
    assert len(parts) == len(traffic.PASSES)
    last, _, totals = parts[-1].partition("| block of |")
    total = {
        row[1].strip(): float(row[2])
        for row in (line.strip("|").split("|") for line in totals.splitlines())
        if row[0].strip() == "vil_tiny_exact"
    }
    for name, part in zip(traffic.PASSES, (*parts[:-1], last), strict=True):
        rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")]
        assert sum(float(row[3]) for row in rows[1:]) == pytest.approx(total[name], abs=len(rows))


class Accesses:
    """Addresses that a kernel loads and stores, of every element and as often as it does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.loaded: list[np.ndarray] = []
        self.stored: list[np.ndarray] = []
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def noting_load(builder, pointers, mask, *rest):
            self.loaded.append(pointers.data[mask.data.astype(bool)])
            return load(builder, pointers, mask, *rest)

        def noting_store(builder, pointers, value, mask, *rest):
            self.stored.append(pointers.data[mask.data.astype(bool)])
            return store(builder, pointers, value, mask, *rest)

        patch.setattr(InterpreterBuilder, "create_masked_load", noting_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", noting_store)

    def of(self, tensor: Tensor, accesses: list[np.ndarray]) -> np.ndarray:
        """Return the accesses between the first and the last element of a tensor."""
        first = tensor.data_ptr()
        steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = first + (sum(steps) + 1) * tensor.element_size()
        return np.concatenate([some[(some >= first) & (some < end)] for some in accesses])

    def clear(self) -> None:
        """Forget them."""
        self.loaded.clear()
        self.stored.clear()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hold every launch to what is said of its kernel; return the names of those that were."""
    accesses, names = Accesses(monkeypatch), set()

    def watched(kernel, programs: int, tensor: Tensor, **arguments) -> None:
        accesses.clear()
        launch(kernel, programs, tensor, **arguments)
        noted = Launch(kernel, arguments)
        names.add(traffic.kernel_name(noted))
        for name, given, reads, writes in traffic.touches(noted):
            place = f"{traffic.kernel_name(noted)} {name}"
            for noted_of, times in ((accesses.loaded, reads), (accesses.stored, writes)):
                found = accesses.of(given, noted_of)
                if times == 0:
                    assert not found.size or name == "scratch", place
                    continue
                elements = np.unique(found).size
                assert elements >= 0.5 * given.numel(), place  # rows may have padding
                if noted_of is accesses.stored or name == "y":
                    assert found.size == times * elements, place

    for module in BOTH_WAYS:
        monkeypatch.setattr(module, "launch", watched)
    return names


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")
@pytest.mark.parametrize(
    "recurrence", ["longhorn", "longhorn_exact", pytest.param("mamba", marks=pytest.mark.slow)]
)
def test_kernels_access_what_is_counted(recurrence: str, checked: set[str]) -> None:
    B, L, E, M, R = 1, 16, 32, 4, 2

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    generator = torch.Generator().manual_seed(0)
    A = -randn(2, E, M).detach().exp() if recurrence == "mamba" else None
    with ops.use_backend("triton"):
        out, *_ = torch.ops.vil.mixer(
            randn(B, L, 2 * E), randn(2, E, 4), randn(2, E), randn(2, R + 2 * M, E),
            randn(2, E, R), randn(2, E), A, randn(2, E), recurrence, True,
        )  # fmt: skip
        out.sum().backward()
    file = "longhorn_exact" if recurrence == "longhorn_exact" else "sequential"
    assert {
        f"{name}._{way}_kernel" for name in (file, "conv") for way in ("forward", "backward")
    } < checked
