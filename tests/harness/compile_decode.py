"""Compile the kernels of one query for GPUs that need not be present, and print their resources, as ``compile_triton``.

Run as a program, in a process without TRITON_INTERPRET: ``python compile_decode.py sm_90:decode:bfloat16:64:merged …``.
The kernel is decode, split (several programs for a head) or merge. The next field is how each part is read, in SHAPES.
With ``stored`` at the end, the position is read on the device.
"""

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource

from benchmarks.attention.compiled import read
from longstride.kernels.backends.triton.decode import MOST_SPLITS, NUM_WARPS, block_of, decode_kernel, merge_kernel
from tests.harness.compile_triton import FOLDED, LISTED, NATURAL, SHIFTED, TABLES, TYPES, amdgcn_usage, target_of

KERNELS = {"decode": decode_kernel, "split": decode_kernel, "merge": merge_kernel}
POINTERS = {"q", "k", "v", "out"}
WIDE = {"lse", "partial", "partial_stats"}
SHAPES = {  # (row of a position, positions of keys, intervals) of each part
    "natural": ((NATURAL, NATURAL, FOLDED),),  # local, block
    "strided": ((NATURAL, NATURAL, FOLDED), (FOLDED, FOLDED, FOLDED)),
    "shifted": ((NATURAL, NATURAL, FOLDED), (FOLDED, SHIFTED, FOLDED)),  # strided, aligned to the target
    "merged": ((NATURAL, NATURAL, FOLDED), (NATURAL, FOLDED, FOLDED)),  # fixed
    "listed": ((LISTED, LISTED, LISTED),),  # anything else
}


def compile_kernel(case: str) -> dict[str, Any]:
    """Return registers, spilled bytes and shared memory of ``architecture:kernel:dtype:width:shape``."""
    architecture, name, dtype, width_text, shape, *stored = case.split(":")
    width = int(width_text)
    rows, columns, bounds = zip(*SHAPES[shape], strict=True)
    values = {
        "SCALE": width**-0.5,
        **dict.fromkeys(("WIDTH", "W", "VALUE_WIDTH", "WV"), width),
        "BLOCK_K": block_of(width),
        "SPLITS": 1 if name == "decode" else MOST_SPLITS,
        "SEGMENTS": len(rows),
        "ROWS": rows,
        "COLUMNS": columns,
        "BOUNDS": bounds,
        "GROUP": 1,
        "STORED": bool(stored),
        "ACCUMULATOR": tl.float32,
    }
    kernel = KERNELS[name]
    constants = {parameter.name: values[parameter.name] for parameter in kernel.params if parameter.is_constexpr}
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.params):
        kind = _type(parameter.name, TYPES[dtype]) if parameter.name not in constants else "constexpr"
        if stored and parameter.name == "position":
            kind = "*i64"
        signature[parameter.name] = kind
        if kind.startswith("*") or parameter.name.startswith("stride"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target_of(architecture), options={"num_warps": NUM_WARPS})
    specialised = [parameter.name for parameter in kernel.params if not parameter.do_not_specialize]
    usage = {"case": case, "shared": compiled.metadata.shared, "by_position": "position" in specialised}
    if "amdgcn" in compiled.asm:
        return usage | amdgcn_usage(compiled.asm["amdgcn"])
    code = read(compiled.asm["cubin"], compiled.metadata.shared, NUM_WARPS)
    return usage | {"registers": code.registers, "spilled_bytes": code.stack_bytes}


def _type(parameter: str, dtype: str) -> str:
    if parameter in TABLES:
        return "*i32"
    if parameter in WIDE:
        return "*fp32"
    return "*" + dtype if parameter in POINTERS else "i32"


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(compile_kernel(case)), flush=True)
