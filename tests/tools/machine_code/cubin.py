"""Machine code of a compiled kernel: registers, spills, tensor-core instructions, waits.

It is read without a GPU, by the cuobjdump, nvdisasm and ptxas that come with Triton. Besides spills, these count
(CUDA C++ Programming Guide; PTX ISA, "Asynchronous warpgroup level matrix instructions"):

- HGMMA, wgmma in SASS, is asynchronous: several may be issued before one wait. SASS writes the wait as `gsb0` on the
  last of them and WARPGROUP.DEPBAR, which says how many groups may still run. Where ptxas cannot prove that nothing
  touches the accumulators meanwhile, it makes each HGMMA wait, and prints one of the notes C7510 to C7519.
- HMMA on sm_90 is mma.sync, which reaches about half of wgmma's rate.

What an instruction costs depends on how often it runs. `step` is the shortest loop around a tensor-core product: a step
along K, or along the keys or queries of attention. `once_a_block` counts the rest of a product of two matrices, which
runs once for each block of the result: the epilogue and what begins a block. Both count the instructions that one
thread issues, whether their predicate is true or not; `step` takes the shorter branch of an `if`, `once_a_block` both.
"""

import re
import subprocess
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# A multiprocessor's registers and most programs; by GPU generation, its most warps and bytes of shared memory.
REGISTERS, PROGRAMS = 65_536, 32
WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
SHARED = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
SHARED_LIMIT = {sm: size - 1024 for sm, size in SHARED.items()}  # what one program may use; CUDA takes 1 KiB
TENSOR_CORE = ("UTCHMMA", "HGMMA", "HMMA")  # on sm_100; on sm_90; on older GPUs and sm_120


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs one of Triton's binaries; raises RuntimeError with its own words where it fails."""
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{program.name} failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order, each as "HGMMA.64x128x16.F32 R24, ...", and its resources."""

    registers: int
    stack: int
    instructions: tuple[str, ...]
    labels: dict[str, int]

    def count(self, *names: str) -> int:
        """How many instructions have one of these names before their first dot."""
        return sum(name_of(i) in names for i in self.instructions)

    @property
    def spills(self) -> int:
        """Loads from and stores to the stack."""
        return self.count("LDL", "STL")

    @property
    def waits(self) -> int:
        """How many HGMMAs end in a wait for all before them; all of them where ptxas has serialised them.

        A group (`gsb0`) does not count if some may still run after it: where wgmma reads registers, Triton 3.6 makes
        each a group of its own and lets three run on, so that each waits only for the third before it.
        """
        at = [i for i, text in enumerate(self.instructions) if name_of(text) == "HGMMA"]
        pieces = [self.instructions[first:last] for first, last in zip(at, [*at[1:], len(self.instructions)])]
        return sum("gsb0" in piece[0] and not _some_run_on(piece[1:]) for piece in pieces)

    @property
    def tensor_core(self) -> str:
        """The first of TENSOR_CORE that is among the instructions, or ""."""
        names = Counter(map(name_of, self.instructions))
        return next((name for name in TENSOR_CORE if names[name]), "")

    def followers(self, at: int) -> Iterator[int]:
        """The indices at which the program may go on after an instruction."""
        instruction, name = self.instructions[at], name_of(self.instructions[at])
        target = re.search(r"`\((\.L\w+)\)", instruction) if name in ("BRA", "CALL") else None
        if target:
            yield self.labels[target.group(1)]
        if name == "BRX":  # by a table without labels: to any place that nothing runs on into
            yield from self._entries
        if at + 1 < len(self.instructions) and not self._ends(at):
            yield at + 1

    def _ends(self, at: int) -> bool:
        """Whether the program never goes on after an instruction."""
        instruction = self.instructions[at]
        # BRA.DIV and BRA.CONV have one more operand; if the threads of a warp agree, the program goes on after them.
        jumps = name_of(instruction) == "BRA" and "," not in instruction
        return not instruction.startswith("@") and (jumps or name_of(instruction) in ("EXIT", "RET", "BRX"))

    @cached_property
    def _entries(self) -> list[int]:
        return [at + 1 for at in range(len(self.instructions) - 1) if self._ends(at)]

    @cached_property
    def _graph(self) -> dict[int, list[int]]:
        return {at: list(self.followers(at)) for at in range(len(self.instructions))}

    @cached_property
    def step(self) -> frozenset[int]:
        """The instructions, as indices, of the shortest loop with a tensor-core product; empty without one."""
        core, marks, loops = self.tensor_core, sorted(self.labels.values()), []
        products = [i for i, text in enumerate(self.instructions) if name_of(text) == core]
        for product in {bisect(marks, i): i for i in reversed(products)}.values():  # the first one after each label
            before = _reached(self._graph, product)
            if product in before:
                loops.append([product])
                while before[loops[-1][-1]] != product:
                    loops[-1].append(before[loops[-1][-1]])
        return frozenset(min(loops, key=len, default=()))

    def once_a_block(self, persistent: bool) -> int:
        """How many instructions run once for each block of a product's result, outside the main loop.

        persistent: whether a program makes several blocks; what runs before the first and after the last is left out.
        So is code for empty matrices, which leads to no product. Raises ValueError where another loop is among the
        instructions, as nothing tells how often it turns. A loop that tries a barrier again turns once.
        """
        graph, product = self._graph, min(self.step)
        backward = {at: [] for at in graph}
        for at, followers in graph.items():
            for follower in followers:
                backward[follower].append(at)
        later, earlier = _reached(graph, product).keys(), _reached(backward, product).keys()
        found = (later & earlier if persistent else later | earlier) - self.step
        among = {at: [follower for follower in graph[at] if follower in found] for at in found}
        for turn in [range(first, at + 1) for at, followers in among.items() for first in followers if first <= at]:
            waits = len(turn) < 5 and any("PHASECHK" in self.instructions[i] for i in turn)
            if not waits and self.step.isdisjoint(turn) and turn[-1] in [turn[0], *_reached(among, turn[0])]:
                raise ValueError(f"instructions {turn[0]} to {turn[-1]} are a loop outside the main loop")
        return len(found)


def _reached(graph: dict[int, list[int]], start: int) -> dict[int, int]:
    """All that comes after `start`, each with the one before it on a shortest way."""
    before, todo = {}, [start]
    for at in todo:  # which grows meanwhile
        for follower in graph[at]:
            if follower not in before:
                before[follower] = at
                todo.append(follower)
    return before


def _some_run_on(instructions: tuple[str, ...]) -> bool:
    """Whether the first wait among the instructions lets some wgmma run on."""
    left = (re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", i) for i in instructions)
    return next((int(found.group(1), 16) > 0 for found in left if found), False)


def opcode_of(instruction: str) -> str:
    """ "HGMMA.64x128x16.F32" of "@P0 HGMMA.64x128x16.F32 R24, ..."."""
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def name_of(instruction: str) -> str:
    """ "HGMMA" of "@P0 HGMMA.64x128x16.F32 R24, ..."."""
    return opcode_of(instruction).partition(".")[0]


def read(cubin: bytes) -> Code:
    """The code of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(BIN / "cuobjdump", "-res-usage", file.name).stdout
        listing = _run(BIN / "nvdisasm", "-c", "-ndf", file.name).stdout  # without its analysis of branches
    instructions, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label.group(1)] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(found.group(1))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))
    return Code(registers, stack, tuple(instructions), labels)


def programs_per_multiprocessor(registers: int, warps: int, shared: int, sm: int) -> int:
    """How many programs fit a multiprocessor; registers are a thread's, warps and bytes a program's."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, WARPS[sm] // warps, SHARED[sm] // (shared + 1024), PROGRAMS)


def assembler_notes(ptx: str, capability: int) -> list[str]:
    """Numbers of ptxas's notes on serialised wgmma, as ["C7515"]. It assembles the code once more."""
    from triton.backends.nvidia import compiler

    arch = compiler.sm_arch_from_capability(capability)
    assembler = Path(compiler.get_ptxas(capability).path)
    options = ["--regAllocOptLevel=2"] if "regAllocOptLevel" in Path(compiler.__file__).read_text() else []
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        options += ["-lineinfo", "-v", f"--gpu-name={arch}"]
        notes = _run(assembler, *options, str(source), "-o", str(result)).stderr
    return sorted(set(re.findall(r"\bC75\d\d\b", notes)))
