"""Count what every Triton kernel costs, without a GPU: registers, spills, instructions.

    python benchmarks/static_cost.py [--arch 90 gfx942] [--kernel NAME]

Compiles the kernels ahead of time and prints a Markdown table. For NVIDIA it reads the machine code
with the disassembler that Triton ships; for AMD it reads what the compiler says of it.

A loop is what lies between a label and the last branch back to it: an outer loop counts an inner
one's instructions once, and code out of line that returns to the main path looks like a loop too.
Latencies and cache misses are not modelled: these numbers bound a kernel's speed and show when it
gets worse, but do not replace a measurement.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # what the interpreter has wrapped cannot be compiled

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from vil.kernels import conv, longhorn_exact, tuning

ARCHITECTURES = ("80", "90", "100", "120", "gfx942")


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that is fixed when it is compiled.

    Attributes:
        name: Selects it on the command line, unique.
        kernel: The function under ``triton.jit``.
        signature: Triton type of every run-time argument, ":16" after it for multiples of 16, which
            is what launches infer of aligned pointers and of sizes.
        constexprs: Values of the compile-time arguments.
        num_warps: Warps of a program.
        unit: What ``units`` counts.
        units: Units that one lane does in one iteration of the loop, or in all if there is no loop.
        on_amd: Compile-time arguments that are others on AMD.
        loops: How many of the largest loops are meant, one per direction; their mean is counted.
    """

    name: str
    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, int | bool | str]
    num_warps: int
    unit: str
    units: int
    on_amd: dict[str, int | bool | str] = field(default_factory=dict)
    loops: int = 1


@dataclass(frozen=True)
class Cost:
    """What a variant costs on one architecture.

    Attributes:
        registers: Vector registers of a lane.
        spills: Instructions that access spilled registers (NVIDIA) or spilled registers (AMD).
        shared: Bytes of shared memory of a program.
        instructions: Of the whole kernel; None for AMD.
        loops: Instructions of every loop, largest first; None for AMD.
        per_unit: Instructions of the variant's loops, or of the whole kernel if it has none, for
            each of its units; None for AMD.
    """

    registers: int
    spills: int
    shared: int
    instructions: int | None = None
    loops: tuple[int, ...] | None = None
    per_unit: float | None = None


_CONV_CONSTEXPRS = {"D": 384, "K": 4, "BLOCK_L": conv.BLOCK_L, "BLOCK_D": conv.BLOCK_D}
_CONV_SIZES = {"B": "i32:16", "L": "i32", "x_stride_b": "i32:16", "x_stride_l": "i32:16"}
_CONV_INPUTS = {"x_ptr": "*bf16:16", "weight_ptr": "*fp32:16", "bias_ptr": "*fp32:16"}
_CONV_UNITS = conv.BLOCK_L * conv.BLOCK_D // (32 * conv.NUM_WARPS)

_EXACT_INPUTS = {
    **dict.fromkeys(("x_ptr", "dt_ptr", "z_ptr"), "*bf16:16"),
    **dict.fromkeys(
        ("keys_ptr", "gram_ptr", "kappa_ptr", "skip_ptr", "bias_ptr", "y_ptr", "states_ptr"),
        "*fp32:16",
    ),
    "B": "i32:16",
    "L": "i32",
    **dict.fromkeys(
        ("x_stride_dir", "x_stride_b", "dt_stride_dir", "dt_stride_b", "z_stride_b"), "i32:16"
    ),
}
_EXACT_CONSTEXPRS = {
    "x_stride_l": 384,
    "dt_stride_l": 384,
    "z_stride_l": 768,
    "D": 384,
    "BLOCK_M": 16,
    "FAST": True,
    "PRECISION": "tf32",
}


def _exact_forward(save: bool) -> Variant:
    block_d, warps = tuning.blocks("exact_forward", 384)
    return Variant(
        name="exact_forward_saving" if save else "exact_forward",
        kernel=longhorn_exact._bidirectional_forward_kernel,
        signature={**_EXACT_INPUTS, "out_ptr": "*bf16:16"},
        constexprs={**_EXACT_CONSTEXPRS, "BLOCK_D": block_d, "SAVE": save},
        num_warps=warps,
        unit="token-channel and direction",
        units=tuning.CHUNK,
        on_amd={"FAST": False, "PRECISION": "ieee"},
        loops=2,
    )


def _exact_backward() -> Variant:
    block_d, warps = tuning.blocks("exact_backward", 384)
    outputs = dict.fromkeys(("dx_ptr", "ddt_ptr", "dz_ptr"), "*bf16:16")
    sums = dict.fromkeys(("dkeys_ptr", "dskip_ptr", "dbias_ptr"), "*fp32:16")
    return Variant(
        name="exact_backward",
        kernel=longhorn_exact._bidirectional_backward_kernel,
        signature={**_EXACT_INPUTS, "dout_ptr": "*bf16:16", **outputs, **sums},
        constexprs={**_EXACT_CONSTEXPRS, "BLOCK_D": block_d},
        num_warps=warps,
        unit="token-channel and direction",
        units=tuning.CHUNK,
        on_amd={"FAST": False, "PRECISION": "ieee"},
        loops=2,
    )


VARIANTS = (
    _exact_forward(save=False),
    _exact_forward(save=True),
    _exact_backward(),
    Variant(
        name="conv_forward",
        kernel=conv._forward_kernel,
        signature={**_CONV_INPUTS, "out_ptr": "*bf16:16", **_CONV_SIZES},
        constexprs={**_CONV_CONSTEXPRS, "FAST": True},
        num_warps=conv.NUM_WARPS,
        unit="element of x",
        units=_CONV_UNITS,
    ),
    Variant(
        name="conv_backward",
        kernel=conv._backward_kernel,
        signature={
            "grad_ptr": "*bf16:16",
            **_CONV_INPUTS,
            "dx_ptr": "*bf16:16",
            "dweight_ptr": "*fp32:16",
            "dbias_ptr": "*fp32:16",
            **_CONV_SIZES,
        },
        constexprs={**_CONV_CONSTEXPRS, "FAST": True},
        num_warps=conv.NUM_WARPS,
        unit="element of x",
        units=_CONV_UNITS,
    ),
)


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
        if divisor:
            attributes[(i,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch), 32)
    options = {"num_warps": variant.num_warps, "num_stages": 1, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def cost(variant: Variant, arch: str) -> Cost:
    """Compile a variant and count.

    Args:
        variant: What to count.
        arch: As in ``compile_variant``.
    """
    compiled = compile_variant(variant, arch)
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        listing = compiled.asm["amdgcn"]
        return Cost(
            _amd_field("vgpr_count", listing), _amd_field("vgpr_spill_count", listing), shared
        )
    registers, listing = _disassemble(compiled.asm["cubin"])
    opcodes, loops = _parse(listing)
    counted = sum(loops[: variant.loops]) / variant.loops if loops else len(opcodes)
    spills = sum(opcode in ("LDL", "STL") for opcode in opcodes)
    return Cost(registers, spills, shared, len(opcodes), loops, counted / variant.units)


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
    """Return the opcode of every instruction, without modifiers, and the lengths of the loops."""
    labels: dict[str, int] = {}
    opcodes: list[str] = []
    lengths: dict[int, int] = {}  # by first instruction
    for line in listing.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ +)?([A-Z]\w*)", line):
            branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            start = labels.get(branch[1]) if branch else None
            # A branch to itself is the trap behind every kernel's end; only padding follows it.
            if start is not None and start < len(opcodes):
                lengths[start] = len(opcodes) - start + 1
            opcodes.append(instruction[1])
    while opcodes[-1] == "NOP":
        opcodes.pop()
    return opcodes, tuple(sorted(lengths.values(), reverse=True))


def table(rows: Iterable[tuple[Variant, str, Cost]]) -> str:
    """Return the costs of (variant, architecture) pairs as a Markdown table."""
    lines = [
        "| kernel | arch | warps | registers | spills | shared | instructions | loops | per unit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, arch, c in rows:
        if c.per_unit is None:
            code = "- | - | -"
        else:
            loops = ", ".join(map(str, c.loops)) or "none"
            code = f"{c.instructions} | {loops} | {c.per_unit:.2f} per {variant.unit}"
        lines.append(
            f"| {variant.name} | {arch} | {variant.num_warps} | {c.registers} | {c.spills} "
            f"| {c.shared} | {code} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="default: all it knows")
    parser.add_argument("--kernel", choices=[v.name for v in VARIANTS], help="default: all")
    args = parser.parse_args()
    variants = [v for v in VARIANTS if args.kernel in (None, v.name)]
    print(table((v, arch, cost(v, arch)) for v in variants for arch in args.arch))


if __name__ == "__main__":
    main()
