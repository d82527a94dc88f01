"""Count registers, spills, shared memory and instructions of the Triton kernels, without a GPU.

    python -m lab.benchmarks.kernels [--arch 90 gfx942] [--models vil_tiny vim_tiny] [--record]
    python -m lab.benchmarks.kernels --arch 75 89 --models vil_tiny_exact --d-state 128

The program compiles, in bfloat16, every kernel that a step of training or of evaluation launches. There are three
cases: a batch that fills the GPU, one long image whose sequence is split, and weights of another grid. For NVIDIA it
reads the machine code with the disassembler that Triton ships; for AMD it reads the compiler's own figures.

Below the table it prints the changes since the record of the installed Triton version in ``results/kernels.json``, as
every version compiles the kernels differently. ``--record`` writes the new figures there. For sm_90, ``chain.py``
estimates the cycles of a loop's iteration. The numbers show when a kernel gets worse, but do not replace a measurement.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # kernels wrapped by the interpreter cannot be compiled

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import triton
from triton.backends.compiler import GPUTarget

from lab.benchmarks.chain import parse, simulate, wavefronts
from vil.kernels import backends, ops
from vil.kernels.plan import forget_plans
from vil.kernels.triton import tuning
from vil.kernels.triton.launch import Launch, recording
from vil.training.files import write_text

ARCHITECTURES = ("80", "90", "100", "120", "gfx942")
MODELS = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
SHAPES = {"batch": (128, 224, 224), "long": (1, 1024, 1024), "grid": (128, 384, 224)}
"""Batch size, image size in pixels, and the image size that the weights were trained at."""
PROCESSORS = 132  # multiprocessors of an H100; they decide how the long sequence is split
MOST_WAITS = 4  # opcodes that the table lists
RECORDS = Path(__file__).parent / "results" / "kernels.json"
Figures = dict[str, Any]


class Driver:
    """Answer what Triton asks the GPU's driver before a launch, without a GPU."""

    def __init__(self, arch: str) -> None:
        """Create a driver; ``arch`` is a compute capability without its point, or an AMD name."""
        amd = arch.startswith("gfx")
        self.target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch), 32)
        self.number = int(re.sub(r"\D", "", arch))

    def get_current_device(self) -> int:
        """Return a number unique to the architecture, by which Triton caches compiled kernels."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the target to compile for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")


def target(arch: str) -> None:
    """Let Triton compile for an architecture in this process; ``arch`` as in ``Driver``."""
    triton.runtime.driver.set_active(Driver(arch))
    amd = arch.startswith("gfx")
    tuning.architecture = lambda device: arch if amd else f"sm_{arch}"
    tuning.compiles_for_nvidia = lambda: not amd
    tuning.processors = lambda device: PROCESSORS
    backends._check_serves = lambda name, device, asked_by: None
    forget_plans()  # made for the previous architecture


def launches(name: str, batch_size: int, img_size: int, trained_size: int, **arguments: Any) -> dict[str, list[Launch]]:
    """Return the launches of a bfloat16 step in each mode, "train" and "eval", without running them.

    Args:
        name: Name of a model of this package; one block is built, since all blocks launch the same.
        batch_size: Number of images.
        img_size: Height and width in pixels.
        trained_size: Image size that the weights were trained at.
        **arguments: More keyword arguments of the model.
    """
    model = timm.create_model(name, img_size=trained_size, depth=1, **arguments)
    model.set_input_size(img_size)
    images, noted = torch.zeros(batch_size, 3, img_size, img_size), {}
    for mode in ("train", "eval"):
        model.train(mode == "train")
        with ops.use_backend("triton"), recording() as noted[mode]:
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(model.training):
                logits = model(images)
            if model.training:
                logits.float().sum().backward()
    return noted


def compiled_kernels(arch: str, models: Sequence[str], d_state: int = 16) -> Iterator[tuple[str, Any]]:
    """Compile each kernel that the models launch once; yield its name and Triton's compiled kernel.

    Args:
        arch: Architecture, as in ``Driver``.
        models: Names of models of this package.
        d_state: States per channel of the models.
    """
    target(arch)
    seen: set[str] = set()
    for model, (shape, (batch, size, trained)) in itertools.product(models, SHAPES.items()):
        noted = launches(model, batch, size, trained, d_state=d_state)
        for mode, launch in ((name, one) for name, own in noted.items() for one in own):
            kernel = launch.kernel.warmup(**launch.arguments, grid=(1,))
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                function = launch.kernel.__name__.removesuffix("_kernel")
                yield f"{function}, {model}, {shape}, {mode}", kernel


def figures(kernel: Any) -> Figures:
    """Count what a compiled kernel costs; instructions and loops are for NVIDIA only.

    Returns:
        "warps" of a program, vector "registers" of a lane, "spills", bytes of "shared" memory, "instructions", and
        "loops" (lengths of inner loops). Spills count instructions that access spilled registers; on AMD, registers.
        On sm_90 also "chain", the cycles of an iteration of each loop in the model of ``chain.py``, its "wavefronts",
        and "waits for", the cycles of the longest chain that wait for results, by opcode.
    """
    found = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
    if "amdgcn" in kernel.asm:
        listing = kernel.asm["amdgcn"]
        for name, field in (("registers", "vgpr_count"), ("spills", "vgpr_spill_count")):
            found[name] = int(re.search(rf"\.{field}:\s*(\d+)", listing)[1])
        return found
    registers, listing = _disassemble(kernel.asm["cubin"])
    instructions, loops = parse(listing)
    spills = sum(one.opcode in ("LDL", "STL") for one in instructions)
    found |= {"registers": registers, "spills": spills, "instructions": len(instructions)}
    found["loops"] = [end - start for start, end in loops]
    if "sm_90" in kernel.asm["ptx"]:
        chains = [simulate(instructions[start:end]) for start, end in loops]
        found["chain"] = [cycles for cycles, _ in chains]
        found["wavefronts"] = [wavefronts(instructions[start:end]) for start, end in loops]
        waits = max(chains, key=lambda chain: chain[0], default=(0, {}))[1]
        found["waits for"] = {opcode: waits[opcode] for opcode in list(waits)[:MOST_WAITS]}
    return found


def _disassemble(cubin: bytes) -> tuple[int, str]:
    """Return the number of registers of a lane, and the disassembly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)

        def output_of(tool: str, *options: str) -> str:
            command = [getattr(triton.knobs.nvidia, tool).path, *options, str(path)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage = output_of("cuobjdump", "-res-usage")
        return int(re.search(r"REG:(\d+)", usage)[1]), output_of("nvdisasm", "-c")


COLUMNS = ("warps", "registers", "spills", "shared", "instructions", "loops", "chain", "wavefronts", "waits for")


def table(found: dict[str, Figures]) -> str:
    """Return the figures by kernel as a Markdown table."""
    lines = [f"| kernel | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, one in found.items():
        cells = [re.sub(r"[][{}']", "", str(one.get(column, "-"))) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def changes(old: dict[str, Figures], new: dict[str, Figures]) -> list[str]:
    """Return a line for every kernel in ``new`` whose figures differ from those in ``old``."""
    lines = []
    for name, one in new.items():
        before = old.get(name)
        if before is None:
            lines.append(f"{name}: not recorded yet")
        elif before != one:
            names = [key for key in one if one[key] != before.get(key)]
            what = ", ".join(f"{key} {before.get(key)} -> {one[key]}" for key in names)
            lines.append(f"{name}: {what}")
    return lines


def costs(arch: str, models: Sequence[str], d_state: int = 16) -> dict[str, Figures]:
    """Return the figures of every kernel of an architecture by name; repeated names are numbered."""
    found: dict[str, Figures] = {}
    for name, kernel in compiled_kernels(arch, models, d_state):
        key = f"{arch} {name}"
        same = sum(other.startswith(key) for other in found)
        found[f"{key} ({same + 1})" if same else key] = figures(kernel)
    return found


def write_records(records: dict[str, dict[str, Figures]]) -> None:
    """Write the figures by Triton version and kernel, with one line per kernel."""
    versions = []
    for version, rows in sorted(records.items()):
        lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in rows.items())
        versions.append(f" {json.dumps(version)}: {{\n  " + ",\n  ".join(lines) + "\n }")
    write_text(RECORDS, "{\n" + ",\n".join(versions) + "\n}\n")


def main() -> None:
    """Print the tables and the changes since the record; write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="as 90 or gfx942")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--d-state", type=int, default=16)
    parser.add_argument("--record", action="store_true", help="write the figures into the record")
    args = parser.parse_args()
    if args.record and args.d_state != 16:
        parser.error(f"--record needs --d-state 16, got {args.d_state}")
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    own = records.setdefault(triton.__version__, {})
    for arch in args.arch:
        found = costs(arch, args.models, args.d_state)
        print(table(found))
        print(f"\nSince the record of Triton {triton.__version__}:")
        print("\n".join(changes(own, found)) or "nothing changed", flush=True)
        if args.record:
            own |= found
            write_records(records)


if __name__ == "__main__":
    main()
