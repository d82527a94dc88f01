"""The registered models: ``timm.create_model`` finds these names once ``vil`` is imported. ``pyramid.py`` adds its own."""

from collections.abc import Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from vil.backbone import VisionLonghorn
from vil.state_dicts import checkpoint_filter_fn


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


default_cfgs = generate_default_cfgs(
    {
        "vil_tiny": _cfg(),
        "vil_small": _cfg(),
        "vil_base": _cfg(),
        "vil_tiny_exact": _cfg(),
        "vil_small_exact": _cfg(),
        "vil_base_exact": _cfg(),
        "vim_tiny": _cfg(),
        "vim_small": _cfg(),
        "vim_base": _cfg(),
    }
)


def dense_indices(depth: int) -> tuple[int, ...]:
    """Return the ends of the four quarters of the blocks, which dense heads take: 5, 11, 17, 23 of 24.

    A quarter that does not end with a block ends with the block that it ends in, so that the last block
    is always one of them; of fewer than four blocks they are all.
    """
    return tuple(sorted({-(-depth * quarter // 4) - 1 for quarter in (1, 2, 3, 4)}))


def build_variant(
    variant: str,
    pretrained: bool,
    depth: int,
    model_cls: type[VisionLonghorn] = VisionLonghorn,
    out_indices: int | Sequence[int] | None = None,
    pretrained_strict: bool = True,
    **kwargs: Any,
) -> VisionLonghorn:
    """Build a registered model.

    Args:
        variant: Its name.
        pretrained: As of ``timm.create_model``.
        depth: Number of blocks.
        model_cls: Its class.
        out_indices: Which features ``features_only=True`` gives: the last n if int, else their numbers;
            None for those of ``dense_indices``.
        pretrained_strict: As of ``timm.create_model``.
        **kwargs: Of ``timm.create_model``.
    """
    if out_indices is None:
        out_indices = dense_indices(depth)
    return build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        pretrained_strict=pretrained_strict,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        depth=depth,
        **kwargs,
    )


@register_model
def vil_tiny(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViL-T: diagonal Longhorn scan, the paper's; 192 channels, 24 blocks."""
    model_args = {"embed_dim": 192, "depth": 24, "recurrence": "longhorn"}
    return build_variant("vil_tiny", pretrained, **(model_args | kwargs))


@register_model
def vil_small(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViL-S: diagonal Longhorn scan, the paper's; 384 channels, 24 blocks."""
    model_args = {"embed_dim": 384, "depth": 24, "recurrence": "longhorn"}
    return build_variant("vil_small", pretrained, **(model_args | kwargs))


@register_model
def vil_base(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViL-B: diagonal Longhorn scan, the paper's; 768 channels, 24 blocks."""
    model_args = {"embed_dim": 768, "depth": 24, "recurrence": "longhorn"}
    return build_variant("vil_base", pretrained, **(model_args | kwargs))


@register_model
def vil_tiny_exact(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViL-T with the exact, closed-form Longhorn scan; 192 channels, 24 blocks."""
    model_args = {"embed_dim": 192, "depth": 24, "recurrence": "longhorn_exact"}
    return build_variant("vil_tiny_exact", pretrained, **(model_args | kwargs))


@register_model
def vil_small_exact(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViL-S with the exact, closed-form Longhorn scan; 384 channels, 24 blocks."""
    model_args = {"embed_dim": 384, "depth": 24, "recurrence": "longhorn_exact"}
    return build_variant("vil_small_exact", pretrained, **(model_args | kwargs))


@register_model
def vil_base_exact(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViL-B with the exact, closed-form Longhorn scan; 768 channels, 24 blocks."""
    model_args = {"embed_dim": 768, "depth": 24, "recurrence": "longhorn_exact"}
    return build_variant("vil_base_exact", pretrained, **(model_args | kwargs))


@register_model
def vim_tiny(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViM-T: Mamba scan, the comparator; 192 channels, 24 blocks."""
    model_args = {"embed_dim": 192, "depth": 24, "recurrence": "mamba"}
    return build_variant("vim_tiny", pretrained, **(model_args | kwargs))


@register_model
def vim_small(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViM-S: Mamba scan, the comparator; 384 channels, 24 blocks."""
    model_args = {"embed_dim": 384, "depth": 24, "recurrence": "mamba"}
    return build_variant("vim_small", pretrained, **(model_args | kwargs))


@register_model
def vim_base(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """ViM-B: Mamba scan, the comparator; 768 channels, 24 blocks."""
    model_args = {"embed_dim": 768, "depth": 24, "recurrence": "mamba"}
    return build_variant("vim_base", pretrained, **(model_args | kwargs))
