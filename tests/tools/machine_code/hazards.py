"""Register hazards of wgmma: instructions touch what an asynchronous product still uses.

wgmma, HGMMA in SASS, returns before it is done. Until a wait covers its group, nothing may write the registers that
hold its first operand, and nothing but another wgmma may touch its accumulators; otherwise the result is undefined
(PTX ISA, "Asynchronous warpgroup level matrix instructions"). ptxas should ensure this. With Triton before 3.9 it does
not where the first operand is made in registers (triton-lang/triton#9433): the product is wrong, and nothing warns.

`gsb0` on an HGMMA closes a group; `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups run.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from cubin import Code, name_of, opcode_of

OPERAND_REGISTERS = 4  # registers of the first operand in every thread, for 8, 16 and 32 bits alike
OPEN = -1  # the age of a use whose group is not closed yet
PRODUCTS = ("HGMMA", "IGMMA", "QGMMA")  # wgmma in 16 and 32 bits, int8, fp8
NO_RESULT = ("BAR", "BRX", "JMX", "NANOSLEEP", "RET", "WARPSYNC")  # their first operand is read
PREDICATE_FIRST = ("ATOM", "ATOMG", "ATOMS", "MATCH", "SHFL")  # their second operand is the result


class Use(NamedTuple):
    """A register of a running HGMMA: its number, whether it is an accumulator, the instruction."""

    register: int
    accumulates: bool
    instruction: int


State = dict[Use, int]  # a use -> its age: how many groups were closed after its own


def _operands(instruction: str) -> list[str]:
    words = instruction.split(maxsplit=2 if instruction.startswith("@") else 1)
    return [operand.strip() for operand in words[-1].split(",")]


def _register(operand: str) -> int | None:
    found = re.fullmatch(r"R(\d+)(\.\w+)*", operand)
    return int(found.group(1)) if found else None


def _results(instruction: str) -> range:
    """The registers that an instruction other than a wgmma writes."""
    operands, opcode = _operands(instruction), opcode_of(instruction)
    name = name_of(instruction)
    second = name in PREDICATE_FIRST and re.fullmatch(r"P[0-6T]", operands[0])
    first = _register(operands[1 if second else 0])
    if first is None or name in NO_RESULT:
        return range(0)
    count = 1
    if ".128" in opcode:
        count = 4
    elif ".64" in opcode or ".WIDE" in opcode or name[0] == "D" or (name == "CS2R" and ".32" not in opcode):
        count = 2
    elif name == "LDSM":
        count = int(opcode[-1]) if opcode[-1] in "24" else 1
    elif name == "HMMA":
        count = 4 if ".F32" in opcode else 2
    return range(first, first + count)


def _reads(instruction: str) -> set[int]:
    """The registers that an instruction other than a wgmma reads, those of wide stores included."""
    operands, opcode = _operands(instruction), opcode_of(instruction)
    written = len(_results(instruction)) > 0
    found = set()
    for operand in operands[1:] if written else operands:
        for number in re.findall(r"(?<![A-Z])R(\d+)", operand):
            wide = 1 if written or "[" in operand else 4 if ".128" in opcode else 2 if ".64" in opcode else 1
            found.update(range(int(number), int(number) + wide))
    return found


def _uses(instruction: str, at: int) -> Iterator[Use]:
    """The registers that a wgmma uses while it runs."""
    operands, opcode = _operands(instruction), opcode_of(instruction)
    columns = int(re.search(r"\.64x(\d+)x", opcode).group(1))
    accumulator = _register(operands[0])
    for register in range(accumulator, accumulator + columns // (4 if re.search(r"x\d+\.F16", opcode) else 2)):
        yield Use(register, True, at)
    first = _register(operands[1])
    if first is not None:  # otherwise it lies in shared memory
        for register in range(first, first + OPERAND_REGISTERS):
            yield Use(register, False, at)


def _touched(instruction: str, state: State) -> set[Use]:
    """The registers in use that an instruction touches although it must not."""
    if name_of(instruction) in PRODUCTS:
        own = list(_uses(instruction, -1))
        sums, operand = ({u.register for u in own if u.accumulates is kind} for kind in (True, False))
        return {use for use in state if use.register in (operand if use.accumulates else sums)}
    written = set(_results(instruction))
    touched = written | _reads(instruction)
    return {use for use in state if use.register in (touched if use.accumulates else written)}


def _after(instruction: str, at: int, state: State) -> State:
    """The registers in use after an instruction."""
    if name_of(instruction) in PRODUCTS:
        state = state | dict.fromkeys(_uses(instruction, at), OPEN)
        return {use: age + 1 for use, age in state.items()} if "gsb0" in instruction else state
    if wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", instruction):  # without a predicate: all threads
        return {use: age for use, age in state.items() if age < int(wait.group(1), 16)}
    return state


def hazards(code: Code) -> dict[int, Use]:
    """Instruction -> a register that it touches while a wgmma still uses it, over all paths of a program."""
    if not code.count(*PRODUCTS):
        return {}
    states: dict[int, State] = {0: {}}
    found: dict[int, Use] = {}
    todo = [0]
    while todo:
        at = todo.pop()
        instruction, state = code.instructions[at], states[at]
        if state and (touched := _touched(instruction, state)):
            found[at] = min(touched)
        state = _after(instruction, at, state)
        for follower in code.followers(at):
            known = states.get(follower)
            # Where two paths lead to an instruction, the lower age of a use counts: it is likelier to be running.
            merged = state if known is None else known | {u: a for u, a in state.items() if a < known.get(u, a + 1)}
            if merged != known:
                states[follower] = merged
                todo.append(follower)
    never = [i for i, text in enumerate(code.instructions) if name_of(text) in PRODUCTS and i not in states]
    if never:  # a way that `followers` does not know
        raise ValueError(f"{len(never)} products of this program are reached by no path, the first at {never[0]}")
    return found
