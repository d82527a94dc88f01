"""CUDA graphs on a CPU: a stand-in for torch.cuda's, which records the operators of a block and repeats them.

As in a CUDA graph, values that Python computed stay as they were, and each operator writes to its tensors of the
recording.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vil.training import passes


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


def record_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let the trainer record its passes on the CPU."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fork = torch.random.fork_rng
    patch.setattr(passes, "uses_graphs", lambda run, device: run.cuda_graphs)
    patch.setattr(torch.random, "fork_rng", lambda devices, device_type: fork([]))
    for name, value in {
        "CUDAGraph": Graph,
        "graph": Recorder,
        "graph_pool_handle": object,
        "current_stream": lambda _: stream,
        "Stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, value)
