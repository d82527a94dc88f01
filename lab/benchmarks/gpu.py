"""Check and measure this library on a GPU in calls of a few minutes, and print the tables of a record.

    python -m lab.benchmarks.gpu --minutes 3       # correctness, kernels, tiny models at 224 px
    python -m lab.benchmarks.gpu --minutes 7       # the rest; repeat it while its exit status is 75
    python -m lab.benchmarks.gpu --show [RECORD]   # default: results/h100.json; also h200.json, h200_graphs.json
    python -m lab.benchmarks.gpu --fill 90         # without a GPU: compile the kernels for this architecture

The parts run in the order of ``PARTS``, the most important first, each in its own processes and for a limited time. So
a failure costs only its part. A part that the end of a call interrupts is resumed by the next call. Records, logs and
Triton's cache are in ``--output``, which you may copy to another machine before the next call.

All numbers are bfloat16 autocast on one GPU. Models are timed by whole steps, scans and kernels by the GPU's own time.
"""

import argparse
import contextlib
import csv
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks.budget import UNFINISHED
from lab.benchmarks.provenance import environment
from vil.training.files import write_text

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "lab" / "benchmarks" / "results" / "h100.json"
IMAGENET, EPOCHS = 1_281_167, 300
SHORTEST_S = 10.0  # no part starts with less time left
SHARE = 0.9  # of a part's time, after which a program that can resume starts nothing new
PASSED, FAILED, TOO_SLOW, INTERRUPTED = "passed", "failed", "too slow", "interrupted"
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """Commands, as arguments of Python separated by ``&&``; {output} is the folder of the records."""

    name: str
    seconds: int
    command: str


_MODELS = "-m lab.benchmarks.models --memory --device cuda --rounds 3 --seconds {seconds} --output {output}/models"
_BEST = "deit_tiny_patch16_224 vil_tiny_exact"  # compiled also in large images, which takes a minute per size
_TINY = f"{_BEST} vil_tiny vim_tiny"
_SMALL = "deit_small_patch16_224 vil_small_exact vil_small vim_small"
_TESTS = "tests/kernels/triton/test_on_gpu.py tests/training/test_passes.py"
_TRAIN = (  # on enlarged digits, so that loading data does not limit the steps
    "train_imagenet.py --config configs/vil_tiny.yaml --data.dataset digits --run.amp"
    " --data.batch-size 128 --data.aug-repeats 0 --augment.aa None --augment.reprob 0 --data.num-workers 14"
    " --schedule.epochs 12 --schedule.warmup-epochs 1 --run.log-interval 10"
)
TRAINED = {  # name of a run -> model and options
    "graphs": "--model.name vil_tiny_exact",
    "eager": "--model.name vil_tiny_exact --run.no-cuda-graphs",
    "compile+graphs": "--model.name vil_tiny_exact --run.torchcompile",
    "deit, compile+graphs": "--model.name deit_tiny_patch16_224 --run.torchcompile",
}
PARTS = (
    Part("tests", 120, f"-m pytest -q -p no:cacheprovider -n 8 -m gpu {_TESTS}"),
    Part("kernels", 60, "-m lab.benchmarks.gpu_kernels blocks {output}/kernels.json"),
    Part(
        "tiny models",
        240,
        f"{_MODELS}-tiny.json {_TINY} --ways graphs compile+graphs --sizes 224:128",
    ),
    Part("scans", 60, "-m lab.benchmarks.gpu_kernels scans {output}/scans.json"),
    Part(
        "large images",
        180,
        f"{_MODELS}-large.json {_TINY} --ways graphs --sizes 512:32 1024:8 2048:2",
    ),
    Part(
        "large images, compiled",
        200,
        f"{_MODELS}-compiled.json {_BEST} --ways compile+graphs --sizes 2048:2 1024:8 512:32",
    ),
    Part(  # steps are so long that graphs gain nothing, and the memory of two would not fit
        "very large images",
        240,
        f"{_MODELS}-huge.json {_BEST} vil_tiny --ways eager --sizes 4096:1 8192:1 --rounds 1",
    ),
    Part(
        "training",
        240,
        " && ".join(f"{_TRAIN} --run.output '{{output}}/training-{run}' {more}" for run, more in TRAINED.items()),
    ),
    Part(
        "small models",
        240,
        f"{_MODELS}-small.json {_SMALL} --ways graphs compile+graphs --sizes 224:64",
    ),
    Part("default run", 70, "train_imagenet.py --run.output {output}/digits"),
)


# --------------------------------------------------------------------------------------------- run


def measure(folder: Path, minutes: float) -> int:
    """Run the unfinished parts until the time is up; return the exit status.

    Raises:
        SystemExit: If there is no GPU, or the folder has results of another GPU or other versions.
    """
    end = time.monotonic() + 60 * minutes
    about = environment() | {"triton": metadata.version("triton"), "dtype": "bfloat16 autocast"}
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no GPU here; --fill and --show need none")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path = folder / "record.json"
    record = json.loads(path.read_text()) if path.exists() else {"environment": about, "parts": {}}
    if record["environment"] != about:
        was = record["environment"]
        sys.exit(f"error: {folder} has results of {was}, but this run has {about}; move it away")
    for part in PARTS:
        entry = record["parts"].setdefault(part.name, {"status": INTERRUPTED, "seconds": 0.0})
        start = time.monotonic()
        if entry["status"] != INTERRUPTED or end - start < SHORTEST_S:
            continue
        print(f"== {part.name}", flush=True)
        log = folder / "logs" / f"{part.name.replace(' ', '-')}.log"
        entry["status"] = _run(part, folder, log, end - start)
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - start, 1)
        write_text(path, json.dumps(record | _results(folder), indent=1) + "\n")
        print(f"{log.read_text(errors='replace')[-1500:]}\n== {entry['status']}", flush=True)
    statuses = {entry["status"] for entry in record["parts"].values()}
    return UNFINISHED if INTERRUPTED in statuses else int(statuses != {PASSED})


def _run(part: Part, folder: Path, log: Path, left: float) -> str:
    """Run a part for at most ``left`` seconds, and return its status."""
    end = time.monotonic() + min(part.seconds, left)
    out_of_time = INTERRUPTED if left < part.seconds else TOO_SLOW
    for command in part.command.split(" && "):
        seconds = f"{SHARE * (end - time.monotonic()):.0f}"
        words = shlex.split(command.format(output=folder, seconds=seconds))
        with log.open("ab") as file, _process(words, folder, file) as process:
            try:
                code = process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                return out_of_time
        if code:
            return out_of_time if code == UNFINISHED else FAILED
    return PASSED


@contextlib.contextmanager
def _process(words: list[str], folder: Path, log: Any = None) -> Iterator[subprocess.Popen]:
    """Run Python in a new process group, which is killed at the end of the block."""
    variables = {"PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(folder / "triton")}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=log, stderr=log, cwd=ROOT, env=os.environ | variables,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _results(folder: Path) -> dict[str, Rows]:
    """Return what the parts have written so far, as rows."""
    files = {name: folder / f"{name}.json" for name in ("scans", "kernels")}
    found = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    models = (json.loads(path.read_text()) for path in sorted(folder.glob("models-*.json")))
    found["models"] = [row for record in models for row in record["rows"]]
    found["digits"] = _csv(folder / "digits" / "log.csv")
    steps = {run: _csv(folder / f"training-{run}" / "steps.csv") for run in TRAINED}
    found["training"] = [_steps(run, own, steps["eager"]) for run, own in steps.items() if own]
    return found


def _csv(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def _steps(run: str, own: Rows, eager: Rows) -> dict[str, Any]:
    """Return the median time of a step, without the first epoch, and whether the losses are eager mode's."""
    later = [row for row in own if row["epoch"] != "1"] or own
    speed, wait = (statistics.median(float(row[key]) for row in later) for key in ("images_per_s", "data_wait"))
    same = [row["loss"] for row in own] == [row["loss"] for row in eager]
    return {"way": run, "ms": 128e3 / speed, "data_wait": wait, "losses_of_eager": same}


# ------------------------------------------------------------------------------------------ tables


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by(rows: Rows, row: str, column: Sequence[str]) -> tuple[list, list, dict]:
    """Return the values of ``row``, those of ``column``, and the rows by both, in the record's order."""
    cells = {(r[row], tuple(r[name] for name in column)): r for r in rows}
    return list(dict.fromkeys(k for k, _ in cells)), list(dict.fromkeys(k for _, k in cells)), cells


def models(rows: Rows) -> str:
    """Return times of steps, and memory, as ratios to DeiT in its fastest way, whose own are in ms and MiB."""
    tables = []
    for peer in dict.fromkeys(r["model"] for r in rows if r["model"].startswith("deit")):
        family = peer.split("_")[1]  # tiny or small
        own = [r | {"name": f"{r['model']}, {r['way']}"} for r in rows if family in r["model"]]
        names, columns, cells = _by([r for r in own if not r["error"]], "name", ("pass", "size", "batch"))
        body = []
        for key, scale, form in (("seconds", 1e3, "{:,.1f} ms"), ("bytes", 2**-20, "{:,.0f} MiB")):
            own = [(name, column, cell[key]) for (name, column), cell in cells.items() if key in cell]
            peers = [(column, value) for name, column, value in own if name.startswith(peer)]
            values = {(name, column): value for name, column, value in own}
            for name in names:
                line = []
                for column in columns:
                    value = values.get((name, column))
                    best = min((v for c, v in peers if c == column), default=value)
                    if value is None:
                        line.append("")
                    else:
                        line.append(form.format(scale * value) if value == best else f"{value / best:.2f}")
                if any(line) and (key == "seconds" or "+" not in name):  # memory is eager mode's
                    body.append([f"{'time' if key == 'seconds' else 'memory'}, {name}", *line])
        heads = ["", *(f"{p}, {px} px, batch {batch}" for p, px, batch in columns)]
        tables.append(table(heads, body))
    return "\n\n".join(tables)


def hours(rows: Rows) -> str:
    """Return the hours of 300 epochs of ImageNet, computed from the times of a step at 224 px."""
    chosen = [r for r in rows if r["pass"] == "training" and r["size"] == 224 and not r["error"]]
    names, ways, cells = _by(chosen, "model", ("way",))
    body = []
    for name in names:
        line = []
        for row in (cells.get((name, way)) for way in ways):
            one = IMAGENET * EPOCHS / row["batch"] * row["seconds"] / 3600 if row else 0
            line.append(f"{1e3 * row['seconds']:.0f} ms: {one:.0f} h, {one / 8:.1f} h" if row else "")
        body.append([name, *line])
    heads = ["step, hours on 1 and on 8 GPUs", *(way for (way,) in ways)]
    return table(heads, body) if body else ""


def scans(rows: Rows) -> str:
    """Return microseconds of both directions with the gate: inference, and forward and backward."""
    rows = [r | {"shape": tuple(r["shape"])} for r in rows]
    names, shapes, cells = _by(rows, "name", ("shape",))
    body = []
    for name in names:
        own = [cells.get((name, shape), {"error": ""}) for shape in shapes]
        texts = (r.get("error", "{inference_us:,.0f}, {training_us:,.0f}") for r in own)
        body.append([name, *(text.format(**r) for text, r in zip(texts, own, strict=True))])
    return table(["(B, L, D)", *(str(shape) for (shape,) in shapes)], body)


def kernels(rows: Rows) -> str:
    """Return microseconds of every kernel of a block at 224 px, batch 128.

    In brackets, in percent: the time that its bytes need at the speed of a copy (lab.benchmarks.traffic), issue slots
    used, time in which a warp waits for global loads, and time in which the data path of shared memory and the L1 cache
    is busy (the last three from Nsight Compute).
    """
    names, columns, cells = _by(rows, "kernel", ("model", "pass"))
    body = []
    for name in names:
        line = [name]
        for column in columns:
            row = cells.get((name, column), {})
            shares = [row.get(key, "-") for key in ("bytes", "issue_slots", "waits_for_loads", "data_path")]
            line.append(f"{row['us']:.0f}" if row else "")
            if set(shares) != {"-"}:
                line[-1] += f" ({', '.join(map(str, shares))})"
        body.append(line)
    return table(["", *(", ".join(column) for column in columns)], body)


def blocks(rows: Rows) -> str:
    """Return microseconds of the scans of a block: one commit, a later one."""
    places, names, cells = _by(rows, "place", ("model",))
    body = []
    for place in places:
        found = (cells.get((place, name)) for name in names)
        body.append([place, *(f"{r['before_us']:,.0f}, {r['us']:,.0f}" if r else "" for r in found)])
    return table(["", *(name for (name,) in names)], body)


def variants(rows: Rows) -> str:
    """Return microseconds of the scans' kernels of a block, with other blocks or splits."""
    rows = [(r, way) for r in rows for way in ("training", "inference")]
    names = list(dict.fromkeys(name for r, way in rows for name in r[way]))
    body = [
        [f"{r['model']}, {way}, {r['size']} px, batch {r['batch']}, {r['variant']}"]
        + [str(r[way].get(name, "")) for name in names]
        for r, way in rows
    ]
    return table(["", *names], body)


def training(rows: Rows) -> str:
    """Return the time of a step in train_imagenet.py, 224 px, batch 128; of vil_tiny_exact where no model is named."""
    form = "{way}|{ms:.1f}|{data_wait:.0f}|{losses_of_eager}"
    body = [form.format(**row).split("|") for row in rows]
    return table(["", "ms", "data wait, %", "losses of eager mode"], body)


def show(record: dict[str, Any]) -> str:
    """Return all tables of a record."""
    lines = [", ".join(f"{name} {value}" for name, value in record["environment"].items())]
    lines += [record["note"]] if "note" in record else []
    for name, entry in record.get("parts", {}).items():
        lines.append(f"{name}: {entry['status']}, {entry['seconds']:.0f} s")
    for r in record["models"]:
        if r["error"]:
            lines.append(f"{r['model']}, {r['pass']}, {r['size']} px, {r['way']}: {r['error']}")
    if record.get("digits"):
        best = max(float(row["top1"]) for row in record["digits"])
        lines.append(f"default run: top-1 {best:.2f} %")
    for function in (models, hours, training, scans, kernels, blocks, variants):
        part = "models" if function is hours else function.__name__
        if record.get(part) and (text := function(record[part])):
            lines.append(f"\n{function.__doc__.strip()}\n\n{text}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, fill the cache, or print a record; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "gpu")
    parser.add_argument("--fill", metavar="ARCH", help="only compile, as for 90")
    parser.add_argument("--show", nargs="?", type=Path, const=RECORD, metavar="RECORD")
    args = parser.parse_args(arguments)
    folder = args.output.resolve()
    if args.show is not None:
        print(show(json.loads(args.show.read_text())))
        return 0
    if args.fill is not None:
        with _process(["-m", "lab.benchmarks.gpu_kernels", "fill", args.fill], folder) as process:
            return process.wait()
    status = measure(folder, args.minutes)
    print(show(json.loads((folder / "record.json").read_text())))
    return status


if __name__ == "__main__":
    sys.exit(main())
