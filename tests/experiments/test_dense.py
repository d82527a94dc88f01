"""The dense experiment: DeiT with our pyramid, a run of a script, and what is made of records."""

from collections.abc import Callable

import pytest
import timm
import torch

from experiments import dense, dense_results
from experiments.dense_peers import TransformerPyramid
from experiments.records import CHOICE_SEED, Row

pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("pycocotools")


def parameters(name: str, *arguments: str) -> int:
    pairs = (argument.split("=") for argument in arguments)
    kwargs = {key: int(value) for key, value in pairs if value.isdigit()}
    model = timm.create_model(name, features_only=True, **kwargs)
    return sum(p.numel() for p in model.parameters())


def test_deit_has_our_levels_and_our_size() -> None:
    deit = timm.create_model("deit_pyramid", embed_dim=105, depth=2, patch_size=8, img_size=64)
    x = torch.randn(1, 3, 64, 64)
    maps = deit.forward_intermediates(x, [1, 3])
    last = super(TransformerPyramid, deit).forward_intermediates(x, 1, intermediates_only=True)[0]
    assert torch.equal(maps[0], deit.pyramid[1](last))
    assert [tuple(m.shape[1:]) for m in maps] == [(105, 8, 8), (105, 2, 2)]
    ours = parameters(*dense.BACKBONES[dense.OURS], "img_size=64")
    theirs = parameters(*dense.BACKBONES[dense.DEIT], "img_size=64")
    assert theirs == pytest.approx(ours, rel=0.05)


def test_features_of_deit_train_whole() -> None:
    net = timm.create_model(
        "deit_pyramid", features_only=True, embed_dim=64, depth=2, out_indices=(1, 2), img_size=64
    )
    sum(m.pow(3).mean() for m in net(torch.randn(1, 3, 64, 64))).backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.slow
def test_a_run_gives_the_last_row_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ("vil_tiny_pyramid", "embed_dim=16", "depth=1", "patch_size=8")
    monkeypatch.setitem(dense.BACKBONES, "tiny", tiny)
    arguments = ["--images", "8", "--batch-size", "4", "--img-size", "64"]
    row = dense.run(arguments, "segment", "tiny", 1e-3, 3, epochs=1)
    assert row["step"] == 2
    assert 0 <= row["miou"] <= 1
    assert row["parameters"] == parameters(*tiny, "img_size=64")
    assert row["head_parameters"] > 0


def invented(score: Callable[[str, float, int], float]) -> list[Row]:
    experiment = dense.Experiment()

    def figures(run: Row) -> Row:
        value = score(run["backbone"], run["lr"], run["seed"])
        metrics = dict.fromkeys((*dense.TASKS.values(), "ap"), value)
        return run | metrics | {"loss": 1.0, "cpu_seconds": 60.0, "parameters": 1000}

    tried = [figures(run) for run in experiment.search()]
    return tried + [figures(run) for run in experiment.reported(tried)]


def test_the_best_rate_is_reported_and_tabled() -> None:
    def score(backbone: str, lr: float, seed: int) -> float:
        best = 3e-3 if backbone in (dense.OURS, dense.FOUR) else 1e-3
        return 0.9 - abs(lr - best) * 10 - 0.001 * (seed % CHOICE_SEED)

    rows = invented(score)
    rates = {r["backbone"]: r["lr"] for r in rows if r["seed"] != CHOICE_SEED}
    assert rates[dense.OURS] == rates[dense.FOUR] == 3e-3
    assert set(rates.values()) == {1e-3, 3e-3}
    table = dense_results.metrics_table(rows, "segment")
    assert f"| {dense.OURS} | 89.9 ± 0.1 |" in table
    assert "| 0.003 |" in table
    assert "| 88.0 | 90.0 |" in dense_results.search_table(rows)
    assert dense_results.figures(rows)["segment_last"] == "89.9"
    differences = dense_results.differences(rows)
    assert len(differences) == 5
    assert all(d.difference == pytest.approx(0, abs=1e-6) for d in differences)
