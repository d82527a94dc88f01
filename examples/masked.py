"""Pretrain a backbone without labels: hide patches of an image and predict their pixels.

    python examples/masked.py
    python examples/masked.py --way mae --data FOLDER --img-size 256 --model-kwargs

With simmim, a learned token replaces each hidden patch. With mae (faster), the backbone encodes visible
patches only, and one extra block decodes. Images are as in segment.py. Before training and after each epoch,
a linear probe on frozen tokens predicts the class at each patch's centre. Its mean IoU over held-out images,
with equal class weights, is printed. Use ``backbone.pt`` in ``vil.load`` or as --weights of other examples.
"""

from training import SMALL, backbone, batches, fit, options, parse, stack

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.transforms.v2.functional import normalize

import vil
from folders import IGNORED, MaskFolder
from vil.training.files import write_atomically


def main() -> None:
    """Train, and save log and weights."""
    parser = options(__doc__, "masked", epochs=4)
    parser.add_argument("--way", choices=("simmim", "mae"), default="simmim")
    parser.add_argument("--hide", type=float, default=0.6, help="part of the patches")
    parser.set_defaults(backbone="vil_tiny", model_kwargs=SMALL, img_size=64)
    parser.set_defaults(images=400, batch_size=16, lr=4e-3)
    args = parse(parser)
    torch.manual_seed(args.seed)
    train, val = batches(args, MaskFolder, stack)
    plain = backbone(args, features_only=False, num_classes=0)
    model = Masked(plain, args.way, args.hide).to(args.device)
    evaluate = partial(mean_iou_of_probe, model, train, val)
    print(f"untrained  miou {evaluate()['miou']:.5g}")
    fit(args, model, plain, train, lambda images, _: model(images), evaluate)
    state_dict = plain.state_dict()
    write_atomically(args.output / "backbone.pt", lambda file: torch.save(state_dict, file))


class Masked(nn.Module):
    """Predict the pixels of hidden patches from the tokens of a backbone."""

    def __init__(self, backbone: vil.VisionLonghorn, way: str, hide: float) -> None:
        """Add a mask token, a linear map to the pixels of a patch and, for mae, a one-block decoder."""
        super().__init__()
        own = isinstance(backbone, vil.VisionLonghorn)
        if not own or len({*backbone.patch_embed.stride, *backbone.patch_embed.patch_size}) > 1:
            raise ValueError("--backbone must be a model of this package with square patches that do not overlap")
        embed, dim, size = backbone.patch_embed, backbone.embed_dim, backbone.patch_embed.stride[0]
        self.hide, self.size = round(hide * embed.num_patches), size
        if not 0 < self.hide < embed.num_patches:
            raise ValueError(f"--hide must hide 1 to {embed.num_patches - 1} patches, got {hide}")
        self.backbone, self.prefix = backbone, backbone.num_prefix_tokens
        self.mask_token = nn.Parameter(0.02 * torch.randn(dim))
        sizes = {"img_size": embed.img_size, "patch_size": size, "embed_dim": dim}
        self.decoder = vil.VisionLonghorn(**sizes, depth=1, num_classes=0) if way == "mae" else None
        self.pixels = nn.Linear(dim, 3 * size**2)

    def patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches, (B, H, W, C), and normalised images, (B, 3, height, width), of images in 0 to 1."""
        cfg = self.backbone.pretrained_cfg
        images = normalize(images.to(self.mask_token.device), cfg["mean"], cfg["std"])
        return self.backbone.patch_embed(images), images

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean absolute pixel error over hidden patches, drawn at random for each image."""
        patches, images = self.patches(images)
        B, H, W, C = patches.shape
        shown = torch.rand(B, H * W, device=images.device).argsort(1)[:, self.hide :]
        hidden = torch.ones(B, H * W, dtype=torch.bool, device=images.device)
        hidden = hidden.scatter(1, shown, False)
        if self.decoder is None:
            patches = torch.where(hidden.view(B, H, W, 1), self.mask_token, patches)
            tokens = self.backbone.forward_patches(patches)[:, self.prefix :]
        else:
            encoded = self.backbone.forward_patches(patches, keep=shown)[:, self.prefix :]
            places = shown[..., None].expand_as(encoded)
            patches = self.mask_token.expand(B, H * W, C).scatter(1, places, encoded)
            tokens = self.decoder.forward_patches(patches.view(B, H, W, C))[:, 1:]
        pixels = F.pixel_unshuffle(images, self.size)
        return F.l1_loss(self.pixels(tokens[hidden]), pixels.flatten(2).mT[hidden])

    @torch.inference_mode()
    def tokens(self, batches: DataLoader) -> tuple[Tensor, Tensor]:
        """Return tokens with an added 1, (N, C + 1), and classes at their centres, (N,), unless ignored."""
        found, size = [], self.size
        for images, masks in batches:
            tokens = self.backbone.forward_patches(self.patches(images)[0])[:, self.prefix :]
            classes = masks[:, size // 2 :: size, size // 2 :: size].flatten()
            found.append((F.pad(tokens.flatten(0, 1).cpu(), (0, 1), value=1), classes))
        tokens, classes = (torch.cat(parts) for parts in zip(*found, strict=True))
        return tokens[classes != IGNORED], classes[classes != IGNORED]


def mean_iou_of_probe(model: Masked, train: DataLoader, val: DataLoader) -> dict[str, float]:
    """Fit a linear probe on training tokens and return its mean IoU on held-out patches."""
    model.eval()
    tokens, classes = model.tokens(train)
    weight = classes.bincount()[classes, None].rsqrt()  # all classes count the same
    one_hot = F.one_hot(classes, len(val.dataset.classes)) * weight
    linear = torch.linalg.lstsq(tokens * weight, one_hot).solution
    tokens, classes = model.tokens(val)
    metric = MulticlassJaccardIndex(linear.shape[1])
    return {"miou": metric((tokens @ linear).argmax(1), classes).item()}


if __name__ == "__main__":
    main()
