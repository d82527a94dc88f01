"""Time one image by every way a model is deployed on CPUs, beside timm's deit_tiny by the same way.

    python -m benchmarks.latency [--threads 1 2] [--ways eager compile onnx_runtime aot_inductor]
        [--rounds 15] [--json FILE] [--note TEXT]

Batch 1, 224 x 224 pixels, float32. A round runs every model by every way in turn, so that a drift of the
machine's speed hits all alike; times and rounds are as in ``vil.measuring``. A row has the median time, the
median of the round-by-round ratios to deit_tiny by the same way, and the same to this model in eager mode.
ONNX models are made once, by ``torch.onnx.export(..., dynamo=True)`` with ``exportable=True``, after one that is
not counted; the CPU seconds are those of this process. Whatever is timed must give the logits of eager mode.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from benchmarks.cpu import MODELS
from benchmarks.provenance import environment
from vil.measuring import in_turns

Program = Callable[[Tensor], Tensor]

SIZE = 224
CLOSE = 1e-3  # of logits: far above rounding, far below what another model gives


def export(name: str, file: Path, **sizes: int) -> tuple[nn.Module, float]:
    """Write a model with random weights as ONNX; return it for the other ways, and the CPU seconds."""
    model = timm.create_model(name, exportable=True, **sizes).eval()
    others = timm.create_model(name, **sizes).eval()
    others.load_state_dict(model.state_dict())
    start = time.process_time()
    program = torch.onnx.export(model, (torch.zeros(1, 3, SIZE, SIZE),), dynamo=True, verbose=False)
    seconds = time.process_time() - start
    program.save(file)
    return others, seconds


def eager(model: nn.Module, file: Path, threads: int) -> Program:
    """Return the model as it is; here and below ``file`` is the ONNX model of it."""
    return model


def compile(model: nn.Module, file: Path, threads: int) -> Program:
    """Return the model compiled by ``torch.compile``."""
    return torch.compile(model)


def onnx_runtime(model: nn.Module, file: Path, threads: int) -> Program:
    """Return the model as ONNX Runtime runs it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def aot_inductor(model: nn.Module, file: Path, threads: int) -> Program:
    """Return the model as a shared library of ``torch.export`` and AOTInductor."""
    program = torch.export.export(model, (torch.zeros(1, 3, SIZE, SIZE),))
    package = f"{file}.{threads}.pt2"
    return torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    )


WAYS = {way.__name__: way for way in (eager, compile, onnx_runtime, aot_inductor)}


def checked(way: str, name: str, program: Program, model: nn.Module) -> Callable[[], None]:
    """Return a function that runs a program once, which gives what the model does.

    Raises:
        RuntimeError: It does not.
    """
    images = torch.randn(1, 3, SIZE, SIZE)

    def step() -> Tensor:
        with torch.inference_mode():
            return program(images)

    with torch.inference_mode():
        apart = (step() - model(images)).abs().max().item()
    if not apart < CLOSE:
        raise RuntimeError(
            f"{way} of {name} gives logits that are {apart:.2g} from those of eager mode"
        )
    return step


def rows_of(
    models: dict[str, tuple[nn.Module, Path]], ways: list[str], threads: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each model by each way, on a number of threads."""
    torch.set_num_threads(threads)
    torch.compiler.reset()  # what was compiled for another number of threads
    steps = {}
    for name, (model, file) in models.items():
        for way in ways:
            program = WAYS[way](model, file, threads)
            steps[way, name] = checked(way, name, program, model)
    seconds = in_turns(steps, rounds)

    def ratio(times: list[float], others: list[float] | None) -> float | None:
        if others is None:
            return None
        return statistics.median(t / o for t, o in zip(times, others, strict=True))

    return [
        {
            "threads": threads,
            "way": way,
            "model": name,
            "ms": 1e3 * statistics.median(times),
            "to_deit": ratio(times, seconds.get((way, MODELS[0]))),
            "to_eager": ratio(times, seconds.get(("eager", name))),
        }
        for (way, name), times in seconds.items()
    ]


def main() -> None:
    """Run, print Markdown tables, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--note", default="", help="of the record: what else the machine was doing")
    args = parser.parse_args()
    torch.manual_seed(0)
    record = {"environment": environment(), "note": args.note, "export": [], "rows": []}
    if "onnx_runtime" in args.ways:
        import onnxruntime

        record["environment"]["onnxruntime"] = onnxruntime.__version__
    print(", ".join(f"{name} {value}" for name, value in record["environment"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        export(MODELS[0], Path(folder) / "first.onnx", depth=1)
        print("| model | CPU s to export |\n|---|---|")
        for name in MODELS:
            file = Path(folder) / f"{name}.onnx"
            model, seconds = export(name, file)
            models[name] = model, file
            record["export"].append({"model": name, "cpu_seconds": seconds})
            print(f"| {name} | {seconds:.1f} |", flush=True)
        print(
            "\n| threads | way | model | ms | to deit_tiny | to eager |\n|---|---|---|---|---|---|"
        )
        for threads in args.threads:
            rows = rows_of(models, args.ways, threads, args.rounds)
            record["rows"] += rows
            for row in rows:
                ratios = [
                    "" if row[key] is None else f"{row[key]:.2f}" for key in ("to_deit", "to_eager")
                ]
                print(
                    f"| {threads} | {row['way']} | {row['model']} | {row['ms']:.1f} "
                    f"| {' | '.join(ratios)} |",
                    flush=True,
                )
            if args.json:  # what there is, lest a stop lose it
                args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
