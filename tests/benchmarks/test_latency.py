"""The benchmark of latency: what it compares, and that nothing wrong is timed."""

from pathlib import Path

import pytest
import timm
import torch

from benchmarks import latency

SMALL = {"img_size": 32, "depth": 1}


@pytest.mark.slow
def test_models_are_compared_with_deit_and_with_eager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(latency, "SIZE", 32)
    threads = torch.get_num_threads()
    models = {}
    for name in ("deit_tiny_patch16_224", "vil_tiny"):
        file = tmp_path / f"{name}.onnx"
        model, seconds = latency.export(name, file, **SMALL)
        assert seconds > 0
        models[name] = model, file
    rows = latency.rows_of(models, ["eager", "onnx_runtime"], threads, rounds=1)
    assert [(row["model"], row["way"]) for row in rows] == [
        (name, way) for name in models for way in ("eager", "onnx_runtime")
    ]
    assert [row["to_deit"] for row in rows[:2]] == [1.0, 1.0]
    assert [row["to_eager"] for row in rows[::2]] == [1.0, 1.0]
    assert rows[3]["to_eager"] == pytest.approx(rows[3]["ms"] / rows[2]["ms"])


def test_what_gives_other_logits_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SIZE", 32)
    model = timm.create_model("vil_tiny", **SMALL).eval()
    with pytest.raises(RuntimeError, match="compile of vil_tiny gives logits that are"):
        latency.checked("compile", "vil_tiny", lambda images: model(images) + 0.01, model)
    with pytest.raises(RuntimeError, match="are nan from"):
        latency.checked("compile", "vil_tiny", lambda images: model(images) / 0 * 0, model)
