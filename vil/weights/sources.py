"""Where weights come from: a file, a folder or a hub, read without executing anything in it."""

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import timm
from safetensors.torch import load_file
from timm.layers import to_2tuple
from timm.models import load_model_config_from_hf, load_state_dict_from_hf
from timm.models._hub import load_model_config_from_path, load_state_dict_from_path
from torch import Tensor

from vil.convert import is_official_vim, with_own_names
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


class _Form(NamedTuple):
    """A kind of source."""

    words: str
    """What it is, for errors."""
    matches: Callable[[str, Path], bool]
    """Recognise a source by its name and its path; the first form that matches counts."""
    read: Callable[[str, Path], tuple[dict[str, Any], Any]]
    """Return fields of a checkpoint that describe the model, and what should be or contain its weights."""
    hint: str = ""
    """What to do if it cannot be read."""


def read_weights(source: str | Path, ema: bool = False) -> Weights:
    """Read weights from a file, a folder, a hub or timm.

    Args:
        source: Same as in ``vil.load``.
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
    path = Path(name.removeprefix("local-dir:"))
    form = next((form for form in _FORMS if form.matches(name, path)), None)
    if form is None:
        runs = [file for file in (path / "best.pt", path / "last.pt") if file.is_file()]
        run = f"; it is the folder of a run: pass its checkpoint, {runs[0]}" if runs else ""
        raise FileNotFoundError(
            f"{name} is not a file, a folder with config.json and weights, hf-hub:NAME or a timm "
            f"model{run or similar_model(name)}"
        )
    is_torch_file = form.read is _read_torch_file
    try:  # only files of torch.save have averaged weights, so read no other source in vain
        described, content = form.read(name, path) if is_torch_file or not ema else ({}, {})
    except Exception as error:  # errors of JSON, safetensors, the unpickler or a download
        if is_torch_file:  # load_archive keeps errors of the disk apart
            raise
        message = f"{name} cannot be read as {form.words}: {one_line(error)}{form.hint}"
        raise ValueError(message) from error
    keys = _AVERAGED if ema else _RAW
    content = content if isinstance(content, dict) else {type(content).__name__: content}
    wrapped = [content[key] for key in keys if isinstance(content.get(key), dict)]
    if ema and not wrapped:
        raise LookupError(f"{name} has no averaged weights ({' or '.join(_AVERAGED)})")
    state_dict = wrapped[0] if wrapped else content
    if not state_dict or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state_dict.items()
    ):
        names = ", ".join([key[:50] for key in content if isinstance(key, str)][:5]) or "nothing"
        raise ValueError(
            f"{name} has no state dict, neither at its top level nor as {' or '.join(keys)}: it has {names}"
        )
    check_plain(state_dict, name)
    check_finite(state_dict, name)
    try:
        state_dict, without = _inner_model(state_dict)
        fields = _description(state_dict, described)
        state_dict = with_own_names(state_dict) if is_official_vim(state_dict) else state_dict
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return Weights(state_dict=state_dict, origin=name + without, averaged=ema, **fields)


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


def _read_torch_file(name: str, path: Path) -> tuple[dict[str, Any], Any]:
    content = load_archive(path)
    fields = content if isinstance(content, dict) else {}
    if fields.keys() >= _CHECKPOINT:
        return fields, content
    arch = fields.get("arch")  # timm's trainer leaves it
    return {"arch": arch} if isinstance(arch, str) and timm.is_model(arch) else {}, content


def _read_timm(name: str, path: Path) -> tuple[dict[str, Any], Any]:
    if not timm.is_model_pretrained(name):
        raise ValueError(f"timm has no weights for {name}")
    model = timm.create_model(name, pretrained=True)
    cfg = model.pretrained_cfg | {"label_offset": None}  # timm has applied it
    return {"arch": name, "pretrained_cfg": cfg}, model.state_dict()


def _fields_of_config(cfg: dict[str, Any], architecture: str, model_args: dict[str, Any] | None) -> dict[str, Any]:
    """Return what timm reads from a config.json as fields of a checkpoint."""
    classes = {"num_classes": cfg["num_classes"]} if "num_classes" in cfg else {}
    model_args = dict(model_args or {}) | classes
    return {"arch": architecture, "pretrained_cfg": cfg, "model_args": model_args}


_NO_NETWORK = '; without a network, pass a file with weights, or see "Without a network" in docs/finetuning.md'
_FORMS = (
    _Form(
        "a torch.save file",
        lambda name, path: path.is_file() and path.suffix != ".safetensors",
        _read_torch_file,
    ),
    _Form(
        "a .safetensors file",
        lambda name, path: path.is_file(),
        lambda name, path: (
            _fields_of_config(*load_model_config_from_path(path.parent))
            if (path.parent / "config.json").is_file()
            else {},
            load_file(path),
        ),
    ),
    _Form(
        "a released model",
        lambda name, path: (path / "config.json").is_file(),
        lambda name, path: (
            _fields_of_config(*load_model_config_from_path(path)),
            load_state_dict_from_path(path),
        ),
    ),
    _Form(
        "a model of the hub",
        lambda name, path: name.startswith("hf-hub:"),
        lambda name, path: (
            _fields_of_config(*load_model_config_from_hf(name.removeprefix("hf-hub:"))),
            load_state_dict_from_hf(name.removeprefix("hf-hub:")),
        ),
        _NO_NETWORK,
    ),
    _Form("weights of timm", lambda name, path: is_model_name(name), _read_timm, _NO_NETWORK),
)


def _inner_model(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Remove the names of the modules around the model, such as "model." of a Lightning module.

    A model is where the first layer of one of timm's models is, however many other entries there are. If there is no
    such layer, it is in the modules that all names share.

    Returns:
        The weights of the model, with the records that PyTorch has of its modules. And what to say of the removed
        names, except for those of DDP and torch.compile, and of the entries that are left out.

    Raises:
        ValueError: If there are several models with the same names, such as a student and a teacher.
    """
    layers = [
        name.removesuffix(layer) for layer in _first_layers() for name in state_dict if f".{name}".endswith(f".{layer}")
    ]
    depth = min((prefix.count(".") for prefix in layers), default=0)
    outermost = sorted({prefix for prefix in layers if prefix.count(".") == depth})
    models = [{n.removeprefix(p) for n in state_dict if n.startswith(p)} for p in outermost]
    if len(models) > 1 and all(names == models[0] for names in models):
        raise ValueError(
            f"there are several models, named {' and '.join(outermost)}; save the state dict of one of them"
        )
    levels = zip(*(name.split(".")[:-1] for name in state_dict), strict=False)
    shared = takewhile(lambda modules: len({*modules}) == 1, levels)
    prefix = outermost[0] if len(models) == 1 else "".join(f"{level[0]}." for level in shared)

    inner = OrderedDict((n.removeprefix(prefix), v) for n, v in state_dict.items() if n.startswith(prefix))
    inner._metadata = {
        f"{module}.".removeprefix(prefix).removesuffix("."): record
        for module, record in getattr(state_dict, "_metadata", {}).items()
        if f"{module}.".startswith(prefix)
    }
    named = re.sub(r"^(module\.|_orig_mod\.)+", "", prefix)
    parts = [f"names without {named[:50]}"] if named else []
    if left_out := [name[:50] for name in state_dict if not name.startswith(prefix)]:
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        parts.append(f"left out: {', '.join(left_out[:5])}{more}")
    return inner, f" ({'; '.join(parts)})" if parts else ""


@cache
def _first_layers() -> tuple[str, ...]:
    """Return the names of the first layer in timm's models."""
    cfgs = filter(None, map(timm.get_pretrained_cfg, timm.list_models()))
    layers = (cfg.first_conv for cfg in cfgs)
    return tuple({f"{layer}.weight" for layer in layers if isinstance(layer, str)})


def _description(state_dict: dict[str, Tensor], content: dict[str, Any]) -> dict[str, Any]:
    """Check the description of a model, and complete it by its weights.

    Args:
        state_dict: Weights of the model alone.
        content: Fields of a checkpoint of train_imagenet.py, or some of them.

    Returns:
        Fields of ``Weights``.

    Raises:
        ValueError: If a value has a wrong type or does not fit the weights.
    """
    run = _checked(content.get("run", {}), _NAMED, "run")
    fields = {
        "architecture": content.get("arch"),
        **{key: content.get(key) for key in ("model_args", "pretrained_cfg", "epoch", "config")},
        **{key: run.get(key) for key in ("history", "val_exceptions")},
        "steps_after": run.get("loss_count"),
    }
    fields = {k: _checked(v, _FIELDS[k], k) for k, v in fields.items() if v is not None}
    if not fields and is_official_vim(state_dict) and "pos_embed" in state_dict:
        tokens, width = (*state_dict["pos_embed"].shape[1:], 0, 0)[:2]
        finer = {"patch_stride": 8} if tokens == _FINER_PATCHES + 1 else {}
        fields = {"architecture": _OFFICIAL_VIM.get(width), "model_args": finer}
    cfg = _relevant(fields.get("pretrained_cfg", {}))
    for key, value in cfg.items():
        _checked(value, _CFG_FIELDS[key], f"pretrained_cfg.{key}")
    read_note(cfg)
    args = dict(fields.get("model_args", {}))
    if wrong := [key for key in NOT_OF_A_MODEL if key in args]:
        raise ValueError(f"model_args must not contain {wrong[0]}, which does not define a model")
    channels, *size = cfg.get("input_size", (3, 224, 224))
    if args.get("img_size") is not None or args.get("in_chans") is not None:
        size = (args.get("in_chans") or channels, *to_2tuple(args.get("img_size") or size))
        # The description may lack it.
        cfg["input_size"] = _checked(size, _SIZE, "in_chans and img_size of model_args")
    if is_own(fields.get("architecture") or ""):
        # Set fc_norm from the weights: by default, another pooling would move the norm.
        args.setdefault("fc_norm", any(key.startswith("fc_norm.") for key in state_dict))
        classes, head = args.get("num_classes"), state_dict.get("head.weight")
        rows = 0 if head is None or not head.ndim else len(head) - cfg.get("label_offset", 0)
        if classes and rows and classes != rows:  # the head would silently be new
            raise ValueError(f"model_args has num_classes {classes}, but head.weight has {rows} classes")
    return fields | {"pretrained_cfg": cfg, "model_args": args}


_Type = tuple[str, Callable[[Any], bool]]  # description for errors, and check of a value


def _checked(value: Any, kind: _Type, name: str) -> Any:
    words, holds = kind
    if not holds(value):
        raise ValueError(f"{name} must be {words}, got {short_repr(value)}")
    return value


def _all(kind: _Type, values: Any) -> bool:
    return isinstance(values, list | tuple) and all(map(kind[1], values))


_TEXT: _Type = ("a string", lambda v: isinstance(v, str))
_COUNT: _Type = ("a whole number of at least 0", lambda v: type(v) is int and 0 <= v < 2**31)
_NUMBER: _Type = ("a finite number", lambda v: type(v) in (int, float) and math.isfinite(v))
_NUMBERS: _Type = ("a list of finite numbers", lambda v: _all(_NUMBER, v))
_TEXTS: _Type = ("a list of strings", lambda v: _all(_TEXT, v))
_NAMED: _Type = (
    "a dictionary with string keys",
    lambda v: isinstance(v, dict) and _all(_TEXT, [*v]),
)
_SIZE: _Type = (
    "three whole numbers above 0",
    lambda v: _all(_COUNT, v) and len(v) == 3 and min(v) > 0,
)
_ROW: _Type = (
    "a row with epoch, val_loss, top1, top5 and val_images",
    lambda v: (
        _NAMED[1](v)
        and _COUNT[1](v.get("epoch"))
        and _all(_NUMBER, [v.get(key) for key in ("val_loss", "top1", "top5", "val_images")])
        and _all(_NUMBER, [v[key] for key in ("ema_loss", "ema_top1", "ema_top5") if key in v])
    ),
)
_FIELDS: dict[str, _Type] = {
    "architecture": _TEXT,
    "model_args": _NAMED,
    "pretrained_cfg": _NAMED,
    "epoch": _COUNT,
    "config": _NAMED,
    "history": (f"a list of rows{_ROW[0].removeprefix('a row')}", lambda v: _all(_ROW, v)),
    "val_exceptions": _TEXTS,
    "steps_after": _COUNT,
}
_CFG_FIELDS: dict[str, _Type] = {
    "num_classes": _COUNT,
    "input_size": _SIZE,
    "label_names": (
        "a list of strings, or a dictionary from index to string",
        lambda v: _all(_TEXT, [*v, *v.values()] if isinstance(v, dict) else v),
    ),
    "label_offset": _COUNT,
    "mean": _NUMBERS,
    "std": _NUMBERS,
    "interpolation": _TEXT,
    "crop_pct": _NUMBER,
    "crop_mode": _TEXT,
    "license": _TEXT,
    "notes": ("a string or a list of strings", lambda v: _all(_TEXT, [v] if _TEXT[1](v) else v)),
}


def _relevant(pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
    return {key: pretrained_cfg[key] for key in _CFG_FIELDS if pretrained_cfg.get(key) is not None}
