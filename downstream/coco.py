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

from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision

from downstream.cascade import cascade_mask_rcnn
from downstream.generated import make_objects
from downstream.objects import Jitter, Objects, as_it_is, percentages, with_certain_masks
from downstream.run import Options, Task, run
from vil.training.program import run_script
from vil.training.recipes import parse
from vil.training.sampler import seed_everything
from vil.training.settings import Count

# From the official configurations, which are the same for tiny and small.
_RATES = {"lr": 1e-4, "weight_decay": 0.1, "layer_decay": 0.837}
RATES = {"tiny": _RATES, "small": _RATES}
_FALLS = (8 / 9, 26 / 27)  # after steps 163,889 and 177,546 of 184,375
_WARMUP, _FIRST_FACTOR = 250, 1e-3  # steps, and share of the learning rate at the first


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(Options):
    """Train Cascade Mask R-CNN on COCO."""

    img_size: Count = 1024
    steps: Count = 184_375
    batch_size: Count = 64
    val_steps: Count = 9219
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"


class Detection(Task):
    """Cascade Mask R-CNN on COCO."""

    options: ObjectOptions

    def __init__(self, *args: Any) -> None:
        """Same arguments as ``Task``."""
        super().__init__(*args)
        self.precision = MeanAveragePrecision(iou_type=("bbox", "segm"))

    def factor(self, step: int) -> float:
        """Rise linearly, then fall to a tenth twice."""
        rise = min(1.0, step / _WARMUP)
        falls = sum(step >= round(self.options.steps * fall) for fall in _FALLS)
        return (rise + (1 - rise) * _FIRST_FACTOR) * 0.1**falls

    def losses(self, batch: list) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses of all parts, and these losses."""
        losses = self.network(*batch)
        return sum(losses.values()), losses

    def validation_step(self, batch: list, batch_idx: int) -> None:
        """Compare the detections in an image with its objects, at its original size."""
        images, targets = batch
        detections = self.network(images)
        self.precision.update([with_certain_masks(each) for each in detections], targets)

    def on_validation_epoch_end(self) -> None:
        """Log COCO's average precision of boxes and masks, in percent."""
        figures = percentages(self.precision.compute())
        self.precision.reset()
        self.log_dict(figures, prog_bar=True, sync_dist=True)
        self.result = {"step": self.trainer.global_step, **figures}


def train(options: ObjectOptions) -> dict[str, float]:
    """Train and validate; return the step and the average precisions in percent.

    Raises:
        UserError: If options, data or weights are invalid.
    """
    options = options.with_rates(RATES)
    seed_everything(options.seed)
    root, features = options.folder(make_objects), options.features()
    train_set = Objects(root, "train2017", Jitter(options.img_size), training=True)
    val_set = Objects(root, "val2017", as_it_is, training=False, train=train_set)
    network = cascade_mask_rcnn(features, len(train_set.classes), options.img_size)
    return run(Detection(options, network, features, train_set, val_set))


def main() -> None:
    """Train with the options of the command line."""
    train(parse(ObjectOptions, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
