"""How often each instruction of a compiled kernel runs: its machine code, executed for one lane of every warp as far as control flow needs it.

Loops in machine code do not say how often they turn: ptxas peels and unrolls them. So the integers that decide it are computed as the GPU
would, from the kernel's parameters: registers and predicates hold a number, or None where a value is not known (whatever comes from
memory, floating point). A branch on None ends the trace with Untraceable; the kernels here branch on sizes and indices alone. Barriers
are taken to be passed. Addresses are computed on the way, so that each access to global memory names its tensor.

Nothing here knows a kernel. SASS is not documented; what its instructions do is in "CUDA Binary Utilities" by name only, the rest was
found by reading: tests/test_ports.py holds counts of real kernels against those computed by hand.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .kernels.launch import Launch
from .machine_code import Code, name_of

WORD = 0xFFFFFFFF
PARAMETERS = 0x210  # where a kernel's parameters begin in the constant bank of sm_90
PARAMETERS_AT = 1 << 60  # the generic address of that place, which SASS finds in c[0x0][0x198]
TENSOR = 40  # argument i begins at address (i + 1) << TENSOR
STEPS = 5_000_000  # of one warp, after which a loop counts as endless


class Untraceable(RuntimeError):
    """The control flow depends on something that is not known before the kernel runs."""


@dataclass
class Trace:
    """What one program does: executions of each instruction, summed over its warps, and which argument each access reaches."""

    counts: Counter = field(default_factory=Counter)  # index of the instruction -> executions by warps
    moved: Counter = field(default_factory=Counter)  # (index of an access to global memory, argument; -1: unknown) -> those not masked
    copied: int = 0  # bytes that the copy engine (TMA) was told to expect


# ---- parameters


def parameters(launch: Launch, signature: dict, ptx: str) -> tuple[bytes, list[str]]:
    """(the constant bank's parameters, names of the arguments that are memory): pointers are (i + 1) << TENSOR for argument i."""
    flat, memory = [], []

    def add(kind, value, name: str) -> None:
        if isinstance(kind, tuple):
            for inner, part in zip(kind, value, strict=True):
                add(inner, part, name)
        elif kind.startswith(("*", "tensordesc", "nvTmaDesc")):
            flat.append(len(memory) + 1 << TENSOR)
            memory.append(name)
            if not kind.startswith("*"):
                flat.extend([*value.shape, *value.strides])
        elif kind != "constexpr":
            flat.append(value)

    for name, kind in signature.items():
        add(kind, launch.arguments.get(name), name)
    sizes = [int(bits) // 8 * int(count or 1) for bits, count in re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\n]*?_param_\d+(?:\[(\d+)\])?,?\n", ptx)]
    if len(sizes) != len(flat) + 2:  # two more: Triton's scratch memory
        raise Untraceable(f"{launch.kernel.__name__}: {len(sizes)} parameters in the code, {len(flat)} + 2 in the launch")
    bank = bytearray()
    for size, value in zip(sizes, flat):
        bank.extend(bytes(-(PARAMETERS + len(bank)) % min(size, 64)))
        packed = struct.pack("<f", value) if isinstance(value, float) else int(value).to_bytes(8, "little", signed=True)
        bank.extend(packed[:size].ljust(size, b"\0"))
    return bytes(bank), memory


# ---- values: a number of 32 bits, or None


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _float(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x))[0]


def _is_predicate(word: str) -> bool:
    return re.fullmatch(r"!?U?P[0-6T]", word) is not None


Reader = Callable[[dict], "int | bool | None"]


def _predicate(word: str) -> Reader:
    name, wanted = word.lstrip("!"), not word.startswith("!")
    if name in ("PT", "UPT"):
        return lambda env: wanted
    if wanted:
        return lambda env: env.get(name)
    return lambda env: None if env.get(name) is None else not env[name]


def _operand(word: str) -> Reader:
    """Reads a register, a constant or a number, as 32 bits; a negated register as up to 2 ** 32, so that subtraction carries."""
    word = word.replace(".reuse", "")
    if found := re.fullmatch(r"([-~|]?)(U?R(?:\d+|Z))\|?", word):
        sign, name = found.groups()
        if name in ("RZ", "URZ"):
            return (lambda env: WORD) if sign == "~" else (lambda env: 0)
        if sign == "-":
            return lambda env: None if env.get(name, 0) is None else (1 << 32) - env.get(name, 0)
        if sign == "~":
            return lambda env: None if env.get(name, 0) is None else WORD - env.get(name, 0)
        if sign == "|":
            return lambda env: None if env.get(name, 0) is None else abs(_signed(env.get(name, 0)))
        return lambda env: env.get(name, 0)
    if found := re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", word):
        at = int(found.group(1), 16)
        return lambda env: env["bank"].get(at)
    if found := re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", word):
        number = int(word, 0) & WORD
        return lambda env: number
    return lambda env: None


def _next(name: str) -> str:
    """The register after this one: the upper half of a pair."""
    found = re.fullmatch(r"(U?R)(\d+)", name)
    return f"{found.group(1)}{int(found.group(2)) + 1}" if found else name


def _pair(word: str) -> Reader:
    """Reads 64 bits."""
    word = word.replace(".reuse", "")
    low = _operand(word)
    if not re.fullmatch(r"U?R\d+", word):
        return low
    high = _operand(_next(word))

    def read(env):
        a, b = low(env), high(env)
        return None if a is None or b is None else b << 32 | a

    return read


# ---- what instructions compute: (words of the modifiers, values) -> result


def _compare(kind: str, a: int, b: int) -> bool:
    return {"GE": a >= b, "GT": a > b, "LE": a <= b, "LT": a < b, "EQ": a == b, "NE": a != b}[kind]


def _lut(table: int, a: int, b: int, c: int) -> int:
    result = 0
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def _and(a, b):
    return False if a is False or b is False else None if a is None or b is None else True


def _or(a, b):
    return True if a is True or b is True else None if a is None or b is None else False


def _shift(words: list[str], low: int, by: int, high: int) -> int:
    both, by = high << 32 | low, by & (63 if "64" in words[2:3] + words[1:2] or "S64" in words or "U64" in words else 31)
    if words[1] == "L":
        return (both << by) >> 32 if "HI" in words else low << by
    if "HI" in words:  # of the upper word alone
        return (_signed(high) if "S32" in words else high) >> by
    return (both - (1 << 64) if "S64" in words and both >> 63 else both) >> by


def _lea(words: list[str], low: int, add: int, high: int, by: int) -> int:
    if "HI" not in words:
        return ((low << by) & WORD) + add
    whole = _signed(low & WORD) if "SX32" in words else (high & WORD) << 32 | low & WORD
    return ((whole << by) >> 32 & WORD) + add


def _permute(a: int, selector: int, c: int) -> int:
    both = (c << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def _from_int(words: list[str], a: int) -> int:
    value = a if "U32" in words else _signed(a & WORD)
    bits = _bits(value)
    return bits + 1 if "RP" in words and _float(bits) < value else bits  # RP: rounded up


def _to_int(words: list[str], a: int) -> int | None:
    value = _float(a & WORD)
    return int(value) if abs(value) < 2**32 else None


def _special(name: str, env: dict) -> int | None:
    fixed = {"SR_CgaCtaId": 0, "SR_LANEID": 0, "SR_TID.Y": 0, "SR_TID.Z": 0}
    return env["special"].get(name, fixed.get(name))


FAMILIES = "IADD3 IMAD LEA SHF LOP3 MOV SEL SGXT ISETP PLOP3 PRMT".split()
# Registers written, where neither the name nor a .64 or .128 says it: by the widest instruction, HGMMA, up to half its columns.
WIDTHS = {"128": 4, "64": 2, "WIDE": 2}


def _written(name: str, words: list[str], first: str) -> list[str]:
    """The registers and the predicate that an instruction may write."""
    if not (found := re.fullmatch(r"(U?R)(\d+)", first)):
        return [first]
    count = next((WIDTHS[word] for word in words if word in WIDTHS), 1)
    if name == "HGMMA":
        count = int(words[1].split("x")[1]) // 2
    elif name == "LDSM":
        count = int(words[-1]) if words[-1] in ("2", "4") else 1
    elif name == "HMMA":
        count = 4
    elif name == "CS2R":
        count = 1 if "32" in words else 2
    return [f"{found.group(1)}{int(found.group(2)) + i}" for i in range(count)]


def _decode(text: str, at: int, labels: dict[str, int]) -> tuple[Reader | None, Callable, list[str]]:
    """(guard, step, what it writes): step(env) computes, and returns where to go on, or None for the next instruction."""
    guard = None
    if text.startswith("@"):
        word, _, text = text[1:].partition(" ")
        guard = _predicate(word)
    head, _, rest = text.partition(" ")
    operands = [x.strip() for x in rest.split(",")] if rest.strip() else []
    words = head.split(".")
    name = words[0]
    if name[0] == "U" and name[1:] in FAMILIES:
        name = name[1:]

    if name in ("BRA", "CALL") and not (name == "BRA" and "DIV" in words):
        target = labels[re.search(r"`\((.*?)\)", text).group(1)]
        conditions = [_predicate(x) for x in operands if _is_predicate(x)]

        def branch(env):
            taken = True
            for condition in conditions:
                taken = _and(taken, condition(env))
            if taken is None:
                raise Untraceable(f"a branch depends on data: {text}")
            if taken and name == "CALL":
                env["stack"].append(at + 1)
            return target if taken else None

        return guard, branch, []
    if name == "RET":
        return guard, lambda env: env["stack"].pop(), []
    if name == "EXIT":
        return guard, lambda env: -1, []
    if not operands or name in ("NOP", "BRA", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "BAR", "DEPBAR"):
        return guard, lambda env: None, []

    # Destinations: a register, then predicates; or predicates first.
    outputs, i = [], 0
    if _is_predicate(operands[0]):
        while i < len(operands) and _is_predicate(operands[i]) and len(outputs) < (1 if name.startswith("VOTE") else 2):
            outputs.append(operands[i])
            i += 1
        target = ""
        if name in ("LOP3", "SHFL") and i < len(operands):
            target, i = operands[i], i + 1
    else:
        target, i = operands[0], 1
        while i < len(operands) and re.fullmatch(r"U?P[0-6T]", operands[i]) and name in ("IADD3", "LEA", "IMAD"):
            outputs.append(operands[i])
            i += 1
    sources = operands[i:]
    flags = [_predicate(x) for x in sources if _is_predicate(x)]
    values = [x for x in sources if not _is_predicate(x)]
    written = [w for x in [target, *outputs] if x and x not in ("PT", "UPT", "RZ", "URZ") for w in _written(name, words, x)]

    def unknown(env):
        for key in written:
            env[key] = None

    wide = "WIDE" in words
    read = [_operand(x) for x in values]
    if name == "IMAD" and (wide or "HI" in words) and len(values) > 2:
        read[2] = _pair(values[2])

    def carry(env) -> int | None:
        total = 0
        for flag in flags if "X" in words else ():
            if flag(env) is None:
                return None
            total += flag(env)
        return total

    def store(env, result: int | None, extra: bool | None = None) -> None:
        if result is None:
            return unknown(env)
        env[target] = result & WORD
        if len(written) > len(outputs) and wide or name == "CS2R" and len(written) > 1:
            env[_next(target)] = result >> 32 & WORD
        for j, output in enumerate(outputs):
            env[output] = extra if name == "LOP3" else (result >> (64 if wide else 32)) > j

    def arithmetic(compute: Callable) -> Callable:
        def step(env):
            found = [r(env) for r in read]
            if None in found:
                return unknown(env)
            store(env, compute(*found))

        return step

    if name == "IMAD":

        def step(env):
            a, b, c, extra = read[0](env), read[1](env), read[2](env), carry(env)
            if a == 0 or b == 0:  # zero times what is not known
                a = b = 0
            if None in (a, b, c, extra):
                return unknown(env)
            if wide or "HI" in words:
                if "U32" not in words:
                    a, b = _signed(a & WORD), _signed(b & WORD)
                product = (a * b + c + extra) & (1 << 65) - 1
                return store(env, product >> 32 if "HI" in words else product)
            store(env, (a * b + c + extra) & (1 << 33) - 1)
    elif name in ("IADD3", "VIADD", "LEA"):

        def step(env):
            found, extra = [r(env) for r in read], carry(env)
            if None in found or extra is None:
                return unknown(env)
            if name == "LEA":
                low, add, *others = found
                high, by = others if len(others) == 2 else (0, others[0])
                return store(env, _lea(words, low, add, high, by) + extra)
            store(env, sum(found) + extra)
    elif name == "SHF":
        step = arithmetic(lambda low, by, high: _shift(words, low & WORD, by, high & WORD) & (1 << 64) - 1 & WORD)
    elif name == "LOP3":

        def step(env):
            a, b, c = (r(env) for r in read[:3])
            table = int(values[3], 16)
            if a == 0 and not table & 0xF0 and table == 0xC0 or b == 0 and table == 0xC0:
                a = b = c = 0
            if None in (a, b, c):
                return unknown(env)
            result = _lut(table, a, b, c) & WORD
            if target not in ("RZ", "URZ"):
                env[target] = result
            for output in outputs:
                env[output] = result != 0
    elif name == "PLOP3":
        tables = [int(x, 16) for x in values]

        def step(env):
            bits = [f(env) for f in flags]
            for output, table in zip(outputs, tables):
                results = {bool(_lut(table, *(-int(x) for x in option)) & 1) for option in _options(bits)}
                env[output] = results.pop() if len(results) == 1 else None
    elif name == "ISETP":
        kind, join = words[1], next(w for w in words if w in ("AND", "OR", "XOR"))

        def step(env):
            a, b, flag = read[0](env), read[1](env), flags[0](env)
            result = None
            if a is not None and b is not None:
                a, b = (a & WORD, b & WORD) if "U32" in words else (_signed(a & WORD), _signed(b & WORD))
                low = flags[1](env) if "EX" in words else None
                if "EX" in words and a == b:
                    result = low  # the upper words are equal: the lower ones decide
                else:
                    result = _compare(kind, a, b)
            found = _and(result, flag) if join == "AND" else _or(result, flag)
            env[outputs[0]] = found
            if len(outputs) > 1:
                env[outputs[1]] = None
    elif name == "SEL":

        def step(env):
            flag = flags[0](env)
            a, b = read[0](env), read[1](env)
            store(env, a if flag is True or a == b else b if flag is False else None)
    elif name in ("VIMNMX", "IMNMX", "VIADDMNMX"):

        def step(env):
            found, smaller = [r(env) for r in read], flags[0](env)
            if None in found or smaller is None:
                return unknown(env)
            *summands, other = found
            pair = sum(summands) & WORD, other & WORD
            if "U32" not in words:
                pair = tuple(map(_signed, pair))
            store(env, min(pair) if smaller else max(pair))
    elif name == "SGXT":
        if "U32" in words:
            step = arithmetic(lambda a, bits: a & (1 << bits) - 1)
        else:
            step = arithmetic(lambda a, bits: (a & (1 << bits) - 1) - ((a >> bits - 1 & 1) << bits))
    elif name == "PRMT":
        step = arithmetic(_permute)
    elif name in ("MOV", "R2UR"):
        step = arithmetic(lambda a, *_: a)
    elif name == "IABS":
        step = arithmetic(lambda a: abs(_signed(a & WORD)))
    elif name in ("I2F", "I2FP"):
        step = arithmetic(lambda a: _from_int(words, a))
    elif name == "F2I":
        step = arithmetic(lambda a: _to_int(words, a))
    elif name == "MUFU" and words[1] == "RCP":
        step = arithmetic(lambda a: _bits(1 / _float(a)) if _float(a) else None)
    elif name == "HFMA2" and values[:2] == ["-RZ", "RZ"]:
        halves = [int(np.float16(float(x)).view(np.uint16)) for x in values[2:4]]
        step = lambda env: store(env, halves[0] << 16 | halves[1])  # noqa: E731
    elif name == "CS2R":
        step = (lambda env: store(env, 0)) if values[0] == "SRZ" else unknown
    elif name in ("S2R", "S2UR"):
        step = lambda env: store(env, _special(values[0], env))  # noqa: E731
    elif name in ("LDC", "ULDC"):
        at_bank = re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", values[0])

        def step(env):
            for j, key in enumerate(written):
                env[key] = env["bank"].get(int(at_bank.group(1), 16) + 4 * j) if at_bank else None
    elif name == "P2R":
        mask = int(values[-1], 16)

        def step(env):
            bits = [env.get(f"P{j}") if mask >> j & 1 else False for j in range(7)]
            store(env, None if None in bits else sum(bit << j for j, bit in enumerate(bits)))
    elif name == "R2P":
        source, mask = _operand(operands[1]), int(operands[-1], 16)

        def step(env):
            for j in range(7):
                if mask >> j & 1:
                    env[f"P{j}"] = None if source(env) is None else bool(source(env) >> j & 1)
    elif name == "ELECT" or name == "SYNCS" and words[1] == "PHASECHK":

        def step(env):  # this lane is the elected one; what is waited for has come

            env[outputs[0]] = True
    elif name in ("VOTEU", "VOTE"):

        def step(env):
            env[outputs[0]] = flags[-1](env)
    elif name == "FCHK":

        def step(env):  # divisions do not take their slow path
            env[outputs[0]] = False
    elif name == "SHFL" and words[1] == "IDX" and values[1] in ("RZ", "URZ", "0x0"):
        step = lambda env: store(env, read[0](env))  # noqa: E731
    elif name == "SYNCS" and words[1] == "ARRIVE" and len(values) == 2:
        arrived = _operand(values[1])

        def step(env):
            env["copied"] += arrived(env) or 0
    elif name in ("LDG", "LDGSTS", "STG", "UTMALDG", "UTMASTG", "ATOMG", "RED"):
        reach = _reach(operands, name.startswith("UTMA"))

        def step(env):
            if not flags or flags[-1](env) is not False:  # an asynchronous copy has its mask as an operand
                env["moved"][at, reach(env)] += 1
            unknown(env)
    else:
        step = unknown
    return guard, step, written


def _options(bits: list) -> list[tuple]:
    """Every way in which the unknown ones may turn out."""
    found = [()]
    for bit in bits:
        found = [(*x, y) for x in found for y in ([False, True] if bit is None else [bit])]
    return found


def _reach(operands: list[str], described: bool) -> Callable[[dict], int]:
    """Which argument an access reaches: by the pointer in it, or by the descriptor that it names."""
    named = [x for x in operands if x.startswith("desc")] or operands
    pairs = [_pair(base) for x in named for base in re.findall(r"(?<!desc)\[(U?R\d+)", x)]

    def reach(env):
        for pair in pairs:
            address = pair(env)
            if described:
                at = (address or 0) - PARAMETERS_AT + PARAMETERS
                low, high = env["bank"].get(at), env["bank"].get(at + 4)
                address = None if low is None or high is None else high << 32 | low
            if address is not None and address >> TENSOR:
                return (address >> TENSOR) - 1
        return -1

    return reach


def _bank(constants: bytes, grid: tuple[int, ...], warps: int) -> dict[int, int]:
    """The words of the constant bank that are known."""
    words = {PARAMETERS + i: int.from_bytes(constants[i : i + 4], "little") for i in range(0, len(constants), 4)}
    words |= dict(zip((0x0, 0x4, 0x8), (32 * warps, 1, 1))) | dict(zip((0xC, 0x10, 0x14), (*grid, 1, 1)))
    return words | {0x198: PARAMETERS_AT & WORD, 0x19C: PARAMETERS_AT >> 32}


class Tracer:
    """A kernel's code, ready to be run for any program of its grid."""

    def __init__(self, code: Code, constants: bytes, grid: tuple[int, ...], warps: int):
        self.grid, self.warps = grid, warps
        self.steps = [_decode(text, at, code.labels) for at, text in enumerate(code.instructions)]
        self.bank = _bank(constants, grid, warps)

    def run(self, *program: int) -> Trace:
        """Runs one program. Raises Untraceable."""
        found = Trace()
        for warp in range(self.warps):
            self._warp(32 * warp, (*program, 0, 0, 0)[:3], found)
        return found

    def _warp(self, thread: int, program: tuple[int, int, int], found: Trace) -> None:
        special = {"SR_TID.X": thread} | dict(zip(("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"), program))
        env: dict = dict(bank=self.bank, special=special, stack=[], copied=0, moved=found.moved)
        counts, steps, at = [0] * len(self.steps), self.steps, 0
        for _ in range(STEPS):
            guard, step, written = steps[at]
            if guard is not None:
                wanted = guard(env)
                if wanted is False:
                    at += 1
                    continue
                if wanted is None:  # it may run: nobody knows what it leaves
                    if step.__name__ == "branch":
                        raise Untraceable(f"a branch depends on data: instruction {at}")
                    before = {key: env.get(key) for key in written}
                    step(env)
                    for key in written:
                        if env.get(key) != before[key]:
                            env[key] = None
                    counts[at] += 1
                    at += 1
                    continue
            counts[at] += 1
            target = step(env)
            if target is None:
                at += 1
            elif target < 0:
                break
            else:
                at = target
        else:
            raise Untraceable(f"more than {STEPS:,} steps")
        found.copied += env["copied"]
        found.counts.update({i: n for i, n in enumerate(counts) if n})


def named(code: Code, trace: Trace) -> Counter:
    """Executions by name: {"HGMMA": 96, ...}."""
    found = Counter()
    for at, count in trace.counts.items():
        found[name_of(code.instructions[at])] += count
    return found
