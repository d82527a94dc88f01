"""How often kernels are compiled, without a GPU: by Triton's own launch path, in processes apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
MODELS = {"vil_tiny": 5, "vil_tiny_exact": 6, "vim_tiny": 5}  # kernels of a training step

PREAMBLE = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import without_gpu
import torch
from vil import warmup
"""

# Prints for every mode and size the kernels of a step.
COUNT = """
for name in sys.argv[1:]:
    sizes = ((224, 8, None), (224, 5, None), (384, 8, None), (208, 1, None), (448, 8, 224), (672, 8, 224))
    for img_size, batch_size, trained_size in sizes:
        model = warmup._create(name, img_size, trained_size, torch.device("cpu"))
        modes = warmup.launches(model, batch_size, img_size, torch.bfloat16, torch.device("cpu"))
        kernels = {mode: sorted(warmup.specializations(noted)) for mode, noted in modes.items()}
        print(json.dumps([name, kernels]))
"""
# Launches the kernel that packs keys and queries for the first time in two processes at once, each of which prints
# whether it was in the cache.
PACK = """
import os
from triton import knobs
from vil.kernels.triton import launch, recurrent_parts

told = {False: b"compiled\\n", True: b"hit\\n"}
knobs.compilation.listener = lambda *, cache_hit, **_: os.write(1, told[cache_hit])
noted = warmup.launches(
    warmup._create("vil_tiny", 224, None, torch.device("cpu")), 2, 224, torch.float32, torch.device("cpu")
)
pack = next(l for l in noted["eval"] if l.kernel is recurrent_parts.pack_kernel)


class WithoutGPU:
    __name__ = "pack"

    def __getitem__(self, grid):
        return lambda **options: pack.kernel.warmup(**pack.arguments, grid=(1,))


kernel = launch.Kernel(WithoutGPU(), 1, 1)
wait, start = os.pipe()
children = []
for _ in range(2):
    if (child := os.fork()) == 0:
        os.close(start)
        os.read(wait, 1)  # until its other end is closed everywhere
        kernel(torch.empty(0))
        os._exit(0)
    children.append(child)
os.close(start)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def start(code: str, cache: Path, *arguments: str) -> subprocess.Popen:
    script = cache.with_suffix(".py")
    script.write_text(PREAMBLE + code)
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen) -> list[str]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return out.splitlines()


@pytest.mark.ci
def test_nothing_is_compiled_after_the_first_step_of_each_mode(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of(start(COUNT, tmp_path / "cache", *MODELS))]
    for name, training in MODELS.items():
        of_it = [kernels for model, kernels in rows if model == name]
        *trained, twice, thrice = of_it
        assert len(trained) == 4
        assert all(kernels == trained[0] for kernels in trained)
        first = trained[0]
        # At another grid than the trained one the convolution has kernels of its own, and nothing else.
        assert twice == thrice
        for mode, kernels in first.items():
            others = [one for one in kernels if one not in twice[mode]]
            assert {one[0] for one in others} == {"vil.kernels.triton.conv"}
            assert len(twice[mode]) == len(kernels)
        assert len(first["train"]) == training
        both = {tuple(kernel) for mode in first.values() for kernel in mode}
        assert len(both) == training + 1  # evaluation saves nothing for a backward pass


@pytest.mark.ci
def test_processes_of_a_machine_compile_a_kernel_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert sorted(lines_of(start(PACK, cache))) == ["compiled", "hit"]
    assert [path.name for path in cache.glob("*.lock")] == ["vil.kernels.triton.pack.lock"]
