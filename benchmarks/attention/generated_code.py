"""What the compiler made of a kernel: registers, memory, and what each of its loops does, read from the machine code.

A kernel that was compiled ahead of time for an NVIDIA card needs no card to be read: triton brings the disassembler.
Loops, in which a kernel's time goes by, are found in the graph of jumps.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import triton

from longstride.kernels.backends.triton.configurations import Configuration, Kernel

WARP = 32  # threads
GROUP = 4  # warps that multiply together on sm_90
LARGEST_PRODUCT = (64, 256, 16)  # of one wgmma, in 16 bits: rows, columns, and what is summed over
LOCAL = ("LDL", "STL")  # to and from what is spilled
PRODUCTS = ("HGMMA", "HMMA")


class Card(NamedTuple):
    """What programs share on one multiprocessor (CUDA's programming guide, technical specifications)."""

    shared_bytes: int  # of one program, at most
    all_shared_bytes: int  # of all programs, a KiB for the system with each
    threads: int
    programs: int
    registers: int = 65_536


CARDS = {
    "sm_80": Card(163 * 1024, 164 * 1024, 2048, 32),
    "sm_86": Card(99 * 1024, 100 * 1024, 1536, 16),
    "sm_90": Card(227 * 1024, 228 * 1024, 2048, 32),
}


class Stretch(NamedTuple):
    """Instructions of a loop's body, without the loops inside it; or all that is in no loop. Each counts for a warp."""

    instructions: int
    products: dict[str, int]  # matrix products by their shape, as 64x128x16; wgmma on sm_90
    fused: int  # multiply-adds of single numbers in fp32 (FFMA)
    local: int  # loads and stores of what was spilled

    @property
    def by_groups(self) -> bool:
        """Whether groups of four warps multiply together (wgmma)."""
        return any(_warps(shape) == GROUP for shape in self.products)

    def multiplied(self, num_warps: int) -> int:
        """Multiply-adds in matrix products of ``num_warps`` warps together; in fp32, where there are none, all."""
        wide = sum(count * _size(shape) // _warps(shape) for shape, count in self.products.items())
        return (wide or self.fused * WARP) * num_warps


class Code(NamedTuple):
    """What a kernel uses, and its instructions."""

    registers: int  # a thread
    stack_bytes: int  # a thread
    shared_bytes: int
    num_warps: int
    loops: tuple[Stretch, ...]  # by their place
    outside: Stretch  # what is in no loop

    def visits(self, kernel: str) -> tuple[Stretch, ...]:
        """Where tiles are visited: loops with products; of a closed run, which is one visit, what is in no loop."""
        if kernel.startswith("closed"):
            return (self.outside,)
        return tuple(loop for loop in self.loops if loop.products or loop.fused > loop.instructions // 3)

    def programs(self, architecture: str) -> int:
        """How many programs one multiprocessor holds at a time."""
        card = CARDS[architecture]
        of_a_warp = -(-self.registers * WARP // 256) * 256  # registers are given out by 256 a warp
        return min(
            card.registers // of_a_warp // self.num_warps,
            card.all_shared_bytes // (self.shared_bytes + 1024),
            card.threads // (WARP * self.num_warps),
            card.programs,
        )


# What a visit needs


def products_of(kernel: Kernel, one: Configuration, width: int, value_width: int) -> list[tuple[int, int, int]]:
    """The matrix products of one visit, as (rows, columns, summed over); widths are padded."""
    q, k = one.block_q, one.block_k
    scores, from_values = (q, k, width), (q, k, value_width)
    if kernel in ("forward", "closed_forward"):
        return [scores, (q, value_width, k)]
    if kernel == "dq":
        return [scores, from_values, (q, width, k)]
    by_key = [(k, q, width), (k, q, value_width), (k, value_width, q), (k, width, q)]
    return by_key if kernel == "dkdv" else [*by_key, (q, width, k)]


def needed(kernel: Kernel, one: Configuration, width: int, value_width: int) -> int:
    """Multiply-adds of one visit."""
    return sum(m * n * k for m, n, k in products_of(kernel, one, width, value_width))


def repeats(stretch: Stretch, kernel: Kernel, one: Configuration, width: int, value_width: int) -> float:
    """How many times a visit computes its products; above 1, some warps repeat what others do."""
    return stretch.multiplied(one.num_warps) / needed(kernel, one, width, value_width)


def fewest_products(kernel: Kernel, one: Configuration, width: int, value_width: int) -> int:
    """wgmma that a group of four warps needs for a visit in 16 bits, were all of them as large as can be."""
    groups = max(one.num_warps // GROUP, 1)
    rows, columns, depth = LARGEST_PRODUCT
    ways = [(by_rows, groups // by_rows) for by_rows in range(1, groups + 1) if groups % by_rows == 0]
    return sum(
        -(-k // depth) * min(-(-m // (rows * r)) * -(-n // (columns * c)) for r, c in ways)
        for m, n, k in products_of(kernel, one, width, value_width)
    )


# Reading


def read(cubin: bytes, shared_bytes: int, num_warps: int) -> Code:
    """A compiled kernel, as ``compiled.asm["cubin"]`` has it; the other two are in its metadata.

    Raises:
        subprocess.CalledProcessError: It is no kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _told_by("cuobjdump", "-res-usage", file.name)
        text = _told_by("nvdisasm", "-c", "-ndf", file.name)  # without its own analysis, which takes long
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
    loops, outside = stretches(text)
    return Code(registers, stack, shared_bytes, num_warps, loops, outside)


def stretches(text: str) -> tuple[tuple[Stretch, ...], Stretch]:
    """The loops of disassembled code, and what is in none, as ``nvdisasm -c`` prints it."""
    blocks = _blocks(text)
    bodies = _loops(blocks, _reached(blocks, 0) | {0})
    inner = [body.difference(*(other for other in bodies if other < body)) for body in bodies]
    loops = tuple(_stretch(blocks, body) for body in inner)
    outside = frozenset(_reached(blocks, 0) | {0}).difference(*bodies)
    return loops, _stretch(blocks, outside)


class _Block(NamedTuple):
    """Instructions that run one after another, and the numbers of the blocks that may follow."""

    opcodes: list[str]
    next: set[int]


def _told_by(program: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / program
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


LABEL = re.compile(r"(?P<name>\.[\w.$]+):$")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);")
TARGET = re.compile(r"`?\((\.L_[\w.]+)\)|\b(\.L_[\w.]+)")


def _blocks(text: str) -> list[_Block]:
    """The blocks of disassembled code, by their place; the first one is where the kernel begins."""
    blocks: list[_Block] = [_Block([], set())]
    places: dict[str, int] = {}  # of labels
    jumps: list[tuple[int, str]] = []
    open_ended = True  # whether the last block goes on into the next one

    def begin() -> None:
        if open_ended:
            blocks[-1].next.add(len(blocks))
        blocks.append(_Block([], set()))

    for line in text.splitlines():
        if found := LABEL.match(line.strip()):
            begin()
            places[found["name"]], open_ended = len(blocks) - 1, True
        elif found := INSTRUCTION.search(line):
            blocks[-1].opcodes.append(found["opcode"])
            name, operands = found["opcode"].split(".")[0], found["operands"]
            if name in ("BRA", "BRX", "CALL", "BSSY", "EXIT", "RET"):
                targets = [a or b for a, b in TARGET.findall(operands)]
                jumps += [(len(blocks) - 1, target) for target in targets]
                # A jump on a condition has a guard or a predicate before its target.
                always = not found["guard"] and not re.match(r"\s*!?U?P\w+,", operands)
                open_ended = not always or name in ("CALL", "BSSY")
                begin()
                open_ended = True
    for block, target in jumps:
        if target in places:
            blocks[block].next.add(places[target])
    return blocks


def _reached(blocks: list[_Block], start: int, within: frozenset[int] | None = None) -> set[int]:
    """Blocks that may run after one, itself only where it may run again."""
    found: set[int] = set()
    ahead = [start]
    while ahead:
        new = {n for n in blocks[ahead.pop()].next if n < len(blocks) and (within is None or n in within)} - found
        found |= new
        ahead += new
    return found


def _loops(blocks: list[_Block], within: set[int] | frozenset[int]) -> list[frozenset[int]]:
    """Sets of blocks that may run one after another for ever, and such sets inside them without the first block."""
    within = frozenset(within)
    after = {block: _reached(blocks, block, within) for block in within}
    largest = {frozenset(b for b in after[a] if a in after[b]) for a in within if a in after[a]}
    found = []
    for body in sorted(largest, key=min):
        entered = {n for block in set(range(len(blocks))) - body for n in blocks[block].next} & body
        found += [body, *_loops(blocks, body - {min(entered, default=min(body))})]
    return found


def _stretch(blocks: list[_Block], body: frozenset[int]) -> Stretch:
    opcodes = [opcode.split(".") for block in sorted(body) for opcode in blocks[block].opcodes]
    names = Counter(name for name, *_ in opcodes)
    shapes = Counter(_shape(kinds[0]) for name, *kinds in opcodes if name in PRODUCTS)
    local = sum(names[kind] for kind in LOCAL)
    return Stretch(sum(names.values()) - names["NOP"], dict(sorted(shapes.items())), names["FFMA"], local)


def _shape(of_opcode: str) -> str:
    """HGMMA says 64x128x16; HMMA says 16816 for 16x8x16."""
    if "x" in of_opcode:
        return of_opcode
    return f"{of_opcode[:2]}x{of_opcode[2]}x{of_opcode[3:]}"


def _size(shape: str) -> int:
    m, n, k = map(int, shape.split("x"))
    return m * n * k


def _warps(shape: str) -> int:
    """Warps that share one product: four on sm_90, whose products have 64 rows."""
    return GROUP if shape.startswith("64x") else 1
