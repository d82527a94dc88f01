"""Weights keep their reference grid with every program that saves and loads them."""

import copy
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_averages(dtype: torch.dtype) -> None:
    """Averages of one grid are of that grid, however they are made, and those of several are refused."""
    wide, x = {"ref_feat_shape": (257, 14)}, torch.randn(1, 3, 48, 64)
    first, second = (small(**wide).state_dict() for _ in range(2))
    exact, other = small(**wide).double(), small(ref_feat_shape=(255, 14)).state_dict()
    for number in (2, 3, 6, 10):
        for last in (1 / number, 0.9):
            terms = [*[(1 - last) / (number - 1)] * (number - 1), last]
            weights = [first] * (number - 1) + [second]
            pairs = [*zip(weights, terms, strict=True)]
            mean = {name: sum(w[name].to(dtype) * t for w, t in pairs) for name in first}
            target = small()
            target.load_state_dict(mean)
            exact.load_state_dict(mean)
            assert target.ref_feat_shape == (257, 14)
            torch.testing.assert_close(target(x), exact(x.double()).float(), rtol=1e-3, atol=1e-4)
    for share in (0.1, 0.5, 0.9):
        mixed = {n: share * v.to(dtype) + (1 - share) * other[n] for n, v in first.items()}
        with pytest.raises(RuntimeError, match="weights of different grids cannot be averaged"):
            small().load_state_dict(mixed)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0, 0.0])
def test_a_grid_of_other_numbers_is_refused(value: float) -> None:
    weights = small().state_dict()
    shape = weights["ref_feat_bits"].shape
    for bits in (torch.full(shape, value), torch.tensor([4, 4]), torch.ones(shape) * 1j):
        with pytest.raises(RuntimeError, match="must be the binary digits of one grid"):
            small().load_state_dict(weights | {"ref_feat_bits": bits})


def test_moving_averages() -> None:
    source, x = small(ref_feat_shape=(14, 13)), torch.randn(1, 3, 48, 64)
    for decay in (0.9, 0.99, 0.9998, 0.99999):
        for average in (
            AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True),
            AveragedModel(source, avg_fn=get_ema_avg_fn(decay), use_buffers=True),
            AveragedModel(source, use_buffers=True),
            ModelEmaV3(source, decay=decay),
            ModelEmaV2(source, decay=decay),
        ):
            for _ in range(5):
                getattr(average, "update_parameters", getattr(average, "update", None))(source)
            assert average.module.ref_feat_shape == (14, 13)
            torch.testing.assert_close(average.module(x), source(x), rtol=1e-3, atol=1e-4)


TOLD = "ref_feat_bits was written, but not by load_state_dict; call the model once"
PROGRAMS: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "compile": lambda model, x: torch.compile(model, fullgraph=True, backend="aot_eager"),
    "script": lambda model, x: torch.jit.script(model),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_loaded_weights(program: str, tmp_path: Path) -> None:
    """Programs made right after loading have the weights' grid, or there is an error."""
    source, x = small(ref_feat_shape=(3, 5), depth=1), torch.randn(1, 3, 48, 64)
    expected = source(x)
    right = set()
    for load in (state_dict, assigned, copied_in_place, tensor_by_tensor):
        target = small(depth=1)
        load(source, target, tmp_path)
        try:
            torch.testing.assert_close(PROGRAMS[program](target, x)(x), expected)
            right.add(load)
        except RuntimeError as error:
            if not re.search(TOLD, str(error)):
                raise
    assert right >= {state_dict, assigned, tensor_by_tensor}
    if program == "compile":
        made = PROGRAMS[program](small(depth=1), x)
        made(x)
        made.load_state_dict({f"_orig_mod.{n}": v for n, v in source.state_dict().items()})
        torch.testing.assert_close(made(x), expected)


@pytest.mark.ci
def test_onnx_of_loaded_weights(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    source, x = small(ref_feat_shape=(3, 5), depth=1), torch.randn(1, 3, 48, 64)
    for load in (state_dict, assigned, tensor_by_tensor):
        target = small(depth=1, exportable=True)
        load(source, target, tmp_path)
        path = tmp_path / f"{load.__name__}.onnx"
        torch.onnx.export(target, (x,), path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path)
        (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), source(x), rtol=1e-3, atol=1e-4)


def test_a_forward_pass_beside_an_export() -> None:
    """PyTorch's flag of an export is one for all threads: here it changes in the middle of a forward pass."""
    model, x = small(depth=1, exportable=True), torch.randn(1, 3, 48, 64)
    expected, begun, end = model(x), threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            end.wait(60)
            return x + 1

    with ThreadPoolExecutor(1) as pool:
        export = pool.submit(torch.export.export, Waiting(), (x,))
        begun.wait(60)
        model.blocks[0].norm.register_forward_pre_hook(lambda *_: (end.set(), export.result())[0])
        torch.testing.assert_close(model(x), expected)


def test_functional_calls() -> None:
    models, x = [small(ref_feat_shape=(3, 5)) for _ in range(2)], torch.randn(2, 3, 48, 64)
    assert torch.equal(functional_call(small(), models[0].state_dict(), x), models[0](x))
    together = vmap(lambda *state: functional_call(models[0], state, x))(*stack_module_state(models))
    for logits, model in zip(together, models, strict=True):
        torch.testing.assert_close(logits, model(x))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """It copies the weights of the first process at its start, and buffers in every step."""
    source, model, x = small(ref_feat_shape=(3, 5)), small(), torch.randn(2, 3, 48, 64)
    expected = source(x)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        copied_in_place(source, model, tmp_path)
        wrapped = DistributedDataParallel(model)
        for _ in range(3):
            torch.testing.assert_close(wrapped(x), expected)
        other = small()
        copied_in_place(other, model, tmp_path)
        torch.testing.assert_close(wrapped(x), other(x))
    finally:
        dist.destroy_process_group()


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
    assert model.ref_feat_shape == (4, 4)
