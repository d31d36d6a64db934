"""Results of SASS's integer instructions (NVIDIA's machine code), to follow loops and addresses.

A value is a number of 32 bits, or None where it is not known. SASS is documented by names alone ("CUDA Binary
Utilities", instruction set of Hopper); the rest was found by reading, and stands or falls with the counts of real
kernels in tests/machine_code/test_ports.py.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

WORD = 0xFFFFFFFF
Reader = Callable[[dict], "int | bool | None"]  # of a program's registers, predicates and constants
Values = list["int | None"]


def signed(x: int) -> int:
    x &= WORD
    return x - (1 << 32) if x >> 31 else x


def is_predicate(word: str) -> bool:
    return re.fullmatch(r"!?U?P[0-6T]", word) is not None


def predicate(word: str) -> Reader:
    """Reads P0, !P0, PT: true, !PT: false."""
    name, wanted = word.lstrip("!"), not word.startswith("!")
    if name in ("PT", "UPT"):
        return lambda env: wanted
    return lambda env: None if env.get(name) is None else env[name] is wanted


SIGNS = {"": lambda x: x, "-": lambda x: (1 << 32) - x, "~": lambda x: WORD - x, "|": lambda x: abs(signed(x))}


def operand(word: str) -> Reader:
    """Reads a register, a constant or a number.

    A register never written is 0. A negated one may be 2 ** 32, so that subtracting 0 carries.
    """
    word = word.replace(".reuse", "")
    if word in ("RZ", "URZ", "SRZ", "-RZ"):
        return lambda env: 0
    if found := re.fullmatch(r"([-~|]?)(U?R(?:\d+|Z))\|?", word):
        sign, name = found.groups()
        change = SIGNS[sign]
        return lambda env: None if env.get(name, 0) is None else change(env.get(name, 0))
    if found := re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", word):
        at = int(found.group(1), 16)
        return lambda env: env["bank"].get(at)
    if re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", word):
        number = int(word, 0) & WORD
        return lambda env: number
    return lambda env: None


def register(name: str, further: int) -> str:
    """R7 is two further than R5."""
    kind, number = re.fullmatch(r"(U?R)(\d+)", name).groups()
    return f"{kind}{int(number) + further}"


def pair(word: str) -> Reader:
    """Reads 64 bits: a register and the next one."""
    word = word.replace(".reuse", "")
    low = operand(word)
    if not re.fullmatch(r"U?R\d+", word):
        return low
    high = operand(register(word, 1))

    def read(env):
        a, b = low(env), high(env)
        return None if a is None or b is None else b << 32 | a

    return read


# ---- instructions in parts

# With a U before it: on registers that a warp shares.
UNIFORM = ("IADD3", "IMAD", "LEA", "SHF", "LOP3", "MOV", "SEL", "SGXT", "ISETP", "PLOP3", "PRMT", "LDC")
WIDTHS = {"128": 4, "64": 2, "WIDE": 2}


@dataclass(frozen=True)
class Instruction:
    """One instruction in its parts.

    "@P0 IADD3.X R5, P1, R3, RZ, RZ, P0, !PT": guard P0, name IADD3, words IADD3 X, targets R5, outputs P1, values
    R3 RZ RZ, flags P0 !PT.
    """

    text: str
    guard: Reader | None
    name: str
    words: tuple[str, ...]
    operands: tuple[str, ...]
    targets: tuple[str, ...]  # registers that it may write
    outputs: tuple[str, ...]  # predicates that it may write
    values: tuple[Reader, ...]
    flags: tuple[Reader, ...]


def parse(text: str) -> Instruction:
    """One line of a disassembly."""
    whole, guard = text, None
    if text.startswith("@"):
        word, _, text = text[1:].partition(" ")
        guard = predicate(word)
    head, _, rest = text.partition(" ")
    operands = tuple(x.strip() for x in rest.split(",")) if rest.strip() else ()
    words = tuple(head.split("."))
    name = words[0][1:] if words[0][0] == "U" and words[0][1:] in UNIFORM else words[0]
    outputs, at, first = [], 0, ""
    most = 1 if name.startswith("VOTE") else 2
    if operands and not is_predicate(operands[0]):
        first, at = operands[0], 1
        most = most if name in ("IADD3", "LEA", "IMAD") else 0  # whose carries are predicates behind the result
    while at < len(operands) and len(outputs) < most and re.fullmatch(r"U?P[0-6T]", operands[at]):
        outputs.append(operands[at])
        at += 1
    if not first and name in ("LOP3", "SHFL") and at < len(operands):  # the result behind the predicate
        first, at = operands[at], at + 1
    sources = operands[at:]
    targets = _targets(name, words, first)
    values = [x for x in sources if not is_predicate(x)]
    readers = [operand(x) for x in values]
    if name == "IMAD" and {"WIDE", "HI"} & set(words):
        readers[2] = pair(values[2])
    elif name == "LDC" and (constant := re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", values[0])):
        readers = [operand(f"c[0x0][{int(constant.group(1), 16) + 4 * i:#x}]") for i in range(len(targets))]
    elif name == "HFMA2" and values[:2] == ["-RZ", "RZ"]:  # two constants of 16 bits
        readers = [operand(str(np.float16(float(x)).view(np.uint16))) for x in values[2:4]]
    flags = tuple(predicate(x) for x in sources if is_predicate(x))
    if name != "ISETP":
        outputs = [x for x in outputs if x not in ("PT", "UPT")]
    return Instruction(whole, guard, name, words, operands, targets, tuple(outputs), tuple(readers), flags)


def _targets(name: str, words: tuple[str, ...], first: str) -> tuple[str, ...]:
    """The registers that an instruction may write."""
    if not re.fullmatch(r"U?R\d+", first):
        return ()
    count = next((WIDTHS[word] for word in words if word in WIDTHS), 1)
    if name == "HGMMA":
        count = int(words[1].split("x")[1]) // 2
    elif name == "LDSM":
        count = int(words[-1]) if words[-1] in ("2", "4") else 1
    elif name in ("HMMA", "CS2R"):
        count = 4 if name == "HMMA" else 1 if "32" in words else 2
    return tuple(register(first, i) for i in range(count))


# ---- what they compute: (words, values, flags), all known -> up to 64 bits and a carry, or None


def _float(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x & WORD))[0]


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _add(words, values, flags):
    return sum(values) + ("X" in words and sum(flags))


def _imad(words, values, flags):
    a, b, c = values
    if "U32" not in words:
        a, b = signed(a), signed(b)
    if {"WIDE", "HI"} & set(words):
        total = (a * b + c) & (1 << 65) - 1
        return total >> 32 if "HI" in words else total
    return (a * b + _add(words, [c], flags)) & (1 << 33) - 1


def _lea(words, values, flags):
    low, add, *others = values
    high, by = others if len(others) == 2 else (0, others[0])
    if "HI" in words:
        whole = signed(low) if "SX32" in words else (high & WORD) << 32 | low & WORD
        return _add(words, [(whole << by) >> 32 & WORD, add], flags)
    return _add(words, [(low << by) & WORD, add], flags)


def _shift(words, values, flags):
    low, by, high = values[0] & WORD, values[1], values[2] & WORD
    double = {"U64", "S64"} & set(words)
    both, by = high << 32 | low, by & (63 if double else 31)
    if words[1] == "L":
        return ((both << by) >> 32 if "HI" in words else low << by) & WORD
    if "HI" in words:  # of the upper word alone
        return (signed(high) if "S32" in words else high) >> by & WORD
    return (both - (1 << 64) if "S64" in words and both >> 63 else both) >> by & WORD


def table(lut: int, a: int, b: int, c: int) -> int:
    """Bit by bit, what the table of 8 answers says."""
    result = 0
    for i in range(8):
        if lut >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result & WORD


def _permute(words, values, flags):
    a, selector, c = values
    both = (c << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def _extreme(words, values, flags):
    *summands, other = values
    both = [sum(summands) & WORD, other & WORD]
    if "U32" not in words:
        both = [signed(x) for x in both]
    return (min(both) if flags[0] else max(both)) & WORD


def _extend(words, values, flags):
    a, bits = values[0] & (1 << values[1]) - 1, values[1]
    return a if "U32" in words else (a - ((a >> bits - 1 & 1) << bits)) & WORD


def _from_int(words, values, flags):
    value = values[0] if "U32" in words else signed(values[0])
    bits = _bits(value)
    return bits + 1 if "RP" in words and _float(bits) < value else bits  # RP: rounded up


def _to_int(words, values, flags):
    value = _float(values[0])
    return int(value) & WORD if abs(value) < 2**32 else None


def _mufu(words, values, flags):
    return _bits(1 / _float(values[0])) if "RCP" in words and _float(values[0]) else None


RESULTS: dict[str, Callable] = {
    "IADD3": _add,
    "VIADD": _add,
    "IMAD": _imad,
    "LEA": _lea,
    "SHF": _shift,
    "LOP3": lambda words, values, flags: table(values[3], *values[:3]),
    "PRMT": _permute,
    "VIMNMX": _extreme,
    "IMNMX": _extreme,
    "VIADDMNMX": _extreme,
    "SGXT": _extend,
    "MOV": lambda words, values, flags: values[0],
    "R2UR": lambda words, values, flags: values[0],
    "CS2R": lambda words, values, flags: values[0],
    "LDC": lambda words, values, flags: sum(x << 32 * i for i, x in enumerate(values)),
    "IABS": lambda words, values, flags: abs(signed(values[0])),
    "I2F": _from_int,
    "I2FP": _from_int,
    "F2I": _to_int,
    "MUFU": _mufu,
    "HFMA2": lambda words, values, flags: values[0] << 16 | values[1] if len(values) == 2 else None,
    "SHFL": lambda words, values, flags: values[0] if "IDX" in words and values[1] == 0 else None,  # lane 0 asks itself
}


# ---- predicates, which may be known where not all that they are made of is


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: bool | None, b: bool | None) -> bool | None:
    return True if True in (a, b) else None if None in (a, b) else False


def _compare(words, values: Values, flags):
    a, b = values[:2]
    result = None
    if a is not None and b is not None:
        a, b = (a & WORD, b & WORD) if "U32" in words else (signed(a), signed(b))
        result = {"GE": a >= b, "GT": a > b, "LE": a <= b, "LT": a < b, "EQ": a == b, "NE": a != b}[words[1]]
        if "EX" in words and a == b:  # of upper words: where they are equal the lower ones decide
            result = flags[1]
    return [(both if "AND" in words else either)(result, flags[0]), None]


def _tabled(words, values: Values, flags):
    options = list(product(*([False, True] if flag is None else [flag] for flag in flags[:3])))
    found = [{bool(table(lut, *(WORD * x for x in option))) for option in options} for lut in values[:2]]
    return [results.pop() if len(results) == 1 else None for results in found]


PREDICATES: dict[str, Callable] = {
    "ISETP": _compare,
    "PLOP3": _tabled,
    "VOTE": lambda words, values, flags: [flags[-1]],
    "VOTEU": lambda words, values, flags: [flags[-1]],
    "ELECT": lambda words, values, flags: [True],  # the lane that is followed is the elected one
    "FCHK": lambda words, values, flags: [False],  # divisions do not take their slow path
    "SYNCS": lambda words, values, flags: [True],  # what is waited for has come
    "USETMAXREG": lambda words, values, flags: [True],  # as have the registers that another warp gave up
}
