"""Compile the Triton kernels for GPUs that need not be present, and print their resources as JSON, one kernel a line.

Run as a program, in a process without TRITON_INTERPRET: ``python compile_triton.py sm_90:forward:bfloat16:64 …``.
Further fields: ``block_q,block_k,num_warps,num_stages`` (and ``,maxnreg``) for other tiles than the first candidate, a
name in SHAPES for how queries and keys are read, ``resume`` for kernels of a second pass, ``between`` for those before
the last one, ``overlap3`` for the fourth of a selection's parts that may have the same pairs, ``shifted_sources`` if
earlier passes have keys in the order of "shifted".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.attention.compiled import CARDS, fewest_products, read, repeats
from longstride.kernels.backends.triton.backward_kernel import delta_kernel, dkdv_kernel, dq_kernel
from longstride.kernels.backends.triton.closed_kernel import closed_forward_kernel, closed_kernel
from longstride.kernels.backends.triton.configurations import Configuration, candidates, pipelined
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.backends.triton.packing import Form
from longstride.kernels.backends.triton.sums_kernel import gather_kernel, groups_kernel

KERNELS = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "dq": dq_kernel,
    "closed": closed_kernel,
    "closed_forward": closed_forward_kernel,
    "delta": delta_kernel,
    "gather": gather_kernel,
    "groups": groups_kernel,
}
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
TABLES = {"table", "data", "source_table", "source_data"}
WIDE = {"lse", "delta", "grad_lse", "per_query", "previous", "workspace", "dk_by_head", "dv_by_head"}
POINTERS = {"q", "k", "v", "out", "grad_out", "dq", "dk", "dv"}
PLANNED = ("forward", "dkdv", "dq", "closed", "closed_forward")  # kernels with configurations of their own
NATURAL, FOLDED, SHIFTED, LISTED, STAIRS = map(int, Form)
# How queries and keys are read: (order of queries, order of keys, intervals) of each segment.
SHAPES = {
    "natural": ((NATURAL, NATURAL, FOLDED),),  # local, block
    "folded": ((FOLDED, FOLDED, FOLDED),),  # column
    "shifted": ((FOLDED, SHIFTED, FOLDED),),  # column aligned to the target
    "merged": ((NATURAL, NATURAL, FOLDED), (NATURAL, FOLDED, FOLDED)),  # fixed
    "stairs": ((NATURAL, NATURAL, STAIRS), (NATURAL, FOLDED, STAIRS)),  # window and first keys by blocks
    "listed": ((LISTED, LISTED, LISTED),),  # anything else
}


def compiled_kernel(case: str) -> Callable[[], dict[str, Any]]:
    """Compile ``architecture:kernel:dtype:width[:…]``; the returned function reads its resources and visits."""
    architecture, name, dtype, width_text, *further = case.split(":")
    width, tiles = int(width_text), [field for field in further if "," in field]
    chosen = (
        configuration_of(tiles[0])
        if tiles
        else candidates(
            name if name in PLANNED else "dq",  # type: ignore[arg-type]
            architecture,
            4 if dtype == "float32" else 2,
            width,
            any(field.startswith("overlap") for field in further),
        )[0]
    )
    if "listed" in further:
        chosen = pipelined(chosen)
    kernel = KERNELS[name]
    values = _constants(name, chosen, width, further)
    constants = {parameter.name: values[parameter.name] for parameter in kernel.params if parameter.is_constexpr}
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.params):
        kind = _type(parameter.name, TYPES[dtype]) if parameter.name not in constants else "constexpr"
        signature[parameter.name] = kind
        if kind.startswith("*") or parameter.name.startswith("stride"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target_of(architecture), options=chosen.options())
    usage = {"case": case, "tiles": list(chosen), "shared": compiled.metadata.shared}
    if "amdgcn" in compiled.asm:
        return lambda: usage | amdgcn_usage(compiled.asm["amdgcn"])
    return lambda: usage | evidence(compiled, architecture, name, chosen, width)


def configuration_of(text: str) -> Configuration:
    """Parse ``block_q,block_k,num_warps,num_stages[,maxnreg]``."""
    *sizes, most = [*map(int, text.split(",")), 0][:5]
    return Configuration(*sizes, maxnreg=most or None)


def evidence(compiled: Any, architecture: str, name: str, chosen: Configuration, width: int) -> dict[str, Any]:
    """Read an NVIDIA GPU's machine code; ``visits`` are the loops that visit tiles, in order."""
    code = read(compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.num_warps)
    usage = {
        "registers": code.registers,
        "spilled_bytes": code.stack_bytes,
        "wgmma": any(loop.by_groups for loop in (*code.loops, code.outside)),
        "programs": code.programs(architecture) if architecture in CARDS else None,
        "local_in_loops": sum(loop.local for loop in code.loops),
    }
    if name not in PLANNED:
        return usage | {"visits": []}
    visits = code.visits(name)
    usage["outside"] = code.outside.instructions
    usage["local_elsewhere"] = sum(loop.local for loop in (*code.loops, code.outside) if loop not in visits)
    details = [loop._asdict() | {"repeats": round(repeats(loop, name, chosen, width, width), 3)} for loop in visits]
    by_groups = any(loop.by_groups for loop in visits)
    return usage | {
        "visits": details,
        "fewest_products": fewest_products(name, chosen, width, width) if by_groups else None,
    }


def _constants(name: str, chosen: Configuration, width: int, further: list[str]) -> dict[str, Any]:
    """Return the kernel's compile-time parameters."""
    segments = SHAPES[next((field for field in further if field in SHAPES), "natural")]
    queries, keys, bounds = zip(*segments, strict=True)
    by_key = name in ("dkdv", "closed", "closed_forward")
    earlier = next((int(field.removeprefix("overlap")) for field in further if field.startswith("overlap")), 0)
    return {
        "SEGMENTS": len(segments),
        "ROWS": keys[0] if by_key else queries[0],
        "COLUMNS": (queries[0] if by_key else keys),
        "BOUNDS": (bounds[0] if by_key else bounds),
        "EARLIER": earlier if by_key else (earlier,) * len(segments),
        "DOUBLINGS": chosen.pair_doublings(),
        "RESUME": "resume" in further,
        "SOURCES": "resume" in further,
        "SOURCE_FORM": SHIFTED if "shifted_sources" in further else FOLDED,
        "FINAL": "between" not in further,
        "GRAD_LSE": True,
        "WIDTH": width,
        "W": width,
        "VALUE_WIDTH": width,
        "WV": width,
        "BLOCK": chosen.block_k if name.startswith("closed") else 64,
        "SCALE": width**-0.5,
        "BLOCK_Q": chosen.block_q,
        "BLOCK_K": chosen.block_k,
        "ROUND_BF16": False,
        "GROUP": 4 if name == "groups" else 1,
        "ACCUMULATOR": tl.float32,
    }


def _type(parameter: str, dtype: str) -> str:
    if parameter in TABLES:
        return "*i32"
    if parameter in WIDE:
        return "*fp32"
    return "*" + dtype if parameter in POINTERS else "i32"


def target_of(architecture: str) -> GPUTarget:
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def amdgcn_usage(assembly: str) -> dict[str, int]:
    registers = re.findall(r"\.vgpr_count:\s+(\d+)", assembly)
    # Memory of a thread. What is called a spill there may have gone to other registers, those of matrix products.
    spilled = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return {"registers": int(registers[-1]), "spilled_bytes": int(spilled[-1])}


if __name__ == "__main__":
    with ThreadPoolExecutor(1) as reader:  # one kernel is read while the next one is compiled
        for usage in reader.map(lambda read_code: read_code(), map(compiled_kernel, sys.argv[1:])):
            print(json.dumps(usage), flush=True)
