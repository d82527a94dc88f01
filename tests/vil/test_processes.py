"""Models copied, pickled, in threads and in other processes: the same bits as where they were made."""

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn

import vil  # noqa: F401  (registers the models)

MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny", "vil_tiny_pyramid"]
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


def in_a_fork_and_before(name: str) -> tuple[tuple[list[float], ...], ...]:
    model = small(name)
    expected = in_another(model)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(partial(in_another, model)).result(60), expected


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_copies(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = small(name)
    found = results(copied(model))
    assert all(map(torch.equal, found, results(model)))


@pytest.mark.parametrize("name", MODELS)
def test_several_threads_at_once(name: str) -> None:
    model = small(name)
    expected = results(model)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: results(model), range(12)):
            assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("name", MODELS)
def test_forked_process_that_uses_one_thread(name: str) -> None:
    """Out of a new process: once autograd has started threads, PyTorch differentiates nothing in a fork."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found, expected = pool.submit(in_a_fork_and_before, name).result(120)
    assert found == expected
