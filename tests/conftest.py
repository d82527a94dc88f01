"""Set environment variables before Triton is imported, and reduce matrices of parameters."""

import itertools
import os

# Loops of small operations run many times slower with several OpenMP threads on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():  # without a GPU, kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all cases of tests marked as pairs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep, for each test marked ``pairs``, only cases that cover all pairs of parameter values."""
    if config.getoption("--full"):
        return
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {id(item) for cases in matrices.values() for item in _without_new_pairs(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def _without_new_pairs(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that a greedy cover of all pairs leaves out."""
    values = [{(name, repr(value)) for name, value in c.callspec.params.items()} for c in cases]
    pairs = [set(itertools.combinations(sorted(chosen), 2)) for chosen in values]
    missing = set().union(*pairs)
    rest = list(range(len(cases)))
    while missing:
        best = max(rest, key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        rest.remove(best)
    return [cases[i] for i in rest]
