"""Decode PTX text into the instructions that ``emulator.cpp`` executes.

An unknown instruction, modifier or operand is an error; none is ignored.
"""

import ctypes
import hashlib
import itertools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    lib.op_name.restype = lib.kind_name.restype = ctypes.c_char_p
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
_APPROXIMATE = ("rcp", "ex2", "lg2", "sqrt", "rsqrt", "tanh")
INSTRUCTION = np.dtype([("f", np.int32, 8), ("imm", np.int64)])
CMP = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


_INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def _plain_instructions() -> dict[str, tuple[str, str, int, int]]:
    """Return operation, kinds of operands, bits of immediates and flags of instructions without other operands."""
    table = {
        "mul.wide.s32": ("MULWS32", "drr", 32, 0), "mul.wide.u32": ("MULWU32", "drr", 32, 0),
        "mul.hi.s32": ("MULHIS32", "rrr", 32, 0), "mul.hi.u32": ("MULHIU32", "rrr", 32, 0),
        "mul.hi.u64": ("MULHIU64", "ddd", 64, 0), "mad.wide.s32": ("MADWS32", "drrd", 32, 0),
        "mad.wide.u32": ("MADWU32", "drrd", 32, 0), "bfe.u32": ("BFEU32", "rrrr", 32, 0),
        "bfe.s32": ("BFES32", "rrrr", 32, 0), "bfe.u64": ("BFEU64", "ddrr", 32, 0),
        "bfi.b32": ("BFI32", "rrrrr", 32, 0), "prmt.b32": ("PRMT", "rrrr", 32, 0),
        "popc.b32": ("POPC32", "rr", 32, 0), "clz.b32": ("CLZ32", "rr", 32, 0),
        "neg.f32": ("FNEG", "rr", 32, 0), "abs.f32": ("FABS", "rr", 32, 0),
        "abs.ftz.f32": ("FABS", "rr", 32, 0), "min.NaN.f32": ("FMIN", "rrr", 32, 2),
        "max.NaN.f32": ("FMAX", "rrr", 32, 2), "bar.sync": ("BAR", "", 32, 0),
        "bar.warp.sync": ("WARPSYNC", "", 32, 0), "ret": ("RET", "", 32, 0),
        "fence.proxy.async.shared::cta": ("FENCEPROXY", "", 32, 0),
        "wgmma.fence.sync.aligned": ("WGFENCE", "", 32, 0),
        "wgmma.commit_group.sync.aligned": ("WGCOMMIT", "", 32, 0),
    }  # fmt: skip
    for t in _INTEGERS:
        bits = 8 * WIDTH[t]
        kind = "d" if bits == 64 else "r"
        counts = {"add": 3, "sub": 3, "mul.lo": 3, "mad.lo": 4, "neg": 2, "abs": 2}
        for name, count in counts.items():
            table[f"{name}.{t}"] = (f"{name[:3].upper()}{bits}", count * kind, bits, 0)
        for name in ("div", "rem", "min", "max"):
            table[f"{name}.{t}"] = (f"{name.upper()}{t.upper()}", 3 * kind, bits, 0)
        table[f"shr.{t}"] = (f"SHR{t[0].upper()}{bits}", f"{kind}{kind}r", 32, 0)
    for bits, kind in ((16, "r"), (32, "r"), (64, "d")):
        table[f"shl.b{bits}"] = (f"SHL{bits}", f"{kind}{kind}r", 32, 0)
    for name, count in (("and", 3), ("or", 3), ("xor", 3), ("not", 2)):
        table[f"{name}.pred"] = (f"{name.upper()}P", count * "p", 32, 0)
        for bits, kind in ((16, "r"), (32, "r"), (64, "d")):
            table[f"{name}.b{bits}"] = (f"{name.upper()}{bits}", count * kind, bits, 0)
    for rn, (ftz, flag) in itertools.product(("", ".rn"), (("", 0), (".ftz", 1))):
        for name, count in {"add": 3, "sub": 3, "mul": 3, "fma": 4}.items():
            table[f"{name}{rn}{ftz}.f32"] = (f"F{name.upper()}", count * "r", 32, flag)
            table[f"{name}{rn}.f32x2"] = (f"F{name.upper()}2", count * "d", 64, 0)
        for name in ("min", "max"):
            table[f"{name}{ftz}.f32"] = (f"F{name.upper()}", "rrr", 32, flag)
        for name, count in ({"div": 3} | dict.fromkeys(_APPROXIMATE, 2)).items():
            for accuracy, more in ((rn, 0), (".full", 4), (".approx", 12)):
                entry = (f"F{name.upper()}", count * "r", 32, flag | more)
                table[f"{name}{accuracy}{ftz}.f32"] = entry
    return {opcode: entry for opcode, entry in table.items() if entry[0] in OPS}


PLAIN = _plain_instructions()
TOKEN = re.compile(
    r"(?P<blank>\s+|;|//[^\n]*|\.pragma[^;]*;)|\.loc(?P<loc>[^\n]*)|\.reg (?P<reg>[^;]*);"
    r"|(?P<open>\{)|(?P<close>\})|(?P<label>[$%\w]+):|(?P<instruction>[^;]*);"
)


class Program:
    """A kernel, decoded from its PTX text."""

    def __init__(self, text: str) -> None:
        self.text = text.split("\n")
        self.ins, self.pool = [], []
        self.nr = self.nrd = self.np = 0  # registers of 32 and 64 bits, and predicates
        self.c32, self.c64, self.special = {}, {}, {}  # slots of constants and special registers
        self.param_types = {}
        self.params = {}  # name -> (kind, slot), for those that the kernel reads
        self.lines = {}  # PTX line -> source location
        self.shared_unit = 4
        self.findings = []
        self.threads = None
        self._scopes, self._ranges = [{}], {}
        self._labels, self._branches = {}, []
        self._inflight = None
        self._body(text, self._head(text))
        for index, label, line in self._branches:
            if label not in self._labels:
                raise PTXError(f"label {label} of line {line}")
            self.ins[index][1] = self._labels[label]
        self.ins = np.array([(fields, imm) for fields, imm in self.ins], INSTRUCTION)
        self.pool = np.array(self.pool, np.int32)

    # ------------------------------------------------------------------ structure

    def _head(self, text: str) -> int:
        """Decode parameters and directives, and return where the body begins."""
        entries = re.findall(r"\.entry", text)
        m = re.search(r"\.visible \.entry \S+?\(([^)]*)\)([^{]*)\{", text)
        if not m or len(entries) != 1:
            raise PTXError("not exactly one kernel")
        for v in re.findall(r"^\s*\.(?:func|global|const|visible \.func|weak)\b.*", text, re.M):
            g = re.match(r"\s*\.global \.align 1 \.b8 (\S+?)\[\d+\] = ", v)
            if not g or text.count(g[1]) != 1:  # allow only a string that nothing refers to
                raise PTXError(f"functions or global variables: {v[:80]}")
        for p in filter(None, (p.strip() for p in m[1].split(","))):
            q = re.fullmatch(r"\.param \.(\w+)(?: \.ptr \.global \.align \d+)? (\S+)", p)
            if not q:
                raise PTXError(f"parameter {p}")
            self.param_types[q[2]] = q[1]
        for name, value in re.findall(r"\.(\w+) ?([\d, ]*)", m[2]):
            if name in ("reqntid", "maxntid"):
                self.threads = int(value.split(",")[0])
            elif name not in ("maxnreg", "minnctapersm"):
                raise PTXError(f"directive {name}")
        memory = ".extern .shared .align 16 .b8 global_smem[]"
        if ".shared" in text[: m.start()] and memory not in text:
            raise PTXError("shared variables")
        return m.end()

    def _body(self, text: str, pos: int) -> None:
        line, source, depth = text.count("\n", 0, pos) + 1, None, 1
        while depth:
            token = TOKEN.match(text, pos)
            if token is None:
                raise PTXError("unfinished")
            kind, raw = token.lastgroup, token[token.lastgroup]
            if kind == "loc":
                m = re.search(r"// (\S+)", raw)
                source = m[1] if m else None
                if m := re.search(r"inlined_at \d+ (\d+)", raw):
                    source = f"{source} (from line {m[1]})"
            elif kind == "reg":
                self._declare(raw)
            elif kind == "open":
                depth += 1
                self._scopes.append({})
            elif kind == "close":
                depth -= 1
                self._scopes.pop()
            elif kind == "label":
                self._labels[raw] = len(self.ins)
                if self._inflight is not None and not raw.startswith(("$L__tmp", "$L__func")):
                    self.findings.append((line, "a label between wgmma and its wait: not checked"))
            elif kind == "instruction":
                self.lines[line] = source
                plain = " ".join(re.sub(r"//[^\n]*", "", raw).split())
                try:
                    self._instruction(plain, line)
                except PTXError as error:
                    raise PTXError(f"line {line}: {plain}: {error}") from None
            line += token[0].count("\n")
            pos = token.end()

    def _declare(self, raw: str) -> None:
        m = re.fullmatch(r"\.(\w+)\s+(.*)", " ".join(raw.split()))
        kind = "p" if m[1] == "pred" else {1: "r", 2: "r", 4: "r", 8: "d"}[WIDTH[m[1]]]
        for name in m[2].split(","):
            name = name.strip()
            q = re.fullmatch(r"(%\w+?)<(\d+)>", name)
            if q:
                self._ranges[q[1]] = (kind, self._new(kind, int(q[2])), int(q[2]))
            else:
                self._scopes[-1][name] = (kind, self._new(kind))

    def _new(self, kind: str, count: int = 1) -> int:
        name = {"p": "np", "r": "nr", "d": "nrd"}[kind]
        at = getattr(self, name)
        setattr(self, name, at + count)
        return at

    # ------------------------------------------------------------------- operands

    def _register(self, name: str) -> tuple[str, int] | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        m = re.fullmatch(r"(%[a-zA-Z]+)(\d+)", name)
        if m and m[1] in self._ranges:
            kind, base, count = self._ranges[m[1]]
            if int(m[2]) >= count:
                raise PTXError(f"register {name} beyond its range")
            return kind, base + int(m[2])
        return None

    def _const(self, kind: str, value: int) -> int:
        table = self.c32 if kind == "r" else self.c64
        value &= 0xFFFFFFFF if kind == "r" else (1 << 64) - 1
        if value not in table:
            table[value] = self._new(kind)
        return table[value]

    def _immediate(self, s: str) -> int | None:
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}|0d[0-9A-Fa-f]{16}", s):
            return int(s[2:], 16)
        if re.fullmatch(r"-?0x[0-9A-Fa-f]+", s):
            return int(s, 16)
        if re.fullmatch(r"-?\d+", s):
            return int(s)
        return SBASE if s == "global_smem" else None

    def _operand(self, s: str, kind: str, bits: int = 32) -> int:
        """Return the slot of an operand of kind p, r or d."""
        s = s.strip()
        reg = self._register(s)
        if reg:
            if reg[0] != kind:
                raise PTXError(f"operand {s} is of kind {reg[0]}, not {kind}")
            return reg[1]
        if s in SPECIAL:
            if kind != "r":
                raise PTXError(f"special register {s}")
            if s not in self.special:
                self.special[s] = self._new("r")
            return self.special[s]
        value = self._immediate(s)
        if value is None or kind == "p":
            raise PTXError(f"operand {s}")
        if bits == 16:
            value &= 0xFFFF
        return self._const(kind, value)

    def _address(self, s: str) -> tuple[str, int]:
        m = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", s.strip())
        if not m:
            raise PTXError(f"address {s}")
        return m[1], int(m[2] or "0", 0)

    @staticmethod
    def _split(s: str) -> list[str]:
        """Split at commas outside of braces and brackets."""
        return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", s) if part.strip()]

    @staticmethod
    def _vector(s: str) -> list[str]:
        s = s.strip()
        if s.startswith("{"):
            return [x.strip() for x in s[1:-1].split(",")]
        return [s]

    # --------------------------------------------------------------- instructions

    def _emit(self, op: str, operands: Sequence[int], f0=0, f1=0, f2=0, imm=0) -> None:
        if op not in OPS:
            raise PTXError(f"operation {op} is not in the emulator")
        fields = (OPS[op], self._guard, len(self.pool), len(operands), f0, f1, f2, self._line)
        self.ins.append([fields, imm if imm < 1 << 63 else imm - (1 << 64)])
        self.pool.extend(operands)

    def _instruction(self, raw: str, line: int) -> None:
        self._line, self._guard = line, -1
        m = re.match(r"@(!?)(\S+)\s+(.*)", raw)
        if m:
            self._guard = self._operand(m[2], "p") << 1 | (m[1] == "!")
            raw = m[3]
        opcode, _, rest = raw.partition(" ")
        name, *mods = opcode.split(".")
        ops = self._split(rest)
        flying = self._inflight[1] if self._inflight and name != "wgmma" else set()
        if clash := flying & set(re.findall(r"%\w+", rest)):
            what = f"registers {sorted(clash)} of the wgmma of line {self._inflight[0]} in flight"
            self.findings.append((line, what))
        if opcode in PLAIN:
            op, kinds, bits, flags = PLAIN[opcode]
            if op in ("FMIN", "FMAX") and len(ops) == 4:  # of three numbers (sm_100 and later)
                if ops[0] == ops[3]:
                    raise PTXError("a target that is also the third number")
                self._simple(op, ops[:3], kinds, bits, f0=flags)
                ops = [ops[0], ops[0], ops[3]]  # the target holds the result so far
            if op in ("BAR", "WARPSYNC"):
                if op == "BAR" and ops != ["0"]:
                    raise PTXError("barrier")
                ops = []
            self._simple(op, ops, kinds, bits, f0=flags)
        elif handler := getattr(self, "_op_" + name, None):
            handler(mods, ops)
        else:
            raise PTXError("unknown instruction")

    def _simple(self, op, ops, kinds, bits=32, **k):
        if len(ops) != len(kinds):
            raise PTXError("number of operands")
        self._emit(op, [self._operand(o, t, bits) for o, t in zip(ops, kinds, strict=True)], **k)

    def _op_mov(self, m, ops):
        (t,) = m
        if t == "pred":
            if ops[1] not in ("-1", "1", "0"):
                self._simple("MOVP", ops, "pp")
                return
            # set a constant predicate by comparing two constants
            one, compare = self._const("r", 0), "eq" if ops[1] != "0" else "ne"
            slots = [self._operand(ops[0], "p"), one, one]
            self._emit("SETPS32", slots, f0=CMP.index(compare))
            return
        w = WIDTH[t]
        wide, bits = ("d", "64") if w == 8 else ("r", "32")
        whole, parts = ops if ops[1].startswith("{") else ops[::-1]
        if not parts.startswith("{"):
            self._simple(f"MOV{bits}", ops, 2 * wide, 8 * w)
            return
        parts = self._vector(parts)
        if len(parts) != 2:
            raise PTXError("vector move")
        slots = [self._new("r") if p == "_" else self._operand(p, "r") for p in parts]
        whole = [self._operand(whole, wide)]
        if ops[1].startswith("{"):
            self._emit(f"PACK{bits}", whole + slots)
        else:
            self._emit(f"UNPACK{bits}", slots + whole)

    def _half_and_float(self, m, ops) -> list[int]:
        """Return the operands, all but the last converted from half precision to float32 (sm_100 and later)."""
        if m not in (["rn", "f32", "bf16"], ["rn", "f32", "f16"]):
            raise PTXError("modifiers")
        convert, _, flags = CONVERSIONS[f"f32.{m[-1]}"]
        target, *halves, last = ops
        wide = [self._new("r") for _ in halves]
        for slot, half in zip(wide, halves, strict=True):
            self._emit(convert, [slot, self._operand(half, "r", 16)], f0=flags)
        return [self._operand(target, "r"), *wide, self._operand(last, "r")]

    def _op_add(self, m, ops):
        self._emit("FADD", self._half_and_float(m, ops))

    def _op_fma(self, m, ops):
        self._emit("FFMA", self._half_and_float(m, ops))

    def _op_sub(self, m, ops):
        if m not in (["rn", "f32x2"], ["f32x2"]):
            self._emit("FSUB", self._half_and_float(m, ops))
            return
        first, second = ([self._new("r"), self._new("r")] for _ in range(2))
        for pair, name in ((first, ops[1]), (second, ops[2])):
            self._emit("UNPACK64", [*pair, self._operand(name, "d")])
        for a, b in zip(first, second, strict=True):
            self._emit("FSUB", [a, a, b])
        self._emit("PACK64", [self._operand(ops[0], "d"), *first])

    def _op_mul(self, m, ops):
        if m not in (["wide", "s16"], ["wide", "u16"]):
            raise PTXError("modifiers")
        extend, _, _ = CONVERSIONS[f"{m[1][0]}32.{m[1]}"]
        wide = [self._new("r") for _ in range(2)]
        for slot, factor in zip(wide, ops[1:], strict=True):
            self._emit(extend, [slot, self._operand(factor, "r", 16)])
        self._emit("MUL32", [self._operand(ops[0], "r"), *wide])

    def _op_selp(self, m, ops):
        w = WIDTH[m[0]]
        k = "d" if w == 8 else "r"
        slots = [self._operand(o, k, 8 * w) for o in ops[:3]]
        self._emit("SEL64" if w == 8 else "SEL32", [*slots, self._operand(ops[3], "p")])

    def _op_setp(self, m, ops):
        cmp, t = m
        if t == "f32":
            name, k, bits = "SETPF32", "r", 32
        else:
            unsigned, bits = t[0] in "ub", 8 * WIDTH[t]
            cmp = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(cmp, cmp)
            if cmp not in CMP[:6]:
                raise PTXError("comparison")
            name, k = f"SETP{'U' if unsigned else 'S'}{bits}", "d" if bits == 64 else "r"
        target, *compared = ops
        slots = [self._operand(target, "p"), *(self._operand(o, k, bits) for o in compared)]
        if len(slots) != 3:
            raise PTXError("operands")
        self._emit(name, slots, f0=CMP.index(cmp))

    def _op_cvt(self, m, ops):
        key = ".".join(m)
        if key not in CONVERSIONS:
            raise PTXError("conversion")
        name, kinds, f0 = CONVERSIONS[key]
        source = self._register(ops[-1])
        if kinds[-1] == "r" and source and source[0] == "d":  # a wider register: its low bits
            low = self._new("r")
            self._emit("CVTU32U64", [low, source[1]])
            self._emit(name, [self._operand(ops[0], kinds[0]), low], f0=f0)
        else:
            self._simple(name, ops, kinds, f0=f0)

    def _memory(self, m, registers, address):
        """Return f0, f1, f2 and offset of an access to memory, the slot of its address, and the registers."""
        space, nc, vec, t = None, 0, 1, m[-1]
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
        names, (base, offset) = self._vector(registers), self._address(address)
        if len(names) != vec:
            raise PTXError("vector length")
        if space == "shared":
            self.shared_unit = min(self.shared_unit, WIDTH[t])
        slot = self._operand(base, "d" if space == "global" else "r")
        how = vec | nc << 8 | (t[0] == "s") << 9
        fields = {"f0": int(space == "shared"), "f1": WIDTH[t], "f2": how, "imm": offset}
        return fields, slot, names

    def _op_ld(self, m, ops):
        if m[0] == "param":
            base, offset = self._address(ops[1])
            w = WIDTH[m[1]]
            if offset or w != WIDTH[self.param_types[base]]:
                raise PTXError("part of a parameter")
            k = "d" if w == 8 else "r"
            if w == 4 and (self._register(ops[0]) or "?")[0] == "d":  # extend to 64 bits
                name, kind = "CVTS64S32" if m[1][0] == "s" else "CVTU64U32", "d"
            else:
                name, kind = "MOV64" if w == 8 else "MOV32", k
            if base not in self.params:
                self.params[base] = (k, self._new(k))
            self._emit(name, [self._operand(ops[0], kind), self.params[base][1]])
            return
        fields, base, names = self._memory(m, *ops)
        width, slots, wide = fields["f1"], [], []
        for name in names:
            reg = self._register(name)
            if width < 8 and reg and reg[0] == "d":  # a wider register: extend
                slots.append(self._new("r"))
                wide.append((reg[1], slots[-1]))
            else:
                slots.append(self._operand(name, "d" if width == 8 else "r"))
        self._emit("LD", [*slots, base], **fields)
        for target, slot in wide:
            self._emit("CVTS64S32" if m[-1][0] == "s" else "CVTU64U32", [target, slot])

    def _op_st(self, m, ops):
        fields, base, names = self._memory(m, *ops[::-1])
        width, slots = fields["f1"], []
        for name in names:
            reg = self._register(name)
            if width < 8 and reg and reg[0] == "d":  # a wider register: store its low bits
                slots.append(self._new("r"))
                self._emit("CVTU32U64", [slots[-1], reg[1]])
            else:
                slots.append(self._operand(name, "d" if width == 8 else "r", 8 * width))
        self._emit("ST", [base, *slots], **fields)

    def _op_prefetch(self, m, ops):
        if m not in (["global", "L1"], ["global", "L2"]):
            raise PTXError("modifiers")
        base, _ = self._address(ops[0])
        self._operand(base, "d", 64)
        self._emit("NOP", [])  # any address may be prefetched, and nothing is read

    def _op_ldmatrix(self, m, ops):
        self._matrices("LDMATRIX", m, ops[1], [*self._vector(ops[0]), None])

    def _op_stmatrix(self, m, ops):
        self._matrices("STMATRIX", m, ops[0], [None, *self._vector(ops[1])])

    def _matrices(self, name, m, address, registers):
        """Emit an access to matrices of 8 x 8 numbers; None among the registers stands for the address."""
        if m[:3] != ["sync", "aligned", "m8n8"] or m[3] not in ("x1", "x2", "x4") or m[-1] != "b16":
            raise PTXError("modifiers")
        trans = int("trans" in m)
        base, offset = self._address(address)
        self.shared_unit = min(self.shared_unit, 2 if trans else 4)
        slots = [self._operand(base if register is None else register, "r") for register in registers]
        self._emit(name, slots, f0=int(m[3][1]), f1=trans, imm=offset)

    def _op_shfl(self, m, ops):
        if m[0] != "sync" or m[2] != "b32":
            raise PTXError("modifiers")
        d, _, p = ops[0].partition("|")
        slots = [self._operand(d, "r"), self._operand(p, "p") if p else -1]
        slots += [self._operand(o, "r") for o in ops[1:5]]
        self._emit("SHFL", slots, f0=["up", "down", "bfly", "idx"].index(m[1]))

    def _op_redux(self, m, ops):
        kinds = ["min.s32", "max.s32", "min.u32", "max.u32", "add.s32", "add.u32"]
        if m[0] != "sync" or ".".join(m[1:]) not in kinds:
            raise PTXError("modifiers")
        self._simple("REDUX", ops, "rrr", f0=kinds.index(".".join(m[1:])))

    def _op_movmatrix(self, m, ops):
        if m != ["sync", "aligned", "m8n8", "trans", "b16"]:
            raise PTXError("modifiers")
        self._simple("MOVMATRIX", ops, "rr")

    def _op_mma(self, m, ops):
        shapes = {
            "sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": ("MMATF32", (4, 4, 2, 4)),
            "sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ("MMABF16", (4, 4, 2, 4)),
            "sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": ("MMAF16", (4, 4, 2, 4)),
            "sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": ("MMABF16K8", (4, 2, 1, 4)),
        }
        key = ".".join(m)
        if key not in shapes:
            raise PTXError("matrix product")
        name, counts = shapes[key]
        slots = []
        for o, count in zip(ops, counts, strict=True):
            v = self._vector(o)
            if len(v) != count:
                raise PTXError("fragment")
            slots += [self._operand(x, "r") for x in v]
        self._emit(name, slots)

    def _op_wgmma(self, m, ops):
        q = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)(k\d+)\.f32\.(\w+)\.\3", ".".join(m))
        kinds = {("k8", "tf32"): 0, ("k16", "bf16"): 1, ("k16", "f16"): 2}
        if q and q.groups()[1:] in kinds:
            self._wgmma(int(q[1]), kinds[q.groups()[1:]], ops)
        elif m == ["wait_group", "sync", "aligned"]:
            self._inflight = None
            self._emit("WGWAIT", [], imm=int(ops[0], 0))
        else:
            raise PTXError("matrix product")

    def _wgmma(self, n, kind, ops):
        d = self._vector(ops[0])
        if len(d) != n // 2:
            raise PTXError("accumulators")
        slots = [self._operand(x, "r") for x in d]
        shared = not ops[1].startswith("{")
        if shared:
            slots.append(self._operand(ops[1], "d", 64))
        else:
            a = self._vector(ops[1])
            if len(a) != 4:
                raise PTXError("fragment")
            slots += [self._operand(x, "r") for x in a]
        slots.append(self._operand(ops[2], "d", 64))
        imm = 0
        if re.fullmatch(r"-?\d+", ops[3]):
            slots.append(-1)
            imm = int(int(ops[3]) != 0)
        else:
            slots.append(self._operand(ops[3], "p"))
        sa, sb = int(ops[4]), int(ops[5])
        if abs(sa) != 1 or abs(sb) != 1:
            raise PTXError("scales")
        if ops[6:] != (["0"] * (1 + shared) if kind else []):  # 16-bit operands must not be transposed
            raise PTXError("transposed operand")
        line, regs = self._inflight or (self._line, set())
        self._inflight = (line, regs | set(d) | (set() if shared else set(a)))
        self._emit("WGMMA", slots, f0=n, f1=shared | (sa < 0) << 1 | (sb < 0) << 2 | kind << 3, imm=imm)

    def _op_bra(self, m, ops):
        if m not in ([], ["uni"]):
            raise PTXError("modifiers")
        if self._inflight is not None:
            self.findings.append((self._line, "a branch between wgmma and its wait: not checked"))
        self._branches.append((len(self.ins), ops[0], self._line))
        self._emit("BRA", [])


_programs: dict[str, Program] = {}


def decode(text: str) -> Program:
    """Return the only kernel of a PTX text, decoded once."""
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _programs:
        _programs[key] = Program(text)
    return _programs[key]


# ------------------------------------------------------------------------------------- execution

KINDS = [LIB.kind_name(i).decode() for i in range(LIB.num_kinds())]
INITIAL = np.dtype([("kind", np.int32), ("slot", np.int32), ("value", np.uint64)])


def _fields(kind, names: str) -> list:
    return [(name, kind) for name in names.split()]


_I32, _U64, _POINTER = ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p


class _Region(ctypes.Structure):
    _fields_ = (*_fields(_U64, "size"), *_fields(_POINTER, "data flags"), *_fields(_I32, "unit id"))


class _Launch(ctypes.Structure):
    _fields_ = (
        *_fields(_I32, "nins"),
        *_fields(_POINTER, "ins pool"),
        *_fields(_I32, "nr nrd np ninit"),
        *_fields(_POINTER, "init"),
        ("grid", _I32 * 3),
        *_fields(_I32, "threads shared nregions"),
        *_fields(_POINTER, "regions"),
        *_fields(_U64, "seed"),
        *_fields(_I32, "slice sunit"),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        *_fields(_I32, "kind line other count cta warp lane owarp olane octa"),
        *_fields(_U64, "addr"),
        *_fields(_I32, "region epoch"),
    )


@dataclass
class Memory:
    """Address and size of a storage; per byte, whether it is written and belongs to a tensor."""

    data: int
    size: int
    flags: np.ndarray
    unit: int


def address_of(region: int, offset: int) -> int:
    """Return the address that a kernel sees; storages are far apart."""
    return ((region + 1) << 40) + (1 << 39) + offset


def execute(
    program: Program,
    grid: tuple[int, int, int],
    shared: int,
    params: Mapping[str, int],
    memories: list[Memory],
    seed: int = 1,
    slice: int = 0,
) -> tuple[list[dict], int, str]:
    """Run a launch.

    Args:
        program: The kernel.
        grid: Numbers of programs.
        shared: Bytes of shared memory of a program.
        params: Bits of each parameter.
        memories: Storages that the kernel may access.
        seed: Seed of the order in which warps run.
        slice: Most instructions of a warp at a time; 0: up to the next barrier.

    Returns:
        Findings, executed warp instructions, and the error that stopped the launch, or "".
    """
    initial = [(0, slot, value) for value, slot in program.c32.items()]
    initial += [(1, slot, value) for value, slot in program.c64.items()]
    initial += [(2, slot, SPECIAL[name]) for name, slot in program.special.items()]
    initial += [(int(k == "d"), slot, params[name]) for name, (k, slot) in program.params.items()]
    initial = np.array(initial, INITIAL)
    launch = _Launch()
    launch.nins, launch.ins = len(program.ins), program.ins.ctypes.data
    launch.pool, launch.init, launch.ninit = (
        program.pool.ctypes.data,
        initial.ctypes.data,
        len(initial),
    )
    launch.nr, launch.nrd, launch.np = program.nr, program.nrd, program.np
    launch.grid[:] = list(grid)
    launch.threads, launch.shared = program.threads, shared
    regions = (_Region * max(len(memories), 1))()
    for i, m in enumerate(memories):
        regions[i] = _Region(m.size, m.data, m.flags.ctypes.data, m.unit, i)
    launch.nregions, launch.regions = len(memories), ctypes.addressof(regions)
    launch.seed, launch.slice, launch.sunit = seed, slice, program.shared_unit
    reports = (_Report * 5000)()
    instructions = ctypes.c_uint64()
    error = ctypes.create_string_buffer(400)
    n = LIB.run_launch(ctypes.byref(launch), reports, 5000, ctypes.byref(instructions), error, 400)
    names = [name for name, _ in _Report._fields_]
    found = [{f: getattr(r, f) for f in names} | {"kind": KINDS[r.kind]} for r in reports[:n]]
    return found, instructions.value, error.value.decode()
