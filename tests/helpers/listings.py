"""Machine code written by hand, and how often its instructions run."""

from collections import Counter

from vitfast.machine_code import trace
from vitfast.machine_code.cubin import Code, name_of


def code(text: str) -> Code:
    """Instructions, one a line; "NAME:" is a label."""
    instructions, labels = [], {}
    for line in text.strip().splitlines():
        if line.strip().endswith(":"):
            labels[line.strip()[:-1]] = len(instructions)
        else:
            instructions.append(line.strip())
    return Code(64, 0, tuple(instructions), labels)


def traced(
    text: str, constants: bytes = b"", program: tuple = (0,), grid: tuple = (8,), warps: int = 4
) -> dict[str, int]:
    """Executions by name, as {"HGMMA": 96, ...}, of one program."""
    found, executions = code(text), Counter()
    for at, count in trace.Tracer(found, constants, grid, warps).run(*program).counts.items():
        executions[name_of(found.instructions[at])] += count
    return dict(executions)
