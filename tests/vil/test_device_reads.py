"""No pass reads a value from the device: each read would wait for the GPU, and CUDA graphs allow none.

Everything runs as on a GPU, in eager mode with the Triton backend, but launches are left out. So results are
arbitrary.
"""

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


def results(model: nn.Module, x: Tensor, kind: str) -> list[Tensor]:
    if kind == "kept":
        patches = model.patch_embed(x)
        return [model.forward_patches(patches, torch.rand(len(x), 16).argsort(1)[:, :5])]
    return [model(x)] if kind != "pyramid" else model.forward_intermediates(x)[1]


CASES = {  # options and sizes
    "plain": ({}, [(32, 32), (48, 48), (64, 64), (48, 24)]),
    "without class token": ({"class_token": False, "global_pool": "avg"}, [(32, 32), (48, 24)]),
    "padded": ({"dynamic_img_pad": True}, [(45, 61)]),
    "overlapping": ({"patch_stride": 4}, [(48, 48)]),
    "grid_aware='dt'": ({"grid_aware": "dt"}, [(48, 48)]),
    "dropped": ({"patch_drop_rate": 0.5}, [(32, 32)]),
    "kept": ({}, [(32, 32)]),
    "pyramid": ({}, [(32, 32), (48, 48), (64, 64), (48, 24)]),
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_exact", "vim_tiny"])
@pytest.mark.parametrize("kind", CASES)
def test_nothing_is_read(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer, "is_eager", lambda *_: True)
    options, sizes = CASES[kind]
    model = timm.create_model(name + "_pyramid" * (kind == "pyramid"), **SMALL, **options)
    with ops.use_backend("triton"), recording() as launches:
        for size in sizes:
            x = torch.randn(2, 3, *size, requires_grad=True)
            with NoReads():
                sum(made.sum() for made in results(model.train(), x, kind)).backward()
            with NoReads(), torch.no_grad():
                results(model.eval(), x, kind)
    assert launches
