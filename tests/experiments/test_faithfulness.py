"""The faithfulness of maps: a toy run to the record, curves by hand, and what is recommended."""

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from experiments import faithfulness, faithfulness_results, trained_models, vision
from experiments.records import Row
from experiments.results import faithfulness_blocks

NAMES = ("evidence", "rollout", "brightness", "random")


@pytest.mark.slow
def test_toy_run_scores_every_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = vision.EXPERIMENTS["digits"]
    settings = dataclasses.replace(settings, steps=2, images_per_class=(4,))
    monkeypatch.setitem(vision.EXPERIMENTS, "toy", settings)
    toy = faithfulness.Experiment(lr=1e-3, images=4, patches=4, seeds=(0,))
    monkeypatch.setitem(faithfulness.EXPERIMENTS, "toy", toy)
    monkeypatch.setattr(trained_models, "WEIGHTS", tmp_path / "weights")
    for run in toy.reported():
        row = faithfulness.run("toy", **run)
        assert row["deletion"].keys() == row["insertion"].keys() > set(NAMES)
        assert ("evidence, baseline" in row["deletion"]) == (run["fill"] == "black")
        areas = (*row["deletion"].values(), *row["insertion"].values())
        assert all(0 < area < 1 for area in areas)
        assert len(set(areas)) > 4
    assert faithfulness.run("toy", **run) == row


def test_curve_by_hand() -> None:
    """Probability: the brightness that is left, of patches 4, 3, 2 and 1 tenths."""
    images = torch.tensor([[0.4, 0.3], [0.2, 0.1]])[None, None].repeat_interleave(2, 2)
    images = images.repeat_interleave(2, 3)

    def probability(images: torch.Tensor) -> torch.Tensor:
        return images.sum((1, 2, 3), keepdim=True)[:, 0, 0] / 4

    empty = torch.zeros(1, 1, 1, 1)
    best, worst = torch.tensor([[[4.0, 3], [2, 1]]]), torch.tensor([[[1.0, 2], [3, 4]]])
    left, come = [1, 0.6, 0.3, 0.1, 0], [0, 0.4, 0.7, 0.9, 1]
    for values, is_insertion, curve in (
        (best, False, left),
        (best, True, come),
        (worst, False, come[::-1]),
    ):
        found = faithfulness.area(probability, images, empty, values, 1, is_insertion)
        expected = (sum(curve) - (curve[0] + curve[-1]) / 2) / 4
        assert found == pytest.approx(expected)
    halves = faithfulness.area(probability, images, empty, best, 2, False)
    assert halves == pytest.approx((0.5 + 0.3 + 0) / 2)
    full = torch.full((1, 1, 1, 1), 0.4)
    assert faithfulness.area(probability, images, full, best, 4, False) == pytest.approx(1.3)


def rows_of(deletion: dict[str, float], insertion: dict[str, float]) -> list[Row]:
    noise = (0.01, -0.01, 0.0, 0.005, -0.005)
    return [
        {
            "seed": seed,
            "deletion": shifted(deletion, shift),
            "insertion": shifted(insertion, shift),
        }
        for seed, shift in enumerate(noise)
    ]


def shifted(areas: dict[str, float], shift: float) -> dict[str, float]:
    return {name: area + shift * (name != "brightness") for name, area in areas.items()}


def test_only_what_beats_brightness_is_recommended() -> None:
    rows = rows_of(
        dict(zip(NAMES, (0.1, 0.5, 0.3, 0.4), strict=True)),
        dict(zip(NAMES, (0.7, 0.6, 0.5, 0.501), strict=True)),
    )
    assert faithfulness_results.better(rows) == {
        "evidence": ["deletion", "insertion"],
        "rollout": ["insertion"],
        "random": [],
    }
    assert faithfulness_results.recommended([rows, []]) == (
        "`evidence` in deletion and insertion, `rollout` in insertion alone"
    )
    assert "| rollout | 0.500 ± 0.008 | 0.600 ± 0.008 | insertion |" in (
        faithfulness_results.table(rows)
    )
    worse = rows_of(dict.fromkeys(NAMES, 0.5), dict.fromkeys(NAMES, 0.5))
    assert faithfulness_results.recommended([rows, worse]) == "none"


def test_what_was_not_run_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("experiments.results.RESULTS", tmp_path)
    found = faithfulness_blocks()
    assert found["digits_mean"] == found["fractals_black"] == "Not run yet."
    assert found["recommended_mean"] == found["recommended_black"] == "none"
    assert "`python -m experiments.faithfulness fractals`" in found["fractals_from"]
