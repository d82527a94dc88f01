"""The documents written from records: up to date, and naming where they are from."""

import json
import shlex
from pathlib import Path
from string import Template

import pytest
import timm

from experiments import results
from vil.training.recipes import load_config


@pytest.mark.parametrize("name", results.DOCUMENTS)
def test_document_is_what_the_records_give(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pictures are drawn anew elsewhere: their bytes depend on matplotlib's version."""
    monkeypatch.setattr(results, "IMAGES", tmp_path)
    template = Template((results.TEMPLATES / name).read_text())
    document = results.ROOT / "docs" / name
    assert document.read_text() == template.substitute(results.placeholders()), (
        "run python -m experiments.results"
    )
    for picture in tmp_path.glob("*.png"):
        assert (results.ROOT / "docs" / "images" / picture.name).exists()


def test_every_record_tells_where_it_is_from() -> None:
    visions = [f"vision_{name}" for name in ("digits", "fractals", "ablations")]
    for name in (
        "mqar_short",
        "mqar_long",
        *visions,
        "finetune",
        "dense",
        "faithfulness_digits",
        "faithfulness_fractals",
    ):
        text = results.provenance(name)
        commit = results.load(name)["environment"]["commit"]
        assert f"commit {commit}, seeds 0, 1, 2" in text
        assert "dirty" not in commit


@pytest.mark.parametrize("run", results.imagenet_runs(), ids=lambda run: run.output)
def test_run_sheet_names_a_recipe_that_loads(run: results.ImageNetRun) -> None:
    config = load_config(shlex.split(run.arguments), Path("unused"))
    assert config.model.name == run.model
    assert config.model.patch_stride == (None if run.patch_stride == 16 else run.patch_stride)
    assert config.schedule.epochs == (300 if run.patch_stride == 16 else 30)


def test_run_sheet_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "| vil_tiny | 76.4 | not run | unmeasured |" in results.run_sheet()
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "SPEEDS", tmp_path / "train_speed.json")
    speed = {"environment": {"device": "GPU"}, "rows": [{"model": "vil_tiny", "hours": 123.4}]}
    (tmp_path / "train_speed.json").write_text(json.dumps(speed))
    (tmp_path / "imagenet_vil_tiny.json").write_text(json.dumps({"top1": 76.5}))
    sheet = results.run_sheet()
    assert "| vil_tiny | 76.4 | 76.50 | 123 on one GPU |" in sheet
    assert "| vil_tiny_finer | none | not run | unmeasured |" in sheet


@pytest.mark.parametrize("run", results.downstream_runs(), ids=lambda run: run.output)
def test_downstream_sheet_names_options_that_exist(run: results.DownstreamRun) -> None:
    tyro = pytest.importorskip("tyro")
    pytest.importorskip("lightning")
    module = pytest.importorskip(f"downstream.{run.task}")
    words = shlex.split(run.command)
    words = words[words.index(f"downstream.{run.task}") + 1 :]
    kinds = {"ade20k": "SceneOptions", "coco": "ObjectOptions"}
    options = tyro.cli(getattr(module, kinds[run.task]), args=words)
    assert options.with_rates(module.RATES).lr > 0
    assert timm.is_model(options.model)


def test_downstream_sheet_takes_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = "| ade20k_vim_tiny | 41.0 mIoU | {} | {} | `torchrun"
    assert row.format("not run", "unmeasured") in results.downstream_sheet()
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "ade20k_vim_tiny.json").write_text(json.dumps({"step": 4, "miou": 40.96}))
    speed = {"device": "GPU", "hours": 12.3}
    (tmp_path / "ade20k_vim_tiny_speed.json").write_text(json.dumps(speed))
    assert row.format("41.0 mIoU", "12 on GPU") in results.downstream_sheet()
