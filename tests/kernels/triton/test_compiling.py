"""How often kernels are compiled, without a GPU: by Triton's own launch path, in a process apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
MODELS = {"vil_tiny": 5, "vil_tiny_exact": 6, "vim_tiny": 5}  # kernels of a training step

# Prints for every mode and size the kernels of a step.
COUNT = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import without_gpu
import torch
from vil import warmup

for name in sys.argv[1:]:
    sizes = ((224, 8, None), (224, 5, None), (384, 8, None), (208, 1, None), (448, 8, 224), (672, 8, 224))
    for img_size, batch_size, trained_size in sizes:
        model = warmup._create(name, img_size, trained_size, torch.device("cpu"))
        modes = warmup.launches(model, batch_size, img_size, torch.bfloat16, torch.device("cpu"))
        kernels = {{mode: sorted(warmup.specializations(noted)) for mode, noted in modes.items()}}
        print(json.dumps([name, kernels]))
"""


def specializations(cache: Path) -> list[tuple[str, dict[str, list]]]:
    """Return models and the kernels that each mode launches at a size."""
    script = cache.with_suffix(".py")
    script.write_text(COUNT)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(script), *MODELS]
    out = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    ).stdout
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.ci
def test_nothing_is_compiled_after_the_first_step_of_each_mode(tmp_path: Path) -> None:
    rows = specializations(tmp_path / "cache")
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
