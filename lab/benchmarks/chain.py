"""Cycles that one warp needs for an iteration of a kernel's loops, from its machine code, without a GPU.

A model of one warp that executes in order: an instruction issues after the one before it, as soon as its source
registers are ready. Each kind of instruction has a fixed latency; a load from global memory takes 620 cycles, whatever
the caches hold. On an H100, the scans' loops agreed within 20 % if nothing ran beside them. With several warps on a
scheduler, the time is bounded below by the longer of the chain, the instructions of all warps, and the accesses to
shared memory and the L1 cache, which a multiprocessor serves 128 bytes at a time (``wavefronts``).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LATENCIES = {  # of an H100, in cycles; MOVM was not measured and taken for LDSM
    "LDG": 620, "ATOM": 700, "LDL": 40, "LDS": 30, "LDSM": 33, "MOVM": 33, "LDC": 40, "S2R": 30, "R2UR": 12, "SHFL": 24,
    "MUFU": 24, "HMMA": 34, "HGMMA": 110, "I2F": 14, "F2F": 14, "F2FP": 6, "IMAD": 5, "FSETP": 6, "ISETP": 6,
}  # fmt: skip
OTHER, BARRIER = 4, 30
ROUNDS = 4  # iterations; the last one is in the steady state
_REGISTER = re.compile(r"\b(?:U?R\d+|U?P\d)\b")
_NO_RESULT = {
    "STG", "STS", "STL", "ST", "RED", "BAR", "BRA", "WARPSYNC", "BSYNC", "BSSY", "EXIT", "WARPGROUP", "CCTL",
    "DEPBAR", "MEMBAR", "NOP",
}  # fmt: skip
_TO_PREDICATES = {
    "ISETP", "FSETP", "PLOP3", "IADD3", "LOP3", "VOTE", "UISETP", "UIADD3", "ULOP3",
}  # fmt: skip


class Instruction(NamedTuple):
    """An instruction of a disassembly."""

    name: str
    """Opcode with modifiers, as LDG.E.128."""
    predicate: str
    operands: str

    @property
    def opcode(self) -> str:
        """Opcode without modifiers."""
        return self.name.partition(".")[0]


def parse(listing: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """Return the instructions of nvdisasm's listing, and first and last + 1 of inner loops, the longest first.

    A loop is the code between a label and the last branch back to it, unless it contains another loop.
    """
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    ends: dict[int, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(found)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?\w+ +)?([A-Z][\w.]*)\s*([^;]*);", line):
            branch = re.search(r"`\((\.L\w+)\)", match[3]) if match[2].startswith("BRA") else None
            start = labels.get(branch[1]) if branch else None
            # A branch to itself is the trap behind every kernel's end; only padding follows it.
            if start is not None and start < len(found):
                ends[start] = len(found) + 1
            found.append(Instruction(match[2], match[1] or "", match[3]))
    while found[-1].opcode == "NOP":
        found.pop()
    inner = [
        (start, end)
        for start, end in ends.items()
        if not any(start <= s and e <= end for s, e in ends.items() if s != start)
    ]
    return found, sorted(inner, key=lambda loop: loop[0] - loop[1])


def simulate(body: Sequence[Instruction]) -> tuple[int, dict[str, int]]:
    """Return the cycles of an iteration, and for what it waits how long: opcodes, the longest first."""
    warp = _Warp()
    ends, waits = [], []
    for _ in range(ROUNDS):
        for instruction in body:
            warp.issue(instruction)
        ends.append(warp.now)
        waits.append(Counter(warp.waits))
    return ends[-1] - ends[-2], dict((waits[-1] - waits[-2]).most_common())


def wavefronts(body: Iterable[Instruction]) -> int:
    """Return the cycles for which a warp's iteration occupies the data path of shared memory and the L1 cache.

    A multiprocessor has one such path. Lanes that read the same number occupy it as if they read different ones. That
    MOVM occupies it is an assumption. In both backward passes of commit f9610ec, Nsight Compute counted 6 % more on an
    H100, which were 57 and 59 % of the time.
    """
    found = 0
    for instruction in body:
        opcode, _, modifiers = instruction.name.partition(".")
        if opcode in ("LDG", "STG", "LDS", "STS", "LDL", "STL"):
            found += 4 if "128" in modifiers else 2 if "64" in modifiers else 1
        elif opcode in ("LDSM", "STSM"):
            found += int(modifiers[-1]) if modifiers[-2:] in (".2", ".4") else 1
        elif opcode in ("SHFL", "MOVM"):
            found += 1
    return found


class _Warp:
    """State of the warp: when each register is ready, and by which opcode."""

    def __init__(self) -> None:
        self.now = 0
        self.waits: Counter[str] = Counter()
        self.ready: dict[str, int] = defaultdict(int)
        self.source: dict[str, str] = {}
        self.products = 0  # end of the products of the warp group

    def issue(self, instruction: Instruction) -> None:
        """Issue an instruction as soon as its sources are ready."""
        opcode = instruction.opcode
        if opcode == "NOP":
            return
        results, sources = _operands(instruction)
        start, cause = self.now + 1, ""
        when = start
        for register in sources:
            if self.ready[register] > when:
                when, cause = self.ready[register], self.source[register]
        if opcode == "WARPGROUP" and "ARRIVE" not in instruction.name and self.products > when:
            when, cause = self.products, "HGMMA"
        if opcode == "BAR":
            when, cause = when + BARRIER, cause or "BAR"
        if when > start:
            self.waits[cause] += when - start
        self.now = when
        end = when + LATENCIES.get(opcode, OTHER)
        if opcode == "HGMMA":
            self.products = max(self.products, end)
        for register in results:
            self.ready[register], self.source[register] = end, opcode


def _operands(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Return the registers that an instruction writes, and those that it reads."""
    opcode, name = instruction.opcode, instruction.name
    parts = [part.strip() for part in instruction.operands.split(",")]
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    written = 0 if opcode in _NO_RESULT else 1
    if opcode in _TO_PREDICATES:
        while written < len(parts) and re.fullmatch(r"U?P\w+", parts[written]):
            written += 1
    sources = _registers([instruction.predicate], 1)
    for part in parts[written:]:
        pair = opcode != "HGMMA" and ("desc" in part or ".64" in part)
        sources += _registers([part], 2 if pair or opcode == "HMMA" else 1)
    if opcode in ("STG", "STS", "STL"):
        sources += _registers(parts[-1:], width)
    if opcode == "HGMMA":
        shape = re.search(r"64x(\d+)", name)
        width = int(shape[1]) // 2 if shape else 4
    elif opcode == "HMMA":
        width = 4
    return _registers(parts[:written], width), sources


def _registers(parts: Iterable[str], width: int) -> list[str]:
    """Return the registers named in operands; a general one also stands for those after it."""
    found = []
    for register in _REGISTER.findall(" ".join(parts)):
        found.append(register)
        if register[0] == "R":
            found += [f"R{int(register[1:]) + k}" for k in range(1, width)]
    return found
