"""What the compiler makes of every configuration that is shipped: ``python benchmarks/attention/evidence.py``.

No card is needed. Each kernel of the table of an architecture is compiled as the launch path compiles it, at the widest
head that a row serves, and its machine code is read (``generated_code``): products a visit of a tile, instructions,
registers, what is spilled, and how many programs share a multiprocessor. So is a candidate that no table has before a
card has run it, ``specialized``: its row says whether that Triton makes specialised warps of it (``specializes``).
The result file has an entry for each version of Triton; a run replaces that of the Triton it runs with and keeps the
others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import triton

from benchmarks.report import RESULTS, write_json
from longstride.kernels.backends.triton.configurations import ARCHITECTURES, Configuration

ROOT = Path(__file__).resolve().parents[2]
COMPILER = ROOT / "tests" / "harness" / "compile_triton.py"
DTYPES = {2: "bfloat16", 4: "float32"}
SHAPES = {  # how the rows and columns of patterns lie, by kernel
    "forward": ("natural", "folded", "merged"),
    "dkdv": ("natural", "folded"),
    "dq": ("natural", "folded", "merged"),
    "closed": ("natural", "folded"),
    "closed_forward": ("natural", "folded"),
}
CANDIDATES = {"sm_90": ("sm_90:specialized:bfloat16:128:natural:128,128,4,2,0",)}  # for tuning on a card
FIELDS = ("block_q", "block_k", "num_warps", "num_stages", "maxnreg")


def main(arguments: list[str] | None = None) -> int:
    """Compile, print a table, write the file. Exit code: 1 where a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(name for name in ARCHITECTURES if name.startswith("sm_"))
    parser.add_argument("--architecture", default="sm_90", choices=known)
    parser.add_argument("--processes", type=int, default=1, help="compile in so many")
    parser.add_argument("--output", type=Path, default=None, help="the JSON file")
    options = parser.parse_args(arguments)
    output = options.output or RESULTS / f"evidence-{options.architecture}.json"
    cases = [*shipped(options.architecture), *CANDIDATES.get(options.architecture, ())]
    with ThreadPoolExecutor(options.processes) as pool:
        shares = [cases[number :: options.processes] for number in range(options.processes)]
        found = {row["case"]: row for rows in pool.map(compiled, shares) for row in rows}
    rows = [row_of(found[case]) for case in cases]
    before = json.loads(output.read_text()) if output.exists() else {"tritons": {}}
    entry = {"date": date.today().isoformat(), "kernels": rows}
    tritons = before["tritons"] | {triton.__version__: entry}
    write_json(output, {"architecture": options.architecture, "tritons": dict(sorted(tritons.items()))})
    for row in rows:
        print(line_of(row))
    print(f"wrote {output}")
    return 0


def shipped(architecture: str) -> list[str]:
    """Every configuration of a table at the widest head that its row serves, as cases of the compiling program."""
    return [
        f"{architecture}:{kernel}:{DTYPES[widest.bytes_an_element]}:{widest.width}:{shape}:{fields_of(one)}"
        for widest, row in ARCHITECTURES[architecture].items()
        for kernel, candidates in row._asdict().items()
        for one in candidates
        for shape in SHAPES[kernel]
    ]


def fields_of(one: Configuration) -> str:
    """A configuration as the compiling program reads it."""
    return ",".join(str(field or 0) for field in (*one[:4], one.maxnreg))


def compiled(cases: list[str]) -> list[dict[str, Any]]:
    """What the compiling program says of cases. It runs by itself, as Triton either compiles or interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, str(COMPILER), *cases]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment | {"PYTHONPATH": path})
    if done.returncode:
        raise SystemExit(1)
    return [json.loads(line) for line in done.stdout.splitlines()]


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the file."""
    _, kernel, dtype, width, shape, _ = found["case"].split(":")
    tiles = dict(zip(Configuration._fields, found["tiles"], strict=True))
    return {
        "kernel": kernel,
        "dtype": dtype,
        "width": int(width),
        "shape": shape,
        **{name: tiles[name] for name in FIELDS},
        "registers": found["registers"],
        "stack_bytes": found["spilled_bytes"],
        "shared_bytes": found["shared"],
        "programs": found["programs"],
        "local": sum(visit["local"] for visit in found["visits"]),
        "local_elsewhere": found["local_elsewhere"],
        "repeats": max(visit["repeats"] for visit in found["visits"]),
        "products": max(sum(visit["products"].values()) for visit in found["visits"]),
        "fewest_products": found["fewest_products"],
        "visits": found["visits"],
        "outside": found["outside"],  # instructions in no loop, each once a program
        "repairs": found["repairs"],
        **({"specializes": found["specializes"]} if kernel == "specialized" else {}),
    }


def line_of(row: dict[str, Any]) -> str:
    """A row in the terminal."""
    tiles = "×".join(str(row[name]) for name in FIELDS[:4]) + (f" ≤{row['maxnreg']}" if row["maxnreg"] else "")
    instructions = "/".join(str(visit["instructions"]) for visit in row["visits"])
    return (
        f"{row['kernel']:14} {row['dtype']:8} {row['width']:3} {row['shape']:8} {tiles:16} "
        f"products {row['products']:3} (fewest {row['fewest_products'] or '–'}) repeats {row['repeats']:.2f}  "
        f"instructions {instructions:24} registers {row['registers']:3} stack {row['stack_bytes']:3} "
        f"local a visit {row['local']}  shared {row['shared_bytes']:6} programs {row['programs']}"
    )


if __name__ == "__main__":
    sys.exit(main())
