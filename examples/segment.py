"""Train semantic segmentation on a timm backbone, with the FPN of segmentation_models_pytorch.

    python examples/segment.py
    python examples/segment.py --backbone resnet18 --data FOLDER --img-size 256
    python examples/segment.py --predict photo.jpg

By default it learns generated shapes. See ``MaskFolder`` in folders.py for the layout of FOLDER. The mean
IoU covers all classes, background included, and all pixels of the held-out images at ``--img-size``.
``--predict`` uses the model that was trained with the same ``--output``, and paints photographs of any size.
"""

from training import backbone, batches, fit, options, parse, stack

import argparse
from functools import partial
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.transforms import v2

from folders import IGNORED, MaskFolder
from pictures import draw_masks, paint_mask
from prediction import add_predict, predict_photos

SHOWN = 8  # images in picture.png


def main() -> None:
    """Train, and save log, weights and a picture; or predict."""
    parser = options(__doc__, "segment", epochs=4)
    add_predict(parser)
    args = parse(parser)
    if args.predict:
        predict_photos(args, segmenter, partial(paint, args.classes))
        return
    torch.manual_seed(args.seed)
    train, val = batches(args, MaskFolder, stack)
    model = segmenter(args, len(val.dataset.classes)).to(args.device)
    loss, metric = partial(loss_of, model), partial(mean_iou, model, val)
    fit(args, model, model[1].encoder, train, loss, metric, val.dataset.classes)
    images, masks = (part[:SHOWN] for part in next(iter(val)))
    with torch.inference_mode():
        predicted = predict(model, images).argmax(1).cpu()
    draw_masks(args.output / "picture.png", images, masks, predicted, len(val.dataset.classes))


def segmenter(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """Return the model that the command line asks for, which normalises its images first."""
    # smp builds the backbone by name to learn its channels; one with all arguments replaces it below.
    # Leave out arguments that smp would take for its own, or passes itself.
    kwargs = {key: value for key, value in args.model_kwargs.items() if key not in ("depth", "in_chans")}
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
    return nn.Sequential(v2.Normalize(args.mean, args.std), model)


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


def masks_of(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the class of each pixel, (H, W), int64, of an image of another size, from logits (classes, h, w).

    It resizes logits, not classes, which gives smooth borders. One class at a time, since a photograph of 12
    megapixels needs 48 MB for each.
    """
    best = logits.new_full(size, -torch.inf)
    mask = torch.zeros(size, dtype=torch.int64, device=logits.device)
    for label, part in enumerate(logits):
        resized = F.interpolate(part[None, None], size, mode="bilinear")[0, 0]
        mask[resized > best] = label
        best = torch.maximum(best, resized)
    return mask


def paint(classes: list[str], model: nn.Module, photo: Tensor, images: Tensor, path: Path) -> str:
    """Save a photograph painted with its predicted classes; return the share of each class in words."""
    mask = masks_of(predict(model, images)[0], photo.shape[1:]).cpu()
    paint_mask(path, photo, mask, classes)
    shares = mask.flatten().bincount(minlength=len(classes)) / mask.numel()
    order = shares.argsort(descending=True, stable=True).tolist()
    return ", ".join(f"{classes[k]} {shares[k]:.1%}" for k in order if shares[k])


if __name__ == "__main__":
    main()
