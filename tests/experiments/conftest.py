"""Experiments without processes of their own, each of which imports PyTorch for seconds."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

import pytest

from experiments import records


class Here:
    """In place of processes; what a run is given and returns is pickled as for those."""

    def submit(self, function: Callable[..., records.Row], **run: object) -> Future:
        function, run = pickle.loads(pickle.dumps((function, run)))
        done = Future()
        done.set_result(pickle.loads(pickle.dumps(function(**run))))
        return done


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs made here; tests/experiments/test_records.py tests the processes."""
    monkeypatch.setattr(records, "ProcessPoolExecutor", lambda jobs, **_: nullcontext(Here()))
