"""No pass reads a value from the device: each read would wait for the GPU, and CUDA graphs allow none.

Everything runs as on a GPU, in eager mode with the Triton backend, but launches are left out. So results are
arbitrary.
"""

from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vil.kernels import mixer, ops

pytest.importorskip("triton", reason="the Triton backend needs triton")

from vil.kernels.triton.launch import recording

READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "drop_path_rate": 0.2}


class NoReads(TorchDispatchMode):
    """Fail on operators that read values of tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in READS, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mixer, "is_eager", lambda *_: True)
    with ops.use_backend("triton"), recording() as launches:
        yield
    assert launches


def keeping(model: nn.Module, x: Tensor) -> Tensor:
    patches = model.patch_embed(x)
    return model.forward_patches(patches, torch.rand(len(x), 16).argsort(1)[:, :5])


SIZES = {"trained": (32, 32), "1.5 times": (48, 48), "2 times": (64, 64), "sides differ": (48, 24)}
CASES: dict[str, tuple[dict, tuple[int, int], Callable[[nn.Module, Tensor], Tensor]]] = {
    **{name: ({}, size, nn.Module.__call__) for name, size in SIZES.items()},
    "padded": ({"dynamic_img_pad": True}, (45, 61), nn.Module.__call__),
    "overlapping": ({"patch_stride": 4}, (48, 48), nn.Module.__call__),
    "grid_aware='dt'": ({"grid_aware": "dt"}, (48, 48), nn.Module.__call__),
    "dropped": ({"patch_drop_rate": 0.5}, (32, 32), nn.Module.__call__),
    "kept": ({}, (32, 32), keeping),
}


def train(model: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with NoReads():
        call(model, x).sum().backward()
    assert x.grad is not None
    with NoReads(), torch.no_grad():
        call(model.eval(), x)


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_exact", "vim_tiny"])
@pytest.mark.parametrize("class_token", [True, False], ids=["class token", "none"])
@pytest.mark.parametrize("case", CASES)
def test_backbone(case: str, class_token: bool, name: str) -> None:
    options, size, call = CASES[case]
    pool = {"class_token": class_token, "global_pool": "token" if class_token else "avg"}
    model = timm.create_model(name, **SMALL, **pool, **options).train()
    train(model, torch.randn(2, 3, *size, requires_grad=True), call)


def test_pyramid() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return sum(made.sum() for made in model.forward_intermediates(x, intermediates_only=True))

    model = timm.create_model("vil_tiny_exact_pyramid", **SMALL).train()
    for size in SIZES.values():
        train(model.train(), torch.randn(2, 3, *size, requires_grad=True), call)
