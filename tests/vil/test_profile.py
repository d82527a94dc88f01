"""``python -m vil.profile``: what it prints of one model and of two, and what it refuses."""

import re
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
import timm
import torch

from vil import profile
from vil.complexity import count_macs, count_parameters
from vil.loading import create
from vil.measuring import PASSES
from vil.profile import Figures, Setting, main, table

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


def test_ratios_are_those_of_rounds_and_of_the_first_to_the_second() -> None:
    rows = cells(table([ONE, TWO], batch_size=8))
    assert rows[""] == ["first", "second", "ratio"]
    assert rows["parameters"] == ["6,000", "4,000", "1.50"]
    assert rows["GMACs"] == ["3.00", "1.50", "2.00"]
    assert rows["training, images/s"] == ["4", "4", "1.00"]  # of 4, 1 and 0.5
    assert rows["inference, MiB"] == ["3", "2", "1.50"]


def test_one_model_has_no_ratio_and_memory_may_be_unknown() -> None:
    silent = Figures("silent", 1, 1, ONE.seconds, dict.fromkeys(PASSES))
    assert cells(table([silent], 8))[""] == ["silent"]
    assert cells(table([silent, TWO], 8))["training, MiB"] == ["not told", "2", ""]


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


def test_features_only_measures_maps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_memory", lambda name, setting: dict.fromkeys(PASSES))
    arguments = ["test_vit", "--batch-size", "1", "--rounds", "1"]
    rows = []
    for more in ([], ["--features-only"]):
        assert main(arguments + more) == 0
        printed = capsys.readouterr().out
        assert "160 x 160 px" in printed  # the model's own size
        rows.append(cells(printed))
    with_head, without = (int(row["parameters"][0].replace(",", "")) for row in rows)
    assert with_head > without


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


def test_a_gpu_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["vil_tiny", "--device", "cuda"])
    assert capsys.readouterr().err.endswith("--device cuda: PyTorch finds no GPU here\n")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vil_tiny", "--img-size", "225"], "vil_tiny with images of 225 x 225 px: cannot create"),
        (
            ["resnet10t", "vil_tiny", "--img-size", "40"],
            "vil_tiny with images of 40 x 40 px: cannot",
        ),
        (
            ["efficientnet_lite0", "--img-size", "32", "--batch-size", "1"],
            "training of efficientnet_lite0: Expected more than 1 value per channel",
        ),
    ],
)
def test_what_cannot_be_measured_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert f"cannot measure {message}" in told
    assert "vil_tiny" not in message or "img_size must be covered by patches of 16 px" in told


def test_a_process_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(profile.ProcessPoolExecutor):
        def submit(self, *args: object) -> None:
            raise BrokenProcessPool

    monkeypatch.setattr(profile, "ProcessPoolExecutor", Killed)
    with pytest.raises(ValueError, match=r"^vil_tiny: its process was killed"):
        profile._memory("vil_tiny", Setting(32, 2, "cpu", "float32", threads=1, rounds=1))


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    setting = Setting(32, 2, "cpu", "float32", threads=1, rounds=1)
    figures = profile._memory("resnet18", setting)
    if figures["training"] is None:
        pytest.skip("this system does not tell")
    weights = 4 * 11_689_512
    assert weights < figures["inference"] < 2 * weights
    assert 4 * weights < figures["training"] < 6 * weights  # gradients and two averages
