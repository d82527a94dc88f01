"""What training processes are started from: all imports made, all loops compiled, and caches filled once.

A process that starts anew imports for seconds, of which none would tell anything about a kill.
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
    """Be train_imagenet.py, in a session of its own, which tells its loader processes.

    Args:
        arguments: Its command line.
        environment: Its further environment variables.
        log: File that its output is added to.
        activities: Shared memory that says what each process is doing, by its place in ACTIVITIES.
        rank: Which process this is.
    """
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # for the loaders: as in any new process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
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
    """Run a model forward; backward would start threads, which a fork does not survive."""
    model = timm.create_model("vil_tiny", img_size=16, patch_size=8, embed_dim=16, depth=1)
    with torch.inference_mode():
        model(torch.zeros(1, 3, 16, 16))


_compile_loops()
load_config(
    [], ROOT / "configs" / "digits.yaml"
)  # the parser of command lines keeps what it learns
gc.freeze()  # or each process copies, in its first collection, all that it shares with this one
