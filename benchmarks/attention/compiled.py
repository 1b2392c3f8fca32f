"""Compile every kernel that launches by default, and read its machine code, without a card.

``python -m benchmarks.attention.compiled`` writes ``benchmarks/results/compiled.json``: registers and memory of each
kernel, and what its loops do. Tests check that the file belongs to the sources of the kernels, and hold the kernels to
rules. Compiling takes minutes, so the file is only renewed when the sources change; a test says when.

Machine code for NVIDIA cards is read with triton's disassembler. Loops, which take a kernel's time, are found in the
graph of jumps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton

from benchmarks.report import RESULTS, ROOT
from longstride.kernels.backends.triton.configurations import ARCHITECTURES, SAFE, Configuration, Kernel

FILE = RESULTS / "compiled.json"
TARGETS = ("gfx942", "sm_80", "sm_86", "sm_90")
# Sources that the machine code, and what is read from it, depend on.
SOURCES = (
    *(f"kernels/backends/triton/{name}.py" for name in ("*_kernel", "tile", "packing", "configurations")),
    "tests/harness/compile_triton.py",
    "benchmarks/attention/compiled.py",
)
FIELDS = ("case", "shared", "spilled_bytes", "registers", "programs", "wgmma", "fewest_products")
VISITS = ("instructions", "products", "local", "repeats")
KERNELS = ("forward", "dkdv", "dq")
DEFAULTS = [
    *(f"{kernel}:{case}" for kernel in KERNELS for case in ("bfloat16:64:folded", "float16:128:natural")),
    "forward:bfloat16:64:merged",
    *(f"{kernel}:bfloat16:64:stairs" for kernel in KERNELS),
    # Strided patterns aligned to the target
    *(f"{kernel}:bfloat16:64:shifted:resume" for kernel in ("forward", "dq")),
    "dkdv:bfloat16:64:shifted:between",
    *(f"{case}:shifted_sources" for case in ("dkdv:bfloat16:64:natural:resume", "gather:bfloat16:64")),
    "dkdv:bfloat16:64:natural:resume",
    "dq:bfloat16:64:merged",
    "closed:bfloat16:64:folded:resume",
    "delta:bfloat16:64",
    "gather:bfloat16:64",
    "groups:bfloat16:64",
    # Selections, and rounds of hashing
    *(f"{kernel}:bfloat16:64:listed" for kernel in KERNELS),
    *(f"{kernel}:bfloat16:64:listed:resume:overlap3" for kernel in KERNELS),
]
WARP = 32  # threads
GROUP = 4  # warps that multiply together on sm_90
LARGEST_PRODUCT = (64, 256, 16)  # of one wgmma in 16 bits: rows, columns, terms of a sum
LOCAL = ("LDL", "STL")  # loads and stores of spilled registers
PRODUCTS = ("HGMMA", "HMMA")


class Card(NamedTuple):
    """The resources of a multiprocessor (CUDA's programming guide, technical specifications)."""

    shared_bytes: int  # limit of one program
    all_shared_bytes: int  # of all programs, plus a KiB for the system each
    threads: int
    programs: int
    registers: int = 65_536


CARDS = {
    "sm_80": Card(163 * 1024, 164 * 1024, 2048, 32),
    "sm_86": Card(99 * 1024, 100 * 1024, 1536, 16),
    "sm_90": Card(227 * 1024, 228 * 1024, 2048, 32),
}


class Stretch(NamedTuple):
    """Instructions per warp of a loop's body without inner loops, or of the code outside loops."""

    instructions: int
    products: dict[str, int]  # matrix products by their shape, as 64x128x16; wgmma on sm_90
    fused: int  # multiply-adds of single numbers in fp32 (FFMA)
    local: int  # loads and stores of spilled registers

    @property
    def by_groups(self) -> bool:
        """Whether groups of four warps multiply together (wgmma)."""
        return any(_warps(shape) == GROUP for shape in self.products)

    def multiplied(self, num_warps: int) -> int:
        """Return the multiply-adds of all warps in matrix products; without any, as in fp32, of single numbers."""
        wide = sum(count * _size(shape) // _warps(shape) for shape, count in self.products.items())
        return (wide or self.fused * WARP) * num_warps


class Code(NamedTuple):
    """The resources of a kernel, and its instructions."""

    registers: int  # per thread
    stack_bytes: int  # per thread
    shared_bytes: int
    num_warps: int
    loops: tuple[Stretch, ...]  # in order
    outside: Stretch  # code outside loops

    def visits(self, kernel: str) -> tuple[Stretch, ...]:
        """Return the code that visits tiles: loops with products; for closed runs, the code outside loops."""
        if kernel.startswith("closed"):
            return (self.outside,)
        return tuple(loop for loop in self.loops if loop.products or loop.fused > loop.instructions // 3)

    def programs(self, architecture: str) -> int:
        """Return how many programs run on a multiprocessor at a time."""
        card = CARDS[architecture]
        of_a_warp = -(-self.registers * WARP // 256) * 256  # registers are allocated by 256 per warp
        return min(
            card.registers // of_a_warp // self.num_warps,
            card.all_shared_bytes // (self.shared_bytes + 1024),
            card.threads // (WARP * self.num_warps),
            card.programs,
        )


# Work of a visit


def products_of(kernel: Kernel, tiles: Configuration, width: int, value_width: int) -> list[tuple[int, int, int]]:
    """Return the matrix products of one visit as (rows, columns, terms of a sum); widths are padded."""
    q, k = tiles.block_q, tiles.block_k
    scores, from_values = (q, k, width), (q, k, value_width)
    if kernel in ("forward", "closed_forward"):
        return [scores, (q, value_width, k)]
    if kernel == "dq":
        return [scores, from_values, (q, width, k)]
    by_key = [(k, q, width), (k, q, value_width), (k, value_width, q), (k, width, q)]
    return by_key if kernel == "dkdv" else [*by_key, (q, width, k)]


def needed(kernel: Kernel, tiles: Configuration, width: int, value_width: int) -> int:
    """Return the multiply-adds of one visit."""
    return sum(m * n * k for m, n, k in products_of(kernel, tiles, width, value_width))


def repeats(stretch: Stretch, kernel: Kernel, tiles: Configuration, width: int, value_width: int) -> float:
    """Return how often a visit computes its products; above 1, warps repeat each other's work."""
    return stretch.multiplied(tiles.num_warps) / needed(kernel, tiles, width, value_width)


def fewest_products(kernel: Kernel, tiles: Configuration, width: int, value_width: int) -> int:
    """Return the fewest wgmma of a group of four warps for a visit in 16 bits, if all have the largest size."""
    groups = max(tiles.num_warps // GROUP, 1)
    rows, columns, depth = LARGEST_PRODUCT
    ways = [(by_rows, groups // by_rows) for by_rows in range(1, groups + 1) if groups % by_rows == 0]
    return sum(
        -(-k // depth) * min(-(-m // (rows * r)) * -(-n // (columns * c)) for r, c in ways)
        for m, n, k in products_of(kernel, tiles, width, value_width)
    )


# Reading


def read(cubin: bytes, shared_bytes: int, num_warps: int) -> Code:
    """Read a compiled kernel, ``compiled.asm["cubin"]``; the other arguments are in its metadata.

    Raises:
        subprocess.CalledProcessError: ``cubin`` is not a kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run_tool("cuobjdump", "-res-usage", file.name)
        text = _run_tool("nvdisasm", "-c", "-ndf", file.name)  # without its slow analysis
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
    loops, outside = stretches(text)
    return Code(registers, stack, shared_bytes, num_warps, loops, outside)


def stretches(text: str) -> tuple[tuple[Stretch, ...], Stretch]:
    """Return the loops of disassembled code, as ``nvdisasm -c`` prints it, and the code outside loops."""
    blocks = _blocks(text)
    bodies = _loops(blocks, _reached(blocks, 0) | {0})
    inner = [body.difference(*(nested for nested in bodies if nested < body)) for body in bodies]
    loops = tuple(_stretch(blocks, body) for body in inner)
    outside = frozenset(_reached(blocks, 0) | {0}).difference(*bodies)
    return loops, _stretch(blocks, outside)


class _Block(NamedTuple):
    """Instructions that run one after another, and the numbers of the blocks that may follow."""

    opcodes: list[str]
    next: set[int]


def _run_tool(program: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / program
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


LABEL = re.compile(r"(?P<name>\.[\w.$]+):$")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);")
TARGET = re.compile(r"`?\((\.L_[\w.]+)\)|\b(\.L_[\w.]+)")


def _blocks(text: str) -> list[_Block]:
    """Return the blocks of disassembled code in order; the kernel starts at the first."""
    blocks: list[_Block] = [_Block([], set())]
    places: dict[str, int] = {}  # of labels
    jumps: list[tuple[int, str]] = []
    open_ended = True  # whether the last block continues in the next one

    def begin() -> None:
        if open_ended:
            blocks[-1].next.add(len(blocks))
        blocks.append(_Block([], set()))

    for line in text.splitlines():
        if match := LABEL.match(line.strip()):
            begin()
            places[match["name"]], open_ended = len(blocks) - 1, True
        elif match := INSTRUCTION.search(line):
            blocks[-1].opcodes.append(match["opcode"])
            name, operands = match["opcode"].split(".")[0], match["operands"]
            if name in ("BRA", "BRX", "CALL", "BSSY", "EXIT", "RET"):
                targets = [a or b for a, b in TARGET.findall(operands)]
                jumps += [(len(blocks) - 1, target) for target in targets]
                # A conditional jump has a guard or a predicate before its target.
                always = not match["guard"] and not re.match(r"\s*!?U?P\w+,", operands)
                open_ended = not always or name in ("CALL", "BSSY")
                begin()
                open_ended = True
    for block, target in jumps:
        if target in places:
            blocks[block].next.add(places[target])
    return blocks


def _reached(blocks: list[_Block], start: int, within: frozenset[int] | None = None) -> set[int]:
    """Return the blocks that may run after ``start``, including itself if it may run again."""
    reached: set[int] = set()
    ahead = [start]
    while ahead:
        new = {n for n in blocks[ahead.pop()].next if n < len(blocks) and (within is None or n in within)} - reached
        reached |= new
        ahead += new
    return reached


def _loops(blocks: list[_Block], within: set[int] | frozenset[int]) -> list[frozenset[int]]:
    """Return the sets of blocks that form loops, and those of the loops nested in them."""
    within = frozenset(within)
    after = {block: _reached(blocks, block, within) for block in within}
    largest = {frozenset(b for b in after[a] if a in after[b]) for a in within if a in after[a]}
    bodies = []
    for body in sorted(largest, key=min):
        entered = {n for block in set(range(len(blocks))) - body for n in blocks[block].next} & body
        bodies += [body, *_loops(blocks, body - {min(entered, default=min(body))})]
    return bodies


def _stretch(blocks: list[_Block], body: frozenset[int]) -> Stretch:
    opcodes = [opcode.split(".") for block in sorted(body) for opcode in blocks[block].opcodes]
    names = Counter(name for name, *_ in opcodes)
    shapes = Counter(_shape(kinds[0]) for name, *kinds in opcodes if name in PRODUCTS)
    local = sum(names[kind] for kind in LOCAL)
    return Stretch(sum(names.values()) - names["NOP"], dict(sorted(shapes.items())), names["FFMA"], local)


def _shape(suffix: str) -> str:
    """Return the shape in an opcode: HGMMA has 64x128x16, HMMA has 16816 for 16x8x16."""
    return suffix if "x" in suffix else f"{suffix[:2]}x{suffix[2]}x{suffix[3:]}"


def _size(shape: str) -> int:
    m, n, k = map(int, shape.split("x"))
    return m * n * k


def _warps(shape: str) -> int:
    """Return how many warps share a product: four on sm_90, if the product has 64 rows."""
    return GROUP if shape.startswith("64x") else 1


# Compiling


def shipped(architecture: str) -> list[str]:
    """Return the cases of every configuration of a table, at its largest head width."""
    dtypes = {2: "bfloat16", 4: "float32"}
    return [
        f"{kernel}:{dtypes[widest.bytes_an_element]}:{widest.width}:folded:"
        + ",".join(str(field or 0) for field in (*entry[:4], entry.maxnreg))
        for widest, row in ARCHITECTURES.get(architecture, SAFE).items()
        for kernel, candidates in row._asdict().items()
        for entry in candidates
    ]


def cases_of(architecture: str) -> list[str]:
    """Return the cases in the file: shipped configurations, and for cards with a table the default ones."""
    defaults = DEFAULTS if architecture in ARCHITECTURES else []
    return list(dict.fromkeys([*defaults, *shipped(architecture)]))


def digest() -> int:
    """Return a checksum of the sources that the file depends on."""
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return zlib.crc32(b"".join(path.read_bytes() for path in paths))


def compiled(architecture: str, cases: Iterable[str]) -> list[dict[str, Any]]:
    """Compile cases in another process, as Triton either compiles or interprets; return a row each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))  # which may have another Triton
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/harness/compile_triton.py"), *(f"{architecture}:{case}" for case in cases)],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = []
    for usage in map(json.loads, done.stdout.splitlines()):
        visits = [{name: visit[name] for name in VISITS} for visit in usage.get("visits", ())]
        rows.append({name: usage[name] for name in FIELDS if name in usage} | {"visits": visits})
    return rows


def main() -> int:
    """Compile all cases and write the file."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        by_target = pool.map(lambda architecture: compiled(architecture, cases_of(architecture)), TARGETS)
        rows = [json.dumps(row) for target_rows in by_target for row in target_rows]
    head = f'{{"triton": "{triton.__version__}", "sources": {digest()}, "found": ['
    FILE.write_text(head + "\n" + ",\n".join(rows) + "\n]}\n")
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
