"""Weights keep their reference grid with every program that saves and loads them."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torch.distributed.checkpoint as dcp
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call, stack_module_state, vmap
from torch.optim.swa_utils import AveragedModel

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}
WAYS: dict[str, Callable[[nn.Module, nn.Module, Path], nn.Module | None]] = {}


def small(**arguments: object) -> nn.Module:
    model = timm.create_model("vil_tiny", **(SMALL | arguments)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def way(load: Callable) -> Callable:
    WAYS[load.__name__] = load
    return load


@way
def state_dict(source: nn.Module, target: nn.Module, folder: Path) -> None:
    target.load_state_dict(source.state_dict())


@way
def assigned(source: nn.Module, target: nn.Module, folder: Path) -> None:
    target.load_state_dict(source.state_dict(), assign=True)


@way
def copied_in_place(source: nn.Module, target: nn.Module, folder: Path) -> None:
    for name, value in target.state_dict().items():
        value.copy_(source.state_dict()[name])


@way
def tensor_by_tensor(source: nn.Module, target: nn.Module, folder: Path) -> None:
    """Like transformers and accelerate."""
    for name, value in source.state_dict(keep_vars=True).items():
        owner, _, last = name.rpartition(".")
        setattr(target.get_submodule(owner), last, value)


@way
def distributed_checkpoint(source: nn.Module, target: nn.Module, folder: Path) -> None:
    dcp.save({"model": source.state_dict()}, checkpoint_id=folder)
    state = {"model": target.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    target.load_state_dict(state["model"])


@way
def distributed_state_dict(source: nn.Module, target: nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(source), checkpoint_id=folder)
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(target, state)


@way
def safetensors_model(source: nn.Module, target: nn.Module, folder: Path) -> None:
    safetensors.torch.save_model(source, str(folder / "model.safetensors"))
    safetensors.torch.load_model(target, folder / "model.safetensors")


@way
def accelerate_checkpoint(source: nn.Module, target: nn.Module, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).save_model(source, folder)
    accelerate.load_checkpoint_in_model(target, folder)


@way
def moving_average(source: nn.Module, target: nn.Module, folder: Path) -> nn.Module:
    average = ModelEmaV3(target, decay=0.0)
    average.update(source)
    return average.module


@way
def averaged_model(source: nn.Module, target: nn.Module, folder: Path) -> nn.Module:
    average = AveragedModel(target, use_buffers=True)
    average.update_parameters(source)
    return average.module


@way
def adapters(source: nn.Module, target: nn.Module, folder: Path) -> nn.Module:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["in_proj", "proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(copy.deepcopy(source), lora)
    tuned.save_pretrained(folder)
    target.load_state_dict(source.state_dict())
    loaded = peft.PeftModel.from_pretrained(target, folder).merge_and_unload()
    source.load_state_dict(tuned.merge_and_unload().state_dict())
    return loaded


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", WAYS)
def test_another_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    source, target, x = small(ref_feat_shape=(3, 5)), small(), torch.randn(2, 3, 48, 64)
    assert not torch.equal(target(x), source(x))
    target = WAYS[name](source, target, tmp_path) or target
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_converted_and_averaged_weights(dtype: torch.dtype) -> None:
    first, second = (small(ref_feat_shape=(3, 5)) for _ in range(2))
    x, other = torch.randn(2, 3, 48, 64), second.state_dict()
    mean = {name: (v.double() + other[name].double()) / 2 for name, v in first.state_dict().items()}
    target, rounded = small(), small(ref_feat_shape=(3, 5)).double()
    target.load_state_dict({name: value.to(dtype) for name, value in mean.items()})
    rounded.load_state_dict({name: value.to(dtype) for name, value in mean.items()})
    assert target.ref_feat_shape.tolist() == [3, 5]
    assert target.ref_feat_shape.dtype == torch.int64
    torch.testing.assert_close(target(x), rounded(x.double()).float(), rtol=1e-3, atol=1e-4)


def test_a_rounded_grid_is_refused() -> None:
    large = small(ref_feat_shape=(257, 4)).state_dict()
    with pytest.raises(RuntimeError, match=r"must be two positive integers.*bfloat16"):
        small().load_state_dict({name: value.bfloat16() for name, value in large.items()})


def test_functional_calls() -> None:
    models, x = [small(ref_feat_shape=(3, 5)) for _ in range(2)], torch.randn(2, 3, 48, 64)
    assert torch.equal(functional_call(small(), models[0].state_dict(), x), models[0](x))
    together = vmap(lambda *state: functional_call(models[0], state, x))(
        *stack_module_state(models)
    )
    for logits, model in zip(together, models, strict=True):
        torch.testing.assert_close(logits, model(x))


def test_inference_mode() -> None:
    """Its tensors have no version, so the grid is read when another tensor takes its place."""
    source, x = small(ref_feat_shape=(3, 5)), torch.randn(2, 3, 48, 64)
    expected = source(x)
    with torch.inference_mode():
        made = small()
        made.load_state_dict(source.state_dict())
        assert torch.equal(made(x), expected)
        for name, value in source.named_buffers():
            setattr(source, name, value.clone())
        assert torch.equal(source(x), expected)


def test_uninitialised_memory_is_written_again() -> None:
    model = small().to("meta").to_empty(device="cpu")
    model.init_weights()
    assert model.ref_feat_shape.tolist() == [4, 4]
