"""Count how often kernels are compiled: no GPU, Triton's own launch path, a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
MODELS = {"vil_tiny": 6, "vil_tiny_exact": 7, "vim_tiny": 6}  # kernels of a training step

# Prints the kernels of a step for every mode and size.
COUNT = """
import json, sys
from lab.benchmarks.kernels import launches, target
from triton import knobs
from vil.kernels.triton import tuning

found = set()

def note(*, fn, compile, **_):
    kernel = fn.jit_function
    found.add((kernel.module, kernel.__name__, json.loads(compile["specialization_data"])["key"]))
    return True  # do not compile

target("90")
tuning.processors = lambda device: 0  # no splits, which need more kernels
knobs.runtime.jit_cache_hook = note
sizes = ((8, 224, 224), (5, 224, 224), (8, 384, 384), (1, 208, 208), (8, 448, 224), (8, 672, 224))
for name in sys.argv[1:]:
    for batch_size, img_size, trained_size in sizes:
        kernels = {}
        for mode, noted in launches(name, batch_size, img_size, trained_size).items():
            found.clear()
            for launch in noted:
                launch.kernel.warmup(**launch.arguments, grid=(1,))
            kernels[mode] = sorted(found)
        print(json.dumps([name, kernels]))
"""


def run(code: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as in a process of a user, with a cache for compiled kernels."""
    script = cache.with_suffix(".py")
    script.write_text(code)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.ci
def test_nothing_is_compiled_after_the_first_step_of_each_mode(tmp_path: Path) -> None:
    out = run(COUNT, tmp_path / "cache", *MODELS).stdout
    rows = [json.loads(line) for line in out.splitlines()]  # of each model and size
    for name, training in MODELS.items():
        of_it = [kernels for model, kernels in rows if model == name]
        *trained, twice, thrice = of_it
        assert len(trained) == 4
        assert all(kernels == trained[0] for kernels in trained)
        first = trained[0]
        # On a grid that differs from the trained one, only the convolution has different kernels.
        assert twice == thrice
        for mode, kernels in first.items():
            others = [one for one in kernels if one not in twice[mode]]
            assert {one[0] for one in others} == {"vil.kernels.triton.conv"}
            assert len(twice[mode]) == len(kernels)
        assert len(first["train"]) == training
        both = {tuple(kernel) for mode in first.values() for kernel in mode}
        assert len(both) == training + 1  # evaluation saves nothing for a backward pass


# Compiles the kernels of a convolution and its gradients on one core. Prints the number of threads that this starts,
# and the kernels that a later launch asks for.
TOGETHER = """
import os, threading
import torch
from lab.benchmarks.kernels import target
from triton import knobs
from vil.kernels.interface import conv_key
from vil.kernels.triton import backend, launch

def run():
    x, weight, bias = torch.randn(1, 20, 32), torch.randn(2, 32, 4), torch.randn(2, 32)
    plan = backend.conv_plan(conv_key(x, weight, None))
    plan.backward(plan.forward(x, weight, bias, None), x, weight, bias, None)

def unexpected(*, fn, **_):
    raise SystemExit(f"{fn.name} was compiled again")

target("90")
launch._REPORT_S = 0.01  # much less than a kernel takes
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
started, start = [], threading.Thread.start
threading.Thread.start = lambda thread: (started.append(thread), start(thread))
with launch.compiling():
    run()
print(len(started))
knobs.runtime.jit_cache_hook = unexpected
with launch.recording() as launches:
    run()
for one in launches:
    print(one.kernel.__name__, one.kernel.warmup(**one.arguments, grid=(1,)).metadata.target.arch)
"""


def test_kernels_are_compiled_together(tmp_path: Path) -> None:
    done = run(TOGETHER, tmp_path / "cache")
    threads, *kernels = done.stdout.splitlines()
    assert threads == "1"
    assert kernels == ["conv_forward_kernel 90", "conv_backward_kernel 90"]
    assert done.stderr.splitlines()[0] == "compiled 0 of 2 kernels"
