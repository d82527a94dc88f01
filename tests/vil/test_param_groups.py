"""vil.param_groups: the rules of a backbone hold wherever it is."""

import copy

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

import vil

SMALL = {"embed_dim": 16, "depth": 4, "img_size": 32}


class Detector(nn.Module):
    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = features, nn.Conv2d(16, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return sum(self.head(level).mean() for level in self.backbone(images))


def lightning_module(features: nn.Module) -> nn.Module:
    lightning = pytest.importorskip("lightning")
    module = lightning.LightningModule()
    module.network = Detector(features)
    return module


def adapted(features: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=r".*\.mixer\.proj", modules_to_save=["head"])
    tuned = peft.get_peft_model(Detector(features), config)
    return tuned.requires_grad_(True)


WRAPPERS = {
    "detector": Detector,
    "features": lambda features: features,
    "compiled": lambda features: torch.compile(Detector(features)),
    "Lightning": lightning_module,
    "PEFT": adapted,
}


@pytest.mark.parametrize("decay", [None, 0.5])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["vil_tiny_pyramid", "vil_tiny"])
def test_each_parameter_has_its_rate_and_decay(wrapper: str, name: str, decay: float | None) -> None:
    model = WRAPPERS[wrapper](timm.create_model(name, features_only=True, **SMALL))
    groups = vil.param_groups(model, 2.0, 0.1, decay)
    found = {id(p): group for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    factor = decay or 1.0
    for whole, parameter in model.named_parameters():
        place, group = whole.replace("base_layer.", ""), found[id(parameter)]
        if ".blocks." in f".{place}":
            assert group["lr"] == 2 * factor ** (4 - int(place.split("blocks.")[1][0])), whole
        elif place.endswith(("pos_embed", "cls_token")) or "patch_embed" in place:
            assert group["lr"] == 2 * factor**5, whole
        else:
            assert "head" in place or "pyramid" in place, whole
            assert group["lr"] == 2, whole
        kept = ("pos_embed", "cls_token", "conv_bias", "dt_bias", "mixer.D")
        none = place.endswith(kept) or parameter.ndim <= 1
        assert group["weight_decay"] == (0 if none else 0.1), whole


def test_a_step_decays_nothing_that_the_recipe_does_not_and_frozen_parameters_stay() -> None:
    model = Detector(timm.create_model("vil_tiny_pyramid", features_only=True, **SMALL))
    model.backbone.model.patch_embed.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(vil.param_groups(model, 1.0, 0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # of the decay alone
    for name, value in model.state_dict().items():
        kept = name.endswith(("D", "bias", "pos_embed", "cls_token", "ref_feat_bits")) or value.ndim < 2
        changed = not (kept or "patch_embed" in name)
        torch.testing.assert_close(value, before[name] * (0.5 if changed else 1.0))


def test_whole_models_have_timms_groups_and_others_need_a_backbone() -> None:
    for name, heads in (("vil_tiny", {}), ("deit_tiny_patch16_224", {"num_heads": 2})):
        model = timm.create_model(name, **SMALL, **heads)
        theirs = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
        expected = {id(p): (g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
        groups = vil.param_groups(model, 1.0, 0.1, 0.5)
        assert {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]} == expected
    plain = nn.Linear(2, 2)
    decays = {group["weight_decay"] for group in vil.param_groups(plain, 1.0, 0.1)}
    assert decays == {0.0, 0.1}
    with pytest.raises(ValueError, match="layer_decay must be 1 or None for Linear"):
        vil.param_groups(plain, 1.0, layer_decay=0.5)
    with pytest.raises(ValueError, match="layer_decay must be above 0 and at most 1, got 2"):
        vil.param_groups(model, 1.0, layer_decay=2.0)


def test_each_of_two_backbones_has_its_rules() -> None:
    pair = nn.ModuleList(timm.create_model("vil_tiny", **SMALL) for _ in range(2))
    groups = vil.param_groups(pair, 1.0, 0.1, 0.5)
    rules = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    one, other = ([rules[id(p)] for p in backbone.parameters()] for backbone in pair)
    assert one == other


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pyramid"])
def test_features_recompute_their_blocks_if_asked(name: str) -> None:
    model = Detector(timm.create_model(name, features_only=True, **SMALL))
    images, counts = torch.randn(1, 3, 32, 32), []
    model.backbone.model.blocks[0].register_forward_pre_hook(lambda *_: counts.append(1))
    for enable, calls in ((False, 1), (True, 2)):
        counts.clear()
        model.backbone.set_grad_checkpointing(enable)
        model(images).backward()
        assert len(counts) == calls
