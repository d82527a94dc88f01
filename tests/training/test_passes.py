"""Training and evaluation with recorded passes: the same bits as in eager mode."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.run_files import assert_same, at_step, load, rows, terminate
from vil.training import passes
from vil.training.errors import ConfigError
from vil.training.passes import ScoringPass, TrainingPass
from vil.training.settings import RunConfig, TrainConfig

EAGER = "--run.no-cuda-graphs"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# CUDA graphs on a CPU: a stand-in for torch.cuda's, which records the operators of a block and repeats them. As in a
# CUDA graph, values that Python computed stay as they were, and each operator writes to its tensors of the recording.


class Graph:
    """Operators with their arguments and results."""

    replays = 0
    """Of all graphs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        """Run all operators again, and put their results where they were."""
        Graph.replays += 1
        with torch.no_grad():
            for function, args, kwargs, results in self.calls:
                again = tree_leaves(function(*args, **kwargs))
                for result, new in zip(tree_leaves(results), again, strict=True):
                    if isinstance(result, torch.Tensor) and result is not new:
                        result.copy_(new)


class Recorder(TorchDispatchMode):
    """Record the operators of a block in a graph."""

    def __init__(self, graph: Graph, pool: object, capture_error_mode: str) -> None:
        super().__init__()
        assert capture_error_mode == "thread_local"
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        results = function(*args, **(kwargs or {}))
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        # A view needs no work; an operator that writes to its arguments returns one of them, or nothing.
        if function._schema.is_mutable or not all(_memory(t) in given for t in made):
            self.graph.calls.append((function, args, kwargs or {}, results))
        return results


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def recorded(monkeypatch) -> None:
    """Let the trainer record its passes on the CPU."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fork = torch.random.fork_rng
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(passes, "uses_graphs", lambda run, device: run.cuda_graphs)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices, device_type: fork([]))
    for name, value in {
        "CUDAGraph": Graph,
        "graph": Recorder,
        "graph_pool_handle": object,
        "current_stream": lambda _: stream,
        "Stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def everything(config: TrainConfig, recurrence: str, accumulation: int) -> TrainConfig:
    """Return the configuration with all that could disturb a graph."""
    args = (f"recurrence={recurrence}", "patch_drop_rate=0.25", "drop_rate=0.1", "grid_aware=False")
    config = config.changed("model", args=args)
    config = config.changed("augment", mix_size=2)
    config = config.changed("optim", clip_grad=0.5)
    return config.changed("run", amp=True, grad_accum_steps=accumulation)


def assert_same_runs(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    for name in ("last.pt", "best.pt"):
        assert_same(load(one / name), load(other / name))


@pytest.mark.usefixtures("recorded")
def test_a_recorded_run_is_the_eager_one(config, train, tmp_path) -> None:
    """Drop path, dropout, EMA, clipping, two sizes of images, and the last batch of an evaluation."""
    chosen = everything(config, "longhorn_exact", 2).changed("data", img_sizes=(16, 24))
    chosen = chosen.changed("data", validation_batch_size=5)  # 12 images: 5, 5, 2
    assert train(chosen, "--run.output", str(tmp_path / "eager"), EAGER) == 0
    assert Graph.replays == 0
    assert train(chosen, "--run.output", str(tmp_path / "graphs")) == 0
    assert Graph.replays == 12 * 2 + 3 * 2 * 3
    assert_same_runs(tmp_path / "graphs", tmp_path / "eager")


@pytest.mark.usefixtures("recorded")
def test_the_first_pass_leaves_statistics_and_random_numbers_as_one_pass_does() -> None:
    torch.manual_seed(0)
    images, targets = torch.randn(4, 3, 32, 32), torch.arange(4)
    found = []
    for graphs in (True, False):
        run = RunConfig(cuda_graphs=graphs, grad_accum_steps=2)
        torch.manual_seed(1)
        model = timm.create_model("resnet10t", num_classes=4, drop_rate=0.5).train()
        own = TrainingPass(model, nn.CrossEntropyLoss(), run, CPU)
        losses = []
        for seed in (2, 3):
            torch.manual_seed(seed)
            losses.append(own(images, targets))
            losses[-1].backward()
        state = {k: v.clone() for k, v in model.state_dict().items()}
        scores = ScoringPass(model.eval(), run, CPU)
        with torch.no_grad():
            logits = [scores(images).clone(), scores(images[:3]).clone()]
        gradients = [p.grad for p in model.parameters()]
        found.append([*losses, *logits, *gradients, *state.values(), torch.rand(1)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("recorded")
def test_a_model_that_cannot_be_recorded_is_an_error_that_names_the_way_out(monkeypatch) -> None:
    class Refusing(Recorder):
        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    scores = ScoringPass(nn.Identity(), RunConfig(), CPU)
    with pytest.raises(ConfigError, match=r"\(operation not permitted .*\); pass --run.no-cuda"):
        scores(torch.zeros(1, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("recurrence", "accumulation"), [("longhorn_exact", 2), ("mamba", 1)])
def test_a_gpu_records_the_eager_run(config, recurrence, accumulation, train, evaluate, monkeypatch, tmp_path) -> None:
    """20 steps with drop path, dropout, EMA and clipping; then the same with a stop, and eval.py both ways."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    config = everything(config, recurrence, accumulation)
    # The gradient of patch dropping is a sum in any order.
    config = config.changed("model", args=tuple(a for a in config.model.args if "patch" not in a))
    config = config.changed("run", device="cuda").changed("schedule", epochs=5)
    eager, whole, parts = (tmp_path / name for name in ("eager", "whole", "parts"))
    assert train(config, "--run.output", str(eager), EAGER) == 0
    assert train(config, "--run.output", str(whole)) == 0
    assert_same_runs(whole, eager)
    with at_step(9, terminate):
        assert train(config, "--run.output", str(parts)) == 143
    assert train(config, "--run.output", str(parts)) == 0
    assert_same_runs(parts, eager)
    scores = []
    for option in ((), ("--no-cuda-graphs",)):
        assert evaluate(str(whole / "last.pt"), *option) == 0
        scores.append(json.loads((whole / "last-eval.json").read_text()))
    assert scores[0]["loss"] == scores[1]["loss"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_pass_takes_little_more_memory_than_an_eager_one() -> None:
    reserved = []
    for graphs in (False, True):
        model = timm.create_model("vil_tiny_exact", depth=6).cuda()
        run = RunConfig(amp=True, cuda_graphs=graphs)
        own = TrainingPass(model, nn.CrossEntropyLoss(), run, CUDA)
        images = torch.randn(64, 3, 224, 224, device="cuda")
        targets = torch.zeros(64, dtype=torch.long, device="cuda")
        torch.cuda.empty_cache()
        for _ in range(3):
            model.zero_grad()
            own(images, targets).backward()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] < 1.3 * reserved[0]
