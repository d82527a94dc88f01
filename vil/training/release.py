"""Export a checkpoint to a folder for timm, transformers and the hub: weights, config, model card."""

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml
from safetensors import SafetensorError
from timm.models import save_for_hf
from timm.models._hub import generate_readme
from torch import nn
from tyro.conf import Positional

from vil.messages import counted, printable
from vil.preprocess import ImageSpec
from vil.profile import count_parameters
from vil.training import onnx
from vil.training.distributed import versions
from vil.training.engine import FEW_CLASSES, interval
from vil.training.errors import ConfigError, OutputError, log
from vil.training.files import sync
from vil.training.recipes import from_dict
from vil.training.resolve import read_source
from vil.training.settings import Section, TrainConfig
from vil.weights.build import model_with
from vil.weights.sources import Weights

# Fields of timm's pretrained_cfg that describe timm's own weights of a model with the same name.
_OF_OTHER_WEIGHTS = ("tag", "description", "origin_url", "paper_name", "paper_ids", "notes")


# Settings left out of the published recipe because they only concern the author's machine.
_PRIVATE = ("model.pretrained", "data.path", "data.num_workers")

_PAPERS = (
    """@inproceedings{liu2025longhorn,
  title={Longhorn: State Space Models are Amortized Online Learners},
  author={Liu, Bo and Wang, Rui and Wu, Lemeng and Feng, Yihao and Stone, Peter and Liu, Qiang},
  booktitle={International Conference on Learning Representations},
  year={2025}
}""",
    """@inproceedings{zhu2024vision,
  title={Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model},
  author={Zhu, Lianghui and Liao, Bencheng and Zhang, Qian and Wang, Xinlong and Liu, Wenyu and Wang,
    Xinggang},
  booktitle={International Conference on Machine Learning},
  year={2024}
}""",
)


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig(Section):
    """Write the weights of a checkpoint as safetensors; timm loads them with local-dir:FOLDER."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint written by train_imagenet.py."""
    folder: Annotated[Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Output folder; must not exist."""
    ema: bool = False
    """Release the averaged weights (EMA) instead of the raw ones."""
    license: str = "other"
    """License of the weights, by its identifier on the Hugging Face hub."""
    onnx: Literal["none", "own", "any"] = "none"
    """Also write model.onnx, for images of the weights' size or of any size, and preprocess.json."""


def release(options: ReleaseConfig) -> None:
    """Write a folder with model.safetensors, config.json and README.md atomically, and with ONNX if asked.

    Raises ConfigError for an invalid license, if packages for ONNX are missing, and for a checkpoint that does not
    exist, lacks averaged weights or was not written by train_imagenet.py. Raises OutputError if the checkpoint is
    unreadable or invalid, or the folder exists or cannot be written, or the model cannot be exported.
    """
    path, folder = Path(options.checkpoint), Path(options.folder)
    if os.path.lexists(folder):
        raise OutputError(f"{folder} exists; choose another folder")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", options.license):
        raise ConfigError(
            f"--license must be a license identifier of the Hugging Face hub, such as apache-2.0 "
            f"or other, got {options.license!r}"
        )
    if options.onnx != "none":
        onnx.check_packages()
    weights = read_source(options.checkpoint, options.ema)
    if weights.config is None:
        raise ConfigError(f"CHECKPOINT {path} must be a checkpoint of train_imagenet.py")
    config = from_dict(weights.config, f"{path}: ")
    try:
        model, _ = model_with(weights)
    except ValueError as error:
        raise OutputError(f"cannot release {path}: {error}") from error
    card = _model_card(folder.name, weights, config, options.license, count_parameters(model))
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed release
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot create {temporary}: {error.strerror}") from error
    try:
        _write(temporary, model.eval(), weights, card, options.license)
        if options.onnx != "none":
            onnx.write(temporary, weights, options.onnx == "any")
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    kind = "averaged weights" if options.ema else "weights"
    log.info(
        f"released {config.model.name}, {kind} of {weights.age}\n"
        f"load it  import vil; timm.create_model('local-dir:{folder.resolve()}', pretrained=True)"
        + ("" if options.onnx == "none" else f"\nor run   {folder / 'model.onnx'}, which agrees with the model")
    )


def _write(folder: Path, model: nn.Module, weights: Weights, card: str, license: str) -> None:
    """Write model.safetensors, config.json and README.md."""
    names, cfg = weights.label_names, weights.pretrained_cfg
    for key in _OF_OTHER_WEIGHTS:
        model.pretrained_cfg.pop(key, None)
    described = ImageSpec.of(cfg).pretrained_cfg(weights.val_fraction)
    own = {"license": license, "notes": described.pop("notes")}
    save_for_hf(
        model,
        folder,
        safe_serialization=True,
        data_config=described,
        model_config={"pretrained_cfg": own} | ({} if names is None else {"label_names": list(names)}),
    )
    path = folder / "config.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    # config.json has the number of classes at its top level, and transformers passes it to the model.
    described["model_args"].pop("num_classes", None)
    path.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    shutil.copymode(path, folder / "model.safetensors")  # safetensors lets only the owner read it
    (folder / "README.md").write_text(card, encoding="utf-8")


def _model_card(name: str, weights: Weights, config: TrainConfig, license: str, parameters: int) -> str:
    """Return a model card in timm's format."""
    model, data, names = config.model, config.data, weights.label_names or ()
    shown = ", ".join(map(_plain, names[:10])) + (", ..." if len(names) > 10 else "")
    start = f"fine-tuned from {_plain(_without_place(model.pretrained))}" if model.pretrained else ""
    details = {
        "Model": f"{model.name}, {parameters:,} parameters",
        "Weights": f"{'averaged weights (EMA)' if weights.averaged else 'weights'} of {weights.age}",
        "Images": f"{model.img_size} x {model.img_size} px, {model.in_chans} channels",
        "Classes": f"{model.num_classes}" + (f": {shown}" if shown else ""),
        "Trained on": data.dataset,
        "Made with": ", ".join(f"{package} {version}" for package, version in versions().items()),
    }
    usage = f"""```python
import timm
import vil  # registers the models

model = timm.create_model({json.dumps(f"local-dir:{name}")}, pretrained=True)  # or hf-hub:YOU/{printable(name)}
prepare = vil.create_transform(model)  # as in training; then model.eval()(prepare("photo.jpg")[None])
model = vil.load({json.dumps(name)}, num_classes=3)  # to fine-tune on other classes
```
"""
    card = {
        "license": license,
        "tags": ["image-classification", "timm", "transformers", "vision-longhorn"],
        "description": f"An image classification model, `{model.name}`, {start or 'trained from scratch'}.",
        "details": details,
        "usage": usage + _metrics(weights, config) + _recipe(config),
        "citation": _PAPERS,
    }
    return generate_readme(card, _plain(name))


def _metrics(weights: Weights, config: TrainConfig) -> str:
    """Return the metrics of the weights as Markdown, or nothing if they were not evaluated."""
    row = next((row for row in weights.history or () if row["epoch"] == weights.epoch), None)
    data, prefix = config.data, "ema_" if weights.averaged else ""
    # The average may have just begun, and a checkpoint be from the middle of an epoch.
    if row is None or f"{prefix}top1" not in row or weights.steps_after:
        return ""
    figures = {
        "top-1 (%)": f"{row[prefix + 'top1']:.2f}",
        "95 % interval": "{:.1f} to {:.1f}".format(*interval(row[prefix + "top1"], row["val_images"])),
        "top-5 (%)": f"{row[prefix + 'top5']:.2f}",
        "loss": f"{row['ema_loss' if weights.averaged else 'val_loss']:.4f}",
    }
    if config.model.num_classes <= FEW_CLASSES:
        del figures["top-5 (%)"]
    scored = f"its split {_plain(data.val_split)}"
    if data.val_fraction or data.dataset == "digits":
        share = f"{data.val_fraction:g} of its images" if data.val_fraction else "360 digits"
        scored = f"{share}, held out of training"
    return (
        f"\n## Metrics\n\nOn {scored} ({counted(row['val_images'], 'image')}, scored after each of "
        f"{counted(len(weights.history), 'epoch')}):\n\n"
        f"| {' | '.join(figures)} |\n|{'---|' * len(figures)}\n| {' | '.join(figures.values())} |\n"
    )


def _recipe(config: TrainConfig) -> str:
    """Return the settings as Markdown, without those that only concern the author's machine."""
    sections: dict[str, dict[str, Any]] = {}
    for section, values in dataclasses.asdict(config).items():
        if section != "run":
            sections[section] = {
                key: list(value) if isinstance(value, tuple) else _without_place(value)
                for key, value in values.items()
                if f"{section}.{key}" not in _PRIVATE
            }
    sections["run"] = {"seed": config.run.seed, "amp": config.run.amp}
    return f"\n## Recipe\n\n```yaml\n{yaml.safe_dump(sections, sort_keys=False)}```\n"


def _without_place(value: Any) -> Any:
    """Return a setting unchanged, or only the last part of a path, to hide the author's folders."""
    if not isinstance(value, str) or value.startswith("hf-hub:"):
        return value
    return Path(value.removeprefix("local-dir:")).name or value


def _plain(text: str) -> str:
    """Escape Markdown and HTML characters of a name and put it on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#|~&$!])", r"\\\1", printable(" ".join(text.split())))
