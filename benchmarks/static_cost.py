"""Count what every Triton kernel costs, without a GPU: registers, spills, instructions.

    python -m benchmarks.static_cost [--arch 90 gfx942] [--kernel NAME ...] [--record]

Compiles the kernels ahead of time and prints a Markdown table. For NVIDIA it reads the machine code
with the disassembler that Triton ships; for AMD it reads what the compiler says of it.

Below the table it prints what changed since the record of the installed Triton version, in
``results/static_cost.json``. Every version compiles the kernels differently, so versions have records
of their own. ``--record`` writes the new figures into the record.

A loop is what lies between a label and the last branch back to it, if no other loop lies there too;
code out of line that returns to the main path looks like one.
Latencies and cache misses are not modelled: these numbers bound a kernel's speed and show when it
gets worse, but do not replace a measurement.

The last column is the CPU time of a cold compilation. It depends on the machine, so records leave it out.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # what the interpreter has wrapped cannot be compiled

import argparse
import contextlib
import json
import re
import resource
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from benchmarks.kernel_variants import VARIANTS, D, Variant
from vil.kernels.triton import tuning
from vil.training.files import write_text

ARCHITECTURES = ("80", "90", "100", "120", "gfx942")
RECORDS = Path(__file__).parent / "results" / "static_cost.json"


@dataclass(frozen=True)
class Cost:
    """What a variant costs on one architecture.

    Attributes:
        warps: Of a program.
        registers: Vector registers of a lane.
        spills: Instructions that access spilled registers (NVIDIA) or spilled registers (AMD).
        shared: Bytes of shared memory of a program.
        instructions: Of the whole kernel; None for AMD.
        loops: Instructions of every loop around no other, longest first; None for AMD.
        per_unit: Instructions of the variant's loops, or of the whole kernel if it has none, for
            each of its units; None for AMD.
        seconds: CPU time of a cold compilation.
    """

    warps: int
    registers: int
    spills: int
    shared: int
    seconds: float
    instructions: int | None = None
    loops: tuple[int, ...] | None = None
    per_unit: float | None = None

    def recorded(self) -> dict[str, Any]:
        """Return what a record keeps: everything but the time of the compilation."""
        fields = asdict(self)
        del fields["seconds"]
        if self.per_unit is not None:
            fields |= {"per_unit": round(self.per_unit, 2), "loops": list(self.loops)}
        return fields


def compile_variant(variant: Variant, arch: str) -> CompiledKernel:
    """Compile ahead of time, with the options that the launchers pass.

    Args:
        variant: What to compile.
        arch: Compute capability without its point, as in "90", or an AMD name such as "gfx942".

    Raises:
        ValueError: The variant does not name the kernel's arguments.
        RuntimeError: Triton was imported under its interpreter.
    """
    kernel = variant.kernel
    if not isinstance(kernel, JITFunction):
        raise RuntimeError(
            f"{variant.name} is wrapped by Triton's interpreter, which was on when it was imported; "
            "compile it in a process of its own, without TRITON_INTERPRET"
        )
    amd = arch.startswith("gfx")
    constexprs = variant.constexprs | (variant.on_amd if amd else {})
    if "FAST" in kernel.arg_names:
        constexprs["FAST"] = 0 if amd else int(arch)
    num_warps = variant.blocks
    if isinstance(num_warps, str):
        block_d, num_warps = blocks_on(arch, num_warps)
        constexprs["BLOCK_D"] = block_d
    given = {**variant.signature, **constexprs}
    if set(given) != set(kernel.arg_names):
        wrong = sorted(set(given) ^ set(kernel.arg_names))
        raise ValueError(
            f"{variant.name} must give {kernel.arg_names}; missing or unknown: {wrong}"
        )
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
            continue
        signature[name], _, divisor = variant.signature[name].partition(":")
        if divisor and not kernel.params[i].do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = _target(arch)
    options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": variant.fusion}
    if variant.max_registers is not None and not amd:
        options["maxnreg"] = variant.max_registers
    return triton.compile(source, target=target, options=options)


def blocks_on(arch: str, kernel: str) -> tuple[int, int]:
    """Return (BLOCK_D, num_warps) of a kernel on an architecture."""
    name = arch if arch.startswith("gfx") else f"sm_{arch}"
    return tuning.blocks_for(name, kernel, D)


def cost(variant: Variant, arch: str) -> Cost:
    """Compile a variant and count.

    Args:
        variant: What to count.
        arch: As in ``compile_variant``.
    """
    with _empty_cache():
        before = _cpu_seconds()
        compiled = compile_variant(variant, arch)
        seconds = _cpu_seconds() - before
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        listing = compiled.asm["amdgcn"]
        registers, spills = (
            _amd_field(f"vgpr_{name}", listing) for name in ("count", "spill_count")
        )
        warps = compiled.metadata.num_warps
        return Cost(warps, registers, spills, shared, seconds)
    registers, listing = _disassemble(compiled.asm["cubin"])
    opcodes, loops = _parse(listing)
    counted = sum(loops[: variant.loops]) if loops else len(opcodes)
    spills = sum(opcode in ("LDL", "STL") for opcode in opcodes)
    warps = compiled.metadata.num_warps
    per_unit = counted / variant.units
    code = (len(opcodes), loops, per_unit)
    return Cost(warps, registers, spills, shared, seconds, *code)


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Let Triton compile everything within a ``with`` block, whatever it has compiled before."""
    previous = triton.knobs.cache.dir
    with tempfile.TemporaryDirectory() as triton.knobs.cache.dir:
        try:
            yield
        finally:
            triton.knobs.cache.dir = previous


def _target(arch: str) -> GPUTarget:
    amd = arch.startswith("gfx")
    return GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch), 32)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _amd_field(name: str, listing: str) -> int:
    return int(re.search(rf"\.{name}:\s*(\d+)", listing)[1])


def _disassemble(cubin: bytes) -> tuple[int, str]:
    """Return the registers of a lane and the disassembly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)

        def output_of(tool: str, *options: str) -> str:
            command = [getattr(triton.knobs.nvidia, tool).path, *options, str(path)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage = output_of("cuobjdump", "-res-usage")
        return int(re.search(r"REG:(\d+)", usage)[1]), output_of("nvdisasm", "-c")


def _parse(listing: str) -> tuple[list[str], tuple[int, ...]]:
    """Return the opcode of every instruction, without modifiers, and the lengths of inner loops."""
    labels: dict[str, int] = {}
    opcodes: list[str] = []
    ends: dict[int, int] = {}  # of loops, by first instruction
    for line in listing.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ +)?([A-Z]\w*)", line):
            branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            start = labels.get(branch[1]) if branch else None
            # A branch to itself is the trap behind every kernel's end; only padding follows it.
            if start is not None and start < len(opcodes):
                ends[start] = len(opcodes) + 1
            opcodes.append(instruction[1])
    while opcodes[-1] == "NOP":
        opcodes.pop()
    loops = [
        end - start
        for start, end in ends.items()
        if not any(start <= s and e <= end for s, e in ends.items() if s != start)
    ]
    return opcodes, tuple(sorted(loops, reverse=True))


def table(rows: Iterable[tuple[Variant, str, Cost]]) -> str:
    """Return the costs of (variant, architecture) pairs as a Markdown table."""
    lines = [
        "| kernel | arch | warps | registers | spills | shared | instructions | loops | per unit "
        "| compiled in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, arch, c in rows:
        if c.per_unit is None:
            code = "- | - | -"
        else:
            loops = ", ".join(map(str, c.loops)) or "none"
            code = f"{c.instructions} | {loops} | {c.per_unit:.2f} per {variant.unit}"
        lines.append(
            f"| {variant.name} | {arch} | {c.warps} | {c.registers} | {c.spills} "
            f"| {c.shared} | {code} | {c.seconds:.1f} s |"
        )
    return "\n".join(lines)


Key = tuple[str, str, str]  # version of Triton, architecture, kernel


def read_records() -> dict[Key, dict[str, Any]]:
    """Return what was recorded."""
    rows = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    return {(row.pop("triton"), row.pop("arch"), row.pop("kernel")): row for row in rows}


def write_records(records: dict[Key, dict[str, Any]]) -> None:
    """Write all records, a line each."""
    names = ("triton", "arch", "kernel")
    rows = (dict(zip(names, key, strict=True)) | records[key] for key in sorted(records))
    write_text(RECORDS, "[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")


def changes(old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]]) -> list[str]:
    """Return a line for every kernel in ``new`` whose figures differ from those in ``old``."""
    lines = []
    for key, figures in new.items():
        before = old.get(key)
        if before is None:
            what = "not recorded yet"
        else:
            names = [name for name in figures if figures[name] != before[name]]
            what = ", ".join(f"{name} {before[name]} -> {figures[name]}" for name in names)
        if what:
            lines.append(f"{key[2]} {key[1]}: {what}")
    return lines


def main() -> None:
    """Print the table and what changed since the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="default: all it knows")
    names = [v.name for v in VARIANTS]
    parser.add_argument("--kernel", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--record", action="store_true", help="write the figures into the record")
    args = parser.parse_args()
    variants = [v for v in VARIANTS if v.name in args.kernel]
    rows = [(variant, arch, cost(variant, arch)) for arch in args.arch for variant in variants]
    print(table(rows))

    version = triton.__version__
    found = {(version, arch, variant.name): c.recorded() for variant, arch, c in rows}
    records = read_records()
    lines = changes(records, found) or ["nothing changed"]
    print(f"\nSince the record of Triton {version}:", *lines, sep="\n")
    if args.record:
        write_records(records | found)


if __name__ == "__main__":
    main()
