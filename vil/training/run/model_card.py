"""The README.md of a released model, as the Hugging Face hub shows it: metrics, data, recipe, licence."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml
from timm.models._hub import generate_readme

from vil.messages import printable
from vil.training.config import TrainConfig
from vil.training.run.setup import versions
from vil.weights import Weights

# Of the recipe: what only says where on the author's machine something lay, or how it was watched.
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


def model_card(name: str, weights: Weights, config: TrainConfig, license: str) -> str:
    """Write a model card in timm's form.

    Args:
        name: Of the released folder.
        weights: What is released, with the log of its run.
        config: The run's settings.
        license: The weights' licence, by its name on the hub.
    """
    return generate_readme(
        {
            "license": license,
            "tags": ["image-classification", "timm", "transformers", "vision-longhorn"],
            "description": _description(config),
            "details": _details(weights, config),
            "usage": _usage(name) + _metrics(weights) + _recipe(config),
            "citation": _PAPERS,
        },
        _plain(name),
    )


def _usage(name: str) -> str:
    source, folder = json.dumps(f"local-dir:{name}"), json.dumps(name)
    return f"""```python
import timm
import vil  # registers the models

model = timm.create_model({source}, pretrained=True)  # hf-hub:YOU/{printable(name)} when pushed
model = vil.load({folder}, num_classes=3)  # to fine-tune on other classes
```
"""


def _description(config: TrainConfig) -> str:
    model = config.model
    start = ", trained from scratch"
    if model.pretrained:
        start = f", fine-tuned from {_plain(_without_place(model.pretrained))}"
    return f"An image classification model, `{model.name}`{start}."


def _details(weights: Weights, config: TrainConfig) -> dict[str, Any]:
    model, data = config.model, config.data
    kind = "averaged weights (EMA)" if weights.averaged else "weights"
    names = weights.label_names or ()
    shown = ", ".join(map(_plain, names[:10])) + (", ..." if len(names) > 10 else "")
    share = (
        "" if data.images_per_class is None else f", {data.images_per_class} images of each class"
    )
    sizes = ", ".join(map(str, data.img_sizes or ()))
    trained = f", trained at {sizes} px" if sizes else ""
    return {
        "Model": f"{model.name}, {sum(t.numel() for t in weights.state_dict.values()):,} values",
        "Weights": f"{kind} of epoch {weights.epoch}",
        "Images": f"{model.img_size} x {model.img_size} px, {model.in_chans} channels{trained}",
        "Classes": f"{model.num_classes}" + (f": {shown}" if shown else ""),
        "Trained on": f"{data.dataset}{share}",
        "Made with": ", ".join(f"{package} {version}" for package, version in versions().items()),
    }


def _metrics(weights: Weights) -> str:
    """Return the row of the run's log that the weights are of."""
    row = next((row for row in weights.history or () if row["epoch"] == weights.epoch), None)
    prefix = "ema_" if weights.averaged else ""
    if row is None or f"{prefix}top1" not in row:  # as where an average has just begun
        return ""
    loss = row["ema_loss" if weights.averaged else "val_loss"]
    return (
        "\n## Metrics\n\nOn the held-out images of its training data:\n\n"
        "| top-1 (%) | top-5 (%) | loss |\n|---|---|---|\n"
        f"| {row[prefix + 'top1']:.2f} | {row[prefix + 'top5']:.2f} | {loss:.4f} |\n"
    )


def _recipe(config: TrainConfig) -> str:
    """Return the settings, without those that only concern the author's machine."""
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
    """Return a setting; of a path only its last name, which does not say where on a machine it lay."""
    if not isinstance(value, str) or value.startswith("hf-hub:"):
        return value
    return Path(value.removeprefix("local-dir:")).name or value


def _plain(text: str) -> str:
    """Escape what Markdown or HTML would read in a name, and put it on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#|~&$!])", r"\\\1", printable(" ".join(text.split())))
