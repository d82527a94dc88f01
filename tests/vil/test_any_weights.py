"""Any structure of a weight file loads exactly, or is refused quickly by an error that vil.load documents."""

import copy
import inspect
import json
import random
import resource
import signal
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import vil
from tests.strategies import ODD_TENSORS, PICKLED, PLAIN, doubled
from vil.backbone import VisionLonghorn
from vil.timm_arguments import NOT_OF_A_MODEL

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_classes": 3}
SECONDS = 3.0  # that reading one file may take, where 0.03 are usual
DOCUMENTED = (ValueError, LookupError, FileNotFoundError, OSError, MemoryError)
ARGUMENTS = [*inspect.signature(VisionLonghorn.__init__).parameters][1:]


MOST = 2 << 30  # bytes that reading a file of some KB may take beside what is taken already


@contextmanager
def little_memory() -> Iterator[None]:
    """Let an allocation of gigabytes fail."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """What a checkpoint of the smallest model has for vil.load."""
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny", **SIZES)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    cfg = {"num_classes": 3, "input_size": (3, 16, 16), "mean": (0.1,) * 3, "std": (0.2,) * 3}
    cfg |= {"interpolation": "bicubic", "crop_pct": 0.9, "label_names": ["ash", "birch", "cedar"]}
    row = {"epoch": 1, "val_loss": 1.0, "top1": 50.0, "top5": 100.0}
    return {
        "arch": "vil_tiny",
        "model_args": SIZES | {"drop_rate": 0.0},
        "pretrained_cfg": cfg,
        "epoch": 1,
        "config": {"model": {"name": "vil_tiny", "depth": 1}, "run": {"seed": 0}},
        "run": {"step": 3, "history": [row]},
        "state_dict": model.state_dict(),
    }


def places(content: dict[str, Any]) -> list[tuple]:
    """Return the ways to everything that vil.load reads, and to what may be put beside it."""
    found = [(key,) for key in content] + [("extra",)]
    for key in ("model_args", "pretrained_cfg", "config", "run"):
        found += [(key, inner) for inner in [*content[key], "extra"]]
    found += [("model_args", key) for key in [*ARGUMENTS, *NOT_OF_A_MODEL]]
    found += [("pretrained_cfg", key) for key in ("label_offset", "architecture", "first_conv")]
    found += [("config", "model", "depth"), ("run", "history", 0)]
    found += [("run", "history", 0, key) for key in ("epoch", "top1", "extra")]
    metadata = content["state_dict"]._metadata
    found += [("metadata",), *(("metadata", key) for key in ("", "blocks.0.mixer", "extra"))]
    return found + [
        ("metadata", key, inner) for key in ("", "blocks.0.mixer") for inner in metadata[key]
    ]


def damaged(content: dict[str, Any], place: tuple, value: Any) -> dict[str, Any]:
    """Put a value in a place of a copy of the content."""
    state = OrderedDict(content["state_dict"])
    inner = copy.deepcopy({key: part for key, part in content.items() if key != "state_dict"})
    inner["metadata"] = copy.deepcopy(content["state_dict"]._metadata)
    whole = inner
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    state._metadata = whole.pop("metadata")
    return {"state_dict": state} | whole


class TooLong(BaseException):
    """Raised where a file takes too long; no Exception, which the code under test could catch."""


@contextmanager
def in_time() -> Iterator[None]:
    """Fail after some seconds of this process's own time, which others beside it do not lengthen."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def loads_exactly_or_is_refused(source: Path, weights: Any, what: str) -> str | None:
    """Load a file; return what the error says, or None if it loaded."""
    try:
        with in_time(), little_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = vil.load(source)
    except (Exception, TooLong) as error:
        told = str(error)
        if type(error) not in DOCUMENTED or not 0 < len(told) < 1000 or "\n" in told:
            pytest.fail(f"{what}: {type(error).__name__}, {told[:200]}")
        return told
    for name, value in model.state_dict().items():
        read = weights.get(name, value)
        if read.shape == value.shape:  # else resampled, which is what is documented
            assert read.is_floating_point() == value.is_floating_point(), f"{what}: {name} is cast"
            assert read.dtype not in (torch.bool, torch.complex64), f"{what}: {name} is cast"
            assert torch.equal(read.to(value.dtype), value), f"{what}: {name} is another"
        assert value.isfinite().all(), f"{what}: {name} is not finite"
    return None


def check_structure(content: dict[str, Any], path: Path, times: int) -> None:
    """Damage each place by some values."""
    loaded = 0
    for place in places(content):
        for number in random.Random(str(place)).sample(range(len(PICKLED)), times):
            value = PICKLED[number]()
            what = f"value {number} at {'.'.join(map(str, place))}"
            broken = damaged(content, place, value)
            torch.save(broken, path)
            weights = broken["state_dict"]
            weights = (
                weights if isinstance(weights, OrderedDict) and "norm.weight" in weights else {}
            )
            loaded += loads_exactly_or_is_refused(path, weights, what) is None
    assert loaded > 10  # where what was damaged is not read, or fits


def test_structure_of_checkpoints(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "whole.pt")
    assert loads_exactly_or_is_refused(tmp_path / "whole.pt", content["state_dict"], "") is None
    check_structure(content, tmp_path / "damaged.pt", 2)


@pytest.mark.nightly
def test_structure_of_checkpoints_thoroughly(content: dict[str, Any], tmp_path: Path) -> None:
    check_structure(content, tmp_path / "damaged.pt", len(PICKLED))


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors(kind: str, content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt"
    draw = random.Random(kind)
    for name in draw.sample([*content["state_dict"]], 6):
        broken = damaged(content, ("epoch",), 1)
        value = content["state_dict"][name]
        broken["state_dict"][name] = ODD_TENSORS[kind](value)
        torch.save(broken, path)
        told = loads_exactly_or_is_refused(path, broken["state_dict"], f"{kind} {name}")
        if kind in ("int8", "bool", "complex64", "1e300", "nan", "sparse", "expanded"):
            assert told is not None, f"{kind} {name} is taken"
            assert name in told, told


@pytest.mark.parametrize("kind", ["a directory", "weights beside it"])
def test_structure_of_config_json(kind: str, content: dict[str, Any], tmp_path: Path) -> None:
    whole = {"architecture": "vil_tiny", "num_classes": 3, "num_features": 8}
    whole |= {"pretrained_cfg": content["pretrained_cfg"], "model_args": content["model_args"]}
    save_file(dict(content["state_dict"]), tmp_path / "model.safetensors")
    source = tmp_path if kind == "a directory" else tmp_path / "model.safetensors"
    ways = [(key,) for key in [*whole, "extra", "label_names"]]
    ways += [("pretrained_cfg", key) for key in [*whole["pretrained_cfg"], "label_offset", "extra"]]
    ways += [("model_args", key) for key in [*ARGUMENTS, *NOT_OF_A_MODEL]]
    for place in ways:
        draw = random.Random(f"{kind} {place}")
        number = draw.randrange(len(PLAIN))
        config = copy.deepcopy(whole)
        (config[place[0]] if len(place) == 2 else config)[place[-1]] = PLAIN[number]()
        (tmp_path / "config.json").write_text(json.dumps(config))
        what = f"value {number} at {'.'.join(place)}"
        loads_exactly_or_is_refused(source, content["state_dict"], what)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        *(
            (("model_args", key), doubled(60), "10000 values")
            for key in ("ref_feat_shape", "recurrence")
        ),
        (("model_args", "weight_init"), doubled(60), "10000 values"),
        (("pretrained_cfg", "label_offset"), doubled(60), "label_offset must be a whole number"),
        (
            ("pretrained_cfg", "label_offset"),
            3,
            "model_args has num_classes 3, and its weights 0",
        ),
        (("metadata", "blocks.0.mixer", "recurrence"), doubled(60), "10000 values"),
        (("metadata", "", "grid_size"), [2, doubled(60)], "10000 values"),
        *((("model_args", key), True, f"model_args has {key}, which") for key in NOT_OF_A_MODEL),
        (
            ("model_args", "norm_layer"),
            "nope",
            "norm_layer must be None, a class, or a name that timm",
        ),
        (("model_args", "depth"), 10**9, "model_args has depth 1000000000, and its weights 1"),
        (("model_args", "d_state"), 2**20, "model_args has d_state 1048576, and its weights 16"),
        (("arch",), 5, "architecture must be text, got 5"),
        (("arch",), "vil_tiny.nope", "vil_tiny.nope"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_each_is_told(
    place: tuple, value: Any, told: str, content: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(damaged(content, place, value), tmp_path / "damaged.pt")
    error = loads_exactly_or_is_refused(tmp_path / "damaged.pt", {}, ".".join(place))
    assert error is not None
    assert told in error, error


def test_what_an_asked_dtype_or_device_cannot_hold(content: dict[str, Any], tmp_path: Path) -> None:
    broken = damaged(content, ("epoch",), 1)
    broken["state_dict"]["norm.weight"] = torch.full((8,), 1e30)
    torch.save(broken, tmp_path / "large.pt")
    assert vil.load(tmp_path / "large.pt").norm.weight[0] == 1e30
    with pytest.raises(ValueError, match=r"norm\.weight is not finite"):
        vil.load(tmp_path / "large.pt", dtype=torch.float16)
    with pytest.raises(ValueError, match="device meta holds no numbers"):
        vil.load(tmp_path / "large.pt", device="meta")
