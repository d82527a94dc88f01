"""Let Triton compile for a chosen GPU and run the result in the emulator.

``install(arch)`` replaces Triton's driver. Specialisation, compilation and caching stay Triton's;
a launch passes its kernel to ``ptx.execute`` instead of CUDA.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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

# Findings that are no fault on their own, and findings between them and failures.
NOTES = {"SAMEVAL_WAW_G", "SAMEVAL_WAW_S", "CTA_SAMEVAL", "LANE_SAMEVAL", "UNDEF_TF32"}
WARNINGS = {f"LANE_{kind}_{space}" for kind in ("RAW", "WAR", "WAW") for space in "GS"} | {"INSTR_WAW"}
# Bytes above which a storage is an input of which few pages are used.
SPARSE = 2**30


@dataclass
class LaunchRecord:
    """What happened in a launch."""

    kernel: str
    findings: list
    instructions: int


@dataclass
class State:
    """The emulated GPU and what it has seen."""

    arch: int = 80
    records: list[LaunchRecord] = field(default_factory=list)
    keep: list[torch.Tensor] = field(default_factory=list)  # keeps addresses from being reused
    flags: dict[int, np.ndarray] = field(default_factory=dict)  # by storage: state of each byte
    edit: Callable[[str], str] | None = None  # PTX text -> PTX text, for planted faults
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
        flags = STATE.flags.get(key)
        if size > SPARSE:  # its pages outside the views stay untouched; marked below
            flags = np.zeros(size, np.uint8)
        elif flags is None or flags.nbytes != size:
            flags = np.full(size, 1, np.uint8)
        else:
            flags &= 1
        for t in views:
            if t.numel() == 0:
                continue
            w = t.element_size()
            if any(x < 0 for x in t.stride()):
                raise NotImplementedError("negative strides")
            strides = (*(x * w for x in t.stride()), 1)
            view = np.lib.stride_tricks.as_strided(flags[t.storage_offset() * w :], (*t.shape, w), strides)
            view |= 3 if size > SPARSE else 2
        unit = min(t.element_size() for t in views)
        memories.append(ptx.Memory(key, size, flags, unit))
        names.append("/".join(arg_names))
    return storages, memories, names


def _parameters(program: ptx.Program, values, storages: dict) -> dict[str, int]:
    """Return the bits of each parameter of a launch; scratch pointers, the last ones, are null."""
    found = dict.fromkeys(program.param_types, 0)
    for (name, t), (kind, arg) in zip(program.param_types.items(), values, strict=False):
        if kind.startswith("*"):
            if t != "u64":
                raise ptx.PTXError("parameter types differ")
            index = storages[arg.untyped_storage().data_ptr()][0]
            found[name] = ptx.address_of(index, arg.storage_offset() * arg.element_size())
        elif kind.startswith("f"):
            code = struct.pack({"fp32": "<f", "f32": "<f", "fp64": "<d"}[kind], arg)
            found[name] = int.from_bytes(code, "little")
        else:
            found[name] = int(arg) & ((1 << 8 * ptx.WIDTH[t]) - 1)
    return found


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
    values = [(name, kind, arg) for (name, kind), arg in zip(signature, args, strict=True) if kind != "constexpr"]
    tensors = [(name, arg) for name, kind, arg in values if kind.startswith("*")]
    storages, memories, names = _memories(tensors)
    params = _parameters(program, [value[1:] for value in values], storages)
    if program.threads != metadata.num_warps * 32:
        raise ptx.PTXError(f"{program.threads} threads, {metadata.num_warps} warps")
    total = grid[0] * grid[1] * grid[2]
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        raise ValueError(f"grid {grid} is over the limit")
    if total == 0:
        raise ValueError("CUDA refuses an empty grid")

    def execute(**order: int) -> tuple[list[dict], int, str]:
        return ptx.execute(program, grid, metadata.shared, params, memories, **order)

    findings, instructions, error = _in_orders(execute, memories, names)
    findings += [_finding("WGMMA_REGS", line, what) for line, what in program.findings]
    for f in findings:
        for prefix, line in (("", f["line"]), ("other_", f["other"])):
            f[prefix + "source"] = program.lines.get(line)
            f[prefix + "text"] = program.text[line - 1].strip() if line else ""
        f["tensor"] = [*names, "shared", ""][f["region"]]
    key = f"{src.fn.module}.{src.fn.__name__}".removeprefix("vil.kernels.triton.")
    state.records.append(LaunchRecord(key, findings, instructions))
    if error and state.raise_on_error:
        raise RuntimeError(f"{key} sm_{state.arch}: {error}")


def _in_orders(execute: Callable, memories: list[ptx.Memory], names: list[str]) -> tuple[list[dict], int, str]:
    """Execute a launch with two orders and time slices of warps, on which results must not depend."""
    kept = [m for m in memories if m.size <= SPARSE]  # larger ones are inputs
    before = [ctypes.string_at(m.data, m.size) for m in kept]
    flags = [m.flags.copy() for m in kept]
    findings, instructions, error = execute()
    if error:
        return findings, instructions, error
    first = [ctypes.string_at(m.data, m.size) for m in kept]
    for m, content, written in zip(kept, before, flags, strict=True):
        ctypes.memmove(m.data, content, m.size)
        m.flags[:] = written
    found, instructions, error = execute(seed=7920, slice=97)
    if not error:
        seen = {(f["kind"], f["line"], f["other"]) for f in findings}
        findings += [f for f in found if (f["kind"], f["line"], f["other"]) not in seen]
        names = [name for m, name in zip(memories, names, strict=True) if m.size <= SPARSE]
        for m, content, name in zip(kept, first, names, strict=True):
            if ctypes.string_at(m.data, m.size) != content:
                findings.append(_finding("ORDER", 0, name))
    return findings, instructions, error


# ---------------------------------------------------------------------------------- installation

_installed = False


def _register(t: torch.Tensor) -> torch.Tensor:
    """Mark a tensor from torch.empty as unwritten and fill it with 0xFF."""
    if t.device.type != "cpu" or type(t) is not torch.Tensor or t.numel() == 0:
        return t
    s = t.untyped_storage()
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


def warnings() -> list[tuple[str, dict]]:
    """Return the findings between failures and notes, with their kernel."""
    return [(r.kernel, f) for r in STATE.records for f in r.findings if f["kind"] in WARNINGS]


def faults() -> list[tuple[str, dict]]:
    """Return the findings that count as failures, with their kernel."""
    allowed = NOTES | WARNINGS
    return [(r.kernel, f) for r in STATE.records for f in r.findings if f["kind"] not in allowed]
