"""Models copied, pickled, in threads and in other processes: the same bits as where they were made."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn

import vil  # noqa: F401  (registers the models)

MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny", "vil_tiny_pyramid"]
LAST_RESORT = 900  # seconds, should a process hang
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_classes": 5}


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL)


def results(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return logits and the gradient of the images."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    logits = model(images)
    return logits.detach(), torch.autograd.grad(logits.square().sum(), images)[0]


def in_another(model: nn.Module) -> tuple[list[float], ...]:
    torch.set_num_threads(1)
    return tuple(found.flatten().tolist() for found in results(model))


def in_forks_and_before(names: list[str]) -> list[tuple[tuple[list[float], ...], ...]]:
    found = []
    for model in map(small, names):
        expected = in_another(model)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            found.append((pool.submit(partial(in_another, model)).result(LAST_RESORT), expected))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_several_threads_at_once(name: str) -> None:
    model = small(name)
    expected = results(model)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: results(model), range(12)):
            assert all(map(torch.equal, found, expected))


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_forked_process_that_uses_one_thread() -> None:
    """Out of a new process: once autograd has started threads, PyTorch differentiates nothing in a fork."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(in_forks_and_before, MODELS).result(LAST_RESORT)
    for name, (in_fork, expected) in zip(MODELS, found, strict=True):
        assert in_fork == expected, name
