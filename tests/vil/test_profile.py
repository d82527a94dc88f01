"""``python -m vil.profile``: what it prints of one model and of two, and what it refuses."""

import re
from functools import partial

import pytest
import timm
import torch

from vil import profile
from vil.complexity import count_macs, count_parameters
from vil.measuring import PASSES
from vil.profile import Figures, main, table
from vil.weights.build import create

ONE, TWO = (
    Figures(name, number, macs, dict.fromkeys(PASSES, seconds), dict.fromkeys(PASSES, memory))
    for name, number, macs, seconds, memory in (
        ("first", 6_000, 3_000_000_000, [1.0, 2.0, 4.0], 3 << 20),
        ("second", 4_000, 1_500_000_000, [4.0, 2.0, 2.0], 2 << 20),
    )
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure memory in the process of the tests, which is started already."""
    monkeypatch.setattr(profile, "_memory", profile._memory_here)


def cells(printed: str) -> dict[str, list[str]]:
    """Return the cells of the table in an output by the first of each row."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in rows}


@pytest.mark.ci
def test_ratios_are_those_of_rounds_and_of_the_first_to_the_second() -> None:
    rows = cells(table([ONE, TWO], batch_size=8))
    assert rows[""] == ["first", "second", "ratio"]
    assert rows["parameters"] == ["6,000", "4,000", "1.50"]
    assert rows["GMACs"] == ["3.00", "1.50", "2.00"]
    assert rows["training, images/s"] == ["4", "4", "1.00"]  # of 4, 1 and 0.5
    assert rows["inference, MiB"] == ["3", "2", "1.50"]


@pytest.mark.ci
@pytest.mark.usefixtures("here")
def test_prints_every_figure_of_two_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["vil_tiny", "deit_tiny_patch16_224"]
    monkeypatch.setattr(profile, "create", partial(create, depth=1))
    assert main([*names, "--img-size", "32", "--batch-size", "2", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    assert "32 x 32 px, batch 2, float32" in printed
    rows = cells(printed)
    models = [timm.create_model(name, img_size=32, depth=1, device="meta") for name in names]
    counts = [count_parameters(model) for model in models]
    assert rows["parameters"][:2] == [f"{count:,}" for count in counts]
    macs = [count_macs(model, (3, 32, 32)) for model in models]
    assert rows["GMACs"][:2] == [f"{number / 1e9:.2f}" for number in macs]
    for pass_name in PASSES:
        assert all(float(c.replace(",", "")) > 0 for c in rows[f"{pass_name}, images/s"])
        assert all(float(cell) >= 0 for cell in rows[f"{pass_name}, MiB"] if cell != "not told")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vil_tinny"], "got vil_tinny; perhaps you meant vil_tiny"),
        (["vil_tiny", "no_such_thing_at_all"], r"timm.list_models\(\), got no_such_thing_at_all$"),
        (["vil_tiny.nothing"], "vil_tiny.nothing: Invalid pretrained tag"),
        (["vil_tiny", "--img-size", "0"], "--img-size: must be a positive whole number, got 0"),
        (["vil_tiny", "--rounds", "a"], "--rounds: must be a positive whole number, got a"),
        ([], "required: MODEL"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
