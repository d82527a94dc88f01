"""Segmentation of larger images: the scenes, the ways, the scores, and what is made of records."""

import dataclasses
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("segmentation_models_pytorch")

from experiments import dense_sizes, dense_sizes_results, letter_scenes
from experiments.dense_sizes import OURS, PLAIN, SHRUNK, STEPS, WHOLE, WINDOWS, Experiment
from experiments.letter_scenes import MARGIN, Scenes, Split
from experiments.records import CHOICE_SEED, Row

TTF = Path(matplotlib.get_data_path(), "fonts", "ttf")
FONTS = [[TTF / "DejaVuSans.ttf"], [TTF / "DejaVuSerif.ttf", TTF / "DejaVuSerif-Bold.ttf"]]
SCENES = Scenes(side=128, letters="IO", sizes=(10, 32), number=12)
TOY = Experiment(steps=2, batch=2, sizes=(128,), scenes=SCENES)


def noise(rng: np.random.Generator, side: int) -> np.ndarray:
    return rng.integers(100, 140, (side, side, 3), dtype=np.uint8)


def scenes(seed: int = 0, number: int = 2) -> Split:
    return letter_scenes.split(seed, number, SCENES, FONTS, noise)


def test_scenes_are_reproducible() -> None:
    first, again, other = scenes(), scenes(), scenes(seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.images, other.images)
    more = scenes(number=3)
    assert np.array_equal(more.images[:2], first.images)


def test_masks_match_the_letters_drawn() -> None:
    """The middle of an O shows the photograph, and that of an I does not."""
    settings = dataclasses.replace(SCENES, sizes=(20, 32), letters="IO")
    photograph = np.full((128, 128, 3), 128, np.uint8)
    made = letter_scenes.draw(np.random.default_rng(0), settings, FONTS[:1], photograph)
    image, classes, objects, heights = made
    changed = (image != photograph).any(2)
    assert set(classes[objects > 0]) == {1, 2}
    assert (changed & (objects == 0)).sum() < 0.1 * changed.sum()  # smooth edges
    for number in range(1, objects.max() + 1):
        rows, columns = np.nonzero(objects == number)
        assert len(set(classes[rows, columns])) == 1
        assert np.ptp(rows) + 1 == pytest.approx(heights[number], abs=2)
        middle = changed[round(rows.mean()), round(columns.mean())]
        assert middle == (classes[rows[0], columns[0]] == 1)


def test_no_letter_is_near_another() -> None:
    for objects in scenes().objects:
        for number in range(1, objects.max() + 1):
            rows, columns = np.nonzero(objects == number)
            top, left = rows.min() - MARGIN, columns.min() - MARGIN
            around = objects[top : rows.max() + MARGIN + 1, left : columns.max() + MARGIN + 1]
            assert set(around.ravel()) <= {0, number}


def test_hull_fills_bays() -> None:
    corner = np.zeros((5, 5), bool)
    corner[:, 0] = corner[-1] = True
    assert np.array_equal(letter_scenes.hull(corner), np.tri(5, dtype=bool))
    line = np.eye(5, dtype=bool)[2:3]
    assert np.array_equal(letter_scenes.hull(line), line)


def test_decorative_fonts_are_left_out(tmp_path: Path) -> None:
    for name in ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "STIXGeneral", "STIXSizOneSymReg"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.ttf").symlink_to(TTF / f"{name}.ttf")
    files = sorted(tmp_path.glob("*/a.ttf"))[:4]
    settings = dataclasses.replace(SCENES, letters="AH", plainness=0.6)
    kept = letter_scenes.plain({"train": files, "val": files[:1]}, settings)
    assert kept == {"train": [[file] for file in files], "val": [[files[0]]]}
    strict = dataclasses.replace(settings, plainness=0.999)
    assert letter_scenes.plain({"train": files}, strict) == {"train": []}


def test_a_file_of_scenes_is_drawn_once(tmp_path: Path) -> None:
    calls = []

    def make(settings: Scenes) -> dict[str, Split]:
        calls.append(settings)
        return {"val": scenes()}

    path = letter_scenes.cached(tmp_path, SCENES, make)
    assert letter_scenes.cached(tmp_path, SCENES, make) == path
    other = dataclasses.replace(SCENES, number=3)
    assert letter_scenes.cached(tmp_path, other, make) != path
    assert calls == [SCENES, other]
    assert np.array_equal(letter_scenes.load(path, "val").objects, scenes().objects)


# -------------------------------------------------------------------------------------------- ways


class Places(nn.Module):
    """Logits that depend on the place in the image and on all of its pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height = torch.arange(x.shape[-2]).view(-1, 1).expand_as(x[:, :1])
        return torch.cat([x, height + x.mean((1, 2, 3), keepdim=True)], 1)


def test_one_window_is_the_whole_image() -> None:
    images, model = torch.rand(2, 3, 64, 64), Places()
    expected = dense_sizes.whole(model, images)
    assert torch.equal(dense_sizes.windows(model, images, 64, 32), expected)
    assert torch.equal(dense_sizes.shrunk(model, images, 64), expected)


def test_windows_are_averaged_where_they_overlap() -> None:
    images, calls = torch.rand(2, 3, 64, 80), []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x

    assert torch.allclose(dense_sizes.windows(model, images, 64, 32), images)
    assert calls == [4]  # at columns 0 and 16 of each
    rows = dense_sizes.windows(Places(), torch.zeros(1, 3, 96, 64), 64, 32)[0, 3, :, 0]
    assert rows[:32].tolist() == list(range(32))
    assert rows[32:64].tolist() == [row + 16 for row in range(32)]  # mean of row and row + 32
    assert rows[64:].tolist() == list(range(32, 64))


@torch.inference_mode()
def test_measures_of_the_grid_differ_beside_the_trained_one_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, kwargs = dense_sizes.BACKBONES[OURS]
    tiny = (name, kwargs | {"embed_dim": 16, "depth": 1})
    monkeypatch.setitem(dense_sizes.BACKBONES, OURS, tiny)
    torch.manual_seed(0)
    model = dense_sizes.segmenter(TOY, OURS).eval()
    for side, distinct in ((64, 1), (128, 3)):
        images, found = torch.rand(1, 3, side, side), []
        for way in (WHOLE, PLAIN, STEPS):
            dense_sizes.measure(model, way)
            found.append(model(images))
        same = [[torch.equal(a, b) for b in found] for a in found]
        assert sum(map(sum, same)) == 9 // distinct


def test_tiles_are_put_together_again() -> None:
    scene = np.arange(96 * 96).reshape(96, 96)
    parts = dense_sizes.tiles(scene, 32)
    assert np.array_equal(parts[1], scene[:32, 32:64])
    assert np.array_equal(dense_sizes.assembled(parts), scene)


# ------------------------------------------------------------------------------------------ scores


def test_scores_of_a_small_and_a_large_letter() -> None:
    """Half of the small one is found, and the large one with as much around it as it has itself."""
    objects = np.zeros((1, 60, 60), np.uint8)
    objects[0, 10:20, 10:14], objects[0, 30:50, 30:32] = 1, 2
    classes = np.array([0, 1, 2], np.uint8)[objects]
    heights = np.zeros((1, 256), np.uint8)
    heights[0, 1:3] = 10, 20
    data = Split(np.zeros((1, 60, 60, 3), np.uint8), classes, objects, heights)
    predicted = np.zeros((60, 60), np.uint8)
    predicted[10:15, 10:14], predicted[30:50, 30:34] = 1, 2
    predicted[0:5, 40:44] = 1  # far from both
    score = dense_sizes.Score(np.zeros((3, 3), np.int64))
    score.add(predicted, data, 0)
    figures = score.figures(images=1)
    assert (figures["small"], figures["large"]) == (50, 50)
    background = (3600 - 40 - 40 - 40 - 20) / (3600 - 20 - 40)
    assert figures["miou"] == pytest.approx(100 * (background + 20 / 60 + 40 / 80) / 3)


def test_a_run_trains_once_and_scores_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kwargs = dense_sizes.BACKBONES[OURS]
    tiny = (name, kwargs | {"embed_dim": 16, "depth": 1})
    monkeypatch.setitem(dense_sizes.BACKBONES, OURS, tiny)
    monkeypatch.setitem(dense_sizes.BACKBONES, "tiny", ("resnet18", {"channels": (8, 8, 8, 8)}))
    make = {"train": scenes(), "val": scenes(1)}
    path = letter_scenes.cached(tmp_path, SCENES, lambda _: make)
    run = partial(dense_sizes.run, TOY, path, lr=1e-3)
    row = run(backbone=OURS, seed=0)
    assert set(row["scores"]["64"]) == {WHOLE}
    assert set(row["scores"]["128"]) == {WHOLE, PLAIN, STEPS, SHRUNK, WINDOWS}
    assert set(run(backbone=OURS, seed=CHOICE_SEED)["scores"]) == {"64"}
    assert set(run(backbone="tiny", seed=0)["scores"]["128"]) == {WHOLE, SHRUNK, WINDOWS}
    monkeypatch.setattr(dense_sizes, "train", None)
    again = run(backbone=OURS, seed=0)
    for way, figures in row["scores"]["128"].items():
        assert again["scores"]["128"][way] == figures | {"ms": again["scores"]["128"][way]["ms"]}
    assert again["loss"] == row["loss"]


# ------------------------------------------------------------------------------------------- texts


def invented(backbone: str, lr: float, seed: int) -> Row:
    """Return a run whose windows are 10 points better, and take 4 times as long."""

    def figures(miou: float, ms: float) -> Row:
        return {"miou": miou, "small": miou / 2, "large": miou, "ms": ms}

    base = 50 - 1000 * abs(lr - 2e-3) + seed % CHOICE_SEED
    found = {WHOLE: figures(base, 10), SHRUNK: figures(base - 20, 5)}
    found |= {WINDOWS: figures(base + 10, 40)} | (
        {PLAIN: figures(base + 1, 10), STEPS: figures(base + 2, 10)} if backbone == OURS else {}
    )
    scored = {"64": {WHOLE: figures(base, 5)}}
    scored |= {} if seed == CHOICE_SEED else {"128": found}
    row = {"backbone": backbone, "lr": lr, "seed": seed, "scores": scored, "loss": 1.0}
    return row | {"train_seconds": 60.0, "parameters": 1000, "head_parameters": 500}


def test_the_best_rate_is_reported_tabled_and_drawn(tmp_path: Path) -> None:
    experiment = Experiment(seeds=(0, 1, 2))
    tried = [invented(**run) for run in experiment.search()]
    rows = tried + [invented(**run) for run in experiment.reported(tried)]
    assert {row["lr"] for row in dense_sizes_results.reported(rows)} == {2e-3}
    table = dense_sizes_results.scores_table(rows, "miou")
    assert f"| {OURS} | {WINDOWS} | 51.0 ± 1.0 | 61.0 ± 1.0 |" in table
    assert table.count(PLAIN) == 1
    assert f"| {OURS} | {WINDOWS} | 4.00 ± 0.00 |" in dense_sizes_results.times_table(rows)
    assert f"| {OURS} | 48.5 | 49.0 | 50.0 | 48.0 |" in dense_sizes_results.search_table(rows)
    assert f"| {OURS} | 0.002 | 1.00 ± 0.00 |" in dense_sizes_results.training_table(rows)
    assert dense_sizes_results.figures(rows)["small_deit_windows_128"] == "30.5"
    found = {d.second: d.difference for d in dense_sizes_results.differences(rows)}
    assert found[f"{OURS}, {WINDOWS}"] == pytest.approx(-8)
    assert len(found) == 6
    dense_sizes_results.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
