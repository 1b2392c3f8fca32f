"""Compile every kernel that launches by default, for cards that need not be there.

``python benchmarks/attention/compiled.py`` writes ``benchmarks/results/compiled.json``: what the machine code of each
kernel says (``generated_code``). Tests hold the file to the sources of the kernels, and the kernels to rules. It takes
minutes; so the file stands until the sources change, and a test says when.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import triton

from benchmarks.report import RESULTS
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
VISITS = ("instructions", "products", "local", "repeats")
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
    """A row of the file: what rules and tables are about."""
    visits = [{name: visit[name] for name in VISITS} for visit in found.get("visits", ())]
    return {name: found[name] for name in FIELDS if name in found} | {"visits": visits}


def main() -> int:
    """Compile all cases and write the file."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_all = pool.map(lambda architecture: compiled(architecture, cases_of(architecture)), TARGETS)
        rows = [json.dumps(row) for some in of_all for row in some]
    head = f'{{"triton": "{triton.__version__}", "sources": {digest()}, "found": ['
    FILE.write_text(head + "\n" + ",\n".join(rows) + "\n]}\n")
    print(f"wrote {FILE}; now run python benchmarks/readme_table.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
