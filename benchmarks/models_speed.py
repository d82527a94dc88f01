"""Time whole models on a GPU against timm's deit of the same size: images/s and peak memory.

    python -m benchmarks.models_speed [--sizes 224 512 1024] [--modes eager graphs compiled]
        [--output FILE.json] [--seconds N]

Inference, and training steps of forward, cross-entropy, backward and fused AdamW, both under bfloat16
autocast, in three ways: op by op ("eager"); captured as one CUDA graph and replayed ("graphs"); and
with every block compiled by torch.compile ("compiled": a whole model takes the compiler minutes, its
blocks are all alike). Models of a size take turns, round by round; images/s is the median over rounds
and a ratio that of the ratios round by round. Memory is the most that a model has allocated, by itself.

What the graph or the compiled blocks compute is compared with what was computed op by op before it is
timed. A model that runs out of memory, fails or takes too long to compile is a row that says so. The
rows are written as they come, and the same command measures what is missing. ``--toy`` runs two layers
on the CPU; its times are those of nothing.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import vil  # noqa: F401  (registers the models)
from benchmarks.budget import UNFINISHED, Budget, add_seconds, time_limit
from benchmarks.provenance import environment
from vil.training.files import write_text

FAMILIES = {  # the first of each is what the others are compared with
    "tiny": ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny"),
    "small": ("deit_small_patch16_224", "vil_small", "vil_small_exact"),
}
BATCH = {224: 128, 512: 32, 1024: 8}  # about as many tokens each
TOY_BATCH = {32: 2, 48: 1}
MODES = ("eager", "graphs", "compiled")
PASSES = ("inference", "training")
CLASSES = 1000
TURN_S = 0.05  # the least that a turn takes
LIMIT_S = 150.0  # for a model to be built and compiled
TOLERANCE = 0.05  # of the logits, relative to their norm: bfloat16 through all layers


@dataclass(frozen=True)
class Cell:
    """Models that are compared with each other."""

    mode: str
    family: str
    size: int
    pass_name: str
    batch: int


@dataclass
class Row:
    """A model in a cell."""

    mode: str
    family: str
    size: int
    pass_name: str
    batch: int
    model: str
    status: str
    """"ok", or why it is not timed."""
    images_per_s: float | None = None
    ratio: float | None = None
    """To the deit of that size, above 1 is faster."""
    peak_gib: float | None = None
    memory_ratio: float | None = None
    """To the deit of that size, below 1 is less."""


# --------------------------------------------------------------------------------------- one model


class Runner:
    """A model that is ready to be timed."""

    def __init__(self, name: str, cell: Cell, device: torch.device, toy: bool) -> None:
        """Build it, warm it up and check what it computes.

        Args:
            name: As timm knows it.
            cell: What to run.
            device: Where.
            toy: Two layers, and compiled by a compiler that does nothing.

        Raises:
            RuntimeError: it computes something else than op by op, or nothing finite.
        """
        self.name, self.cell, self.device = name, cell, device
        others = _allocated(device, reset=True)
        torch.manual_seed(0)
        options: dict[str, Any] = {"depth": 2} if toy else {}
        self.model = timm.create_model(name, img_size=cell.size, **options).to(device)
        self.images = torch.randn(cell.batch, 3, cell.size, cell.size, device=device)
        self.labels = torch.randint(CLASSES, (cell.batch,), device=device)
        self.model.train(cell.pass_name == "training")
        self.step = self._inference if cell.pass_name == "inference" else self._training
        if cell.pass_name == "training":
            on_gpu = device.type == "cuda"
            parameters = self.model.parameters()
            self.optimizer = torch.optim.AdamW(parameters, 1e-4, fused=True, capturable=on_gpu)
        expected = self.step().clone() if cell.mode != "eager" else None
        self.run, out = self._prepared("eager" if toy else "inductor")
        self._check(out, expected)
        self.repeats = self._repeats()
        self.peak_gib = (_allocated(device, peak=True) - others) / 2**30

    def _inference(self) -> Tensor:
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16):
            return self.model(self.images)

    def _training(self) -> Tensor:
        self.optimizer.zero_grad()  # to None, so that a captured backward pass writes, not adds
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _prepared(self, compiler: str) -> tuple[Callable[[], object], Tensor]:
        """Return what to time, and the tensor that it leaves its result in."""
        if self.cell.mode == "graphs":
            return captured(self.step, self.device)
        if self.cell.mode == "compiled":
            for block in self.model.blocks:
                block.compile(dynamic=False, backend=compiler)
        for _ in range(3):
            out = self.step()
        return self.step, out

    def _check(self, out: Tensor, expected: Tensor | None) -> None:
        if not torch.isfinite(out).all():
            raise RuntimeError("the result is not finite")
        if expected is None or self.cell.pass_name == "training":
            return  # every step of training has another loss
        error = float((out - expected).norm() / expected.norm().clamp(min=1e-30))
        if error > TOLERANCE:
            raise RuntimeError(f"disagrees with eager: error {error:.2g} > {TOLERANCE}")

    def _repeats(self) -> int:
        self.turn(1)
        return max(1, round(TURN_S / self.turn(1)))

    def turn(self, repeats: int) -> float:
        """Run some steps and return the seconds of one."""
        _wait(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            self.run()
        _wait(self.device)
        return (time.perf_counter() - start) / repeats


def captured(
    step: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], object], Tensor]:
    """Capture a step in a CUDA graph; return what replays it, and its result, which that overwrites.

    On a CPU, for toys, the step is returned as it is.
    """
    if device.type != "cuda":
        return step, step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        graph.replay()
    _wait(device)
    return graph.replay, out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device, peak: bool = False, reset: bool = False) -> int:
    """Return the bytes that tensors hold on a GPU, or did at most since the last reset."""
    if device.type != "cuda":
        return 0
    if reset:
        gc.collect()  # runners are cycles of an object and its methods
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


# ---------------------------------------------------------------------------------------- one cell


def measure(
    cell: Cell, device: torch.device, rounds: int, toy: bool, limit_s: float = LIMIT_S
) -> list[Row]:
    """Time all models of a cell in turns.

    Args:
        cell: What to run.
        device: Where.
        rounds: Turns of each model.
        toy: As of ``Runner``.
        limit_s: Seconds that a model may take to be built and compiled.
    """
    rows = {name: Row(**asdict(cell), model=name, status="ok") for name in FAMILIES[cell.family]}
    runners: list[Runner] = []
    for name, row in rows.items():
        try:
            # Of one thread, so that the limit also interrupts the compilation of a backward pass.
            with time_limit(limit_s), torch.autograd.set_multithreading_enabled(False):
                runners.append(Runner(name, cell, device, toy))
        except torch.OutOfMemoryError:
            row.status = "out of memory"
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            row.status = f"failed: {type(error).__name__}: {lines[0]}"
        print(f"{_label(cell)} {name}: {row.status}", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for _ in range(rounds):
        for runner in runners:
            seconds[runner.name].append(runner.turn(runner.repeats))
    base = next((r for r in runners if r.name == FAMILIES[cell.family][0]), None)
    for runner in runners:
        _fill(rows[runner.name], runner, seconds, base)
    return list(rows.values())


def _fill(row: Row, runner: Runner, seconds: dict[str, list[float]], base: Runner | None) -> None:
    times = seconds[runner.name]
    row.images_per_s = row.batch / statistics.median(times)
    on_gpu = runner.device.type == "cuda"
    row.peak_gib = runner.peak_gib if on_gpu else None
    if base is not None:
        row.ratio = statistics.median(b / a for a, b in zip(times, seconds[base.name], strict=True))
        row.memory_ratio = runner.peak_gib / base.peak_gib if on_gpu else None


def _label(cell: Cell) -> str:
    return f"{cell.size} px, batch {cell.batch}, {cell.pass_name}, {cell.mode}"


def is_broken(device: torch.device) -> bool:
    """Tell whether an error has left the GPU unusable for this process."""
    try:
        _wait(device)
        torch.ones(1, device=device).sum().item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


# -------------------------------------------------------------------------------------------- main


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; one that is not timed says why."""
    lines = [
        "| px, batch | pass | mode | model | images/s | x deit | peak GiB | x deit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        what = (f"{row['size']}, {row['batch']}", row["pass_name"], row["mode"], row["model"])
        if row["images_per_s"] is None:
            figures = (row["status"].replace("|", "/"), "", "", "")
        else:
            figures = (
                f"{row['images_per_s']:.4g}",
                *(
                    "-" if row[name] is None else f"{row[name]:.2f}"
                    for name in ("ratio", "peak_gib", "memory_ratio")
                ),
            )
        lines.append(f"| {' | '.join((*what, *figures))} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    default = Path(__file__).parent / "results" / "models_speed.json"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=(*BATCH, *TOY_BATCH), metavar="PX")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=default, help="the record, JSON")
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU; times mean nothing")
    add_seconds(parser)
    args = parser.parse_args(arguments)
    args.sizes = args.sizes or list(TOY_BATCH if args.toy else BATCH)
    return args


def recorded(path: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record if it was made in the same environment."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return content["rows"] if content["environment"] == head["environment"] else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, print a table, and return the exit status."""
    args = parse(arguments)
    budget = Budget(args.seconds)
    if not torch.cuda.is_available() and not args.toy:
        print("benchmarks.models_speed needs a GPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.toy else "cuda")
    head = {"environment": environment() | {"toy": args.toy}}
    rows = recorded(args.output, head)
    done = {(r["mode"], r["family"], r["size"], r["pass_name"]) for r in rows}
    axes = (args.modes, args.families, args.sizes, PASSES)
    missing = [axis for axis in product(*axes) if axis not in done]
    batch = TOY_BATCH if args.toy else BATCH
    args.output.parent.mkdir(parents=True, exist_ok=True)
    while missing and budget.left:
        mode, family, size, pass_name = missing.pop(0)
        cell = Cell(mode, family, size, pass_name, batch[size])
        limit_s = max(10.0, min(LIMIT_S, budget.left / 2))
        rows += [asdict(row) for row in measure(cell, device, args.rounds, args.toy, limit_s)]
        write_text(args.output, json.dumps(head | {"rows": rows}, indent=1) + "\n")
        torch.compiler.reset()
        if is_broken(device):  # a fresh process goes on with the next cell
            left = ["--seconds", str(budget.left)] if args.seconds is not None else []
            os.execv(sys.executable, [sys.executable, *sys.argv, *left])
    print(table(rows))
    if missing:
        print(f"the time is up, {len(missing)} comparisons are missing", file=sys.stderr)
    return UNFINISHED if missing else int(any(r["status"].startswith("failed") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
