"""Do all imports, compile all loops and fill caches once, in the server that training processes fork from.

A fresh process would spend seconds on imports, in which a kill shows nothing.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  a run imports it to draw its curve
import timm
import torch

import vil  # noqa: F401  registers the models with timm
from vil.training import train as loop
from vil.training.errors import run_script
from vil.training.recipes import load_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # scripts are not installed
train_imagenet = importlib.import_module("train_imagenet")

ACTIVITIES = ("starting", "training", "saving", "evaluating", "finishing")


def train(
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    activities: ctypes.Array,
    rank: int,
) -> None:
    """Run train_imagenet.py in a new session, which identifies its data-loading workers.

    Args:
        arguments: Command line of the script.
        environment: Additional environment variables.
        log: File that its output is appended to.
        activities: Shared memory with the current activity of each rank, as an index into ACTIVITIES.
        rank: Rank of this process.
    """
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # start workers as in any new process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())

    def note(function: Callable[..., Any], during: str, after: str | None = None) -> Any:
        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            before = activities[rank]
            activities[rank] = ACTIVITIES.index(during)
            result = function(*args, **kwargs)
            activities[rank] = before if after is None else ACTIVITIES.index(after)
            return result

        return noted

    report = loop.Report
    report.__enter__ = note(report.__enter__, "starting", after="training")
    report.summary = note(report.summary, "finishing", after="finishing")
    loop.save = note(loop.save, "saving")
    loop.evaluate = note(loop.evaluate, "evaluating")
    sys.argv = ["train_imagenet.py", *arguments]
    sys.exit(run_script(train_imagenet.main))


def _compile_loops() -> None:
    """Run a model forward only; backward would start threads, which do not survive a fork."""
    model = timm.create_model("vil_tiny", img_size=16, patch_size=8, embed_dim=16, depth=1)
    with torch.inference_mode():
        model(torch.zeros(1, 3, 16, 16))


_compile_loops()
load_config([], ROOT / "configs" / "digits.yaml")  # fills the command-line parser's caches
gc.freeze()  # otherwise the first collection in each process would copy all shared memory
