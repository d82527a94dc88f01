"""mmdetection's and mmsegmentation's registration, over stand-ins: neither imports without compiled mmcv."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from timm import create_model
from torch import Tensor, nn

from tests.documents.pages import block_with


class BaseModule(nn.Module):
    """What mmengine's does with its argument here."""

    def __init__(self, init_cfg: dict | None = None) -> None:
        super().__init__()
        self.init_cfg = init_cfg


class Registry(dict):
    """As mmengine's: a decorator with a call, and ``build`` from a dict."""

    def register_module(self) -> Callable:
        return lambda cls: self.setdefault(cls.__name__, cls)

    def build(self, cfg: dict) -> nn.Module:
        return self[cfg.pop("type")](**cfg)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, after the documented file was imported."""
    registry = Registry()
    for name, content in (("", {}), ("model", {"BaseModule": BaseModule}), ("registry", {})):
        module = ModuleType(f"mmengine.{name}".rstrip("."))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["mmengine.registry"].MODELS = registry
    exec(block_with("dense", "register_module"), {})
    return registry


def build(models: Registry, **arguments: object) -> nn.Module:
    cfg = {"type": "VisionLonghornPyramid", "model": "vil_test_pyramid", "img_size": 64}
    return models.build(cfg | arguments)


def test_the_documented_backbone_gives_a_tuple_of_maps(models: Registry, images: Callable) -> None:
    maps = build(models, out_indices=(1, 2, 3))(images(64, 96))
    assert isinstance(maps, tuple)
    assert [tuple(m.shape) for m in maps] == [(1, 32, 8, 12), (1, 32, 4, 6), (1, 32, 2, 3)]


def test_it_takes_weights_of_the_plain_model(models: Registry, tmp_path: Path) -> None:
    plain = create_model("vil_test", num_classes=5)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    backbone = build(models, weights=str(tmp_path / "plain.pt")).features.model

    def block(model: nn.Module) -> Tensor:
        return model.blocks[3].mixer.in_proj.weight

    assert torch.equal(block(backbone), block(plain))
