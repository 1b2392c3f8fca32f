"""Compile every kernel that launches by default, for cards that need not be there.

``python benchmarks/attention/compiled.py`` writes ``benchmarks/results/compiled.json``: what the machine code of each
kernel says (``generated_code``) and, for sm_90, the rate that an H100 should reach. Tests hold the file to the sources
of the kernels, and the kernels to rules. It takes minutes; so the file stands until the sources change, and a test says
when.

Rates are estimates, not measurements, in multiply-adds of visits without a mask. A visit keeps the tensor units busy
for its multiply-adds over MULTIPLY_ADDS. Besides, each of the four schedulers issues an instruction a cycle, and
exponentials leave at EXPONENTIALS a cycle; these two are added up. A program that is alone on its multiprocessor does
one after the other. Where several share it, they overlap imperfectly: the root of the sum of their squares. CLOCK and
the two ways of overlapping were chosen with the published rates of ``KNOWN`` in view, so that the model is within a
tenth of them is a fit, not a test.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import triton

from benchmarks.report import RESULTS, rounded
from longstride.kernels.backends.triton.configurations import ARCHITECTURES, SAFE

ROOT = Path(__file__).resolve().parents[2]
FILE = RESULTS / "compiled.json"
TARGETS = ("gfx942", "sm_80", "sm_86", "sm_90")
# What machine code and what is read in it depend on.
SOURCES = (
    *(f"kernels/backends/triton/{name}.py" for name in ("*_kernel", "tile", "packing", "configurations")),
    "tests/harness/compile_triton.py",
    "benchmarks/attention/generated_code.py",
)
FIELDS = ("case", "shared", "spilled_bytes", "registers", "programs", "wgmma", "fewest_products")
VISITS = ("instructions", "products", "special", "local", "repeats")
KERNELS = ("forward", "dkdv", "dq")
DEFAULTS = [
    *(f"{kernel}:{case}" for kernel in KERNELS for case in ("bfloat16:64:folded", "float16:128:natural")),
    "forward:bfloat16:64:merged",
    *(f"{kernel}:bfloat16:64:stairs" for kernel in KERNELS),
    "dkdv:bfloat16:64:natural:resume",
    "dq:bfloat16:64:merged",
    "closed:bfloat16:64:folded:resume",
    "delta:bfloat16:64",
    "gather:bfloat16:64",
    "groups:bfloat16:64",
    # Selections, and rounds of hashing.
    *(f"{kernel}:bfloat16:64:listed" for kernel in KERNELS),
    *(f"{kernel}:bfloat16:64:listed:resume:overlap3" for kernel in KERNELS),
]

MULTIPROCESSORS = 132
CLOCK = 1.65e9  # cycles a second under such load: between the 1.75 of a light one and the 1.45 of large products
MULTIPLY_ADDS = 2_048  # of a multiprocessor's tensor units a cycle, in 16 bits
SCHEDULERS = 4
EXPONENTIALS = 16  # of a multiprocessor a cycle
WARP = 32
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}  # of a visit; closed runs are bound by memory


class Known(NamedTuple):
    """A kernel whose rate was published, and what was read once in its machine code by Triton 3.6.0 for sm_90."""

    what: str
    tflops: float
    width: int
    block_q: int
    block_k: int
    num_warps: int
    programs: int
    instructions: int  # without matrix products
    special: int


# Forward, 16 bits, no mask, 16,384 positions. It is not ours, and no command here compiles it.
KNOWN = (
    # facebookexperimental/triton#205: 487; pytorch/benchmark#2391: 477
    Known("Triton's tutorial, measured: 487", 487, 128, 128, 128, 8, 1, 492 - 16, 66),
    # Shah et al. 2024, figure 5
    Known("Triton's tutorial, measured: 403", 403, 64, 128, 64, 4, 2, 518 - 16, 68),
)


def rate(multiply_adds: float, instructions: float, special: float, num_warps: int, programs: int) -> float:
    """Estimate the TFLOP/s of an H100 that repeats such visits.

    Args:
        multiply_adds: of all warps.
        instructions: of a warp, without matrix products.
        special: exponentials among them.
        num_warps: of a program.
        programs: on a multiprocessor.
    """
    tensor = multiply_adds / MULTIPLY_ADDS
    vector = instructions * num_warps / SCHEDULERS + special * WARP * num_warps / EXPONENTIALS
    cycles = math.hypot(tensor, vector) if programs > 1 else tensor + vector
    return 2 * multiply_adds / cycles * CLOCK * MULTIPROCESSORS / 1e12


def known_rate(one: Known) -> float:
    """Estimate the TFLOP/s of a kernel that was measured elsewhere."""
    multiply_adds = 2 * one.block_q * one.block_k * one.width
    return rate(multiply_adds, one.instructions, one.special, one.num_warps, one.programs)


def shipped(architecture: str) -> list[str]:
    """Every configuration of a table, at the widest head that it serves."""
    dtypes = {2: "bfloat16", 4: "float32"}
    return [
        f"{kernel}:{dtypes[widest.bytes_an_element]}:{widest.width}:folded:"
        + ",".join(str(field or 0) for field in (*one[:4], one.maxnreg))
        for widest, row in ARCHITECTURES.get(architecture, SAFE).items()
        for kernel, candidates in row._asdict().items()
        for one in candidates
    ]


def cases_of(architecture: str) -> list[str]:
    """All that the file has: shipped configurations; for cards with a table of their own, defaults in many shapes."""
    defaults = DEFAULTS if architecture in ARCHITECTURES else []
    return list(dict.fromkeys([*defaults, *shipped(architecture)]))


def digest() -> int:
    """Return a checksum of what machine code, and what is read in it, depend on."""
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return zlib.crc32(b"".join(path.read_bytes() for path in paths))


def compiled(architecture: str, cases: Iterable[str]) -> list[dict[str, Any]]:
    """Compile cases in a process of their own, as Triton either compiles or interprets; a row each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))  # another Triton may be on it
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/harness/compile_triton.py"), *(f"{architecture}:{case}" for case in cases)],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [row_of(json.loads(line)) for line in done.stdout.splitlines()]


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the file: what rules and tables are about, and for sm_90 in 16 bits an estimate."""
    visits = [{name: visit[name] for name in VISITS} for visit in found.get("visits", ())]
    row = {name: found[name] for name in FIELDS if name in found} | {"visits": visits}
    architecture, kernel, dtype, width, *_ = found["case"].split(":")
    if architecture == "sm_90" and kernel in PRODUCTS and dtype != "float32":
        block_q, block_k, num_warps = found["tiles"][:3]
        full = min(visits, key=lambda visit: visit["instructions"])
        multiply_adds = PRODUCTS[kernel] * block_q * block_k * int(width) * full["repeats"]
        instructions = full["instructions"] - sum(full["products"].values())
        row["tflops"] = rounded(rate(multiply_adds, instructions, full["special"], num_warps, row["programs"]))
    return row


def main() -> int:
    """Compile all cases and write the file."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_all = pool.map(lambda architecture: compiled(architecture, cases_of(architecture)), TARGETS)
        rows = [json.dumps(row) for some in of_all for row in some]
    known = [{**one._asdict(), "estimate": rounded(known_rate(one))} for one in KNOWN]
    head = f'{{"triton": "{triton.__version__}", "sources": {digest()}, "known": {json.dumps(known)}, "found": ['
    FILE.write_text(head + "\n" + ",\n".join(rows) + "\n]}\n")
    print(f"wrote {FILE}; now run python benchmarks/readme_table.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
