"""Counts how often each instruction of a compiled kernel runs, following one lane of every warp.

Loops in machine code do not say how often they turn: ptxas peels and unrolls them. So the integers that decide it are
computed (sass.py) from the kernel's parameters: registers and predicates hold a number, or None where a value is not
known (from memory, floating point). A branch on None ends the trace with Untraceable; the kernels here branch on sizes
and indices alone, but for those of Gluon, whose warps ask shared memory for their share of the work. Barriers are taken
to be passed. Addresses are computed too, so that each access to global memory names its tensor.
"""

import functools
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..kernels.launch import Launch
from .cubin import Code
from .sass import PREDICATES, RESULTS, WORD, Instruction, both, is_predicate, operand, pair, parse, predicate

PARAMETERS = 0x210  # where a kernel's parameters begin in the constant bank of sm_90
PARAMETERS_AT = 1 << 60  # the generic address of that place, which SASS finds in c[0x0][0x198]
TENSOR = 40  # argument i begins at address (i + 1) << TENSOR
STEPS = 5_000_000  # of one warp, after which a loop counts as endless
END = -1
ACCESSES = ("LDG", "LDGSTS", "STG", "UTMALDG", "UTMASTG", "ATOMG", "RED")  # to global memory


class Untraceable(RuntimeError):
    """The control flow depends on something that is not known before the kernel runs."""


@dataclass
class Trace:
    """Executions of each instruction by one program, summed over its warps; what its accesses reach."""

    counts: Counter = field(default_factory=Counter)  # index of the instruction -> executions by warps
    # (index of an access to global memory, argument; -1: unknown) -> those not masked
    moved: Counter = field(default_factory=Counter)
    copied: int = 0  # bytes that the copy engine (TMA) was told to expect


# ---- parameters


def parameters(launch: Launch, signature: dict, ptx: str) -> tuple[bytes, list[str]]:
    """(the constant bank's parameters, names of the arguments that are memory).

    The pointer of the i-th of these arguments is (i + 1) << TENSOR.
    """
    flat, memory = [], []

    def add(kind, value, name: str) -> None:
        if isinstance(kind, tuple):
            for i, (inner, part) in enumerate(zip(kind, value, strict=True)):
                add(inner, part, f"{name}[{i}]")
        elif kind.startswith(("*", "tensordesc", "nvTmaDesc")):
            flat.append(len(memory) + 1 << TENSOR)
            memory.append(name)
            if not kind.startswith("*"):
                flat.extend([*value.shape, *value.strides])
        elif kind != "constexpr":
            flat.append(value)

    for name, kind in signature.items():
        add(kind, launch.arguments.get(name), name)
    declared = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\n]*?_param_\d+(?:\[(\d+)\])?,?\n", ptx)
    sizes = [int(bits) // 8 * int(count or 1) for bits, count in declared]
    if len(sizes) != len(flat) + 2:  # two more: Triton's scratch memory
        name, made = launch.kernel.__name__, f"{len(flat)} + 2 in the launch"
        raise Untraceable(f"{name}: {len(sizes)} parameters in the code, {made}")
    bank = bytearray()
    for size, value in zip(sizes, flat):
        bank.extend(bytes(-(PARAMETERS + len(bank)) % min(size, 64)))
        packed = struct.pack("<f", value) if isinstance(value, float) else int(value).to_bytes(8, "little", signed=True)
        bank.extend(packed[:size].ljust(size, b"\0"))
    return bytes(bank), memory


# ---- steps: what an instruction does to the registers; it returns where to go on, or None for the next instruction


def _unknown(found: Instruction) -> Callable:
    written = dict.fromkeys((*found.targets, *found.outputs))
    return lambda env: env.update(written)


def _computed(found: Instruction) -> Callable:
    """Of registers, with carries as predicates."""
    compute, unknown, bits = RESULTS[found.name], _unknown(found), 32 * max(1, len(found.targets))

    def step(env):
        values, flags = [read(env) for read in found.values], [read(env) for read in found.flags]
        result = None if None in values or None in flags else compute(found.words, values, flags)
        if result is None:
            return unknown(env)
        for i, key in enumerate(found.targets):
            env[key] = result >> 32 * i & WORD
        for i, key in enumerate(found.outputs):
            env[key] = result != 0 if found.name == "LOP3" else result >> bits > i

    return step


def _decided(found: Instruction) -> Callable:
    """Of predicates."""

    def step(env):
        values, flags = [read(env) for read in found.values], [read(env) for read in found.flags]
        env.update(zip(found.outputs, PREDICATES[found.name](found.words, values, flags)))

    return step


def _branch(found: Instruction, at: int, labels: dict[str, int]) -> Callable:
    target = labels[re.search(r"`\((.*?)\)", found.text).group(1)]
    conditions = [predicate(x) for x in found.operands if is_predicate(x)]

    def step(env):
        taken = functools.reduce(both, [condition(env) for condition in conditions], True)
        if taken is None:
            raise Untraceable(f"a branch depends on data: {found.text}")
        if taken and found.name == "CALL":
            env["calls"].append(at + 1)
        return target if taken else None

    return step


def _access(found: Instruction, at: int) -> Callable:
    """To global memory: which argument it reaches, by the pointer in it or the descriptor that it names."""
    described, unknown = found.name.startswith("UTMA"), _unknown(found)
    named = [x for x in found.operands if x.startswith("desc")] or found.operands
    pairs = [pair(base) for x in named for base in re.findall(r"(?<!desc)\[(U?R\d+)", x)]

    def reach(env) -> int:
        for read in pairs:
            address = read(env)
            if described:
                place = (address or 0) - PARAMETERS_AT + PARAMETERS
                low, high = env["bank"].get(place), env["bank"].get(place + 4)
                address = None if low is None or high is None else high << 32 | low
            if address is not None and address >> TENSOR:
                return (address >> TENSOR) - 1
        return -1

    def step(env):
        if not found.flags or found.flags[-1](env) is not False:  # an asynchronous copy has its mask as an operand
            env["moved"][at, reach(env)] += 1
        unknown(env)

    return step


def _packed(found: Instruction) -> Callable:
    """Predicates into a register (P2R), or out of it (R2P)."""
    source, mask = operand(found.operands[1]), int(found.operands[-1], 16)
    wanted = [i for i in range(7) if mask >> i & 1]

    def pack(env):
        bits = [env.get(f"P{i}", False) for i in wanted]
        env[found.targets[0]] = None if None in bits else sum(bit << i for i, bit in zip(wanted, bits))

    def unpack(env):
        bits = source(env)
        env.update({f"P{i}": None if bits is None else bool(bits >> i & 1) for i in wanted})

    return pack if found.name == "P2R" else unpack


def _step(found: Instruction, at: int, labels: dict[str, int]) -> Callable:
    """The function step(env) that carries out one instruction."""
    if found.name in ("BRA", "CALL") and "DIV" not in found.words:
        return _branch(found, at, labels)
    if found.name == "RET":
        return lambda env: env["calls"].pop()
    if found.name == "EXIT":
        return lambda env: END
    if found.name in ACCESSES:
        return _access(found, at)
    if found.name in ("S2R", "S2UR"):
        return lambda env: env.update({found.targets[0]: env["special"].get(found.operands[1])})
    if found.name in ("P2R", "R2P"):
        return _packed(found)
    if found.name == "SYNCS" and "ARRIVE" in found.words and len(found.values) == 2:
        return lambda env: env.update(copied=env["copied"] + (found.values[1](env) or 0))
    if found.name == "SEL":

        def select(env):
            flag, (a, b) = found.flags[0](env), (read(env) for read in found.values[:2])
            result = a if flag is True or a == b else b if flag is False else None
            env.update((key, result if result is None else result & WORD) for key in found.targets)

        return select
    if found.name in PREDICATES and found.outputs and (found.name != "SYNCS" or "PHASECHK" in found.words):
        return _decided(found)
    return _computed(found) if found.name in RESULTS else _unknown(found)


def _bank(constants: bytes, grid: tuple[int, ...], warps: int) -> dict[int, int]:
    """The words of the constant bank that are known."""
    words = {PARAMETERS + i: int.from_bytes(constants[i : i + 4], "little") for i in range(0, len(constants), 4)}
    words |= dict(zip((0x0, 0x4, 0x8), (32 * warps, 1, 1))) | dict(zip((0xC, 0x10, 0x14), (*grid, 1, 1)))
    return words | {0x198: PARAMETERS_AT & WORD, 0x19C: PARAMETERS_AT >> 32}


class Tracer:
    """A kernel's code, ready to be run for any program of its grid."""

    def __init__(self, code: Code, constants: bytes, grid: tuple[int, ...], warps: int):
        self.warps, self.bank = warps, _bank(constants, grid, warps)
        found = [parse(text) for text in code.instructions]
        self.steps = [(x.guard, _step(x, at, code.labels), x) for at, x in enumerate(found)]

    def run(self, *program: int) -> Trace:
        """Runs one program. Raises Untraceable."""
        found = Trace()
        for warp in range(self.warps):
            self._warp(32 * warp, (*program, 0, 0, 0)[:3], found)
        return found

    def _warp(self, thread: int, program: tuple[int, int, int], found: Trace) -> None:
        special = {"SR_TID.X": thread, "SR_TID.Y": 0, "SR_TID.Z": 0, "SR_LANEID": 0, "SR_CgaCtaId": 0}
        special |= dict(zip(("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"), program))
        env: dict = dict(bank=self.bank, special=special, calls=[], copied=0, moved=found.moved)
        counts, steps, at = [0] * len(self.steps), self.steps, 0
        for _ in range(STEPS):
            guard, step, instruction = steps[at]
            wanted = True if guard is None else guard(env)
            if wanted is False:
                at += 1
                continue
            counts[at] += 1
            target = _maybe(step, instruction, env) if wanted is None else step(env)
            if target == END:
                break
            at = at + 1 if target is None else target
        else:
            raise Untraceable(f"more than {STEPS:,} steps")
        found.copied += env["copied"]
        found.counts.update({i: n for i, n in enumerate(counts) if n})


def _maybe(step: Callable, instruction: Instruction, env: dict) -> None:
    """An instruction that may run or not: nobody knows what it leaves where it would change something."""
    if instruction.name == "EXIT":  # of some lanes perhaps: what follows for the others counts for the warp
        return
    written = (*instruction.targets, *instruction.outputs)
    before = [env.get(key) for key in written]
    if step(env) is not None:
        raise Untraceable(f"a branch depends on data: {instruction.text}")
    env.update((key, None) for key, value in zip(written, before) if env.get(key) != value)
