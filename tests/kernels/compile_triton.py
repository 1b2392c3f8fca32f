"""Compiles the Triton kernels for cards that need not be there, and prints what they use, as JSON, one kernel a line.

Run as a program, in a process without TRITON_INTERPRET: ``python compile_triton.py sm_90:forward:bfloat16:64 …``.
Further fields: ``block_q,block_k,num_warps,num_stages`` for other tiles than the table's, ``natural`` for kernels that
read no order, ``resume`` for those of a second pass.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.backends.triton.backward_kernels import delta_kernel, dkdv_kernel, dq_kernel
from kernels.backends.triton.configurations import Configuration, configuration
from kernels.backends.triton.forward_kernel import forward_kernel

KERNELS = {"forward": forward_kernel, "dkdv": dkdv_kernel, "dq": dq_kernel, "delta": delta_kernel}
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
INDICES = {"layout_of": "*i64", "table": "*i64", "data": "*i32"}
WIDE = {"lse", "delta", "grad_lse"}
SIZES = {"num_heads", "context", "num_tiles", "num_blocks"}


def compile_kernel(case: str) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of ``architecture:kernel:dtype:width[:…]``."""
    architecture, name, dtype, width_text, *further = case.split(":")
    width, tiles = int(width_text), [field for field in further if "," in field]
    chosen = (
        Configuration(*map(int, tiles[0].split(",")))
        if tiles
        else configuration("dq" if name == "delta" else name, architecture, 4 if dtype == "float32" else 2, width)  # type: ignore[arg-type]
    )
    ordered = "natural" not in further
    flags = {"QUERIES_ORDERED": ordered, "KEYS_ORDERED": ordered, "RESUME": "resume" in further}
    flags |= {"FINAL": True, "GRAD_LSE": True}
    sizes = {"WIDTH": width, "W": width, "VALUE_WIDTH": width, "WV": width, "BLOCK": 64, "SCALE": width**-0.5}
    blocks = {"BLOCK_Q": chosen.block_q, "BLOCK_K": chosen.block_k}
    known = {**flags, **sizes, **blocks, "ROUND_BF16": False, "ACCUMULATOR": tl.float32}
    kernel = KERNELS[name]
    constants = {parameter.name: known[parameter.name] for parameter in kernel.params if parameter.is_constexpr}
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.params):
        kind = _type(parameter.name, TYPES[dtype]) if parameter.name not in constants else "constexpr"
        signature[parameter.name] = kind
        if kind.startswith("*") or parameter.name.startswith("stride"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    compiled = triton.compile(source, target=_target(architecture), options=options)
    found = {"case": case, "tiles": list(chosen), "shared": compiled.metadata.shared}
    if "cubin" in compiled.asm:
        return found | _cubin_usage(compiled.asm["cubin"]) | {"wgmma": "wgmma.mma_async" in compiled.asm["ptx"]}
    return found | _amdgcn_usage(compiled.asm["amdgcn"])


def _type(parameter: str, dtype: str) -> str:
    if parameter in INDICES:
        return INDICES[parameter]
    if parameter in WIDE:
        return "*fp32"
    if parameter.startswith("previous"):
        return "*fp32"
    return "i32" if parameter.startswith("stride") or parameter in SIZES else "*" + dtype


def _target(architecture: str) -> GPUTarget:
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def _cubin_usage(cubin: bytes) -> dict[str, int]:
    program = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    # What is spilled lies on the stack.
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[-1]
    return {"registers": int(registers), "spilled_bytes": int(stack)}


def _amdgcn_usage(assembly: str) -> dict[str, int]:
    registers = re.findall(r"\.vgpr_count:\s+(\d+)", assembly)
    spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    return {"registers": int(registers[-1]), "spilled_bytes": 4 * int(spilled[-1])}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(compile_kernel(case)), flush=True)
