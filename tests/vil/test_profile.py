"""vil.profile: counters of multiply-adds, and the command."""

from functools import partial
from pathlib import Path

import pytest
import timm

from tests.documents.pages import blocks
from vil.profile import count_macs, count_parameters, main, table_of_models

ROOT = Path(__file__).parents[2]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vil_tinny"], "Unknown model (vil_tinny)"),
        (["vil_tiny", "--img-size", "100"], "patches of 16 px with stride 16 px, got (100, 100)"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.ci
def test_without_a_model_prints_the_table_of_the_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([])
    printed = capsys.readouterr().out
    assert printed.strip() == table_of_models()
    assert printed in (ROOT / "docs/choosing.md").read_text()


@pytest.mark.ci
def test_other_models_at_other_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["vil_tiny", "resnet18", "--img-size", "64"])
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, (name, size) in zip(lines, (("vil_tiny", {"img_size": 64}), ("resnet18", {})), strict=True):
        model = timm.create_model(name, **size)
        macs = f"{count_macs(model, (3, 64, 64)) / 1e9:.2f}"
        assert name in line
        assert [c.strip() for c in line.split("|")][2:4] == [f"{count_parameters(model):,}", macs]


@pytest.mark.ci
def test_quantized_weights_count_as_others() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = timm.create_model("vil_tiny", depth=1, img_size=64)
    plain = count_macs(model, (3, 64, 64)), count_parameters(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert (count_macs(model, (3, 64, 64)), count_parameters(model)) == plain


DOCUMENTED = blocks("speed")


@pytest.mark.ci
@pytest.mark.parametrize("block", DOCUMENTED[1:])
def test_lines_of_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1, img_size=64))
    exec((DOCUMENTED[0] + block).replace("224, 224", "64, 64"), {})
    assert "assert" in block
