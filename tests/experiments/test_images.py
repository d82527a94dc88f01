"""Experiments on images: variants that change one thing each, and runs."""

import dataclasses
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch

from experiments import images, variants  # noqa: F401  registers the variants

SMALL = {"depth": 2, "img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 10}
TINY = dataclasses.replace(images.DATA["digits"], steps=2, per_class=4)


def create(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, embed_dim=32, **SMALL)


def test_scalar_beta_is_one_step_size_for_all_channels() -> None:
    mixer = create("scalar_diagonal").blocks[0].mixer
    assert mixer.dt_weight.shape[1] == mixer.dt_bias.shape[1] == 64
    assert torch.equal(mixer.dt_weight, mixer.dt_weight[:, :1].expand_as(mixer.dt_weight))
    assert mixer.parametrizations.dt_weight.original.shape[1] == 1
    mixer = create("heads_exact").blocks[0].mixer
    assert mixer.parametrizations.dt_weight.original.shape[1] == 4
    assert torch.equal(mixer.dt_bias, mixer.dt_bias[:, ::16].repeat_interleave(16, 1))


@pytest.mark.parametrize("class_token", [True, False])
def test_grid_convolution_of_a_kernel_with_one_tap_is_the_causal_one(class_token: bool) -> None:
    """One tap only scales each token, so the mixers agree; a second reads just one neighbour."""
    torch.manual_seed(0)
    pool = {} if class_token else {"class_token": False, "global_pool": "avg"}
    model = timm.create_model("conv2d_exact", embed_dim=32, **SMALL, **pool).eval()
    plain = timm.create_model("vil_tiny_exact", embed_dim=32, **SMALL, **pool).eval()
    state = {name: value for name, value in model.state_dict().items() if "grid_conv" not in name}
    missing = plain.load_state_dict(state, strict=False).missing_keys
    assert bool(missing) != class_token
    with torch.no_grad():
        for own, other in zip(model.blocks, plain.blocks, strict=True):
            for weight in (own.mixer.grid_conv.weight, other.mixer.conv_weight):
                weight.zero_()
            own.mixer.grid_conv.weight[:, 0, 1, 1] = other.mixer.conv_weight[:, :, -1] = 0.5
            own.mixer.grid_conv.bias.zero_()
            other.mixer.conv_bias.zero_()
            if class_token:
                own.mixer.conv_weight.copy_(other.mixer.conv_weight)
                own.mixer.conv_bias.zero_()
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(model(images), plain(images))
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.grid_conv.weight[:, 0, 0, 1] = 1  # the patch above
        tokens = torch.randn(1, 16 + class_token, 64)
        above = tokens.clone()
        changed = [i for i in range(17) if i != 8] if class_token else range(16)
        above[:, changed[1]] += 1
        differs = (mixer._convolved(tokens) != mixer._convolved(above)).any(-1)[:, 0]
    expected = torch.zeros_like(differs)
    expected[:, [changed[1], changed[5]]] = True
    assert torch.equal(differs, expected)


@pytest.mark.ci
def test_a_run_trains_and_scores(tmp_path: Path) -> None:
    rows = [images.run(TINY, None, model="ViL", lr=1e-3, seed=seed) for seed in (0, 0, 1)]
    assert rows[0]["steps"] == 2
    assert rows[0]["parameters"] == 304_330
    assert rows[0]["loss"] == rows[1]["loss"] != rows[2]["loss"]
    every = dataclasses.replace(TINY, every_epoch=True)
    training, config, row = images.trained(every, "ViL", 1e-3, 0)
    assert row["loss"] == rows[0]["loss"]
    assert len(row["curve"]) == 2
    assert row["curve"][0][0] < row["curve"][1][0] == pytest.approx(row["ms_per_step"] * 2 / 1e3)
    assert row["curve"][1][1] == row["top1"]
    content = {"state_dict": training.model.state_dict(), "config": asdict(config)}
    torch.save(content, tmp_path / "weights.pt")
    start = str(tmp_path / "weights.pt")
    tuned, scratch = (
        images.run(TINY, start, model="ViL", lr=1e-3, seed=0, start=arm) for arm in images.STARTS
    )
    assert tuned["train_loss"] < scratch["train_loss"] == rows[0]["train_loss"]
