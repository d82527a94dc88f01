"""Train Cascade Mask R-CNN on COCO with a pyramid backbone, by the published recipe (ViTDet's).

    torchrun --nproc-per-node 8 -m downstream.coco --data coco --output output/coco \
        --weights output/vil_tiny/best.pt --accumulate 2
    python -m downstream.coco --generated 4 --output /tmp/dry --precision 32-true --img-size 64 \
        --steps 4 --batch-size 2 --num-workers 0 --model-kwargs embed_dim=48 depth=4

Published: 45.7 box AP (Vim-T). Repeat the command to resume.
"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from downstream.cascade import cascade_mask_rcnn
from downstream.features import make_features
from downstream.generated import make_objects
from downstream.objects import Jitter, Objects, as_it_is, average_precision, found
from downstream.run import Options, Task, run, world_size
from vil.training.errors import run_script
from vil.training.recipes import parse
from vil.training.sampler import seed_everything
from vil.training.settings import Count, CountFromZero

# From the official configurations, which are the same for tiny and small.
_RATES = {"lr": 1e-4, "weight_decay": 0.1, "layer_decay": 0.837}
RATES = {"tiny": _RATES, "small": _RATES}
_FALLS = (8 / 9, 26 / 27)  # after steps 163,889 and 177,546 of 184,375
_FIRST_FACTOR = 1e-3  # share of the learning rate at the first step


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(Options):
    """Train Cascade Mask R-CNN on COCO."""

    img_size: Count = 1024
    steps: Count = 184_375
    batch_size: Count = 64
    warmup_steps: CountFromZero = 250
    val_steps: Count = 9219
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"


class Detection(Task):
    """Cascade Mask R-CNN on COCO."""

    options: ObjectOptions

    def __init__(self, *args: Any) -> None:
        """Same arguments as ``Task``."""
        super().__init__(*args)
        self.rows: list[dict[str, Any]] = []

    def factor(self, step: int) -> float:
        """Rise linearly, then fall to a tenth twice."""
        rise = step / self.options.warmup_steps if step < self.options.warmup_steps else 1.0
        falls = sum(step >= round(self.options.steps * fall) for fall in _FALLS)
        return (rise + (1 - rise) * _FIRST_FACTOR) * 0.1**falls

    def training_step(self, batch: list, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        losses = self.network(*batch)
        loss = sum(losses.values())
        self.log_dict(losses)
        self.log("loss", loss, prog_bar=True)
        return self.finite(loss)

    def validation_step(self, batch: list, batch_idx: int) -> None:
        """Collect the detections in an image, at its original size."""
        images, (number,) = batch
        (detections,) = self.network(images)
        self.rows += found(number, self.val_set.categories, detections)

    def on_validation_epoch_end(self) -> None:
        """Log the average precision of the detections of all processes."""
        parts: list[Any] = [self.rows]
        if world_size() > 1:
            parts = [None] * world_size()
            torch.distributed.all_gather_object(parts, self.rows)
        self.rows = []
        every = [row for part in parts for row in part]
        figures = average_precision(self.val_set.coco, every, self.val_set.ids)
        self.log_dict(figures, prog_bar=True, sync_dist=True)
        self.result = {"step": self.trainer.global_step, **figures}


def train(options: ObjectOptions) -> dict[str, float]:
    """Train and validate; return the step and the average precisions in percent.

    Raises:
        UserError: If options, data or weights are invalid.
    """
    options = options.with_rates(RATES)
    seed_everything(options.seed)
    root = options.data
    if root is None:
        root = make_objects(options.output / "generated", options.generated, options.img_size)
    sets = [
        Objects(root, "train2017", Jitter(options.img_size), with_objects=True),
        Objects(root, "val2017", as_it_is, with_objects=False),
    ]
    features = make_features(
        options.model, options.weights, options.grad_checkpointing, **options.arguments
    )
    network = cascade_mask_rcnn(features, len(sets[0].categories) + 1, options.img_size)
    return run(Detection(options, network, features, *sets))


def main() -> None:
    """Train with the options of the command line."""
    train(parse(ObjectOptions, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
