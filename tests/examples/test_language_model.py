"""The example of a sequence model decodes what it computes at once, and learns from a file."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vil.kernels import ops

SCRIPT = Path(__file__).parents[2] / "examples" / "language_model.py"


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_decoding_equals_the_full_pass(example: dict, recurrence: str) -> None:
    torch.manual_seed(0)
    model = example["LanguageModel"](11, embed_dim=32, depth=2, recurrence=recurrence).double()
    ids = torch.randint(11, (2, 40))
    whole, _ = model(ids)
    logits, caches = model(ids[:, :17])
    parts = [logits]
    for t in range(17, 40):
        logits, caches = model(ids[:, t : t + 1], caches)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)
    later = ids.clone()
    later[:, 20:] = 0
    torch.testing.assert_close(model(later)[0][:, :20], whole[:, :20], rtol=1e-10, atol=1e-12)  # causal


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    def run_it(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "out"), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return run_it


def test_a_file_is_learnt_and_a_prompt_continued(run: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("long horns, " * 200, encoding="utf-8")
    small = ("--embed-dim", "32", "--depth", "1", "--window", "32", "--steps", "40", "--lr", "1e-2")
    printed = run(str(text), *small, "--characters", "5")
    losses = [float(found) for found in re.findall(r"held out ([\d.]+)", printed)]
    assert losses[-1] < 0.2 < losses[0]
    assert run("--prompt", "horns, lo", "--characters", "6", "--temperature", "0.1") == "horns, long hor\n"
    with pytest.raises(ValueError, match=r"--prompt must consist of characters of the text, got \['X'\]"):
        run("--prompt", "X")
    for steps in ("1", "2", "10"):
        assert f"step {steps}  loss" in run(str(text), *small, "--steps", steps, "--characters", "1")
    with pytest.raises(ValueError, match="the text must have more than 2570 characters"):
        run(str(text), "--steps", "1")
