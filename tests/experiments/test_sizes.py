"""The experiment on other sizes: a toy run from training to the record, its methods, and its tables."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from experiments import sizes, sizes_results, sizes_training, vision
from experiments.records import CHOICE_SEED, Row, select
from vil.training.data.batches import TrainData
from vil.training.distributed import World
from vil.training.run.setup import build_model

TOY = sizes.Experiment(
    models=("ViL", "DeiT"),
    seeds=(0,),
    rates=(1e-3, 2e-3),
    more={"ViL, sizes": (0,), "ViL, sizes, plain": (0,), "DeiT x 2": (0,)},
    sides=(1, 2),
    ingredients=(2,),
    tuned=(0,),
    tuning=(0, 1),
    tuning_batch=8,
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Name the toy, and keep its weights elsewhere."""
    settings = vision.EXPERIMENTS["digits"]
    settings = dataclasses.replace(settings, steps=2, images_per_class=(4,))
    monkeypatch.setitem(vision.EXPERIMENTS, "toy", settings)
    monkeypatch.setitem(sizes.EXPERIMENTS, "toy", TOY)
    monkeypatch.setattr(sizes_training, "WEIGHTS", tmp_path / "weights")
    return "toy"


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_toy_run_chooses_scores_and_reports(toy: str, tmp_path: Path) -> None:
    sizes.execute(toy, tmp_path / "sizes.json", jobs=1)
    rows = json.loads((tmp_path / "sizes.json").read_text())["runs"]
    assert len(select(rows, part="rate", model="ViL")) == 2
    assert len(select(rows, part="rate", model="DeiT")) == 3  # of two rates one is at an edge
    assert {row["seed"] for row in select(rows, part="rate")} == {CHOICE_SEED}
    [vil] = select(rows, part="sizes", model="ViL")
    assert set(vil["resized"]) == set(sizes.METHODS)
    for method in ("plain", "both"):
        assert vil["resized"][method]["1"] == vil["top1"]
    assert set(vil["resized"]["taps"]) == {"4"}
    assert vil["padded"]["mask"] == vil["top1"]
    [deit] = select(rows, part="sizes", model="DeiT x 2")
    assert set(deit["resized"]) == {"plain"}
    assert deit["steps"] == 4
    curves = {row["method"]: row["curve"] for row in select(rows, part="fine-tuning")}
    assert curves["plain"]["0"] == vil["resized"]["plain"]["4"]
    assert curves["both"]["0"] == vil["resized"]["both"]["4"]
    again = sizes.run(toy, **{key: vil[key] for key in ("part", "model", "lr", "seed")})
    assert again == {key: vil[key] for key in again}


def test_weights_are_trained_once(toy: str) -> None:
    row = sizes_training.train(toy, "ViL", 1e-3, 0)
    path = sizes_training.path_of(toy, "ViL", 1e-3, 0)
    written = path.stat().st_mtime_ns
    assert sizes_training.train(toy, "ViL", 1e-3, 0) == row
    assert path.stat().st_mtime_ns == written
    assert row["steps"] == 2


def test_training_sizes_come_in_turn(toy: str) -> None:
    config = sizes_training.configure(toy, "ViL, sizes", 1e-3, 0)
    data = sizes_training.RandomSizes(config, torch.device("cpu"), World())
    parts = [step.micro_batches[0] for step in data.steps(0)]
    assert [tuple(images.shape[2:]) for images, _ in parts] == [(16, 16), (24, 24)]
    plain = next(TrainData(config, torch.device("cpu"), World()).steps(0)).micro_batches[0]
    assert torch.equal(parts[0][1], plain[1])
    assert (parts[0][0].float() - plain[0].float()).abs().mean() < 16


def test_ingredients_differ_from_both_and_leave_nothing_behind(toy: str) -> None:
    config = sizes_training.configure(toy, "ViL", 1e-3, 0)
    torch.manual_seed(0)
    net = build_model(config.model).eval()
    for block in net.blocks:  # as they begin, steps and taps are too small to matter
        torch.nn.init.normal_(block.mixer.x_proj_weight)
    images = torch.randn(1, 1, 32, 32)
    with torch.inference_mode():
        out = {method: sizes.Arm(net, method)(images) for method in sizes.METHODS}
        again = {method: sizes.Arm(net, method)(images) for method in reversed(sizes.METHODS)}
    assert all(torch.equal(out[method], again[method]) for method in sizes.METHODS)
    names = list(sizes.METHODS)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert not torch.allclose(out[first], out[second], rtol=1e-3), (first, second)


def test_each_is_scored_by_what_it_can_do() -> None:
    assert sizes.methods_of("ViM") == sizes.METHODS
    assert sizes.methods_of("DeiT x 3") == ("plain",)
    assert sizes.methods_of("ViL, sizes") == ("both",)
    assert sizes.methods_of("ViL, sizes, plain") == ("plain",)


def test_only_the_comparator_gets_another_rate() -> None:
    settings = sizes.EXPERIMENTS["digits"]
    rows: list[Row] = []
    for model in ("ViL", "DeiT"):
        rows += [run | {"loss": 1 / run["lr"]} for run in settings.rates_of([], model)]
    assert [run["lr"] for run in settings.rates_of(rows, "DeiT")] == [*settings.rates, 16e-3]
    assert [run["lr"] for run in settings.rates_of(rows, "ViL")] == list(settings.rates)
    assert settings.best_rate(rows, "ViL, sizes") == 8e-3
    reported = settings.reported(rows, "ViL, sizes", (0, 1))
    assert reported[0] == {"part": "sizes", "model": "ViL, sizes", "lr": 8e-3, "seed": 0}


# ------------------------------------------------------------------------------------------ tables


def rows_of(model: str, trained: list[float], larger: list[float]) -> list[Row]:
    """Return runs that have a top-1 at the trained size and another elsewhere; half of it plain."""
    rows = []
    for seed, (top1, other) in enumerate(zip(trained, larger, strict=True)):
        at = {"both": {"1": top1, "4": other}, "plain": {"1": top1, "4": other / 2}}
        at |= {name: {"4": other - 1} for name in ("taps", "steps")}
        if model == "DeiT":
            at = {"plain": {"1": top1, "4": other}}
        shaped = {method: other for method in at if method in ("plain", "both")}
        row = {"part": "sizes", "model": model, "lr": 1e-3, "seed": seed, "top1": top1, "loss": 0.1}
        padded = {"plain": other, "mask": top1}
        row |= {"resized": at, "stretched": {"wide": shaped, "high": shaped}, "padded": padded}
        rows.append(row | ({} if model == "DeiT" else {"finer": shaped}))
    return rows


def test_tables_and_picture_of_rows(tmp_path: Path) -> None:
    rows = rows_of("ViL", [80.0, 90.0], [72.0, 81.0]) + rows_of("DeiT", [80.0, 80.0], [40.0, 40.5])
    curve = {"part": "fine-tuning", "model": "ViL", "method": "both", "seed": 0, "curve": {"5": 50}}
    resized = sizes_results.resized_table(rows)
    assert "| model |  | 1 x the tokens | 4 x the tokens |" in resized
    assert "| ViL | both | 85.0 ± 7.1 | 76.5 ± 6.4 |" in resized
    assert "| ViL | plain | 85.0 ± 7.1 | 38.2 ± 3.2 |" in resized
    assert "| DeiT | plain | 80.0 ± 0.0 | 40.2 ± 0.4 |" in resized
    shares = sizes_results.shares_table(rows, {"4": 91, "half the stride": 90})
    assert "| 4 x the tokens | 91 | 90.0 ± 0.0, short by 1.0 | 50.3 ± 0.4 |" in shares
    assert "| half the stride | 90 | 90.0 ± 0.0, met |  |" in shares
    assert "| twice as wide |  | 90.0 ± 0.0 | 50.3 ± 0.4 |" in shares
    text = sizes_results.against_deit_text(rows)
    assert "Of 3 differences" in text
    assert "in favour of the scan: 3 (4 x the tokens: ViL; twice as wide: ViL; twice" in text
    assert "in favour of DeiT: 0; within the noise: 0." in text
    text = sizes_results.aims_text(rows, {"4": 91, "half the stride": 90})
    assert text == "1 of 2 are met (missed, in points: 4 x the tokens: ViL by 1.0)"
    shapes = sizes_results.shapes_table(rows)
    assert "| ViL | both | 76.5 ± 6.4 | 76.5 ± 6.4 | 76.5 ± 6.4 | 85.0 ± 7.1 |" in shapes
    assert "| ViL | taps | 75.5 ± 6.4 |" in sizes_results.ingredients_table(rows)
    assert sizes_results.curve_table(rows) == sizes_results.several_sizes_table(rows) == "Not run."
    assert "| both | 50.0 |" in sizes_results.curve_table([curve])
    rows += rows_of("ViL, sizes", [80.0, 90.0], [72.0, 81.0])
    assert "| several sizes | both | 2 | 85.0" in sizes_results.several_sizes_table(rows)
    assert sizes_results.figures(rows)["kept_4"] == "90"
    sizes_results.draw(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_rates_are_shown_where_they_were_tried() -> None:
    rows = [
        {"part": "rate", "model": model, "lr": lr, "loss": lr, "top1": 50.0, "seed": CHOICE_SEED}
        for model in ("ViL", "ViL exact", "ViM", "DeiT")
        for lr in ((1, 2) if model == "DeiT" else (1,))
    ]
    table = sizes_results.rates_table(rows)
    assert "| ViL | 1.000 (50.0) |  |" in table
    assert "| DeiT | 1.000 (50.0) | 2.000 (50.0) |" in table
