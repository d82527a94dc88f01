"""Run a script of examples/ with peers of our backbones registered with timm.

    python -m experiments.dense_peers segment --backbone deit_pyramid --model-kwargs depth=8

``deit_pyramid`` is DeiT with the levels of ``vil.pyramid``, from its last block, in the place of ours.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vil.pyramid import STRIDES, PyramidLevel

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class TransformerPyramid(VisionTransformer):
    """timm's vision transformer whose features are maps at strides 4, 8, 16 and 32."""

    def __init__(self, **kwargs: Any) -> None:
        """Create a backbone; arguments as of timm's ``VisionTransformer``."""
        super().__init__(**kwargs)
        stride = self.patch_embed.patch_size[0]
        self.pyramid = nn.ModuleList(PyramidLevel(self.embed_dim, stride, to) for to in STRIDES)
        self.feature_info = [
            {"module": f"pyramid.{i}", "num_chs": self.embed_dim, "reduction": to}
            for i, to in enumerate(STRIDES)
        ]

    def forward_intermediates(
        self, x: Tensor, indices: list[int] | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the maps, (B, C, H, W), of chosen levels."""
        levels, _ = feature_take_indices(len(STRIDES), indices)
        last = super().forward_intermediates(x, 1, intermediates_only=True)[0]
        return [self.pyramid[level](last) for level in levels]

    def prune_intermediate_layers(
        self,
        indices: int | list[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove what features do not need; return the levels as absolute numbers."""
        levels, _ = feature_take_indices(len(STRIDES), indices)
        super().prune_intermediate_layers(1, prune_norm, prune_head)
        for level in set(range(len(STRIDES))) - set(levels):
            self.pyramid[level] = nn.Identity()
        return levels


default_cfgs = generate_default_cfgs(
    {"deit_pyramid": {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}}
)


@register_model
def deit_pyramid(pretrained: bool = False, **kwargs: Any) -> TransformerPyramid:
    """DeiT with a pyramid: blocks as of ``deit_tiny_patch16_224``, heads of 32 to 63 channels."""
    arguments = {"embed_dim": 192, "depth": 12, "dynamic_img_size": True} | kwargs
    arguments |= {"num_heads": max(1, arguments["embed_dim"] // 32)}
    return build_model_with_cfg(
        TransformerPyramid,
        "deit_pyramid",
        pretrained,
        feature_cfg={"out_indices": tuple(range(len(STRIDES))), "feature_cls": "getter"},
        **arguments,
    )


def main() -> None:
    """Run the script as if it had been started by its path."""
    name, *sys.argv[1:] = sys.argv[1:]
    script = EXAMPLES / f"{name}.py"
    sys.argv[0] = str(script)
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
