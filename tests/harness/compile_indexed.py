"""Compile the kernels of attention to listed keys for GPUs that need not be present; print resources as JSON lines.

Run as a program, in a process without TRITON_INTERPRET: ``python compile_indexed.py sm_90:dq:bfloat16:128:16 …``. The
numbers are the width of q, k and v, and the heads of a group.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton.language as tl

from longstride.kernels.backends.triton import indexed, indexer
from tests.harness.compile_delta import usage_of
from tests.harness.compile_triton import TYPES

NARROW = {"q", "k", "v", "out", "grad_out", "dq", "dk", "dv"}  # in the dtype of rows; other numbers are fp32
INTEGERS = {"numbers": "*i32", "readers": "*i32", "starts": "*i64", "ends": "*i64", "owners": "*i64"}


def compiled_kernel(case: str) -> dict[str, Any]:
    """Compile ``architecture:kernel:dtype:width:group`` and return its resources."""
    architecture, name, dtype, *sizes = case.split(":")
    width, group = map(int, sizes)
    is_nvidia = architecture.startswith("sm_")
    kernel = getattr(indexer if name in ("highest", "scores") else indexed, f"{name}_kernel")
    if name == "highest":
        tiles = indexer.row_tiles(indexer.MOST_PLACES)
    elif name == "scores":
        tiles = indexer.score_tiles(width, getattr(torch, dtype), is_nvidia)
    else:
        tiles = indexed.tiles_for(group, width, getattr(torch, dtype), is_nvidia)
    values: dict[str, Any] = dict.fromkeys(("WIDTH", "W", "VALUE_WIDTH", "WV"), width) | tiles
    values |= {"SCALE": width**-0.5, "GROUP": group, "PIECE": indexed.PIECE, "POOL": 16, "GRAD_LSE": True}
    values |= {"ROUND_BF16": False, "ACCUMULATOR": tl.float32}
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    types = {parameter.name: _type(parameter.name, TYPES[dtype]) for parameter in kernel.params}
    options = {option: tiles[option] for option in ("num_warps", "num_stages")}
    return usage_of(case, kernel, types, constants, options)


def _type(parameter: str, dtype: str) -> str:
    if parameter.startswith(("stride", "num_", "count", "window")):
        return "i32"
    return INTEGERS.get(parameter) or "*" + (dtype if parameter in NARROW else "fp32")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(compiled_kernel(case)), flush=True)
