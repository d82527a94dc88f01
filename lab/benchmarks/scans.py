"""Time scans of one direction on a CPU: this library's, mambapy's and a loop over tokens.

    pip install mambapy && python -m lab.benchmarks.scans [--lengths 256 1024] [--rounds 5] [--record]
    python -m lab.benchmarks.scans --show

One thread, (1, L, 256) with 16 states, float32. A figure is the median over rounds of CPU time relative to this
library's scan of the same recurrence in the same round; each round runs everything once. The loop is the plain
PyTorch that papers print, with states updated in no place. transformers' Mamba runs a training step of a model
of 4 layers of width 128: with its own loop, with mambapy, and with the adapter of docs/scans.md.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.benchmarks import provenance
from vil.kernels import ops
from vil.training.files import write_text

RECORD = Path(__file__).parent / "results" / "scans.json"
CHANNELS, STATES = 256, 16


def loop(x: Tensor, dt: Tensor, A: Tensor | None, q: Tensor, k: Tensor, recurrence: str) -> Tensor:
    """Return a scan of one direction, token by token."""
    step = F.softplus(dt) if A is not None else torch.sigmoid(dt)
    if A is None:
        step = step / (1 + step * k.square().sum(-1, keepdim=True))
    state, read = x.new_zeros(x.shape[0], x.shape[2], k.shape[2]), []
    for t in range(x.shape[1]):
        value, eps, key = x[:, t, :, None], step[:, t, :, None], k[:, t, None]
        if recurrence == "mamba":
            state = torch.exp(eps * A) * state + eps * key * value
        elif recurrence == "longhorn":
            state = state + eps * key * (value - key * state)
        else:
            state = state + eps * (value - state @ key.mT) * key
        read.append(state @ q[:, t, :, None])
    return torch.cat(read, -1).mT


def mambapy(x: Tensor, dt: Tensor, A: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return Mamba's scan by the parallel scan of mambapy, which stores all states."""
    from mambapy.pscan import pscan

    step = F.softplus(dt)[..., None]
    states = pscan(torch.exp(step * A), step * k[:, :, None] * x[..., None])
    return (states @ q[..., None]).squeeze(3)


def contestants(length: int) -> dict[str, Callable[[], Tensor]]:
    """Return forward passes by name, "ours" of a recurrence first; all need gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = (CHANNELS, CHANNELS, STATES, STATES)
    x, dt, q, k = (torch.randn(1, length, size, generator=generator, requires_grad=True) for size in sizes)
    A = -torch.arange(1.0, STATES + 1).repeat(CHANNELS, 1)
    found = {}
    for recurrence in ("longhorn", "longhorn_exact"):
        found[f"{recurrence}: ours"] = lambda r=recurrence: ops.longhorn_scan(x, dt, q, k, recurrence=r)
        found[f"{recurrence}: loop"] = lambda r=recurrence: loop(x, dt, None, q, k, r)
    found["mamba: ours"] = lambda: ops.mamba_scan(x, dt, A, q, k)
    found["mamba: loop"] = lambda: loop(x, dt, A, q, k, "mamba")
    found["mamba: mambapy"] = lambda: mambapy(x, dt, A, q, k)
    return found


def in_transformers(length: int) -> dict[str, Callable[[], Tensor]]:
    """Return losses of transformers' Mamba with its loop, with mambapy and with the adapter of docs/scans.md."""
    from transformers import MambaConfig, MambaForCausalLM
    from transformers.models.mamba import modeling_mamba

    text = (Path(__file__).parents[2] / "docs" / "scans.md").read_text(encoding="utf-8")
    (block,) = (part for part in text.split("```python\n") if "modeling_mamba.mamba_selective_scan =" in part)
    own, session = modeling_mamba.mamba_selective_scan, {}
    exec(block.partition("```")[0], session)
    modeling_mamba.mamba_selective_scan = own
    ids = torch.randint(200, (1, length), generator=torch.Generator().manual_seed(0))

    def loss(scan: Callable, use_mambapy: bool) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        config = MambaConfig(hidden_size=128, num_hidden_layers=4, vocab_size=200, use_mambapy=use_mambapy)
        model = MambaForCausalLM(config)

        def run() -> Tensor:
            modeling_mamba.mamba_selective_scan = scan
            return model(ids, labels=ids).loss

        return run

    return {
        "transformers: ours": loss(session["selective_scan"], False),
        "transformers: loop": loss(own, False),
        "transformers: mambapy": loss(own, True),
    }


def cpu_seconds(forward: Callable[[], Tensor], train: bool) -> float:
    """Return the CPU time of a forward pass, or of a forward and a backward pass."""
    started = time.process_time()
    with torch.set_grad_enabled(train):
        out = forward()
        if train:
            out.sum().backward()
    return time.process_time() - started


def measure(length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the time of each contestant relative to ours, in inference and training."""
    found = contestants(length) | in_transformers(length)
    agreed = {name.partition(":")[0]: run().detach() for name, run in found.items() if name.endswith("ours")}
    for name, run in found.items():
        torch.testing.assert_close(run().detach(), agreed[name.partition(":")[0]], rtol=1e-3, atol=1e-3)
    times = {name: {"inference": [], "training": []} for name in found}
    for _ in range(rounds):
        for name, run in found.items():
            for mode, values in times[name].items():
                values.append(cpu_seconds(run, mode == "training"))
    ratios = {}
    for name, modes in times.items():
        ours = times[name.partition(":")[0] + ": ours"]
        ratios[name] = {
            mode: statistics.median(a / b for a, b in zip(values, ours[mode], strict=True))
            for mode, values in modes.items()
        }
    return ratios


def table(record: dict) -> str:
    """Return the Markdown table of a record, without our own rows, which are 1."""
    lengths = list(record["ratios"])
    lines = [
        "| scan | " + " | ".join(f"{mode}, {n} tokens" for mode in ("inference", "training") for n in lengths) + " |"
    ]
    lines.append("|---" * (1 + 2 * len(lengths)) + "|")
    for name in record["ratios"][lengths[0]]:
        if not name.endswith("ours"):
            values = [record["ratios"][n][name][mode] for mode in ("inference", "training") for n in lengths]
            lines.append(f"| {name} | " + " | ".join(f"{v:.1f}" if v < 10 else f"{v:.0f}" for v in values) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print, write a record, or print the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write the figures to results/scans.json")
    parser.add_argument("--show", action="store_true", help="print the record")
    args = parser.parse_args()
    if args.show:
        record = json.loads(RECORD.read_text())
        print(*(f"{k} {v}" for k, v in record["environment"].items()), sep=", ")
        print(table(record))
        return
    torch.set_num_threads(1)
    ratios = {str(length): measure(length, args.rounds) for length in args.lengths}
    record = {"environment": provenance.environment(), "rounds": args.rounds, "ratios": ratios}
    print(table(record))
    if args.record:
        write_text(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
