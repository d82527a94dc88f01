"""Time this library's bidirectional scans on a CUDA GPU against other implementations.

    python -m benchmarks.scan [--shapes 128,197,384 ...] [--repetitions 50] [--output FILE.json]
        [--resume] [--seconds N]

``contestants.py`` has the contestants and their common task. Before any timing, each output (with
and without autograd) and all gradients are compared with the float64 reference at the full shape.
A contestant that disagrees is not timed, is named in every output, and makes the exit status 1.

Times are GPU times between two CUDA events, medians over repetitions. Before each repetition, the
GPU waits for at least as long as the CPU takes to submit the work. This excludes launch overhead,
which a network hides behind earlier layers. The GPU also reads a buffer of at least twice the L2
cache, so that inputs come from memory. Contestants take turns, so that a drift of the clock
affects all equally. A ratio is the median of the ratios turn by turn.

``roofline.py`` explains the ratios to the design's roofline.

Without a GPU, ``--toy`` runs everything on the CPU, our scans on the reference backend; its times
mean nothing.

mamba-ssm is optional.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import provenance
from benchmarks.budget import UNFINISHED, Budget, add_seconds, time_limit
from benchmarks.contestants import (
    COMPILED,
    FLASH,
    HEAD,
    MAMBA_SSM,
    MAMBA_TRITON,
    Contestant,
    chunked_scan,
    contestants,
    make_inputs,
    tensors_of,
    truth,
)
from benchmarks.roofline import PASSES, Device, roofline_ms
from vil.kernels import ops
from vil.kernels.reference import RECURRENCES
from vil.training.files import write_text

SHAPES = ((128, 197, 384), (64, 197, 768), (8, 6085, 384), (1, 6085, 384))

# Largest allowed ``worst_error``: twice the spacing of bfloat16 numbers, as in vil.selfcheck.
# Attention may have twice as much, since it also rounds its L x L weights to bfloat16.
_EPS = torch.finfo(torch.bfloat16).eps
TOLERANCES = dict.fromkeys(RECURRENCES, 2 * _EPS) | {"attention": 4 * _EPS}

LIMIT_S = 240.0  # for one contestant to compile, per shape
PEERS = (MAMBA_SSM, MAMBA_TRITON, FLASH, COMPILED)  # that ratios refer to
TOY_SHAPES = ((1, 17, 64), (2, 33, 64))


# --------------------------------------------------------------------------------- correctness gate


def worst_error(results: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[str, float]:
    """Return the name of the result furthest from the exact one, and its error.

    The error is the larger of two ratios: largest error to largest exact value, and root mean
    square error to root mean square exact value. It is infinite for NaN and for a wrong shape.
    """
    errors = {}
    for name, expected in exact.items():
        if results[name].shape != expected.shape:
            return name, float("inf")
        difference = results[name].double() - expected
        largest = difference.abs().max() / expected.abs().max().clamp(min=1e-30)
        typical = difference.norm() / expected.norm().clamp(min=1e-30)
        error = torch.maximum(largest, typical).item()
        errors[name] = error if error == error else float("inf")
    name = max(errors, key=errors.__getitem__)
    return name, errors[name]


@dataclass
class Entry:
    """A contestant at one shape.

    Attributes:
        contestant: The contestant.
        status: "ok", or the reason why it is not timed.
        disagrees: Whether the reason is a wrong result.
        error: Worst error against the reference, or None without results.
        passes: Functions to time, by pass; empty unless the status is "ok".
    """

    contestant: Contestant
    status: str
    disagrees: bool = False
    error: float | None = None
    passes: dict[str, Callable[[], object]] = field(default_factory=dict)


def admit(
    contestant: Contestant, inputs: dict[str, Tensor], exact: dict[str, Tensor], limit_s: float
) -> Entry:
    """Run a contestant once, compare all results with the exact ones, and admit or refuse it.

    Args:
        contestant: The contestant.
        inputs: Inputs from ``make_inputs``.
        exact: Exact results from ``truth`` for the contestant's task.
        limit_s: Seconds that the contestant may take, including compilation.
    """
    if contestant.missing:
        return Entry(contestant, contestant.missing)
    tensors = tensors_of(contestant.task, inputs)
    own = tuple(t.detach().requires_grad_() for t in contestant.arrange(tensors))
    grad = contestant.turn(inputs["grad"])

    def inference() -> Tensor:
        with torch.no_grad():
            return contestant.run(*own)

    def forward() -> Tensor:
        return contestant.run(*own)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), own, grad)

    # Backward stays on this thread, so that the limit also interrupts its compilation.
    try:
        with time_limit(limit_s), torch.autograd.set_multithreading_enabled(False):
            results = {
                "inference": contestant.turn(inference()),
                "output": contestant.turn(forward().detach()),
                **contestant.restore(both(), tuple(tensors)),
            }
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Entry(contestant, f"failed: {type(error).__name__}: {lines[0]}")
    name, error = worst_error(results, exact)
    tolerance = TOLERANCES[contestant.task]
    if not error <= tolerance:
        what = name if name in ("inference", "output") else f"gradient of {name}"
        status = f"disagrees with the reference ({what}: error {error:.2g} > {tolerance:.2g})"
        return Entry(contestant, status, disagrees=True, error=error)
    passes = dict(zip(PASSES, (inference, forward, both), strict=True))
    return Entry(contestant, "ok", error=error, passes=passes)


# ----------------------------------------------------------------------------------------- timing


class CudaClock:
    """Clock of CUDA events around submitted work, with unrelated data in the L2 cache."""

    def __init__(self, clock_hz: float) -> None:
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._other = torch.zeros(max(1 << 26, l2 // 2), device="cuda")  # twice the L2 or more
        self._clock_hz = clock_hz

    def warm_up(self, run: Callable[[], object]) -> float:
        """Call ``run`` five times; return the seconds the CPU took to submit the last call."""
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            submitted = time.perf_counter()
        torch.cuda.synchronize()
        return submitted - start

    def time(self, run: Callable[[], object], submission_s: float) -> float:
        """Call ``run`` once; return the milliseconds the GPU took."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((2 * submission_s + 2e-4) * self._clock_hz))
        self._other.sum()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Call ``run`` once; return its peak memory in bytes, including its results."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before


class WallClock:
    """Stand-in for ``CudaClock`` on a CPU, for ``--toy``: wall time, and no memory."""

    def warm_up(self, run: Callable[[], object]) -> float:
        """Return 0: toy times mean nothing, so no warm-up is needed."""
        return 0.0

    def time(self, run: Callable[[], object], submission_s: float) -> float:
        """Call ``run`` once; return the milliseconds it took."""
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return 0: memory is not measured on a CPU."""
        return 0


def measure(
    entries: list[Entry], pass_name: str, repetitions: int, clock: CudaClock | WallClock
) -> dict[str, Any]:
    """Time one pass of all admitted contestants in turns.

    Returns:
        For each contestant by name: "ms" of every repetition, "submission_s" and "peak_bytes".
    """
    runs = {e.contestant.name: e.passes[pass_name] for e in entries if e.passes}
    measured = {
        name: {"ms": [], "submission_s": clock.warm_up(run), "peak_bytes": clock.peak_bytes(run)}
        for name, run in runs.items()
    }
    for _ in range(repetitions):
        for name, run in runs.items():
            of_it = measured[name]
            of_it["ms"].append(clock.time(run, of_it["submission_s"]))
    return measured


def rows_of(
    shape: tuple[int, int, int],
    pass_name: str,
    entries: list[Entry],
    measured: dict[str, Any],
    device: Device,
) -> list[dict[str, Any]]:
    """Return a row of the results for each contestant, timed or not."""
    rows = []
    peers = {name: measured[name]["ms"] for name in PEERS if name in measured}
    for entry in entries:
        contestant = entry.contestant
        row = {
            "shape": list(shape),
            "pass": pass_name,
            "contestant": contestant.name,
            "ours": contestant.ours,
            "status": entry.status,
            "disagrees": entry.disagrees,
            "error": entry.error if entry.error != float("inf") else "not finite",
        }
        rows.append(row)
        if contestant.name not in measured:
            continue
        of_it = measured[contestant.name]
        times = of_it["ms"]
        quartiles = statistics.quantiles(times, n=4, method="inclusive")
        row["ms"] = statistics.median(times)
        row["iqr_ms"] = quartiles[2] - quartiles[0]
        row["submission_ms"] = 1e3 * of_it["submission_s"]
        row["peak_mib"] = of_it["peak_bytes"] / 2**20
        if contestant.ours:
            row["roofline_ms"] = roofline_ms(contestant.task, pass_name, shape, device)
            row["of_roofline"] = row["ms"] / row["roofline_ms"]
        row["faster_than"] = {
            name: statistics.median(b / a for a, b in zip(times, peer, strict=True))
            for name, peer in peers.items()
            if name != contestant.name
        }
    return rows


def run_shape(
    shape: tuple[int, int, int],
    players: list[Contestant],
    device: Device,
    clock: CudaClock | WallClock,
    repetitions: int,
    place: str = "cuda",
    limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:
    """Check all contestants at one shape, time the correct ones, and return the rows.

    Args:
        shape: (B, L, D).
        players: The contestants.
        device: Rates for the roofline.
        clock: Clock that times a call.
        repetitions: Number of repetitions per contestant and pass.
        place: Type of the torch device.
        limit_s: Seconds that a contestant may take to compile.
    """
    inputs = make_inputs(shape, place)
    entries: dict[str, Entry] = {}
    for task in dict.fromkeys(player.task for player in players):
        exact = truth(task, inputs)
        for player in players:
            if player.task == task:
                if place == "cuda":
                    _poison()
                entries[player.name] = admit(player, inputs, exact, limit_s)
                # Show progress: compilers are silent for minutes.
                print(f"{shape} {player.name}: {entries[player.name].status}", file=sys.stderr)
    in_order = [entries[player.name] for player in players]
    rows = []
    for pass_name in PASSES:
        measured = measure(in_order, pass_name, repetitions, clock)
        rows += rows_of(shape, pass_name, in_order, measured, device)
    return rows


def _poison() -> None:
    """Fill the memory that PyTorch hands out next with NaN, which exposes unwritten results."""
    torch.full((1 << 28,), float("nan"), dtype=torch.bfloat16, device="cuda")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; a row without times gives the reason."""
    lines = [
        "| shape | pass | contestant | ms | IQR | x roofline | x faster than mamba-ssm | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shape = ", ".join(map(str, row["shape"]))
        start = f"| {shape} | {row['pass']} | {row['contestant']} |"
        if "ms" not in row:
            status = row["status"].replace("|", "/")
            emphasis = "**" if row["disagrees"] else ""
            lines.append(f"{start} {emphasis}{status}{emphasis} | | | | |")
            continue
        roofline = f"{row['of_roofline']:.2f}" if row["ours"] else ""
        rival = row["faster_than"].get(MAMBA_SSM)
        faster = "" if rival is None else f"{rival:.2f}"
        cells = (f"{row['ms']:.3f}", f"{row['iqr_ms']:.3f}", roofline, faster)
        cells += (f"{row['peak_mib']:.0f}",)
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)


def refused(rows: list[dict[str, Any]]) -> str:
    """Return a line for each contestant that disagrees with the reference, and for ours if untimed.

    The text is empty if all is well; contestants of other libraries may be missing or fail.
    """
    bad = [row for row in rows if row["disagrees"] or (row["ours"] and "ms" not in row)]
    lines = (
        f"REFUSED: {row['contestant']} at {tuple(row['shape'])}: {row['status']}" for row in bad
    )
    return "\n".join(dict.fromkeys(lines))


# -------------------------------------------------------------------------------------------- main


def probe() -> Device:
    """Read the GPU's clock from the driver and measure its bandwidth."""
    from triton.runtime import driver

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    # The driver reports kHz.
    clock_hz = 1e3 * driver.active.utils.get_device_properties(index)["sm_clock_rate"]
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    clock = CudaClock(clock_hz)

    def copy() -> None:
        target.copy_(source)

    submission_s = clock.warm_up(copy)
    seconds = statistics.median(clock.time(copy, submission_s) for _ in range(20)) / 1e3
    moved = 2 * source.numel() * source.element_size()
    return Device(
        properties.name, properties.multi_processor_count, clock_hz, bandwidth=moved / seconds
    )


def environment(device: Device) -> dict[str, Any]:
    """Return the device and versions that the times depend on."""
    versions = {}
    for package in ("triton", "mamba-ssm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return asdict(device) | {"cuda": torch.version.cuda} | versions | provenance.environment()


def shape_of(text: str) -> tuple[int, int, int]:
    """Parse "B,L,D"."""
    sizes = tuple(map(int, text.split(",")))
    if len(sizes) != 3 or min(sizes) < 1 or sizes[2] % HEAD:
        raise argparse.ArgumentTypeError(f"must be B,L,D with D a multiple of {HEAD}, got {text}")
    return sizes


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    default = Path(__file__).parent / "results" / "scan.json"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="B,L,D", help="default: all"
    )
    parser.add_argument("--repetitions", type=int, default=50, help="at least 2")
    parser.add_argument("--output", type=Path, default=default, help="results, JSON")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds a contestant may take to compile"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the shapes that the output has already"
    )
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU; times mean nothing")
    add_seconds(parser)
    args = parser.parse_args(arguments)
    if args.repetitions < 2:
        parser.error(f"--repetitions must be at least 2, got {args.repetitions}")
    if args.toy and args.shapes is SHAPES:
        args.shapes = TOY_SHAPES
    return args


def recorded(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record if it was made in the same environment.

    Args:
        path: The record, which need not exist.
        about: Result of ``environment``; its bandwidth is measured each time and may differ.
    """
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    same = all(content["environment"].get(k) == v for k, v in about.items() if k != "bandwidth")
    return content["rows"] if same else []


def toy_contestants() -> list[Contestant]:
    """Return the contestants without torch.compile, which takes minutes on a CPU."""
    return [
        replace(player, run=chunked_scan) if player.name == COMPILED else player
        for player in contestants()
    ]


def failed_shape(
    shape: tuple[int, int, int], players: list[Contestant], error: BaseException
) -> list[dict[str, Any]]:
    """Return a row per contestant and pass that says why a shape could not be measured."""
    lines = str(error).strip().splitlines() or [""]
    status = f"failed: {type(error).__name__}: {lines[0]}"
    nothing = Device("", 1, 1, 1)
    entries = [Entry(player, player.missing or status) for player in players]
    return [row for name in PASSES for row in rows_of(shape, name, entries, {}, nothing)]


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print a table, write the results; return the exit status."""
    args = parse(arguments)
    budget = Budget(args.seconds)
    if not torch.cuda.is_available() and not args.toy:
        print("benchmarks.scan times GPU kernels: it needs a CUDA GPU", file=sys.stderr)
        return 2
    args.output.parent.mkdir(parents=True, exist_ok=True)
    device = Device(f"toy on {provenance.processor()}", 1, 1e9, 1e9) if args.toy else probe()
    clock = WallClock() if args.toy else CudaClock(device.clock_hz)
    backend, place = ("reference", "cpu") if args.toy else ("triton", "cuda")
    about = environment(device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    players = toy_contestants() if args.toy else contestants()
    rows = recorded(args.output, about) if args.resume else []
    done = {tuple(row["shape"]) for row in rows}
    missing = [shape for shape in args.shapes if shape not in done]
    while missing and budget.left:
        shape = missing.pop(0)
        torch.compiler.reset()  # each shape compiles separately; torch keeps only a few
        torch.cuda.empty_cache()
        limits = {"place": place, "limit_s": max(10.0, min(args.limit, budget.left / 2))}
        try:
            with ops.use_backend(backend):
                new = run_shape(shape, players, device, clock, args.repetitions, **limits)
        except torch.OutOfMemoryError as error:
            new = failed_shape(shape, players, error)
        rows += new
        print(table(new), flush=True)
        result = {"environment": about, "tolerances": TOLERANCES, "rows": rows}
        write_text(args.output, json.dumps(result, indent=1))  # so an interruption keeps the rows
    complaint = refused(rows)
    print(complaint, end="\n" if complaint else "", file=sys.stderr)
    if missing and not complaint:
        print(f"the time is up, missing: {missing}; continue with --resume", file=sys.stderr)
        return UNFINISHED
    return int(bool(complaint))


if __name__ == "__main__":
    sys.exit(main())
