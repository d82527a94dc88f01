"""The registered models: ``timm.create_model`` finds these names once ``vil`` is imported."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import FeatureGetterNet

from vil.backbone import VisionLonghorn
from vil.convert import checkpoint_filter_fn
from vil.pyramid import STRIDES, VisionLonghornPyramid
from vil.timm_models import state_images


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


# Name -> channels, recurrence and description. Every model of this table also has a pyramid.
_MODELS = {
    "vil_tiny": (192, "longhorn", "ViL-T: diagonal Longhorn scan, the paper's"),
    "vil_small": (384, "longhorn", "ViL-S: diagonal Longhorn scan, the paper's"),
    "vil_base": (768, "longhorn", "ViL-B: diagonal Longhorn scan, the paper's"),
    "vil_tiny_exact": (192, "longhorn_exact", "ViL-T: exact, closed-form Longhorn scan"),
    "vil_small_exact": (384, "longhorn_exact", "ViL-S: exact, closed-form Longhorn scan"),
    "vil_base_exact": (768, "longhorn_exact", "ViL-B: exact, closed-form Longhorn scan"),
    "vim_tiny": (192, "mamba", "ViM-T: Mamba scan, the comparator"),
    "vim_small": (384, "mamba", "ViM-S: Mamba scan, the comparator"),
    "vim_base": (768, "mamba", "ViM-B: Mamba scan, the comparator"),
}
_PYRAMID, _FINER = "_pyramid", "_finer"
# Weights that Vision Mamba's authors published: name -> repository and file on the hub.
_PUBLISHED = {
    "vim_tiny": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
    "vim_tiny_finer": ("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
    "vim_small": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth"),
    "vim_small_finer": ("hustvl/Vim-small-midclstok", "vim_s_midclstok_ft_81p6acc.pth"),
    "vim_base": ("hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
}
_VARIANTS = [
    *(name + end for end in ("", _PYRAMID) for name in _MODELS),
    *(name for name in _PUBLISHED if name.endswith(_FINER)),
]


def _plain(variant: str) -> str:
    """Return the name in ``_MODELS``."""
    return variant.removesuffix(_PYRAMID).removesuffix(_FINER)


def _tagged(variant: str) -> tuple[str, dict[str, Any]]:
    """Return a model's name, with a tag if there are weights, and its configuration."""
    hub_id, file = _PUBLISHED.get(variant.removesuffix(_PYRAMID), (None, None))
    if hub_id is None:
        return variant, _cfg()
    about = {"origin_url": "https://github.com/hustvl/Vim", "paper_ids": "arXiv:2401.09417"}
    return f"{variant}.midclstok_in1k", _cfg(hf_hub_id=hub_id, hf_hub_filename=file, **about)


RECURRENCES = {variant: _MODELS[_plain(variant)][1] for variant in _VARIANTS}
default_cfgs = generate_default_cfgs(dict(map(_tagged, _VARIANTS)))


def dense_indices(depth: int) -> tuple[int, ...]:
    """Return the last block of each quarter, whose maps dense heads take: 5, 11, 17, 23 of 24 blocks.

    If a quarter ends inside a block, that block counts, so the last block is always included. With fewer
    than four blocks, all are.
    """
    return tuple(sorted({-(-depth * quarter // 4) - 1 for quarter in (1, 2, 3, 4)}))


def _create(variant: str, pretrained: bool, depth: int = 24, **kwargs: Any) -> VisionLonghorn:
    """Build a registered model; same arguments as ``timm.create_model``.

    A ``*_pyramid`` model with a head is built without levels: no logit depends on them, and
    DistributedDataParallel refuses parameters without a gradient.
    """
    model_cls, indices = VisionLonghorn, dense_indices(depth)
    if variant.endswith(_PYRAMID) and (kwargs.get("features_only") or kwargs.get("num_classes") == 0):
        model_cls, indices = VisionLonghornPyramid, tuple(range(len(STRIDES)))
        feature_cls = kwargs.get("feature_cls", "getter")
        if getattr(feature_cls, "func", feature_cls) not in ("getter", FeatureGetterNet):
            raise ValueError(f'feature_cls must be "getter" to return the maps of a pyramid, got {feature_cls!r}')
    elif variant.endswith(_PYRAMID):
        kwargs.setdefault("dynamic_img_pad", True)
        for name in ("pyramid_blocks", "output_stride"):
            if name in kwargs:
                raise ValueError(f"{name} needs features_only=True or num_classes=0, got a model with a head")
    out_indices = kwargs.pop("out_indices", None)
    feature_cfg = {
        "out_indices": indices if out_indices is None else out_indices,
        "feature_cls": "getter",
    }
    if "output_fmt" in kwargs:
        feature_cfg["output_fmt"] = form = kwargs.pop("output_fmt")
        if form not in ("NCHW", "NLC") or not kwargs.get("features_only"):
            raise ValueError(f'output_fmt must be "NCHW" or "NLC", with features_only=True, got {form!r}')
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        pretrained_strict=kwargs.pop("pretrained_strict", True),
        feature_cfg=feature_cfg,
        depth=depth,
        **kwargs,
    )
    state_images(model)
    if isinstance(model, FeatureGetterNet):  # which does not pass it on
        model.set_grad_checkpointing = model.model.set_grad_checkpointing
    return model


def _register(variant: str) -> None:
    embed_dim, recurrence, what = _MODELS[_plain(variant)]
    model_args: dict[str, Any] = {"embed_dim": embed_dim, "recurrence": recurrence}
    if variant.endswith(_FINER):
        model_args["patch_stride"] = 8
        what += ", a patch every 8 pixels"
    elif variant.endswith(_PYRAMID):
        what += ", maps at strides 4, 8, 16 and 32"

    def entry(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
        return _create(variant, pretrained, **(model_args | kwargs))

    entry.__name__ = entry.__qualname__ = variant
    entry.__doc__ = f"{what}; {embed_dim} channels, 24 blocks."
    globals()[variant] = register_model(entry)  # where pickle looks for it


for _variant in _VARIANTS:
    _register(_variant)
