"""Let Triton compile for a chosen GPU and run the result in the emulator.

``install(arch)`` replaces Triton's driver. Specialisation, compilation and caching stay Triton's;
a launch passes its kernel to ``ptx.execute`` instead of CUDA.
"""

import ctypes
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import ptx

# A separate cache: its machine code is PTX, which a GPU could not use.
os.environ["TRITON_CACHE_DIR"] = str(ptx.CACHE / "triton")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

# Architecture -> largest shared memory of a program, in bytes.
SHARED_LIMIT = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}

# Severity of findings that are not failures. "note": no fault on its own.
SEVERITY = {
    "SAMEVAL_WAW_G": "note",
    "SAMEVAL_WAW_S": "note",
    "CTA_SAMEVAL": "note",
    "LANE_SAMEVAL": "note",
    "UNDEF_TF32": "note",
    "LANE_RAW_G": "lane",
    "LANE_WAR_G": "lane",
    "LANE_WAW_G": "lane",
    "LANE_RAW_S": "lane",
    "LANE_WAR_S": "lane",
    "LANE_WAW_S": "lane",
    "INSTR_WAW": "warn",
}


@dataclass
class LaunchRecord:
    """What happened in a launch."""

    kernel: str
    arch: int
    grid: tuple
    ctas: int
    warps: int
    shared: int
    findings: list
    error: str
    instructions: int
    barriers: int
    seconds: float
    ops: dict


@dataclass
class State:
    """The emulated GPU and what it has seen."""

    arch: int = 80
    options: ptx.Options = field(default_factory=ptx.Options)
    records: list[LaunchRecord] = field(default_factory=list)
    keep: list[torch.Tensor] = field(default_factory=list)  # keeps addresses from being reused
    flags: dict[int, np.ndarray] = field(default_factory=dict)  # by storage: state of each byte
    # Seeds of the orders in which warps run; results must not depend on them.
    orders: tuple[int, ...] = (0, 1)
    cta_filter: Callable[[str, int], list[int]] | None = None  # kernel, total -> chosen programs
    edit: Callable[[str], str] | None = None  # PTX text -> PTX text, for planted faults
    sparse_limit: int = 1 << 28  # bytes; larger storages are not tracked byte by byte
    opcodes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    raise_on_error: bool = True


STATE = State()


class _Utils:
    def load_binary(self, name, kernel, shared, device):
        return (name, kernel.decode(), 0, 0, 1024)

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED_LIMIT[device], "multiprocessor_count": 132, "warpSize": 32}


class Launcher:
    """Replacement for Triton's compiled launcher."""

    def __init__(self, src, metadata) -> None:
        self.src, self.metadata = src, metadata

    def __call__(self, gx, gy, gz, stream, function, packed, launch_metadata, enter, leave, *args):
        launch(self.src, self.metadata, (gx, gy, gz), function, args)


class Driver:
    """Driver that reports the emulated GPU to Triton."""

    launcher_cls = Launcher
    utils = _Utils()

    def get_current_device(self):
        return STATE.arch

    def set_current_device(self, device):
        STATE.arch = device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", STATE.arch, 32)

    def get_device_capability(self, device):
        return divmod(STATE.arch, 10)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cuda


# Triton's type name -> format code of struct.
_SCALARS = {"fp32": "f", "f32": "f", "fp64": "d", "i1": "b", "u1": "B"}
_SCALARS |= {f"i{bits}": code for bits, code in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))}
_SCALARS |= {f"u{bits}": code for bits, code in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))}


def _memories(tensors) -> tuple[dict, list[ptx.Memory], list[str]]:
    """Return the storages of (name, tensor) pairs: a dict by address, memories, and names."""
    storages, memories, names = {}, [], []
    for name, t in tensors:
        s = t.untyped_storage()
        key = s.data_ptr()
        if key not in storages:
            storages[key] = (len(storages), s.nbytes(), [], [])
        storages[key][2].append(t)
        storages[key][3].append(name)
    for key, (_, size, views, arg_names) in storages.items():
        flags = None
        if size <= STATE.sparse_limit:
            flags = STATE.flags.get(key)
            if flags is None or flags.nbytes != size:
                flags = np.full(size, 1, np.uint8)
            flags &= 1
            for t in views:
                if t.numel() == 0:
                    continue
                w = t.element_size()
                if any(x < 0 for x in t.stride()):
                    raise NotImplementedError("negative strides")
                strides = (*(x * w for x in t.stride()), 1)
                view = np.lib.stride_tricks.as_strided(
                    flags[t.storage_offset() * w :], (*t.shape, w), strides
                )
                view |= 2
        unit = min(t.element_size() for t in views)
        memories.append(ptx.Memory(key, size, flags, unit))
        names.append("/".join(arg_names))
    return storages, memories, names


def _parameters(program: ptx.Program, values, storages: dict) -> bytearray:
    """Return the parameters of a launch, in the layout that the kernel reads."""
    params = bytearray()
    layout = iter(program.param_layout)
    for kind, arg in values:
        t, offset = next(layout)
        params += b"\0" * (offset - len(params))
        if kind == "p":
            if t != "u64":
                raise ptx.PTXError("parameter types differ")
            index = storages[arg.untyped_storage().data_ptr()][0]
            address = ptx.address_of(index, arg.storage_offset() * arg.element_size())
            params += struct.pack("<Q", address)
        else:
            code = struct.pack("<" + kind, arg)
            if len(code) != ptx.WIDTH[t]:
                code = struct.pack("<" + {1: "b", 2: "h", 4: "i", 8: "q"}[ptx.WIDTH[t]], arg)
            params += code
    for t, offset in layout:  # scratch pointers, null
        params += b"\0" * (offset - len(params)) + b"\0" * ptx.WIDTH[t]
    return params


def _finding(kind: str, line: int, what: str) -> dict:
    return {"kind": kind, "line": line, "other": 0, "count": 1, "region": -1, "what": what}


def launch(src, metadata, grid: tuple[int, int, int], text: str, args: Iterable) -> None:
    """Execute a kernel in every order of warps and record the findings."""
    state = STATE
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise NotImplementedError("clusters, cooperative or dependent launches")
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise NotImplementedError("scratch memory")
    if getattr(metadata, "tmem_size", None):
        raise NotImplementedError("tensor memory")
    if state.edit:
        text = state.edit(text)
    program = ptx.decode(text)
    signature = list(src.signature.items())
    tensors, values = [], []
    for (name, kind), arg in zip(signature, args, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            tensors.append((name, arg))
            values.append(("p", arg))
        else:
            values.append((_SCALARS[kind], arg))
    storages, memories, names = _memories(tensors)
    params = _parameters(program, values, storages)
    if program.threads != metadata.num_warps * 32:
        raise ptx.PTXError(f"{program.threads} threads, {metadata.num_warps} warps")
    total = grid[0] * grid[1] * grid[2]
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        raise ValueError(f"grid {grid} is over the limit")
    if total == 0:
        raise ValueError("CUDA refuses an empty grid")
    ctas = state.cta_filter(metadata.name, total) if state.cta_filter else list(range(total))
    key = f"{src.fn.module}.{src.fn.__name__}".removeprefix("vil.kernels.triton.")
    begin = time.time()
    orders = state.orders
    if any(m.size > state.sparse_limit for m in memories):
        orders = orders[:1]
    again = len(orders) > 1
    before = [ctypes.string_at(m.data, m.size) if again else None for m in memories]
    flags_before = [None if m.flags is None else m.flags.copy() for m in memories]
    first = []
    findings, error, stats = [], "", None
    for run, seed in enumerate(orders):
        if run:
            for m, b, f in zip(memories, before, flags_before, strict=True):
                ctypes.memmove(m.data, b, m.size)
                if f is not None:
                    m.flags[:] = f
        options = replace(state.options, seed=seed * 7919 + state.options.seed)
        options.slice = 0 if run == 0 else 97
        found, stats, error = ptx.execute(
            program, grid, ctas, metadata.shared, bytes(params), memories, options
        )
        if run == 0:
            findings = found
            first = [ctypes.string_at(m.data, m.size) for m in memories] if again else []
        elif not error:
            seen = {(f["kind"], f["line"], f["other"]) for f in findings}
            findings += [f for f in found if (f["kind"], f["line"], f["other"]) not in seen]
            for m, a, n in zip(memories, first, names, strict=True):
                if ctypes.string_at(m.data, m.size) != a and not options.noise:
                    findings.append(_finding("ORDER", 0, n))
        if error:
            break
    findings += [_finding("WGMMA_REGS", line, what) for line, what in program.findings]
    for f in findings:
        for prefix, line in (("", f["line"]), ("other_", f["other"])):
            f[prefix + "source"] = program.lines.get(line)
            f[prefix + "text"] = program.text[line - 1].strip() if line else ""
        f["tensor"] = [*names, "shared", ""][f["region"]]
    state.records.append(
        LaunchRecord(
            kernel=key,
            arch=state.arch,
            grid=grid,
            ctas=len(ctas),
            warps=metadata.num_warps,
            shared=metadata.shared,
            findings=findings,
            error=error,
            instructions=stats[0],
            barriers=stats[1],
            seconds=time.time() - begin,
            ops={name: stats[2 + i] for name, i in ptx.OPS.items() if stats[2 + i]},
        )
    )
    for op, n in program.opcodes.items():
        state.opcodes[op] += n
    if error and state.raise_on_error:
        raise RuntimeError(f"{key} sm_{state.arch}: {error}")


# ---------------------------------------------------------------------------------- installation

_installed = False


def _register(t: torch.Tensor) -> torch.Tensor:
    """Mark a tensor from torch.empty as unwritten and fill it with 0xFF, unless it is too large."""
    if t.device.type != "cpu" or type(t) is not torch.Tensor or t.numel() == 0:
        return t
    s = t.untyped_storage()
    if s.nbytes() <= STATE.sparse_limit:
        STATE.flags[s.data_ptr()] = np.zeros(s.nbytes(), np.uint8)
        ctypes.memset(s.data_ptr(), 0xFF, s.nbytes())
    STATE.keep.append(t)
    return t


def install(arch: int) -> State:
    """Make Triton compile for sm_``arch`` and run in the emulator, on CPU tensors."""
    global _installed
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set")
    STATE.arch = arch
    if _installed:
        return STATE
    _installed = True

    CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: src.encode()
    triton.runtime.driver.set_active(Driver())

    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like
    torch.empty = lambda *a, **k: _register(empty(*a, **k))
    torch.Tensor.new_empty = lambda self, *a, **k: _register(new_empty(self, *a, **k))
    torch.empty_like = lambda *a, **k: _register(empty_like(*a, **k))
    return STATE


def install_project() -> None:
    """Make vil's launchers choose the same as on the emulated GPU, and forget kernels of another one."""
    from vil.kernels import backends
    from vil.kernels.plan import forget_plans
    from vil.kernels.triton import tuning

    tuning.architecture = lambda device: f"sm_{STATE.arch}"
    backends._check_serves = lambda name, device, asked_by: None
    forget_plans()


def clear() -> None:
    """Forget all launches and tensors."""
    STATE.records.clear()
    STATE.keep.clear()
    STATE.flags.clear()


def kinds() -> set[str]:
    """Return the kinds of all findings."""
    return {f["kind"] for r in STATE.records for f in r.findings}


def _findings(*severities: str) -> list[tuple[str, dict]]:
    return [
        (r.kernel, f)
        for r in STATE.records
        for f in r.findings
        if SEVERITY.get(f["kind"], "fail") in severities
    ]


def warnings() -> list[tuple[str, dict]]:
    """Return the findings between failures and notes, with their kernel."""
    return _findings("warn", "lane")


def faults() -> list[tuple[str, dict]]:
    """Return the findings that count as failures, with their kernel."""
    return _findings("fail")
