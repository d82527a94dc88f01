"""vil.profile: counters of multiply-adds, steps and turns, and the command; no test here is of a speed or of memory."""

import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.documents.pages import blocks
from vil import profile
from vil.profile import (
    PASSES,
    Figures,
    calflops_hooks,
    count_macs,
    count_parameters,
    fvcore_handles,
    in_turns,
    main,
    step_of,
    table,
    table_of_models,
)
from vil.weights.build import create

ROOT = Path(__file__).parents[2]
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
        (["--rounds", "2"], "options need a MODEL"),
        (["vil_tiny"] * 3, "MODEL must be at most two names, got vil_tiny vil_tiny vil_tiny"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.ci
def test_without_a_model_prints_the_table_of_the_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == table_of_models()
    assert printed in (ROOT / "docs/choosing.md").read_text()


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_moves_every_parameter_and_inference_none(dtype: torch.dtype) -> None:
    model = timm.create_model("vil_tiny", img_size=32, embed_dim=32, depth=1, num_classes=5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_of(model, IMAGES, "inference", dtype)()
    assert not model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    step_of(model, IMAGES, "training", dtype)()
    assert model.training
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_turns_leave_out_the_first_round_and_the_first_step_of_each() -> None:
    now, ran = [0.0], []

    def step(name: str, seconds: float):
        def run() -> None:
            ran.append(name)
            now[0] += seconds if ran[-3:] == [name] * 3 or ran[-2:] == [name] * 2 else 100.0

        return run

    seconds = in_turns({"a": step("a", 1.0), "b": step("b", 3.0)}, 2, clock=lambda: now[0])
    assert ran == ["a", "a", "a", "b", "b", "b"] * 3
    assert seconds == {"a": [1.0, 1.0], "b": [3.0, 3.0]}


MODELS = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
SIZES = (64, 96)  # other grids than the trained one, and so with an order of the convolution


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return timm.create_model(request.param, depth=2).eval()


def images(size: int) -> Tensor:
    return torch.zeros(1, 3, size, size)


@pytest.fixture
def fvcore(caplog: pytest.LogCaptureFixture):
    """Return fvcore, whose warnings of what it does not know are not printed."""
    caplog.set_level(logging.ERROR)
    return pytest.importorskip("fvcore.nn")


@pytest.mark.ci
def test_fvcore_counts_what_count_macs_does(model: nn.Module, fvcore) -> None:
    for size in SIZES:
        without = fvcore.FlopCountAnalysis(model, images(size))
        assert without.total() > 0
        assert without.unsupported_ops()["vil::mixer"] == 2
        counted = without.copy().set_op_handle(**fvcore_handles())
        assert counted.total() == count_macs(model, (3, size, size))
        assert counted.by_operator()["mixer"] == counted.total() - without.total() > 0
        assert not any(name.startswith("vil::") for name in counted.unsupported_ops())


@pytest.fixture
def calflops() -> Iterator:
    package = pytest.importorskip("calflops")
    mapping = pytest.importorskip("calflops.pytorch_ops").MODULE_HOOK_MAPPING
    before = dict(mapping)
    yield package
    mapping.clear()
    mapping.update(before)


@pytest.mark.ci
def test_calflops_counts_what_count_macs_does(model: nn.Module, calflops) -> None:
    def count(size: int) -> int:
        shape = (1, 3, size, size)
        quiet = {"print_results": False, "output_as_string": False}
        return calflops.calculate_flops(model, shape, **quiet)[1]

    before = count(SIZES[0])
    calflops.pytorch_ops.MODULE_HOOK_MAPPING.update(calflops_hooks())
    for size in SIZES:
        assert count(size) == count_macs(model, (3, size, size))
    assert before < count(SIZES[0])


DOCUMENTED = blocks("speed")


@pytest.mark.ci
@pytest.mark.usefixtures("fvcore", "calflops")
@pytest.mark.parametrize("block", DOCUMENTED[1:])
def test_lines_of_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1, img_size=64))
    exec((DOCUMENTED[0] + block).replace("224, 224", "64, 64"), {})
    assert "assert" in block
