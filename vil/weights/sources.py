"""Where weights come from: a file, a folder or a hub, read without executing anything in it."""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import load_file
from timm.layers import to_2tuple
from timm.models import load_model_config_from_hf, load_state_dict_from_hf
from timm.models._hub import load_model_config_from_path, load_state_dict_from_path
from torch import Tensor

from vil.convert import is_official_vim
from vil.messages import counted, nfc, one_line, short_repr
from vil.preprocess import read_note
from vil.timm_models import NOT_OF_A_MODEL, is_own, similar_model
from vil.weights.archive import check_finite, check_plain, load_archive

_RAW = ("state_dict", "model")  # where files of training programs keep weights
_AVERAGED = ("state_dict_ema", "model_ema")
# Keys that train_imagenet.py, and no other program, writes into a checkpoint.
_CHECKPOINT = {"arch", "model_args", "pretrained_cfg", "epoch", "config", "run"}
_OFFICIAL_VIM = {192: "vim_tiny", 384: "vim_small", 768: "vim_base"}
_FINER_PATCHES = 27 * 27  # of the official fine-tuning: 224 px, a patch of 16 px every 8


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights, and their source's description of the model."""

    state_dict: dict[str, Tensor]
    origin: str
    """The source, as it was named."""
    averaged: bool = False
    """Whether these are averages over the steps of a training run."""
    architecture: str | None = None
    """timm's name of the model; None if the source does not state it."""
    model_args: dict[str, Any] = field(default_factory=dict)
    """Arguments with which timm's entry point makes that model, including the number of classes."""
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)
    """Classes and preprocessing in timm's terms, as far as the source states them: num_classes, input_size,
    mean, std, interpolation, crop_pct, crop_mode, label_names, label_offset."""
    epoch: int | None = None
    """Epochs of training; this field and the next two are set only for checkpoints of train_imagenet.py."""
    config: dict[str, Any] | None = None
    """All settings of the run that trained them."""
    history: list[dict[str, Any]] | None = None
    """That run's log, a row per epoch."""
    val_exceptions: tuple[str, ...] = ()
    """Images that are on the other side of ``val_fraction`` than their hash says; see ``FolderSource``."""
    steps_after: int = 0
    """Steps since that epoch: a checkpoint may be written in the middle of the next one."""

    @property
    def val_fraction(self) -> float:
        """Fraction of the images that the run held out by their hash; 0 if none or unknown."""
        return read_note(self.pretrained_cfg).get("val_fraction", 0.0)

    @property
    def age(self) -> str:
        """Epoch of the weights, such as "epoch 3" or "epoch 3 and 12 more steps"; "" if it is unknown."""
        steps = f" and {counted(self.steps_after, 'more step')}" if self.steps_after else ""
        return "" if self.epoch is None else f"epoch {self.epoch}{steps}"

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Class names in the order of the head's outputs; None if some or all are unknown."""
        names = self.pretrained_cfg.get("label_names")
        if isinstance(names, dict):  # timm's form if some outputs may lack a name
            numbers = [str(i) for i in range(len(names))]
            names = [names[i] for i in numbers] if names.keys() == {*numbers} else None
        return nfc(names) if isinstance(names, list | tuple) else None


def read_weights(source: str | Path, ema: bool = False) -> Weights:
    """Read weights from a file, a folder, a hub or timm.

    Args:
        source: One of the following.

            - A checkpoint of train_imagenet.py.
            - A folder from release.py, also as ``local-dir:FOLDER``.
            - A ``.safetensors`` file, described by a config.json beside it.
            - A file with a state dict, possibly as "state_dict" or "model", such as official Vision Mamba's.
            - ``hf-hub:NAME``.
            - The name of a timm model that has weights.
        ema: Read the averaged weights of a training program instead of the last ones.

    Raises:
        FileNotFoundError: If there is no such file, folder or model.
        OSError, MemoryError: If a file of torch.save cannot be read; its content may be intact.
        LookupError: If it has no averaged weights.
        ValueError: If any other source cannot be read or downloaded. If the source has no weights or some that are
            not finite, is damaged, or would execute code. If its description of the model has wrong types,
            arguments that do not identify a model, or another number of classes than the head.
    """
    name = str(source)
    scheme, _, place = name.partition(":")
    path = Path(place if scheme == "local-dir" else name)
    if path.is_file() and path.suffix != ".safetensors":
        return _from_file(path, ema)
    if ema:
        raise LookupError(f"{name} has no averaged weights (EMA); only checkpoint files have them")
    if scheme == "hf-hub":
        return _released(name, "", load_model_config_from_hf, load_state_dict_from_hf, place)
    if path.is_dir() or scheme == "local-dir":
        return _from_folder(path, name)
    if path.is_file():
        described = (path.parent / "config.json").is_file()
        read_config = load_model_config_from_path if described else None
        return _released(name, "as weights: ", read_config, lambda _: load_file(path), path.parent)
    if is_model_name(name):
        return _from_timm(name)
    raise FileNotFoundError(
        f"{name} is not a file, a folder, hf-hub:NAME or a timm model{similar_model(name)}"
    )


def is_model_name(source: str) -> bool:
    """Return whether a source is the name of a timm model, with one of its tags or without.

    timm reads vil_tiny.pt as a model with the tag pt, so the name of a missing file is no model name.
    """
    known = timm.is_model_pretrained(source) or ("." not in source and timm.is_model(source))
    return known and not Path(source).exists()


def no_weights(name: str) -> Weights:
    """Describe a timm model by its entry point alone, without weights."""
    return Weights(
        state_dict={},
        origin=name,
        architecture=name.partition(".")[0],
        pretrained_cfg=_relevant(timm.get_pretrained_cfg(name).to_dict()),
    )


def _from_file(path: Path, ema: bool) -> Weights:
    """Read what torch.save wrote, by train_imagenet.py or another program."""
    content = load_archive(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__} instead of a state dict")
    keys = _AVERAGED if ema else _RAW
    found = next((key for key in keys if isinstance(content.get(key), dict)), None)
    if ema and found is None:
        raise LookupError(f"{path} has no averaged weights ({' or '.join(_AVERAGED)})")
    state_dict = content[found] if found else content
    if not _is_state_dict(state_dict):
        names = [key for key in content if isinstance(key, str)]
        raise ValueError(
            f"{path} has no state dict, neither at its top level nor as {' or '.join(keys)}: "
            f"it has {', '.join(key[:50] for key in names[:5]) or 'nothing'}"
        )
    described: dict[str, Any] = {}
    if content.keys() >= _CHECKPOINT:
        described = {
            key: content[key] for key in ("model_args", "pretrained_cfg", "epoch", "config")
        }
        described["architecture"] = content["arch"]
        run = content["run"]
        _check_value(run, _NAMED, "run", str(path))
        described |= {key: run.get(key) for key in ("history", "val_exceptions")}
        described["steps_after"] = run.get("loss_count")
    elif isinstance(content.get("arch"), str) and timm.is_model(content["arch"]):
        described = {"architecture": content["arch"]}  # as timm's trainer leaves it
    return _weights(state_dict, str(path), described, averaged=ema)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def _weights(
    state_dict: dict[str, Tensor], origin: str, described: dict[str, Any], averaged: bool = False
) -> Weights:
    """Check weights and their description, and complete the description.

    Args:
        state_dict: State dict as it was read.
        origin: Source, as it was named.
        described: Fields of ``Weights`` that the source states.
        averaged: Whether the weights are averages over training steps.

    Raises:
        ValueError: If a weight is not finite, or the description is wrong.
    """
    if not _is_state_dict(state_dict):
        raise ValueError(f"{origin} has no state dict")
    check_plain(state_dict, origin)
    check_finite(state_dict, origin)
    described = {key: value for key, value in described.items() if value is not None}
    for key, form in _FORMS.items():
        if key in described:
            _check_value(described[key], form, key, origin)
    cfg = _relevant(described.get("pretrained_cfg", {}))
    for key, value in cfg.items():
        _check_value(value, _CFG_FORMS[key], f"pretrained_cfg.{key}", origin)
    try:
        read_note(cfg)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    for key in NOT_OF_A_MODEL:
        if key in described.get("model_args", {}):
            raise ValueError(
                f"{origin}: model_args must not contain {key}, which does not define a model"
            )
    prefix = _prefix(state_dict, origin)
    names = {name.removeprefix(prefix): name for name in state_dict if name.startswith(prefix)}
    origin += _describe_prefix(prefix, [name for name in state_dict if not name.startswith(prefix)])
    renamed = {new: state_dict[old] for new, old in names.items()}
    state_dict = _with_metadata(renamed, state_dict, names)
    if is_official_vim(state_dict):
        shape = tuple(state_dict["pos_embed"].shape) if "pos_embed" in state_dict else ()
        finer = {"patch_stride": 8} if shape[1:2] == (_FINER_PATCHES + 1,) else {}
        name = _OFFICIAL_VIM.get(shape[-1]) if shape else None
        described = described or {"architecture": name, "model_args": finer}
    described = {"model_args": {}} | described
    args, (channels, *size) = described["model_args"], cfg.get("input_size", (3, 224, 224))
    if args.get("img_size") is not None or args.get("in_chans") is not None:
        size = (args.get("in_chans") or channels, *to_2tuple(args.get("img_size") or size))
        _check_value(size, _SIZE, "in_chans and img_size of model_args", origin)
        cfg["input_size"] = size  # the description may lack it
    described["pretrained_cfg"] = cfg
    if is_own(described.get("architecture") or ""):
        # Set fc_norm from the weights: by default, another pooling would move the norm.
        place = any(key.startswith("fc_norm.") for key in state_dict)
        described["model_args"] = {"fc_norm": place} | described["model_args"]
        stated, head = described["model_args"].get("num_classes"), state_dict.get("head.weight")
        rows = 0 if head is None or not head.ndim else len(head) - cfg.get("label_offset", 0)
        if stated and rows and stated != rows:  # the head would silently be new
            raise ValueError(
                f"{origin}: model_args has num_classes {stated}, but head.weight has {rows} classes"
            )
    return Weights(state_dict=state_dict, origin=origin, averaged=averaged, **described)


def _with_metadata(
    state_dict: dict[str, Tensor], former: dict[str, Tensor], names: dict[str, str]
) -> dict[str, Tensor]:
    """Return a state dict with what PyTorch recorded about its modules, by their new names."""
    places = {old.rpartition(".")[0]: new.rpartition(".")[0] for new, old in names.items()}
    recorded = getattr(former, "_metadata", {})
    state_dict = OrderedDict(state_dict)
    state_dict._metadata = {places[key]: recorded[key] for key in recorded if key in places}
    return state_dict


@cache
def _first_layers() -> tuple[str, ...]:
    """Return the names of the first layer in timm's models."""
    cfgs = filter(None, map(timm.get_pretrained_cfg, timm.list_models()))
    layers = (cfg.first_conv for cfg in cfgs)
    return tuple({f"{layer}.weight" for layer in layers if isinstance(layer, str)})


def _prefix(names: Collection[str], origin: str) -> str:
    """Return the modules around the model, such as "model." of a Lightning module; "" if there are none.

    A model is where the first layer of one of timm's models is, however many other entries there are. If there is no
    such layer, it is the prefix that all names share.

    Raises:
        ValueError: If there are several models with the same names, such as a student and a teacher.
    """
    found = {
        name.removesuffix(layer)
        for layer in _first_layers()
        for name in names
        if f".{name}".endswith(f".{layer}")
    }
    depth = min((prefix.count(".") for prefix in found), default=0)
    outermost = [prefix for prefix in sorted(found) if prefix.count(".") == depth]
    if len(outermost) == 1:
        return outermost[0]
    inside = [{n.removeprefix(p) for n in names if n.startswith(p)} for p in outermost]
    if inside and all(own == inside[0] for own in inside):
        raise ValueError(
            f"{origin} has several models, named {' and '.join(outermost)}; save the state dict of one of them"
        )
    return _shared_prefix(names)


def _describe_prefix(prefix: str, left_out: list[str]) -> str:
    """Return what to say of a prefix, except for those of DDP and torch.compile, and of names without it."""
    named = re.sub(r"^(module\.|_orig_mod\.)+", "", prefix)
    parts = [f"names without {named[:50]}"] if named else []
    if left_out:
        parts.append(f"left out: {', '.join(name[:50] for name in left_out[:5])}")
        parts[-1] += f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return f" ({'; '.join(parts)})" if parts else ""


def _shared_prefix(names: Collection[str]) -> str:
    """Return the modules with which all names start. Without them, some names still have a module.

    So "head." of a mere head is no prefix.
    """
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = takewhile(lambda modules: len({*modules}) == 1, levels)
    prefix = "".join(f"{modules[0]}." for modules in shared)
    return prefix if any("." in name.removeprefix(prefix) for name in names) else ""


_Form = tuple[str, Callable[[Any], bool]]  # description for errors, and check of a value


def _check_value(value: Any, form: _Form, name: str, origin: str) -> None:
    words, holds = form
    if not holds(value):
        raise ValueError(f"{origin}: {name} must be {words}, got {short_repr(value)}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value))


def _is_row(value: Any) -> bool:
    numbers = ("val_loss", "top1", "top5", "val_images")
    averages = (f"ema_{key}" for key in ("loss", "top1", "top5"))
    return (
        _is_named(value)
        and _is_count(value.get("epoch"))
        and all(_is_number(value.get(key)) for key in numbers)
        and all(_is_number(value[key]) for key in averages if key in value)
    )


def _are(holds: Callable[[Any], bool], count: int | None = None) -> Callable[[Any], bool]:
    """Return a check for a list of ``count`` values (any number if None) that all pass ``holds``."""
    return lambda v: isinstance(v, list | tuple) and count in (None, len(v)) and all(map(holds, v))


_NAMED: _Form = ("a dictionary with string keys", _is_named)
_NUMBERS: _Form = ("a list of finite numbers", _are(_is_number))
_COUNT: _Form = ("a whole number of at least 0", _is_count)
_NAMES: _Form = (
    "a list of strings, or a dictionary from index to string",
    lambda v: _are(_is_text)(v) or (_is_named(v) and all(map(_is_text, v.values()))),
)
_SIZE: _Form = ("three whole numbers above 0", lambda v: _are(_is_count, 3)(v) and min(v) > 0)
_TEXT: _Form = ("a string", _is_text)
_FORMS: dict[str, _Form] = {
    "architecture": _TEXT,
    "model_args": _NAMED,
    "pretrained_cfg": _NAMED,
    "epoch": _COUNT,
    "config": _NAMED,
    "history": ("a list of rows with epoch, val_loss, top1, top5 and val_images", _are(_is_row)),
    "val_exceptions": ("a list of strings", _are(_is_text)),
    "steps_after": _COUNT,
}
_CFG_FORMS: dict[str, _Form] = {
    "num_classes": _COUNT,
    "input_size": _SIZE,
    "label_names": _NAMES,
    "label_offset": _COUNT,
    "mean": _NUMBERS,
    "std": _NUMBERS,
    "interpolation": _TEXT,
    "crop_pct": ("a finite number", _is_number),
    "crop_mode": _TEXT,
    "license": _TEXT,
    "notes": ("a string or a list of strings", lambda v: _is_text(v) or _are(_is_text)(v)),
}


def _from_folder(folder: Path, name: str) -> Weights:
    """Read a folder in timm's layout: config.json and weights."""
    for checkpoint in (folder / "best.pt", folder / "last.pt"):
        if checkpoint.is_file():
            raise ValueError(f"{name} is the folder of a run; pass its checkpoint, {checkpoint}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name} is not a folder with config.json and weights")
    what = "as a released model: "
    return _released(name, what, load_model_config_from_path, load_state_dict_from_path, folder)


def _released(
    name: str,
    what: str,
    read_config: Callable[[Any], tuple[dict[str, Any], str, dict[str, Any] | None]] | None,
    read_weights: Callable[[Any], dict[str, Tensor]],
    place: Any,
) -> Weights:
    """Read weights, and the description of their model in timm's config.json."""
    described: dict[str, Any] = {}
    try:
        if read_config is not None:
            cfg, architecture, model_args = read_config(place)
            classes = {"num_classes": cfg["num_classes"]} if "num_classes" in cfg else {}
            described = {"architecture": architecture, "pretrained_cfg": cfg}
            described["model_args"] = dict(model_args or {}) | classes
        state_dict = read_weights(place)
    except Exception as error:  # errors of JSON, safetensors, the unpickler or a download
        raise ValueError(f"{name} cannot be read {what}{one_line(error)}") from error
    return _weights(state_dict, name, described)


def _from_timm(name: str) -> Weights:
    """Get the weights that timm has of a model."""
    if not timm.is_model_pretrained(name):
        raise ValueError(f"timm has no weights for {name}; pass a file or a folder with weights")
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # also errors of a download
        raise ValueError(
            f"the weights of {name} cannot be loaded: {one_line(error)}; without a network, pass a file with them, or "
            f'see "Without a network" in docs/finetuning.md'
        ) from error
    cfg = model.pretrained_cfg | {"label_offset": None}  # timm has applied it
    return _weights(model.state_dict(), name, {"architecture": name, "pretrained_cfg": cfg})


def _relevant(pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
    return {key: pretrained_cfg[key] for key in _CFG_FORMS if pretrained_cfg.get(key) is not None}
