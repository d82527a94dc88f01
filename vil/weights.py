"""Where weights come from: a file, a folder or a hub, read without executing anything in it."""

import argparse
import errno
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypedDict

import timm
import torch
from safetensors.torch import load_file
from timm.models import (
    clean_state_dict,
    load_model_config_from_hf,
    load_state_dict_from_hf,
)
from timm.models._hub import load_model_config_from_path, load_state_dict_from_path
from torch import Tensor

from vil.convert import convert_official_vim, is_official_vim
from vil.forms import Plain, Range, is_dictionary, misfit
from vil.messages import one_line
from vil.state_dicts import sizes_of
from vil.timm_arguments import NOT_OF_A_MODEL

_RAW = ("state_dict", "model")  # where files of training programs keep weights
_AVERAGED = ("state_dict_ema", "model_ema")
_OFFICIAL_VIM = {192: "vim_tiny", 384: "vim_small", 768: "vim_base"}
_FINER_PATCHES = 27 * 27  # of the official fine-tuning: 224 px, a patch of 16 px every 8
_PREPROCESSING = ("mean", "std", "interpolation", "crop_pct")
_Count = Annotated[int, Range(1, 2**31 - 1)]
_CountFromZero = Annotated[int, Range(0, 2**31 - 1)]


class _Averages(TypedDict, total=False):
    """What is told of an epoch's averaged weights, where there were some."""

    ema_loss: float
    ema_top1: float
    ema_top5: float


class _Row(_Averages):
    """What is told of an epoch of a run."""

    epoch: int
    val_loss: float
    top1: float
    top5: float


class _Log(TypedDict, total=False):
    """What is read here of how far a run has come."""

    history: list[_Row]


class PretrainedCfg(TypedDict, total=False):
    """Classes and preprocessing in timm's terms."""

    num_classes: _CountFromZero
    input_size: tuple[_Count, _Count, _Count]
    label_names: list[str] | tuple[str, ...] | dict[str, str]
    label_offset: _CountFromZero
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float


class Described(TypedDict):
    """What train_imagenet.py, and no other program, keeps beside the weights."""

    arch: str
    model_args: dict[str, Plain]
    pretrained_cfg: PretrainedCfg
    epoch: _CountFromZero
    config: dict[str, dict[str, Plain]]
    run: _Log


class _Model(TypedDict, total=False):
    """What is read of any source that says which model its weights are of."""

    architecture: str
    model_args: dict[str, Plain]
    pretrained_cfg: PretrainedCfg


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights, and what their source says about the model they belong to."""

    state_dict: dict[str, Tensor]
    origin: str
    """The source, as it was named."""
    averaged: bool = False
    """Whether these are averages over the steps of a training run."""
    architecture: str | None = None
    """timm's name of the model; None where the source does not say."""
    model_args: dict[str, Any]
    """Arguments with which timm's entry point makes that model, the number of classes too."""
    pretrained_cfg: dict[str, Any]
    """Classes and preprocessing in timm's terms: num_classes, input_size, mean, std, interpolation,
    crop_pct, label_names, label_offset; what the source does not say is left out."""
    epoch: int | None = None
    """Epochs that they were trained for; this and the next two only of train_imagenet.py."""
    config: dict[str, Any] | None = None
    """All settings of the run that trained them."""
    history: list[dict[str, Any]] | None = None
    """That run's log, a row per epoch."""

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the head's outputs, None if unknown or not of all."""
        names = self.pretrained_cfg.get("label_names")
        if isinstance(names, dict):  # as timm writes them where some outputs may have none
            numbers = [str(i) for i in range(len(names))]
            names = [names[i] for i in numbers] if names.keys() == {*numbers} else None
        return tuple(names) if isinstance(names, list | tuple) else None


def read_weights(source: str | Path, ema: bool = False) -> Weights:
    """Read weights from any of the places they are kept in.

    Args:
        source: A checkpoint of train_imagenet.py; a folder of release.py, also as ``local-dir:FOLDER``;
            a ``.safetensors`` file, which takes its description from a config.json beside it; a file
            of another training program with a state dict or with one as "state_dict" or "model", the
            official Vision Mamba's among them; ``hf-hub:NAME``; or the name of a timm model, which
            stands for the weights that timm has of it.
        ema: Read the averaged weights of a training program instead of the last ones.

    Raises:
        FileNotFoundError: there is no such file, folder or model.
        OSError, MemoryError: it cannot be read, which says nothing of what it holds.
        LookupError: it has no averaged weights.
        ValueError: it holds no weights, or some that are not finite, is damaged, or would execute code.
            Or what it says of its model is nested, too large, contradicts its weights, or has arguments
            that do not say which model it is.
    """
    name = str(source)
    scheme, _, place = name.partition(":")
    path = Path(place if scheme == "local-dir" else name)
    if path.is_file() and path.suffix != ".safetensors":
        return _from_file(path, ema)
    if ema:
        raise LookupError(f"{name} has no averaged weights; only a checkpoint has both")
    if scheme == "hf-hub":
        return _from_hub(name, place)
    if path.is_dir() or scheme == "local-dir":
        return _from_folder(path, name)
    if path.is_file():
        return _from_safetensors(path)
    if is_model_name(name):
        return _from_timm(name)
    raise FileNotFoundError(f"{name} is no file, no folder, no hf-hub:NAME and no model of timm")


def is_model_name(source: str) -> bool:
    """Tell whether a source is the name of a timm model, with one of its tags or none.

    timm takes vil_tiny.pt for a model with the tag pt: a file that is missing is no name.
    """
    known = timm.is_model_pretrained(source) or ("." not in source and timm.is_model(source))
    return known and not Path(source).exists()


def is_own(name: str) -> bool:
    """Tell whether a timm model's name is of this package."""
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("vil.")


def no_weights(name: str) -> Weights:
    """Describe a timm model by its entry point alone, without weights."""
    return Weights(
        state_dict={},
        origin=name,
        architecture=name.partition(".")[0],
        model_args={},
        pretrained_cfg=_relevant(timm.get_pretrained_cfg(name).to_dict()),
    )


def load_archive(path: Path) -> Any:
    """Read what torch.save wrote, tensors and plain values, and compare it with its checksums.

    Raises:
        OSError, MemoryError: the disk or the memory fails, which says nothing of the content;
            FileNotFoundError: it is missing.
        ValueError: it is damaged, no such file, or holds more than tensors and plain values.
    """
    with _reading(path) as file:
        _check_members(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def check_sums(path: Path) -> None:
    """Compare what torch.save wrote with its checksums; torch.load does not.

    Raises:
        As load_archive does.
    """
    with _reading(path) as file:
        _check_members(file)


def check_plain(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Check that tensors hold all of their numbers, which a few bytes of a file can claim of any size.

    Args:
        tensors: By name.
        origin: What has them, for the error message.

    Raises:
        ValueError: one is sparse, quantized or empty of data, or has places that share a number.
    """
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"{origin}: {name} is no plain tensor")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(
                f"{origin}: {name} has not the numbers for its shape {(*value.shape,)}"
            )


def check_finite(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Check that all numbers of plain tensors are numbers.

    A tensor without dimensions may be infinite, as the limits are to which some models clip.

    Args:
        tensors: Weights, by name.
        origin: What has them, for the error message.

    Raises:
        ValueError: some are NaN or infinite.
    """
    # Those of a byte, which lack functions, are widened; the answers are fetched from a GPU at once.
    floats = {
        name: value.float() if value.element_size() == 1 else value
        for name, value in tensors.items()
        if value.is_floating_point() or value.is_complex()
    }
    if not floats:
        return
    wrong = [v.isfinite().logical_not().any() if v.ndim else v.isnan() for v in floats.values()]
    names = [name for name, bad in zip(floats, torch.stack(wrong).tolist(), strict=True) if bad]
    if names:
        more = f", nor are {len(names) - 1} other tensors" if len(names) > 1 else ""
        raise ValueError(f"{origin}: {names[0]} is not finite{more}")


class _FaultError(Exception):
    """What is wrong with a file, to stand after its name."""


class _Reader(io.FileIO):
    """A file that remembers that the disk failed, whatever the program that reads makes of it."""

    failure: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        """Read, as the base does."""
        return self._remembering(super().readinto, buffer)

    def readall(self) -> bytes:
        """Read, as the base does."""
        return self._remembering(super().readall)

    def _remembering(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and tell errors of the disk and the memory from those of the content.

    Raises:
        OSError, MemoryError: of the disk and of the memory.
        ValueError: any other, which is the content's.
    """
    raw = _Reader(path)
    try:
        with io.BufferedReader(raw) as file:
            yield file
    except _FaultError as error:
        raise ValueError(f"{path} {error}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is no file of torch.save, or holds more than tensors and plain values; what could "
            f"execute code is not read"
        ) from error
    except Exception as error:  # zipfile and torch.load raise many things for a damaged file
        if raw.failure is not None:
            raise raw.failure from error
        # A number in the file that leads to a place before its beginning is the file's fault.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(f"not enough memory for {path}") from error
        raise ValueError(f"{path} is truncated or not a checkpoint: {one_line(error)}") from error


def _check_members(file: BinaryIO) -> None:
    """Compare a zip archive with its checksums and with what torch.save writes.

    Raises:
        _FaultError: it differs.
        Exception: anything that zipfile does, of what is no archive.
    """
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise _FaultError("is compressed, which torch.save does not do")
        if sum(member.file_size for member in members) > size:
            raise _FaultError("is damaged: its parts are larger than the whole")
        if len({member.filename for member in members}) < len(members):
            raise _FaultError("is damaged: two of its parts have one name")
        damaged = archive.testzip()
    if damaged is not None:
        raise _FaultError(f"is damaged: wrong checksum in {damaged}")


def _from_file(path: Path, ema: bool) -> Weights:
    """Read what torch.save wrote, by train_imagenet.py or another program."""
    content = _load(path)
    keys = _AVERAGED if ema else _RAW
    found = next((key for key in keys if isinstance(content.get(key), dict)), None)
    if ema and found is None:
        raise LookupError(f"{path} has no averaged weights ({' or '.join(_AVERAGED)})")
    state_dict = content[found] if found else content
    if not _is_state_dict(state_dict):
        names = [key for key in content if isinstance(key, str)]
        raise ValueError(
            f"{path} holds no state dict, neither itself nor as {' or '.join(keys)}: "
            f"it has {', '.join(key[:50] for key in names[:5]) or 'nothing'}"
        )
    described: dict[str, Any] = {}
    if Described.__required_keys__ <= content.keys():
        described = _describe_checkpoint(content, path)
    elif isinstance(content.get("arch"), str) and timm.is_model(content["arch"]):
        described = {"architecture": content["arch"]}  # as timm's trainer leaves it
    return _weights(state_dict, str(path), described, averaged=ema)


def _is_state_dict(value: Any) -> bool:
    return (
        is_dictionary(value)
        and len(value) > 0
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def _weights(
    state_dict: dict[str, Tensor], origin: str, described: dict[str, Any], averaged: bool = False
) -> Weights:
    """Put weights under the names that they have here, and complete what is known of their model.

    Args:
        state_dict: As it was read.
        origin: Its source.
        described: What the source says: fields of Weights, none if it says nothing.
        averaged: Whether it is an average.

    Raises:
        ValueError: a weight is not finite, it is of an official Vision Mamba that no model here is, or
            what the source says cannot be so.
    """
    _check_state_dict(state_dict, origin)
    _check_described(described, origin)
    state_dict = _clean(state_dict)
    if is_official_vim(state_dict):
        try:
            described = described or _describe_official_vim(state_dict)
            state_dict = convert_official_vim(state_dict)
        except Exception as error:  # tensors of any shapes can have these names
            raise ValueError(f"{origin} cannot be read: {one_line(error)}") from error
    described = {"model_args": {}, "pretrained_cfg": {}} | described
    if is_own(described.get("architecture") or ""):
        # The pooling says so, too, but another one that is asked for must not move the norm.
        place = any(key.startswith("fc_norm.") for key in state_dict)
        described["model_args"] = {"fc_norm": place} | described["model_args"]
        _check_sizes(described, state_dict, origin)
    return Weights(state_dict=state_dict, origin=origin, averaged=averaged, **described)


def _check_state_dict(state_dict: dict[str, Tensor], origin: str) -> None:
    """Check that a state dict has finite numbers, and beside them what PyTorch and this package record.

    Raises:
        ValueError: it has something else.
    """
    if not _is_state_dict(state_dict):
        raise ValueError(f"{origin} holds no state dict")
    recorded = getattr(state_dict, "_metadata", {})
    wrong = misfit(recorded, dict[str, dict[str, Plain]], "the state dict's _metadata")
    if wrong is not None:
        raise ValueError(f"{origin}: {wrong}")
    check_plain(state_dict, origin)
    check_finite(state_dict, origin)


def _check_described(described: dict[str, Any], origin: str) -> None:
    """Check what a source says of its model, before anything prints, compares or builds it.

    Raises:
        ValueError: it has another form, or says how to build a model.
    """
    model = {key: value for key, value in described.items() if value is not None}
    wrong = misfit(model, _Model, "its description")
    if wrong is not None:
        raise ValueError(f"{origin}: {wrong}")
    for key in NOT_OF_A_MODEL:
        if key in model.get("model_args", {}):
            raise ValueError(
                f"{origin}: model_args has {key}, which does not say which model it is"
            )


def _check_sizes(described: dict[str, Any], state_dict: dict[str, Tensor], origin: str) -> None:
    """Compare the sizes that a source says its model has with those of its weights.

    A model of other sizes could take all of the memory, or for ever to build, before that is found.

    Raises:
        ValueError: they differ.
    """
    for name, size in sizes_of(state_dict).items():
        stated = described["model_args"].get(name)
        if name == "num_classes":
            size -= described["pretrained_cfg"].get("label_offset", 0)
        if isinstance(stated, int) and stated != size:
            raise ValueError(f"{origin}: model_args has {name} {stated}, and its weights {size}")


def _load(path: Path) -> dict[str, Any]:
    """Load a file of tensors and plain values."""
    with _reading(path) as file:
        if file.peek(2)[:2] == b"PK":  # also if it is cut off
            _check_members(file)
            file.seek(0)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the options of a trainer
            content = torch.load(file, map_location="cpu", weights_only=True)
    if not is_dictionary(content):
        raise ValueError(f"{path} holds a {type(content).__name__} and no state dict")
    return content


def _describe_checkpoint(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Say what a checkpoint of train_imagenet.py knows of its model."""
    wrong = misfit(content, Described, "the checkpoint")
    if wrong is not None:
        raise ValueError(f"{path}: {wrong}")
    return {
        "architecture": content["arch"],
        "model_args": content["model_args"],
        "pretrained_cfg": _relevant(content["pretrained_cfg"]),
        "epoch": content["epoch"],
        "config": content["config"],
        "history": content["run"].get("history"),
    }


def _describe_official_vim(state_dict: dict[str, Tensor]) -> dict[str, Any]:
    """Tell the official Vision Mamba's models from each other by their shapes."""
    _, tokens, dim = state_dict["pos_embed"].shape
    args = {"patch_stride": 8} if tokens == _FINER_PATCHES + 1 else {}
    return {"architecture": _OFFICIAL_VIM.get(dim), "model_args": args}


def _from_folder(folder: Path, name: str) -> Weights:
    """Read a folder in timm's layout: config.json and weights."""
    for checkpoint in (folder / "best.pt", folder / "last.pt"):
        if checkpoint.is_file():
            raise ValueError(f"{name} is the folder of a run; name its checkpoint, {checkpoint}")
    try:
        described = _describe_config(*load_model_config_from_path(folder))
        state_dict = load_state_dict_from_path(folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name} is no folder with a config.json and weights") from None
    except Exception as error:  # of JSON, of safetensors, of the unpickler
        raise ValueError(f"{name} cannot be read as a released model: {one_line(error)}") from error
    return _weights(state_dict, name, described)


def _from_safetensors(path: Path) -> Weights:
    """Read one file; config.json beside it says what it is of."""
    described: dict[str, Any] = {}
    try:
        if (path.parent / "config.json").is_file():
            described = _describe_config(*load_model_config_from_path(path.parent))
        state_dict = load_file(path)
    except Exception as error:  # of JSON and of safetensors
        raise ValueError(f"{path} cannot be read as weights: {one_line(error)}") from error
    return _weights(state_dict, str(path), described)


def _from_hub(name: str, place: str) -> Weights:
    """Read a model of the Hugging Face hub, or of its cache on this machine."""
    try:
        described = _describe_config(*load_model_config_from_hf(place))
        state_dict = load_state_dict_from_hf(place)
    except Exception as error:  # also whatever a download raises
        raise ValueError(f"{name} cannot be read: {one_line(error)}") from error
    return _weights(state_dict, name, described)


def _from_timm(name: str) -> Weights:
    """Get the weights that timm has of a model."""
    if not timm.is_model_pretrained(name):
        raise ValueError(f"{name} has no trained weights; name a file or a folder that has")
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # also whatever a download raises
        raise ValueError(f"the weights of {name} cannot be had: {one_line(error)}") from error
    cfg = _relevant(model.pretrained_cfg)
    cfg.pop("label_offset", None)  # timm has applied it
    return _weights(model.state_dict(), name, {"architecture": name, "pretrained_cfg": cfg})


def _describe_config(
    pretrained_cfg: dict[str, Any], architecture: str, model_args: dict[str, Any] | None
) -> dict[str, Any]:
    """Say what timm's config.json knows of its model."""
    classes = {key: pretrained_cfg[key] for key in ("num_classes",) if key in pretrained_cfg}
    return {
        "architecture": architecture,
        "model_args": dict(model_args or {}) | classes,
        "pretrained_cfg": _relevant(pretrained_cfg),
    }


def _relevant(pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
    keys = ("num_classes", "input_size", "label_names", "label_offset", *_PREPROCESSING)
    return {key: pretrained_cfg[key] for key in keys if pretrained_cfg.get(key) is not None}


def _clean(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove what torch.compile and DistributedDataParallel put before the names."""
    cleaned = clean_state_dict(state_dict)
    return state_dict if cleaned.keys() == state_dict.keys() else cleaned
