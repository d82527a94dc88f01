"""Damaged weight files load exactly, or are refused by an error that vil.load documents."""

import copy
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import vil
from tests.strategies import ODD_TENSORS
from vil.timm_models import NOT_OF_A_MODEL

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_classes": 3}


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """Return what vil.load reads from a checkpoint of the smallest model."""
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny", **SIZES)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    cfg = {"num_classes": 3, "input_size": (3, 16, 16), "mean": (0.1,) * 3, "std": (0.2,) * 3}
    cfg |= {"interpolation": "bicubic", "crop_pct": 0.9, "label_names": ["ash", "birch", "cedar"]}
    row = {"epoch": 1, "val_loss": 1.0, "top1": 50.0, "top5": 100.0, "val_images": 9}
    return {
        "arch": "vil_tiny",
        "model_args": SIZES | {"drop_rate": 0.0},
        "pretrained_cfg": cfg,
        "epoch": 1,
        "config": {"model": {"name": "vil_tiny", "depth": 1}, "run": {"seed": 0}},
        "run": {"step": 3, "history": [row]},
        "state_dict": model.state_dict(),
    }


def with_value(content: dict[str, Any], place: tuple, value: Any) -> dict[str, Any]:
    """Return a copy of the content with another value in one place; the weights are shared."""
    whole = copy.deepcopy({key: part for key, part in content.items() if key != "state_dict"})
    inner = whole = whole | {"state_dict": OrderedDict(content["state_dict"])}
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return whole


def loads_exactly_or_is_refused(source: Path, weights: dict[str, torch.Tensor]) -> str | None:
    """Load a file; return what the error says, or None if it loaded."""
    try:
        model = vil.load(source)
    except ValueError as error:
        told = str(error)
        assert 0 < len(told) < 1000
        assert "\n" not in told
        return told
    for name, value in model.state_dict().items():
        read = weights[name]
        if read.shape == value.shape:  # else it is resampled, as documented
            assert read.is_floating_point() == value.is_floating_point(), f"{name} is cast"
            assert torch.equal(read.to(value.dtype), value), f"{name} is another"
        assert value.isfinite().all(), f"{name} is not finite"
    return None


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors(kind: str, content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt"
    names = [name for name in content["state_dict"] if name != "ref_feat_bits"]  # no weight
    for name in random.Random(kind).sample(names, 6):
        broken = with_value(content, ("state_dict", name), ODD_TENSORS[kind](content["state_dict"][name]))
        torch.save(broken, path)
        told = loads_exactly_or_is_refused(path, broken["state_dict"])
        if kind in ("int8", "bool", "complex64", "1e300", "nan", "sparse", "expanded"):
            assert told is not None, f"{kind} {name} is taken"
            assert name in told, told


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("pretrained_cfg", "label_offset"), 3, "label_offset must be below the 3 rows"),
        (("pretrained_cfg", "mean"), "grey", "pretrained_cfg.mean must be a list of finite"),
        (("pretrained_cfg", "input_size"), (3, 16), "must be three whole numbers above 0"),
        (("pretrained_cfg", "crop_pct"), float("nan"), "must be a finite number, got nan"),
        *((("model_args", key), True, f"must not contain {key}, which") for key in NOT_OF_A_MODEL),
        (("model_args", "norm_layer"), "nope", "norm_layer must be None, a class, or a name"),
        (("model_args", "num_classes"), 4, "num_classes 4, but head.weight has 3"),
        (("model_args", "d_state"), 32, "size mismatch for blocks.0.mixer.x_proj_weight"),
        (("model_args",), [1], "model_args must be a dictionary"),
        (("run", "history", 0, "epoch"), "first", "history must be a list of rows"),
        (("arch",), 5, "architecture must be a string, got 5"),
        (("arch",), "vil_tiny.nope", "vil_tiny.nope"),
        (("state_dict",), {}, "has no state dict"),
        (("state_dict",), {"norm.weight": 1}, "has no state dict"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_each_is_told(place: tuple, value: Any, told: str, content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "whole.pt")
    assert loads_exactly_or_is_refused(tmp_path / "whole.pt", content["state_dict"]) is None
    torch.save(with_value(content, place, value), tmp_path / "damaged.pt")
    error = loads_exactly_or_is_refused(tmp_path / "damaged.pt", {})
    assert error is not None
    assert told in error, error


def test_what_an_asked_dtype_or_device_cannot_hold(content: dict[str, Any], tmp_path: Path) -> None:
    large = torch.full((8,), 1e30)
    torch.save(with_value(content, ("state_dict", "norm.weight"), large), tmp_path / "large.pt")
    assert vil.load(tmp_path / "large.pt").norm.weight[0] == 1e30
    with pytest.raises(ValueError, match=r"norm\.weight is not finite"):
        vil.load(tmp_path / "large.pt", dtype=torch.float16)
    with pytest.raises(ValueError, match="device meta, which stores no values"):
        vil.load(tmp_path / "large.pt", device="meta")
