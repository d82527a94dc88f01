"""Any timm model trains by name, and its checkpoint loads like one of our own models."""

import dataclasses
import json

import pytest
import timm
import torch

import vil
from vil.training.release import ReleaseConfig, release
from vil.training.settings import ModelConfig

MODELS = {  # with further options
    "resnet18": ["--model.args", "drop_rate=0.1", "channels=(8, 16, 32, 64)"],
    "convnext_atto": ["--model.args", "depths=(1, 1, 1, 1)"],
    "mobilenetv3_small_050": ["--model.drop-path-rate", "0.1"],
    "deit_tiny_patch16_224": ["--model.depth", "2", "--model.args", "num_heads=2"],
    "vil_tiny": ["--model.depth", "2", "--model.args", "d_state=4"],
}


@pytest.mark.ci
@pytest.mark.parametrize("name", list(MODELS))
def test_model_of_timm_trains_and_comes_back(name, config, train, evaluate, image_folder, tmp_path) -> None:
    config = dataclasses.replace(config, model=ModelConfig(name=name, img_size=32))
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder), "--schedule.epochs", "2", *MODELS[name])
    assert train(config, *arguments) == 0
    last = folder / "last.pt"
    saved = torch.load(last, weights_only=True)
    assert (saved["arch"], saved["epoch"]) == (name, 2)
    assert evaluate(str(last), "--device", "cpu") == 0
    result = json.loads((folder / "last-eval.json").read_text())
    row = saved["run"]["history"][-1]
    assert (result["top1"], result["loss"]) == (row["top1"], row["val_loss"])

    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = vil.load(last).eval()
    assert all(torch.equal(saved["state_dict"][key], v) for key, v in model.state_dict().items())
    release(ReleaseConfig(checkpoint=str(last), folder=str(tmp_path / "small")))
    again = timm.create_model(f"local-dir:{tmp_path / 'small'}", pretrained=True).eval()
    with torch.no_grad():
        logits = model(images)
        assert logits.shape == (2, 4)
        assert torch.equal(vil.load(tmp_path / "small").eval()(images), logits)
        assert torch.equal(again(images), logits)
    features = vil.load(last, features_only=True, out_indices=(0, 1)).eval()
    assert [tap.ndim for tap in features(images)] == [4, 4]
