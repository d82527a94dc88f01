"""Decode PTX text into the instructions that ``emulator.cpp`` executes.

An unknown instruction, modifier or operand is an error; none is ignored.
"""

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("emulator.cpp")
CACHE = Path(os.environ.get("PTX_EMULATOR_CACHE", Path.home() / ".cache" / "ptx_emulator"))
COMPILE = ("g++", "-O2", "-march=native", "-ffp-contract=off", "-std=c++17", "-w")


def library() -> ctypes.CDLL:
    """Load the emulator; compile it first if this source, compiler or processor is new."""
    query = [*COMPILE, "-dM", "-E", "-x", "c++", os.devnull]
    machine = subprocess.run(query, check=True, capture_output=True).stdout
    digest = hashlib.sha256(SOURCE.read_bytes() + machine).hexdigest()[:16]
    target = CACHE / f"emulator-{digest}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        command = [*COMPILE, "-shared", "-fPIC", "-o", str(part), str(SOURCE)]
        subprocess.run(command, check=True)
        part.rename(target)
    lib = ctypes.CDLL(str(target))
    lib.op_name.restype = ctypes.c_char_p
    return lib


LIB = library()
OPS = {LIB.op_name(i).decode(): i for i in range(LIB.num_ops())}


class PTXError(Exception):
    """PTX that the emulator does not know."""


SPECIAL = {
    "%tid.x": 0, "%ctaid.x": 1, "%ctaid.y": 2, "%ctaid.z": 3, "%nctaid.x": 4, "%nctaid.y": 5,
    "%nctaid.z": 6, "%laneid": 7, "%ntid.x": 8, "%tid.y": 9, "%tid.z": 10, "%ntid.y": 11,
    "%ntid.z": 12,
}  # fmt: skip
WIDTH = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16x2": 4, "bf16x2": 4,
}  # fmt: skip
CONVERSIONS = {
    "f32.bf16": ("CVTF32BF16", "rr", 0), "f32.f16": ("CVTF32F16", "rr", 0),
    "rn.bf16.f32": ("CVTBF16F32", "rr", 0), "rn.f16.f32": ("CVTF16F32", "rr", 0),
    "rn.bf16x2.f32": ("CVTBF16X2", "rrr", 0), "rn.f16x2.f32": ("CVTF16X2", "rrr", 0),
    "rna.tf32.f32": ("CVTTF32", "rr", 0), "rn.tf32.f32": ("CVTTF32", "rr", 1),
    "rzi.s32.f32": ("CVTS32F32", "rr", 0), "rni.s32.f32": ("CVTS32F32", "rr", 1),
    "rmi.s32.f32": ("CVTS32F32", "rr", 2), "rzi.u32.f32": ("CVTU32F32", "rr", 0),
    "rn.f32.s32": ("CVTF32S32", "rr", 0), "rn.f32.u32": ("CVTF32U32", "rr", 0),
    "rn.f32.s64": ("CVTF32S64", "rd", 0), "u64.u32": ("CVTU64U32", "dr", 0),
    "s64.s32": ("CVTS64S32", "dr", 0), "u32.u64": ("CVTU32U64", "rd", 0),
    "s32.s64": ("CVTU32U64", "rd", 0), "u32.u16": ("CVTU32U16", "rr", 0),
    "s32.s16": ("CVTS32S16", "rr", 0), "u16.u32": ("CVTU16U32", "rr", 0),
    "s32.s8": ("CVTS32S8", "rr", 0), "u32.u8": ("CVTU32U8", "rr", 0),
    "u64.u16": ("CVTU64U16", "dr", 0), "s64.s16": ("CVTS64S16", "dr", 0),
    "u16.u64": ("CVTU32U64", "rd", 0), "s16.s8": ("CVTS32S8", "rr", 0),
}  # fmt: skip
CACHING = ("L1::no_allocate", "ca", "cg", "cs", "wb", "weak")  # hints, without effect here
SBASE = 1024
CMP = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@dataclass
class Program:
    """A decoded kernel."""

    name: str
    ins: np.ndarray
    pool: np.ndarray
    nr: int
    nrd: int
    np: int
    c32: dict
    c64: dict
    special: dict
    params: list  # (slot, width, offset)
    param_layout: list  # (type, offset)
    param_bytes: int
    threads: int
    lines: dict  # PTX line -> source location
    text: list
    opcodes: dict
    shared_unit: int
    maxnreg: int | None
    findings: list = field(default_factory=list)


class Decoder:
    """Decoder of the PTX text of one kernel into a ``Program``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.ins, self.pool = [], []
        self.nr = self.nrd = self.npr = 0
        self.c32, self.c64, self.special = {}, {}, {}
        self.params = {}  # name -> (type, offset)
        self.param_slots = {}
        self.scopes = [{}]
        self.ranges = {}
        self.labels, self.fixups = {}, []
        self.locs, self.opcodes = {}, {}
        self.min_shared = 4
        self.findings = []
        self.inflight = None
        self.threads = None
        self.maxnreg = None

    # ------------------------------------------------------------------ structure

    def decode(self) -> Program:
        text = self.text
        m = re.search(r"\.visible \.entry (\S+?)\(", text)
        if not m or len(re.findall(r"\.entry", text)) != 1:
            raise PTXError("not exactly one kernel")
        for v in re.findall(r"^\s*\.(?:func|global|const|visible \.func|weak)\b.*", text, re.M):
            g = re.match(r"\s*\.global \.align 1 \.b8 (\S+?)\[\d+\] = ", v)
            if not g or text.count(g[1]) != 1:  # allow only a string that nothing refers to
                raise PTXError(f"functions or global variables: {v[:80]}")
        self.name = m[1]
        pos = m.end()
        end = text.index(")", pos)
        offset = 0
        for p in text[pos:end].split(","):
            p = p.strip()
            if not p:
                continue
            q = re.fullmatch(r"\.param \.(\w+)(?: \.ptr \.global \.align \d+)? (\S+)", p)
            if not q:
                raise PTXError(f"parameter {p}")
            w = WIDTH[q[1]]
            offset = -(-offset // w) * w
            self.params[q[2]] = (q[1], offset)
            offset += w
        self.param_bytes = offset
        head_end = text.index("{", end)
        for d in re.findall(r"\.(\w+) ?([\d, ]*)", text[end + 1 : head_end]):
            if d[0] in ("reqntid", "maxntid"):
                self.threads = int(d[1].split(",")[0])
            elif d[0] == "maxnreg":
                self.maxnreg = int(d[1])
            elif d[0] not in ("minnctapersm",):
                raise PTXError(f"directive {d}")
        if (
            re.search(r"\.shared", text[:pos])
            and ".extern .shared .align 16 .b8 global_smem[]" not in text
        ):
            raise PTXError("shared variables")
        self.body(text, head_end + 1)
        for index, label, line in self.fixups:
            if label not in self.labels:
                raise PTXError(f"label {label} of line {line}")
            self.ins[index][9] = self.labels[label]
        return Program(
            self.name, self._pack(), np.array(self.pool, dtype=np.int32), self.nr, self.nrd,
            max(self.npr, 1), self.c32, self.c64, self.special,
            [(s, w, o) for (s, w, o) in self.param_slots.values()], list(self.params.values()),
            self.param_bytes, self.threads, self.locs, self.lines, self.opcodes, self.min_shared,
            self.maxnreg, self.findings,
        )  # fmt: skip

    def _pack(self) -> np.ndarray:
        dtype = np.dtype([("f", np.int32, 8), ("imm", np.int64)])
        out = np.zeros(len(self.ins), dtype=dtype)
        for k, i in enumerate(self.ins):
            out[k] = (i[:8], np.int64(i[9] if i[9] < 1 << 63 else i[9] - (1 << 64)))
        return out

    def body(self, text: str, pos: int) -> None:
        depth, line = 1, text.count("\n", 0, pos) + 1
        loc = None
        n = len(text)
        while pos < n:
            c = text[pos]
            if c == "\n":
                line += 1
                pos += 1
            elif c in " \t\r;":
                pos += 1
            elif text.startswith("//", pos):
                pos = text.index("\n", pos)
            elif text.startswith(".loc", pos):
                e = text.index("\n", pos)
                raw = text[pos:e]
                m = re.search(r"// (\S+)", raw)
                loc = m[1] if m else None
                m = re.search(r"inlined_at \d+ (\d+)", raw)
                if m:
                    loc = f"{loc} (from line {m[1]})"
                pos = e
            elif text.startswith(".reg", pos):
                e = text.index(";", pos)
                self.declare(text[pos:e])
                pos = e + 1
            elif text.startswith(".pragma", pos):
                pos = text.index(";", pos) + 1
            elif c == "{":
                depth += 1
                self.scopes.append({})
                pos += 1
            elif c == "}":
                depth -= 1
                self.scopes.pop()
                pos += 1
                if depth == 0:
                    return
            else:
                m = re.compile(r"([$%\w]+):").match(text, pos)
                if m:
                    self.labels[m[1]] = len(self.ins)
                    if self.inflight is not None and not m[1].startswith(("$L__tmp", "$L__func")):
                        self.findings.append(
                            (line, "a label between wgmma and its wait: not checked")
                        )
                    pos = m.end()
                    continue
                # an instruction ends at the semicolon
                e = text.index(";", pos)
                raw = re.sub(r"//[^\n]*", "", text[pos:e])
                self.locs[line] = loc
                try:
                    self.instruction(" ".join(raw.split()), line)
                except PTXError as error:
                    raise PTXError(f"line {line}: {' '.join(raw.split())}: {error}") from None
                line += text.count("\n", pos, e)
                pos = e + 1
        raise PTXError("unfinished")

    def declare(self, raw: str) -> None:
        m = re.fullmatch(r"\.reg \.(\w+)\s+(.*)", " ".join(raw.split()))
        kind = "p" if m[1] == "pred" else {1: "r", 2: "r", 4: "r", 8: "d"}[WIDTH[m[1]]]
        for name in m[2].split(","):
            name = name.strip()
            q = re.fullmatch(r"(%\w+?)<(\d+)>", name)
            if q:
                self.ranges[q[1]] = (kind, self._new(kind, int(q[2])), int(q[2]))
            else:
                self.scopes[-1][name] = (kind, self._new(kind, 1))

    def _new(self, kind: str, count: int) -> int:
        if kind == "p":
            at, self.npr = self.npr, self.npr + count
        elif kind == "r":
            at, self.nr = self.nr, self.nr + count
        else:
            at, self.nrd = self.nrd, self.nrd + count
        return at

    # ------------------------------------------------------------------- operands

    def register(self, name: str) -> tuple[str, int] | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        m = re.fullmatch(r"(%[a-zA-Z]+)(\d+)", name)
        if m and m[1] in self.ranges:
            kind, base, count = self.ranges[m[1]]
            if int(m[2]) >= count:
                raise PTXError(f"register {name} beyond its range")
            return kind, base + int(m[2])
        return None

    def const(self, kind: str, value: int) -> int:
        table = self.c32 if kind == "r" else self.c64
        value &= 0xFFFFFFFF if kind == "r" else (1 << 64) - 1
        if value not in table:
            table[value] = self._new(kind, 1)
        return table[value]

    def immediate(self, s: str) -> int | None:
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}|0d[0-9A-Fa-f]{16}", s):
            return int(s[2:], 16)
        if re.fullmatch(r"-?0x[0-9A-Fa-f]+", s):
            return int(s, 16)
        if re.fullmatch(r"-?\d+", s):
            return int(s)
        return SBASE if s == "global_smem" else None

    def operand(self, s: str, kind: str, bits: int = 32) -> int:
        """Return the slot of an operand of kind p, r or d."""
        s = s.strip()
        reg = self.register(s)
        if reg:
            if reg[0] != kind:
                raise PTXError(f"operand {s} is of kind {reg[0]}, not {kind}")
            return reg[1]
        if s in SPECIAL:
            if kind != "r":
                raise PTXError(f"special register {s}")
            if s not in self.special:
                self.special[s] = self._new("r", 1)
            return self.special[s]
        value = self.immediate(s)
        if value is None or kind == "p":
            raise PTXError(f"operand {s}")
        if bits == 16:
            value &= 0xFFFF
        return self.const(kind, value)

    def address(self, s: str) -> tuple[str, int]:
        m = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", s.strip())
        if not m:
            raise PTXError(f"address {s}")
        return m[1], int(m[2] or "0", 0)

    @staticmethod
    def split(s: str) -> list[str]:
        parts, depth, cur = [], 0, ""
        for c in s:
            if c in "{[":
                depth += 1
            elif c in "}]":
                depth -= 1
            if c == "," and depth == 0:
                parts.append(cur.strip())
                cur = ""
            else:
                cur += c
        if cur.strip():
            parts.append(cur.strip())
        return parts

    @staticmethod
    def vector(s: str) -> list[str]:
        s = s.strip()
        if s.startswith("{"):
            return [x.strip() for x in s[1:-1].split(",")]
        return [s]

    # --------------------------------------------------------------- instructions

    def emit(self, op: str, operands: Sequence[int], f0=0, f1=0, f2=0, imm=0) -> None:
        if op not in OPS:
            raise PTXError(f"operation {op} is not in the emulator")
        self.ins.append(
            [OPS[op], self.guard, len(self.pool), len(operands), f0, f1, f2, self.line, 0, imm]
        )
        self.pool.extend(operands)

    def instruction(self, raw: str, line: int) -> None:
        self.line, self.guard = line, -1
        m = re.match(r"@(!?)(\S+)\s+(.*)", raw)
        if m:
            self.guard = self.operand(m[2], "p") << 1 | (m[1] == "!")
            raw = m[3]
        opcode, _, rest = raw.partition(" ")
        self.opcodes[opcode] = self.opcodes.get(opcode, 0) + 1
        mods = opcode.split(".")
        ops = self.split(rest)
        handler = getattr(self, "op_" + mods[0], None)
        if handler is None:
            raise PTXError("unknown instruction")
        if self.inflight is not None and mods[0] != "wgmma":
            used = set(re.findall(r"%\w+", rest))
            if clash := used & self.inflight[1]:
                what = (
                    f"registers {sorted(clash)} of the wgmma of line {self.inflight[0]} in flight"
                )
                self.findings.append((line, what))
        handler(mods[1:], ops)

    def simple(self, op, ops, kinds, bits=32, **k):
        if len(ops) != len(kinds):
            raise PTXError("number of operands")
        self.emit(op, [self.operand(o, t, bits) for o, t in zip(ops, kinds, strict=True)], **k)

    def op_mov(self, m, ops):
        (t,) = m
        if t == "pred":
            if ops[1] not in ("-1", "1", "0"):
                self.simple("MOVP", ops, "pp")
                return
            # set a constant predicate by comparing two constants
            one, compare = self.const("r", 0), "eq" if ops[1] != "0" else "ne"
            slots = [self.operand(ops[0], "p"), -1, one, one]
            self.emit("SETPS32", slots, f0=CMP.index(compare))
            return
        w = WIDTH[t]
        wide, bits = ("d", "64") if w == 8 else ("r", "32")
        if ops[0].startswith("{"):
            parts = self.vector(ops[0])
            if len(parts) != 2:
                raise PTXError("vector move")
            slots = [self._new("r", 1) if p == "_" else self.operand(p, "r") for p in parts]
            self.emit(f"UNPACK{bits}", [*slots, self.operand(ops[1], wide)])
        elif ops[1].startswith("{"):
            parts = self.vector(ops[1])
            if len(parts) != 2:
                raise PTXError("vector move")
            slots = [self.operand(p, "r") for p in parts]
            self.emit(f"PACK{bits}", [self.operand(ops[0], wide), *slots])
        else:
            self.simple(f"MOV{bits}", ops, 2 * wide, 8 * w)

    def _int(self, name, m, ops, count=3):
        """Emit an integer operation (add, sub, mul.lo, ...) for the width of its type."""
        w = WIDTH[m[-1]]
        kind, bits = {8: ("d", 64), 2: ("r", 16)}.get(w, ("r", 32))
        self.simple(f"{name}{bits}", ops, kind * count, bits)

    def _f2(self, name, m, ops, count):
        if m not in (["rn", "f32x2"], ["f32x2"]):
            raise PTXError("modifiers")
        self.simple(name, ops, "d" * count, 64)

    def _float(self, name, m, ops, count, approx=False, extra=()):
        flags = 0
        for x in m[:-1]:
            if x == "ftz":
                flags |= 1
            elif x == "rn":
                pass
            elif x == "NaN" and "NaN" in extra:
                flags |= 2
            elif x in ("approx", "full") and approx:
                flags |= 4 if x == "full" else 12
            else:
                raise PTXError(f"modifier {x}")
        self.simple(name, ops, "r" * count, f0=flags)

    def _half_and_float(self, name, m, ops):
        """Convert all but the last operand from half precision to float32, then compute (sm_100 and later)."""
        convert, _, flags = CONVERSIONS[f"f32.{m[-1]}"]
        target, *halves, last = ops
        wide = [self._new("r", 1) for _ in halves]
        for slot, half in zip(wide, halves, strict=True):
            self.emit(convert, [slot, self.operand(half, "r", 16)], f0=flags)
        self.emit(name, [self.operand(target, "r"), *wide, self.operand(last, "r")])

    def op_add(self, m, ops):
        if m[-1] == "f32x2":
            self._f2("FADD2", m, ops, 3)
        elif m in (["rn", "f32", "bf16"], ["rn", "f32", "f16"]):
            self._half_and_float("FADD", m, ops)
        elif m[-1] == "f32":
            self._float("FADD", m, ops, 3)
        elif len(m) == 1 and m[0] in ("s32", "u32", "s64", "u64", "s16", "u16"):
            self._int("ADD", m, ops)
        else:
            raise PTXError("modifiers")

    def op_sub(self, m, ops):
        if m in (["rn", "f32x2"], ["f32x2"]):
            halves = [self._new("r", 1) for _ in range(4)]
            for place in (0, 1):
                pair = halves[2 * place : 2 * place + 2]
                self.emit("UNPACK64", [*pair, self.operand(ops[1 + place], "d")])
            for place in (0, 1):
                self.emit("FSUB", [halves[place], halves[place], halves[2 + place]])
            self.emit("PACK64", [self.operand(ops[0], "d"), *halves[:2]])
        elif m in (["rn", "f32", "bf16"], ["rn", "f32", "f16"]):
            self._half_and_float("FSUB", m, ops)
        elif m[-1] == "f32":
            self._float("FSUB", m, ops, 3)
        elif len(m) == 1 and m[0] in ("s32", "u32", "s64", "u64", "s16", "u16"):
            self._int("SUB", m, ops)
        else:
            raise PTXError("modifiers")

    def op_mul(self, m, ops):
        if m[-1] == "f32x2":
            self._f2("FMUL2", m, ops, 3)
        elif m[-1] == "f32":
            self._float("FMUL", m, ops, 3)
        elif m[0] == "lo":
            self._int("MUL", m, ops)
        elif m in (["wide", "s32"], ["wide", "u32"]):
            self.simple(f"MULW{m[1].upper()}", ops, "drr")
        elif m in (["wide", "s16"], ["wide", "u16"]):
            extend, _, _ = CONVERSIONS[f"{m[1][0]}32.{m[1]}"]
            wide = [self._new("r", 1) for _ in range(2)]
            for slot, factor in zip(wide, ops[1:], strict=True):
                self.emit(extend, [slot, self.operand(factor, "r", 16)])
            self.emit("MUL32", [self.operand(ops[0], "r"), *wide])
        elif m in (["hi", "s32"], ["hi", "u32"]):
            self.simple(f"MULHI{m[1].upper()}", ops, "rrr")
        elif m == ["hi", "u64"]:
            self.simple("MULHIU64", ops, "ddd", 64)
        else:
            raise PTXError("modifiers")

    def op_mad(self, m, ops):
        if m[0] == "lo":
            self._int("MAD", m, ops, 4)
        elif m in (["wide", "s32"], ["wide", "u32"]):
            self.simple(f"MADW{m[1].upper()}", ops, "drrd")
        else:
            raise PTXError("modifiers")

    def _typed(self, name, m, ops):
        if len(m) != 1 or m[0] not in ("s32", "u32", "s64", "u64"):
            raise PTXError("modifiers")
        k = "d" if m[0].endswith("64") else "r"
        self.simple(name + m[0].upper(), ops, k * 3, int(m[0][1:]))

    def op_div(self, m, ops):
        if m[-1] == "f32":
            self._float("FDIV", m, ops, 3, approx=True)
        else:
            self._typed("DIV", m, ops)

    def op_rem(self, m, ops):
        self._typed("REM", m, ops)

    def _extreme(self, name, m, ops):
        """Emit the minimum or maximum of two float32 numbers, or of three (sm_100 and later)."""
        target, *rest = ops
        while len(rest) > 2:  # the target holds the result so far
            if target in rest[2:]:
                raise PTXError("a target that is also the third number")
            self._float(name, m, [target, *rest[:2]], 3, extra=("NaN",))
            rest = [target, *rest[2:]]
        self._float(name, m, [target, *rest], 3, extra=("NaN",))

    def op_min(self, m, ops):
        if m[-1] == "f32":
            self._extreme("FMIN", m, ops)
        else:
            self._typed("MIN", m, ops)

    def op_max(self, m, ops):
        if m[-1] == "f32":
            self._extreme("FMAX", m, ops)
        else:
            self._typed("MAX", m, ops)

    def _logic(self, name, m, ops):
        (t,) = m
        if t == "pred":
            self.simple(name + "P", ops, "p" * len(ops))
        else:
            w = WIDTH[t]
            self.simple(f"{name}{8 * w}", ops, ("d" if w == 8 else "r") * len(ops), 8 * w)

    def op_and(self, m, ops):
        self._logic("AND", m, ops)

    def op_or(self, m, ops):
        self._logic("OR", m, ops)

    def op_xor(self, m, ops):
        self._logic("XOR", m, ops)

    def op_not(self, m, ops):
        self._logic("NOT", m, ops)

    def op_shl(self, m, ops):
        self._shift("SHL", WIDTH[m[0]], ops)

    def op_shr(self, m, ops):
        self._shift("SHRS" if m[0][0] == "s" else "SHRU", WIDTH[m[0]], ops)

    def _shift(self, name, w, ops):
        kinds = "ddr" if w == 8 else "rrr"
        self.simple(f"{name}{8 * w}", ops, kinds)

    def op_shf(self, m, ops):
        if m[0] not in "lr" or m[1] not in ("wrap", "clamp") or m[2] != "b32":
            raise PTXError("modifiers")
        self.simple("SHFLF", ops, "rrrr", f0=int(m[0] == "r"), f1=int(m[1] == "wrap"))

    def op_neg(self, m, ops):
        if m == ["f32"]:
            self.simple("FNEG", ops, "rr")
        elif m[-1] == "f32":
            raise PTXError("modifiers")
        else:
            self._int("NEG", m, ops, 2)

    def op_abs(self, m, ops):
        if m in (["f32"], ["ftz", "f32"]):
            self.simple("FABS", ops, "rr")
        elif m[-1] == "f32":
            raise PTXError("modifiers")
        else:
            self._int("ABS", m, ops, 2)

    def op_bfe(self, m, ops):
        if m == ["u64"]:
            self.simple("BFEU64", ops, "ddrr")
        else:
            self.simple({"u32": "BFEU32", "s32": "BFES32"}[m[0]], ops, "rrrr")

    def op_bfi(self, m, ops):
        if m != ["b32"]:
            raise PTXError("modifiers")
        self.simple("BFI32", ops, "rrrrr")

    def op_prmt(self, m, ops):
        if m != ["b32"]:
            raise PTXError("modifiers")
        self.simple("PRMT", ops, "rrrr")

    def op_lop3(self, m, ops):
        if m != ["b32"]:
            raise PTXError("modifiers")
        self.emit("LOP3", [self.operand(o, "r") for o in ops[:4]], imm=int(ops[4], 0))

    def op_popc(self, m, ops):
        self.simple({"b32": "POPC32"}[m[0]], ops, "rr")

    def op_clz(self, m, ops):
        self.simple({"b32": "CLZ32"}[m[0]], ops, "rr")

    def op_selp(self, m, ops):
        w = WIDTH[m[0]]
        k = "d" if w == 8 else "r"
        slots = [self.operand(o, k, 8 * w) for o in ops[:3]]
        self.emit("SEL64" if w == 8 else "SEL32", [*slots, self.operand(ops[3], "p")])

    def op_setp(self, m, ops):
        cmp, *mid, t = m
        combine = 0
        for x in mid:
            if x in ("and", "or", "xor"):
                combine = {"and": 1, "or": 2, "xor": 3}[x]
            else:
                raise PTXError(f"modifier {x}")
        p, _, q = ops[0].partition("|")
        if t == "f32":
            name, k, bits = "SETPF32", "r", 32
            f0 = CMP.index(cmp)
        else:
            unsigned = t[0] in "ub"
            cmp = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(cmp, cmp)
            if cmp not in CMP[:6]:
                raise PTXError("comparison")
            f0 = CMP.index(cmp)
            bits = 8 * WIDTH[t]
            name, k = f"SETP{'U' if unsigned else 'S'}{bits}", "d" if bits == 64 else "r"
        slots = [self.operand(p, "p"), self.operand(q, "p") if q else -1]
        slots += [self.operand(o, k, bits) for o in ops[1:3]]
        neg = 0
        if combine:
            c = ops[3]
            neg = int(c.startswith("!"))
            slots.append(self.operand(c.lstrip("!"), "p"))
        elif len(ops) != 3:
            raise PTXError("operands")
        self.emit(name, slots, f0=f0, f1=combine, f2=neg)

    def op_fma(self, m, ops):
        if m[-1] == "f32x2":
            self._f2("FFMA2", m, ops, 4)
        elif m in (["rn", "f32", "bf16"], ["rn", "f32", "f16"]):
            self._half_and_float("FFMA", m, ops)
        elif m[-1] == "f32":
            self._float("FFMA", m, ops, 4)
        else:
            raise PTXError("modifiers")

    def op_rcp(self, m, ops):
        self._float("FRCP", m, ops, 2, approx=True)

    def op_ex2(self, m, ops):
        self._float("FEX2", m, ops, 2, approx=True)

    def op_lg2(self, m, ops):
        self._float("FLG2", m, ops, 2, approx=True)

    def op_sqrt(self, m, ops):
        self._float("FSQRT", m, ops, 2, approx=True)

    def op_rsqrt(self, m, ops):
        self._float("FRSQRT", m, ops, 2, approx=True)

    def op_tanh(self, m, ops):
        self._float("FTANH", m, ops, 2, approx=True)

    def op_cvt(self, m, ops):
        key = ".".join(m)
        if key not in CONVERSIONS:
            raise PTXError("conversion")
        name, kinds, f0 = CONVERSIONS[key]
        source = self.register(ops[-1])
        if kinds[-1] == "r" and source and source[0] == "d":  # a wider register: its low bits
            low = self._new("r", 1)
            self.emit("CVTU32U64", [low, source[1]])
            self.emit(name, [self.operand(ops[0], kinds[0]), low], f0=f0)
        else:
            self.simple(name, ops, kinds, f0=f0)

    def op_cvta(self, m, ops):
        # generic addresses equal global ones here
        if m not in (["to", "global", "u64"], ["global", "u64"]):
            raise PTXError("address conversion")
        self.simple("MOV64", ops, "dd", 64)

    def _space(self, m):
        space, nc, vec, signed = None, 0, 1, 0
        t = m[-1]
        for x in m[:-1]:
            if x in ("global", "shared", "shared::cta"):
                space = x.split("::")[0]
            elif x == "nc":
                nc = 1
            elif x in ("v2", "v4", "v8"):
                vec = int(x[1])
            elif not x.startswith("L1::evict") and x not in CACHING:
                raise PTXError(f"modifier {x}")
        if space is None:
            raise PTXError("state space")
        if t[0] == "s":
            signed = 1
        return space, nc, vec, signed, WIDTH[t]

    def op_ld(self, m, ops):
        if m[0] == "param":
            base, offset = self.address(ops[1])
            t, at = self.params[base]
            w = WIDTH[m[1]]
            if offset or w != WIDTH[t]:
                raise PTXError("part of a parameter")
            k = "d" if w == 8 else "r"
            if w == 4 and (self.register(ops[0]) or "?")[0] == "d":  # extend to 64 bits
                name, kind = "CVTS64S32" if m[1][0] == "s" else "CVTU64U32", "d"
            else:
                name, kind = "MOV64" if w == 8 else "MOV32", k
            if base not in self.param_slots:
                self.param_slots[base] = (self._new(k, 1), w, at)
            self.emit(name, [self.operand(ops[0], kind), self.param_slots[base][0]])
            return
        space, nc, vec, signed, w = self._space(m)
        dst = self.vector(ops[0])
        if len(dst) != vec:
            raise PTXError("vector length")
        k = "d" if w == 8 else "r"
        base, offset = self.address(ops[1])
        if space == "shared":
            self.min_shared = min(self.min_shared, w)
        b = self.operand(base, "d" if space == "global" else "r", 64 if space == "global" else 32)
        slots, wide = [], []
        for d in dst:
            reg = self.register(d)
            if w < 8 and reg and reg[0] == "d":  # a wider register: extend
                slots.append(self._new("r", 1))
                wide.append((reg[1], slots[-1]))
            else:
                slots.append(self.operand(d, k))
        how = vec | nc << 8 | signed << 9
        self.emit("LD", [*slots, b], f0=int(space == "shared"), f1=w, f2=how, imm=offset)
        for d, s in wide:
            self.emit("CVTS64S32" if signed else "CVTU64U32", [d, s])

    def op_prefetch(self, m, ops):
        if m != ["global", "L2"]:
            raise PTXError("modifiers")
        base, _ = self.address(ops[0])
        self.operand(base, "d", 64)
        self.emit("NOP", [])  # any address may be prefetched, and nothing is read

    def op_st(self, m, ops):
        space, nc, vec, _, w = self._space(m)
        src = self.vector(ops[1])
        if len(src) != vec or nc:
            raise PTXError("vector length")
        k = "d" if w == 8 else "r"
        base, offset = self.address(ops[0])
        if space == "shared":
            self.min_shared = min(self.min_shared, w)
        b = self.operand(base, "d" if space == "global" else "r", 64 if space == "global" else 32)
        slots = []
        for o in src:
            reg = self.register(o)
            if w < 8 and reg and reg[0] == "d":  # a wider register: store its low bits
                slots.append(self._new("r", 1))
                self.emit("CVTU32U64", [slots[-1], reg[1]])
            else:
                slots.append(self.operand(o, k, 8 * w))
        self.emit("ST", [b, *slots], f0=int(space == "shared"), f1=w, f2=vec, imm=offset)

    def op_ldmatrix(self, m, ops):
        if m[:3] != ["sync", "aligned", "m8n8"] or m[3] not in ("x1", "x2", "x4") or m[-1] != "b16":
            raise PTXError("modifiers")
        trans = int("trans" in m)
        count = int(m[3][1])
        dst = self.vector(ops[0])
        base, offset = self.address(ops[1])
        self.min_shared = min(self.min_shared, 2 if trans else 4)
        slots = [self.operand(d, "r") for d in (*dst, base)]
        self.emit("LDMATRIX", slots, f0=count, f1=trans, imm=offset)

    def op_stmatrix(self, m, ops):
        if m[:3] != ["sync", "aligned", "m8n8"] or m[3] not in ("x1", "x2", "x4") or m[-1] != "b16":
            raise PTXError("modifiers")
        trans = int("trans" in m)
        count = int(m[3][1])
        src = self.vector(ops[1])
        base, offset = self.address(ops[0])
        self.min_shared = min(self.min_shared, 2 if trans else 4)
        slots = [self.operand(d, "r") for d in (base, *src)]
        self.emit("STMATRIX", slots, f0=count, f1=trans, imm=offset)

    def op_cp(self, m, ops):
        if m == ["async", "commit_group"]:
            self.emit("CPCOMMIT", [])
        elif m == ["async", "wait_group"]:
            self.emit("CPWAIT", [], imm=int(ops[0], 0))
        elif m == ["async", "wait_all"]:
            self.emit("CPWAIT", [], imm=-1)
        elif (
            len(m) == 4
            and m[0] == "async"
            and m[1] in ("ca", "cg")
            and m[2:] == ["shared", "global"]
        ):
            db, do = self.address(ops[0])
            sb, so = self.address(ops[1])
            slots = [self.operand(db, "r"), self.operand(sb, "d", 64)]
            if len(ops) > 3:
                slots.append(self.operand(ops[3], "r"))
            self.emit("CPASYNC", slots, f0=int(ops[2], 0), f1=int(len(ops) > 3), f2=so, imm=do)
        else:
            raise PTXError("modifiers")

    def op_bar(self, m, ops):
        if m == ["sync"] and ops == ["0"]:
            self.emit("BAR", [])
        elif m == ["warp", "sync"]:
            self.emit("WARPSYNC", [])
        else:
            raise PTXError("barrier")

    def op_barrier(self, m, ops):
        if m not in (
            ["sync"],
            ["sync", "aligned"],
            ["cta", "sync"],
            ["cta", "sync", "aligned"],
        ) or ops != ["0"]:
            raise PTXError("barrier")
        self.emit("BAR", [])

    def op_shfl(self, m, ops):
        if m[0] != "sync" or m[2] != "b32":
            raise PTXError("modifiers")
        d, _, p = ops[0].partition("|")
        slots = [self.operand(d, "r"), self.operand(p, "p") if p else -1]
        slots += [self.operand(o, "r") for o in ops[1:5]]
        self.emit("SHFL", slots, f0=["up", "down", "bfly", "idx"].index(m[1]))

    def op_redux(self, m, ops):
        kinds = ["min.s32", "max.s32", "min.u32", "max.u32", "add.s32", "add.u32"]
        if m[0] != "sync" or ".".join(m[1:]) not in kinds:
            raise PTXError("modifiers")
        self.simple("REDUX", ops, "rrr", f0=kinds.index(".".join(m[1:])))

    def op_vote(self, m, ops):
        raise PTXError("vote")

    def op_elect(self, m, ops):
        if m != ["sync"]:
            raise PTXError("modifiers")
        d, _, p = ops[0].partition("|")
        self.emit("ELECT", [-1 if d == "_" else self.operand(d, "r"), self.operand(p, "p")])

    def op_mma(self, m, ops):
        shapes = {
            "sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": ("MMATF32", (4, 4, 2, 4)),
            "sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ("MMABF16", (4, 4, 2, 4)),
            "sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": ("MMAF16", (4, 4, 2, 4)),
        }
        key = ".".join(m)
        if key not in shapes:
            raise PTXError("matrix product")
        name, counts = shapes[key]
        slots = []
        for o, count in zip(ops, counts, strict=True):
            v = self.vector(o)
            if len(v) != count:
                raise PTXError("fragment")
            slots += [self.operand(x, "r") for x in v]
        self.emit(name, slots)

    def op_wgmma(self, m, ops):
        q = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)(k\d+)\.f32\.(\w+)\.\3", ".".join(m))
        kinds = {("k8", "tf32"): 0, ("k16", "bf16"): 1, ("k16", "f16"): 2}
        if q and q.groups()[1:] in kinds:
            self._wgmma(int(q[1]), kinds[q.groups()[1:]], ops)
        elif m == ["fence", "sync", "aligned"]:
            self.emit("WGFENCE", [])
        elif m == ["commit_group", "sync", "aligned"]:
            self.emit("WGCOMMIT", [])
        elif m == ["wait_group", "sync", "aligned"]:
            self.inflight = None
            self.emit("WGWAIT", [], imm=int(ops[0], 0))
        else:
            raise PTXError("matrix product")

    def _wgmma(self, n, kind, ops):
        d = self.vector(ops[0])
        if len(d) != n // 2:
            raise PTXError("accumulators")
        slots = [self.operand(x, "r") for x in d]
        shared = not ops[1].startswith("{")
        if shared:
            slots.append(self.operand(ops[1], "d", 64))
        else:
            a = self.vector(ops[1])
            if len(a) != 4:
                raise PTXError("fragment")
            slots += [self.operand(x, "r") for x in a]
        slots.append(self.operand(ops[2], "d", 64))
        imm = 0
        if re.fullmatch(r"-?\d+", ops[3]):
            slots.append(-1)
            imm = int(int(ops[3]) != 0)
        else:
            slots.append(self.operand(ops[3], "p"))
        sa, sb = int(ops[4]), int(ops[5])
        if abs(sa) != 1 or abs(sb) != 1:
            raise PTXError("scales")
        if ops[6:] != (
            ["0"] * (1 + shared) if kind else []
        ):  # 16-bit operands must not be transposed
            raise PTXError("transposed operand")
        line, regs = self.inflight or (self.line, set())
        self.inflight = (line, regs | set(d) | (set() if shared else set(a)))
        self.emit(
            "WGMMA", slots, f0=n, f1=shared | (sa < 0) << 1 | (sb < 0) << 2 | kind << 3, imm=imm
        )

    def op_fence(self, m, ops):
        if m != ["proxy", "async", "shared::cta"]:
            raise PTXError("fence")
        self.emit("FENCEPROXY", [])

    def op_bra(self, m, ops):
        if m not in ([], ["uni"]):
            raise PTXError("modifiers")
        if self.inflight is not None:
            self.findings.append((self.line, "a branch between wgmma and its wait: not checked"))
        self.fixups.append((len(self.ins), ops[0], self.line))
        self.emit("BRA", [])

    def op_ret(self, m, ops):
        self.emit("RET", [])

    def op_exit(self, m, ops):
        self.emit("RET", [])

    def op_trap(self, m, ops):
        self.emit("TRAP", [])


_programs: dict[str, Program] = {}


def decode(text: str) -> Program:
    """Return the only kernel of a PTX text, decoded once."""
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _programs:
        _programs[key] = Decoder(text).decode()
    return _programs[key]


# ------------------------------------------------------------------------------------- execution

KINDS = [
    "OOB_GLOBAL", "OUT_OF_VIEW", "UNINIT_GLOBAL", "MISALIGNED", "OOB_SHARED", "UNINIT_SHARED",
    "RACE_RAW_G", "RACE_WAR_G", "RACE_WAW_G", "RACE_RAW_S", "RACE_WAR_S", "RACE_WAW_S",
    "SAMEVAL_WAW_G", "SAMEVAL_WAW_S", "CTA_RACE", "CTA_SAMEVAL", "LANE_RAW_G", "LANE_WAR_G",
    "LANE_WAW_G", "LANE_RAW_S", "LANE_WAR_S", "LANE_WAW_S", "LANE_SAMEVAL", "ASYNC_RACE",
    "NC_AFTER_WRITE", "DIVERGENT", "DEADLOCK", "PROXY_FENCE", "WGMMA_REGS", "UNDEF_TF32",
    "HARD_ERROR", "INSTR_WAW",
]  # fmt: skip
assert LIB.num_kinds() == len(KINDS)


def _fields(kind, names: str) -> list:
    return [(name, kind) for name in names.split()]


_I32, _U64, _POINTER = ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p


class _Region(ctypes.Structure):
    _fields_ = (*_fields(_U64, "size"), *_fields(_POINTER, "data flags"), *_fields(_I32, "unit id"))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", _I32 * 3),
        *_fields(_I32, "nctas"),
        *_fields(_POINTER, "ctas"),
        *_fields(_I32, "threads shared"),
        *_fields(_POINTER, "params"),
        *_fields(_I32, "nregions"),
        *_fields(_POINTER, "regions"),
        *_fields(_U64, "seed"),
        *_fields(_I32, "slice noise tcmode sunit lanecheck poison"),
        *_fields(_U64, "budget"),
    )


class _Prog(ctypes.Structure):
    _fields_ = (
        *_fields(_I32, "nins"),
        *_fields(_POINTER, "ins pool"),
        *_fields(_I32, "nr nrd np nc32"),
        *_fields(_POINTER, "c32slot c32val"),
        *_fields(_I32, "nc64"),
        *_fields(_POINTER, "c64slot c64val"),
        *_fields(_I32, "nspec"),
        *_fields(_POINTER, "specslot speckind"),
        *_fields(_I32, "nparam"),
        *_fields(_POINTER, "paramslot paramwidth paramoff"),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        *_fields(_I32, "kind line other count cta warp lane owarp olane octa"),
        *_fields(_U64, "addr"),
        *_fields(_I32, "region epoch"),
    )


@dataclass
class Options:
    """How a launch is executed."""

    seed: int = 1  # seed of the order in which warps run
    slice: int = 0  # most instructions of a warp at a time; 0: up to the next barrier
    noise: int = 0  # 1: approximate instructions are off by their documented error
    tcmode: int = 1  # bit 0: sums cut as tensor cores do; bit 1: operands rounded to TF32, not cut
    budget: int = 2_000_000_000  # instructions after which a warp counts as hung


@dataclass
class Memory:
    """Address and size of a storage; per byte, whether it is written and belongs to a tensor."""

    data: int
    size: int
    flags: np.ndarray | None
    unit: int


def address_of(region: int, offset: int) -> int:
    """Return the address that a kernel sees; storages are far apart."""
    return ((region + 1) << 40) + (1 << 39) + offset


def execute(
    program: Program,
    grid: tuple[int, int, int],
    ctas: Sequence[int],
    shared: int,
    params: bytes,
    memories: list[Memory],
    options: Options,
) -> tuple[list[dict], list[int], str]:
    """Run CTAs of a launch.

    Returns:
        Findings, statistics, and the error that stopped the launch, or "".
    """
    keep = []

    def array(values, dtype):
        a = np.ascontiguousarray(np.array(values, dtype=dtype))
        keep.append(a)
        return a.ctypes.data

    p = _Prog()
    p.nins, p.ins, p.pool = len(program.ins), program.ins.ctypes.data, program.pool.ctypes.data
    p.nr, p.nrd, p.np = program.nr, program.nrd, program.np
    p.nc32, p.nc64, p.nspec = len(program.c32), len(program.c64), len(program.special)
    p.c32slot, p.c32val = array([*program.c32.values()], np.int32), array([*program.c32], np.uint32)
    p.c64slot, p.c64val = array([*program.c64.values()], np.int32), array([*program.c64], np.uint64)
    p.specslot = array([*program.special.values()], np.int32)
    p.speckind = array([SPECIAL[k] for k in program.special], np.int32)
    p.nparam = len(program.params)
    for name, i in (("paramslot", 0), ("paramwidth", 1), ("paramoff", 2)):
        setattr(p, name, array([x[i] for x in program.params], np.int32))
    launch = _Launch()
    launch.grid[:] = list(grid)
    launch.nctas, launch.ctas = len(ctas), array(ctas, np.int32)
    launch.threads, launch.shared = program.threads, shared
    buffer = ctypes.create_string_buffer(params, max(len(params), 8))
    launch.params = ctypes.addressof(buffer)
    regions = (_Region * max(len(memories), 1))()
    for i, m in enumerate(memories):
        flags = m.flags.ctypes.data if m.flags is not None else None
        regions[i] = _Region(m.size, m.data, flags, m.unit, i)
    launch.nregions, launch.regions = len(memories), ctypes.addressof(regions)
    launch.seed, launch.slice, launch.budget = options.seed, options.slice, options.budget
    launch.noise, launch.tcmode, launch.sunit = options.noise, options.tcmode, program.shared_unit
    reports = (_Report * 5000)()
    stats = (ctypes.c_uint64 * (2 + len(OPS)))()
    error = ctypes.create_string_buffer(400)
    n = LIB.run_launch(ctypes.byref(p), ctypes.byref(launch), reports, 5000, stats, error, 400)
    names = [name for name, _ in _Report._fields_]
    found = [{f: getattr(r, f) for f in names} | {"kind": KINDS[r.kind]} for r in reports[:n]]
    return found, list(stats), error.value.decode()
