"""Compile the kernels of the gated delta rule for GPUs that need not be present; print their resources as JSON lines.

Run as a program, in a process without TRITON_INTERPRET: ``python compile_delta.py sm_90:states:bfloat16:128 …``. The
number is the width of q, k and v. All kernels have decay, documents, correction and first and last states.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from benchmarks.attention.compiled import CARDS, read
from longstride.kernels.backends.triton import delta
from tests.harness.compile_triton import TYPES, amdgcn_usage, target_of

NARROW = {"q", "k", "v", "rows", "grad_out", "out", "dq", "dk", "dv"}  # in the dtype of rows; other tensors are fp32


def compiled_kernel(case: str) -> dict[str, Any]:
    """Compile ``architecture:kernel:dtype:width`` and return its resources."""
    architecture, name, dtype, width_text = case.split(":")
    width, is_nvidia = int(width_text), architecture.startswith("sm_")
    kernel = getattr(delta, f"{name}_kernel")
    tiles = delta.tiles_for(width, getattr(torch, dtype))
    is_sequential = name in ("states", "grad_states")
    precision, exact = delta.precisions(getattr(torch, dtype), is_nvidia)
    block_d, block_v = tiles.states if is_sequential else tiles.chunks
    values = dict.fromkeys(("DECAY", "BEGINS", "CORRECT", "INITIAL", "FINAL", "KEYS", "SYSTEM"), True)
    values |= {"WIDTH": width, "VALUE_WIDTH": width, "BLOCK_D": block_d, "BLOCK_V": block_v, "CHUNK": delta.CHUNK}
    values |= {"PRECISION": precision, "EXACT": exact, "ACC": tl.float32}
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    types = {parameter.name: _type(parameter.name, TYPES[dtype]) for parameter in kernel.params}
    options = {"num_warps": 2 if name == "inverses" else delta.WARPS, "num_stages": 1}
    return usage_of(case, kernel, types, constants, options)


def usage_of(
    case: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Compile a kernel whose parameters have these types, but for ``constants``, and return its resources."""
    architecture = case.split(":")[0]
    signature, attributes = {}, {}
    for number, name in enumerate(types):
        signature[name] = kind = "constexpr" if name in constants else types[name]
        if kind.startswith("*") or name.startswith("stride"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target_of(architecture), options=options)
    usage = {"case": case, "shared": compiled.metadata.shared}
    if "amdgcn" in compiled.asm:
        return usage | amdgcn_usage(compiled.asm["amdgcn"])
    code = read(compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.num_warps)
    usage |= {"registers": code.registers, "spilled_bytes": code.stack_bytes}
    return usage | {"programs": code.programs(architecture) if architecture in CARDS else None}


def _type(parameter: str, dtype: str) -> str:
    if parameter.startswith(("stride", "num_")):
        return "i32"
    return "*u8" if parameter == "begins" else "*" + (dtype if parameter in NARROW else "fp32")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(compiled_kernel(case)), flush=True)
