"""Compare the time and memory of timm models on a CPU or a GPU: inference, training, and ways of deployment.

    python -m lab.benchmarks.models deit_tiny_patch16_224 vil_tiny --sizes 224 1024 --batches 1 8
        [--passes inference training] [--ways eager compile graphs onnx aoti] [--memory] [--device cuda]
        [--dtype float32] [--threads 1] [--clock wall] [--rounds 5] [--seconds N] [--output FILE.json]
    python -m lab.benchmarks.models --show lab/benchmarks/results/cpu.json

A cell is a combination of size, batch, pass and way. Each cell is a new process, in which all models take turns,
round by round (``steps.py``), so that a drift of the machine's speed affects all equally. A row has the
median over rounds, and the median of the round-by-round ratios to the first model.

    passes   inference, or training: forward, cross-entropy, backward and AdamW
    ways     eager; compile: torch.compile of every block, or of a model without blocks; graphs: a CUDA graph;
             compile+graphs: both; onnx: ONNX Runtime; aoti: AOTInductor. The last two are for inference on a CPU.
    clock    wall; or cpu: CPU seconds of the process, which depend less on other programs
    memory   peak memory of a step minus the memory before it: resident on a CPU, allocated on a GPU

In inference, the logits of other ways are compared with eager mode before timing. The row of a failed model has the
error. Rows are written one by one; repeat the command to resume. The default dtype on a GPU is bfloat16 by autocast.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import vil  # noqa: F401  (registers the models)
from lab.benchmarks.budget import UNFINISHED, Budget, add_seconds
from lab.benchmarks.provenance import environment
from lab.benchmarks.steps import PASSES, Step, in_turns, step_of, watch_memory
from vil.timm_models import create, is_own
from vil.training.files import write_text

Program = Callable[[Tensor], Tensor]
Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
WAYS = ("eager", "compile", "graphs", "compile+graphs", "onnx", "aoti")
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # of logits, relative to their norm
SMALL = 64  # px, of the first step, which compiles


# ------------------------------------------------------------------------------------------- ways


def build(name: str, cell: Row, **arguments: Any) -> tuple[nn.Module, Tensor]:
    """Return a model with random weights and the images of a cell, on the cell's device."""
    torch.manual_seed(0)
    size, channels = cell["size"], timm.get_pretrained_cfg(name).input_size[0]
    model = create(name, img_size=size, **arguments).to(cell["device"])
    return model, torch.randn(cell["batch"], channels, size, size, device=cell["device"])


def compiled(model: nn.Module) -> nn.Module:
    """Compile a model's blocks, which share one compilation, or the whole model if it has none."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        return torch.compile(model, dynamic=False)
    for block in blocks:
        block.compile(dynamic=False)
    return model


def graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a step in a CUDA graph; return a function that replays it and returns its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay(kept: Callable[[], Any] = step) -> Any:
        # The graph uses the memory of the weights and images that the step refers to.
        graph.replay()
        return result

    return replay


def onnx_runtime(name: str, cell: Row, folder: Path) -> Program:
    """Return a model in ONNX Runtime, with the weights of ``build``."""
    import onnxruntime

    extra = {"exportable": True} if is_own(name) else {}
    model, images = build(name, cell, **extra)
    model.load_state_dict(build(name, cell)[0].state_dict())
    file = folder / f"{name}.onnx"
    torch.onnx.export(model.eval(), (images,), dynamo=True, verbose=False).save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {given: images.numpy()})[0])


def aot_inductor(name: str, cell: Row, folder: Path) -> Program:
    """Return a model as a shared library of AOTInductor."""
    model, images = build(name, cell)
    program = torch.export.export(model.eval(), (images,))
    package = str(folder / f"{name}.pt2")
    return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=package))


def step_by(name: str, cell: Row, folder: Path) -> Step:
    """Return a function that runs one step of a model in the cell's way.

    Raises:
        RuntimeError: If the logits differ from eager mode's, or are not finite.
    """
    model, images = build(name, cell)
    dtype, way = getattr(torch, cell["dtype"]), cell["way"]
    program: Program = model
    expected = None
    if cell["pass"] == "inference" and way != "eager":
        expected = _logits(model.eval(), images, dtype)
    graphs = way.endswith("graphs")
    if way.startswith("compile"):
        program = compiled(model)
    if way in ("onnx", "aoti"):
        program = {"onnx": onnx_runtime, "aoti": aot_inductor}[way](name, cell, folder)
    if cell["pass"] == "training":
        step = step_of(program, images, "training", dtype, capturable=graphs)
        return graphed(step) if graphs else step
    step = graphed(lambda: _logits(program, images, dtype)) if graphs else partial(program, images)
    if expected is not None:
        found = step() if graphs else _logits(program, images, dtype)
        check(found, expected, TOLERANCE[cell["dtype"]])
    if way in ("eager", "compile"):
        return step_of(program, images, "inference", dtype)
    return step


def _logits(program: Program, images: Tensor, dtype: torch.dtype) -> Tensor:
    autocast = torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32)
    with torch.inference_mode(), autocast:
        return program(images).float().clone()


def check(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise RuntimeError unless logits are finite and within ``tolerance`` of the expected ones."""
    if not torch.isfinite(found).all():
        raise RuntimeError("the logits are not finite")
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    if error > tolerance:
        raise RuntimeError(f"disagrees with eager mode: error {error:.2g} > {tolerance}")


# ------------------------------------------------------------------------------------------ a cell


def memory_of(name: str, cell: Row) -> int:
    """Return the bytes that a step takes, after a small step that loads libraries and compiles."""
    dtype = getattr(torch, cell["dtype"])
    small = {**cell, "size": SMALL, "batch": 1}
    step_of(*build(name, small), cell["pass"], dtype)()
    step = step_of(*build(name, cell), cell["pass"], dtype)
    most = watch_memory(cell["device"])
    step()
    return most()


def measure(cell: Row) -> list[Row]:
    """Time the models of a cell in turns, in this process."""
    torch.set_num_threads(cell["threads"])
    names = cell["models"]
    rows = {name: {"model": name, "error": None} for name in names}
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                if cell["memory"]:
                    rows[name]["bytes"] = memory_of(name, cell)
                steps[name] = step_by(name, cell, Path(folder))
                steps[name]()
            except Exception as error:  # the other models may still run
                steps.pop(name, None)
                first = (str(error).strip().splitlines() or [""])[0]
                rows[name]["error"] = f"{type(error).__name__}: {first}"
        clock = time.process_time if cell["clock"] == "cpu" else None
        seconds = in_turns(steps, cell["rounds"], cell["device"], clock=clock)
    base = seconds.get(names[0])
    for name, times in seconds.items():
        rows[name]["seconds"] = statistics.median(times)
        if base:
            ratios = [t / b for t, b in zip(times, base, strict=True)]
            rows[name]["seconds_ratio"] = statistics.median(ratios)
    for row in rows.values():
        if row.get("bytes") and rows[names[0]].get("bytes"):
            row["bytes_ratio"] = row["bytes"] / rows[names[0]]["bytes"]
    return list(rows.values())


def in_process(cell: Row) -> list[Row]:
    """Run ``measure`` in a new process; if that process dies, every row says so."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(cell["threads"]))
    done = subprocess.run(
        [sys.executable, "-m", "lab.benchmarks.models", "--cell", json.dumps(cell)],
        cwd=ROOT,
        env=os.environ | counts,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return [{"model": name, "error": f"exit {done.returncode}"} for name in cell["models"]]


# ------------------------------------------------------------------------------------------ output


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table; a row without times gives the reason."""
    heads = ("px", "batch", "pass", "way", "model", "ms per image", "ratio", "MiB", "ratio")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [str(row[key]) for key in ("size", "batch", "pass", "way", "model")]
        if row["error"]:
            cells += [row["error"].replace("|", "/"), "", "", ""]
        else:
            cells.append(f"{1e3 * row['seconds'] / row['batch']:.4g}")
            cells.append(_ratio(row.get("seconds_ratio")))
            cells.append(f"{row['bytes'] / 2**20:.0f}" if "bytes" in row else "")
            cells.append(_ratio(row.get("bytes_ratio")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("models", nargs="*", help="names of timm; ratios are to the first")
    add("--sizes", nargs="+", default=["224"], metavar="PX[:BATCH]")
    add("--batches", type=int, nargs="+", default=[8], help="of sizes that name none")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    add("--ways", nargs="+", choices=WAYS, default=["eager"])
    add("--memory", action="store_true", help="measure memory, too")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=TOLERANCE, help="default: bfloat16 on a GPU, else float32")
    add("--threads", type=int, default=1)
    add("--clock", choices=("wall", "cpu"), default="wall")
    add("--rounds", type=int, default=5)
    add("--output", type=Path, help="the record, JSON; the same command continues it")
    add("--show", type=Path, help="print the table of a record, and measure nothing")
    add("--cell", type=json.loads, help=argparse.SUPPRESS)
    add_seconds(parser)
    args = parser.parse_args(arguments)
    if not args.models and args.cell is None and args.show is None:
        parser.error("name at least one model")
    if args.device == "cpu" and (graphs := [way for way in args.ways if way.endswith("graphs")]):
        parser.error(f"--ways {graphs[0]} needs --device cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def cells(args: argparse.Namespace) -> list[Row]:
    """Return all combinations to measure, except training by ONNX Runtime and AOTInductor."""
    shapes = [
        (int(size), int(batch))
        for size, _, own in (text.partition(":") for text in args.sizes)
        for batch in ([own] if own else args.batches)
    ]
    return [
        {"size": size, "batch": batch, "pass": pass_name, "way": way}
        for (size, batch), pass_name, way in product(shapes, args.passes, args.ways)
        if pass_name == "inference" or way not in ("onnx", "aoti")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that the record lacks, print the table, and return the exit status."""
    args = parse(arguments)
    if args.cell is not None:
        print(json.dumps(measure(args.cell)))
        return 0
    if args.show is not None:
        print(table(json.loads(args.show.read_text())["rows"]))
        return 0
    budget = Budget(args.seconds)
    protocol = {key: getattr(args, key) for key in ("device", "dtype", "threads", "clock", "rounds")}
    head = environment() | {"on": protocol.pop("device"), **protocol}
    rows: list[Row] = []
    if args.output and args.output.exists():
        content = json.loads(args.output.read_text())
        if content["environment"] != head:
            was = content["environment"]
            sys.exit(f"error: {args.output} has {was}, but this run has {head}; move it away")
        rows = content["rows"]
    settings = {"models": args.models, "memory": args.memory, "device": args.device, **protocol}
    missing = [c for c in cells(args) if not any(c.items() <= row.items() for row in rows)]
    while missing and budget.left:
        cell = missing.pop(0)
        rows += [cell | row for row in in_process(settings | cell)]
        print(table(rows[-len(args.models) :]), file=sys.stderr, flush=True)
        if args.output:
            write_text(args.output, json.dumps({"environment": head, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    if missing:
        return UNFINISHED
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
