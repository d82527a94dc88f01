"""Threads give bit-identical results; two ranks have the gradients of one process."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

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


@pytest.mark.parametrize("name", MODELS)
def test_several_threads_at_once(name: str) -> None:
    model = small(name)
    expected = results(model)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: results(model), range(12)):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", MODELS[:3])
def test_mixed_precision_of_fsdp2_casts_parameters_and_images_only(name: str) -> None:
    """On another grid, every block also gets tables, which FSDP2 must not cast."""
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    cast = small(name).bfloat16()(images.bfloat16())
    sharded, policy = small(name), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*sharded.blocks, sharded):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        assert torch.equal(sharded(images), cast)
    finally:
        dist.destroy_process_group()


def gradients_of_two(rank: int, store: Path) -> None:
    """Compare gradients of two ranks, half a batch each, with one process; for DDP and FSDP2."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    own = images[2 * rank : 2 * rank + 2]
    for name in MODELS[:3]:
        alone, sharded = small(name), small(name)
        alone(images).square().mean().backward()
        expected = {key: p.grad for key, p in alone.named_parameters()}
        wrapped = DistributedDataParallel(small(name))
        wrapped(own).square().mean().backward()
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        sharded(own).square().mean().backward()
        for key, parameter in sharded.named_parameters():
            both = (parameter.grad.full_tensor(), wrapped.module.get_parameter(key).grad)
            for found in both:
                assert torch.allclose(found, expected[key], rtol=1e-4, atol=1e-5), (name, key)
    dist.barrier()
    os._exit(0)  # the usual end may abort a process while a thread of gloo still runs


@pytest.mark.ci
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(gradients_of_two, (tmp_path / "store",), nprocs=2)
