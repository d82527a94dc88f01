"""Do all imports, compile all loops and fill caches once, in the server that training processes fork from.

A fresh process would spend seconds on imports, in which a kill shows nothing.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import matplotlib.figure  # noqa: F401  a run imports it to draw its curve
import timm
import torch

import vil  # noqa: F401  registers the models with timm
from vil.training.program import run_script
from vil.training.recipes import load_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # scripts are not installed
train_imagenet = importlib.import_module("train_imagenet")


def train(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Run train_imagenet.py in a new session, which identifies its data-loading workers.

    Args:
        arguments: Command line of the script.
        environment: Additional environment variables.
        log: File that its output is appended to.
    """
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # start workers as in any new process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
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
