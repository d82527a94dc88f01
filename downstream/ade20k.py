"""Train UperNet on ADE20K with a pyramid backbone, by the published recipe.

    torchrun --nproc-per-node 4 -m downstream.ade20k --data ADEChallengeData2016 --output output/ade20k \
        --weights output/vil_tiny/best.pt
    python -m downstream.ade20k --generated 8 --output /tmp/dry --precision 32-true --img-size 64 \
        --steps 4 --batch-size 4 --num-workers 0 --model-kwargs embed_dim=48 depth=4 \
        --pyramid-blocks 0 1 2 3

As in the official code, the default is 60,000 steps of 32 images. ``--steps 160000 --batch-size 16`` trains on a
third more images. Published: 41.0 mIoU (Vim-T), 44.9 (Vim-S). Repeat the command to resume.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from downstream.generated import make_scenes
from downstream.run import Options, Task, run, world_size
from downstream.scenes import CLASSES, IGNORED, Augment, Scenes, by_windows, whole
from vil.training.errors import ConfigError
from vil.training.program import run_script
from vil.training.recipes import parse
from vil.training.sampler import seed_everything
from vil.training.settings import Count, CountFromZero

# From the official scripts of the two sizes.
RATES = {
    "tiny": {"lr": 2e-4, "weight_decay": 0.1, "layer_decay": 0.92},
    "small": {"lr": 1e-4, "weight_decay": 0.05, "layer_decay": 0.95},
}
_FourBlocks = tuple[CountFromZero, CountFromZero, CountFromZero, CountFromZero]
_AUXILIARY_WEIGHT = 0.4
_WARMUP, _FIRST_FACTOR = 1500, 1e-6  # steps, and share of the learning rate at the first


@dataclass(frozen=True, kw_only=True)
class SceneOptions(Options):
    """Train UperNet on ADE20K."""

    img_size: Count = 512
    steps: Count = 60_000
    batch_size: Count = 32
    val_steps: Count = 6000
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"
    pyramid_blocks: _FourBlocks = (5, 11, 17, 23)
    """Blocks after which the four maps are taken."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size == world_size() * self.accumulate:
            raise ConfigError(
                "--batch-size must be at least 2 images per process and micro-batch, which batch "
                f"normalisation needs, got {self.batch_size}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        return {"pyramid_blocks": self.pyramid_blocks} | super().arguments


class UperNet(nn.Module):
    """A backbone with mmsegmentation's UPerHead on its four maps, and its FCNHead on the third."""

    def __init__(self, backbone: nn.Module) -> None:
        """Add heads to a backbone.

        Args:
            backbone: Result of ``make_features``.
        """
        super().__init__()
        channels = backbone.feature_info.channels()
        config = UperNetConfig(
            num_labels=CLASSES,
            hidden_size=channels[2],
            pool_scales=[1, 2, 3, 6],
            auxiliary_channels=256,
            auxiliary_num_convs=1,
            auxiliary_concat_input=False,
        )
        self.backbone = backbone
        self.decode_head = UperNetHead(config, channels)
        self.auxiliary_head = UperNetFCNHead(config, channels, in_index=2)
        for head in (self.decode_head, self.auxiliary_head):
            for conv in (module for module in head.modules() if isinstance(module, nn.Conv2d)):
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            nn.init.normal_(head.classifier.weight, std=0.01)
            nn.init.zeros_(head.classifier.bias)
            # mmsegmentation has this dropout.
            head.classifier = nn.Sequential(nn.Dropout2d(0.1), head.classifier)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, 150, H, W) for images (B, 3, H, W)."""
        return _enlarged(self.decode_head(self.backbone(images)), images)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of the two heads, averaged over all pixels; the loss of label 255 is 0.

        Args:
            images: (B, 3, H, W).
            labels: int64 (B, H, W).
        """
        maps = self.backbone(images)
        logits = (_enlarged(head(maps), images) for head in (self.decode_head, self.auxiliary_head))
        sums = [F.cross_entropy(each, labels, ignore_index=IGNORED, reduction="sum") for each in logits]
        return sums[0] / labels.numel(), sums[1] / labels.numel()


def _enlarged(logits: Tensor, images: Tensor) -> Tensor:
    return F.interpolate(logits.float(), images.shape[-2:], mode="bilinear")


class Segmentation(Task):
    """UperNet on ADE20K."""

    options: SceneOptions

    def __init__(self, *args: Any) -> None:
        """Same arguments as ``Task``."""
        super().__init__(*args)
        self.overlap = mean_overlap()

    def factor(self, step: int) -> float:
        """Rise linearly, then fall linearly to 0."""
        done = min(1.0, step / _WARMUP)
        return (done + (1 - done) * _FIRST_FACTOR) * (1 - step / self.options.steps)

    def losses(self, batch: list) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the heads' losses, and the second one."""
        images, labels = (torch.stack(column) for column in batch)
        loss, auxiliary = self.network.loss(images, labels)
        return loss + _AUXILIARY_WEIGHT * auxiliary, {"auxiliary_loss": auxiliary}

    def validation_step(self, batch: list, batch_idx: int) -> None:
        """Compare the prediction for an image with its labels, at the original size."""
        (image,), (labels,) = batch
        size = self.options.img_size
        logits = by_windows(self.network, image[None], size, size * 2 // 3)
        logits = F.interpolate(logits, labels.shape, mode="bilinear")
        self.overlap.update(logits.argmax(1), labels[None])

    def on_validation_epoch_end(self) -> None:
        """Log the mean IoU in percent."""
        miou = 100 * self.overlap.compute()
        self.overlap.reset()
        self.log("miou", miou, prog_bar=True, sync_dist=True)
        self.result = {"step": self.trainer.global_step, "miou": miou.item()}


def mean_overlap() -> MulticlassJaccardIndex:
    """Return the mean IoU of classes that occur in predictions or labels; pixels of label 255 do not count."""
    return MulticlassJaccardIndex(CLASSES, ignore_index=IGNORED)


def train(options: SceneOptions) -> dict[str, float]:
    """Train and validate; return the step and the mean IoU in percent.

    Raises:
        UserError: If options, data or weights are invalid.
    """
    options = options.with_rates(RATES)
    seed_everything(options.seed)
    root, features = options.folder(make_scenes), options.features()
    sets = [
        Scenes(root, "training", Augment(options.img_size)),
        Scenes(root, "validation", partial(whole, size=options.img_size)),
    ]
    return run(Segmentation(options, UperNet(features), features, *sets))


def main() -> None:
    """Train with the options of the command line."""
    train(parse(SceneOptions, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
