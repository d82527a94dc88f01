"""Train semantic segmentation on a timm backbone, with the FPN of segmentation_models_pytorch.

    python examples/segment.py
    python examples/segment.py --backbone resnet18 --data FOLDER --img-size 256

By default it learns generated shapes. See ``MaskFolder`` in folders.py for the layout of FOLDER. The mean
IoU covers all classes, background included, and all pixels of the held-out images at ``--img-size``.
"""

from training import backbone, batches, fit, model_kwargs, options, stack

import argparse
from functools import partial

import segmentation_models_pytorch as smp
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.transforms import v2

from folders import IGNORED, MaskFolder
from pictures import draw_masks

SHOWN = 8  # images in picture.png


def main() -> None:
    """Train, and save log, weights and a picture."""
    args = options(__doc__, "output/segment", epochs=4).parse_args()
    torch.manual_seed(args.seed)
    train, val = batches(args, MaskFolder, stack)
    model = segmenter(args, len(val.dataset.classes)).to(args.device)
    loss, metric = partial(loss_of, model), partial(mean_iou, model, val)
    fit(args, model, model[1].encoder, train, loss, metric)
    images, masks = (part[:SHOWN] for part in next(iter(val)))
    with torch.inference_mode():
        predicted = predict(model, images).argmax(1).cpu()
    draw_masks(args.output / "picture.png", images, masks, predicted, len(val.dataset.classes))


def segmenter(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """Return the model that the command line asks for, which normalises its images first."""
    # smp builds the backbone by name to learn its channels; one with all arguments replaces it below.
    # Leave out depth, which smp would take for its own argument of that name.
    kwargs = {key: value for key, value in model_kwargs(args).items() if key != "depth"}
    kwargs |= dict.fromkeys(("decoder_pyramid_channels", "decoder_segmentation_channels"), 64)
    model = smp.FPN(f"tu-{args.backbone}", encoder_weights=None, classes=num_classes, **kwargs)
    named = model.encoder.model.feature_info
    model.encoder.model = backbone(args, out_indices=named.out_indices)
    channels = model.encoder.model.feature_info.channels()
    if channels != named.channels():
        raise ValueError(
            f"--weights have {channels} channels, but --model-kwargs give {named.channels()}; "
            "pass the arguments of the weights' model in --model-kwargs"
        )
    mean, std = (timm.get_pretrained_cfg_value(args.backbone, key) for key in ("mean", "std"))
    return nn.Sequential(v2.Normalize(mean, std), model)


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits, (B, classes, H, W), float32, on the model's device; bfloat16 inside on GPUs."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(images.to(device)).float()


def loss_of(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    """Return cross-entropy plus Dice loss, in which rare classes count as much as frequent ones."""
    logits = predict(model, images)
    masks = masks.to(logits.device)
    dice = smp.losses.DiceLoss("multiclass", ignore_index=IGNORED)
    return F.cross_entropy(logits, masks, ignore_index=IGNORED) + dice(logits, masks)


@torch.inference_mode()
def mean_iou(model: nn.Module, val: DataLoader) -> dict[str, float]:
    """Return the mean intersection over union of held-out images."""
    metric = MulticlassJaccardIndex(len(val.dataset.classes), ignore_index=IGNORED)
    for images, masks in val:
        metric.update(predict(model, images).argmax(1).cpu(), masks)
    return {"miou": metric.compute().item()}


if __name__ == "__main__":
    main()
