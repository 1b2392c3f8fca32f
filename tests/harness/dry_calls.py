"""What whole calls compile and launch on a GPU that is not present, as JSON.

Run as a program, in a process without TRITON_INTERPRET. Nothing is compiled: a kernel counts when triton would compile
it.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from longstride.kernels import sparse_attention
from longstride.kernels.backends import triton as backend
from longstride.kernels.cache import BoundedCache
from longstride.kernels.patterns import Block, Column, Fixed, Local, Pattern, Strided
from tests.harness.dry_card import DryCard

ROOT = Path(__file__).resolve().parents[2]
Inputs = tuple[Tensor, ...]  # q, k, v, and a gradient of the output
# The paper's on enwik8, as a model has them: eight heads whose summaries differ, or of two kinds.
FIXED = Fixed(128, 32, num_summaries=4)
STRIDED = [Local(128), Column(128)] * 4


def inputs_of(batch: int, context: int, heads: int = 8, width: int = 64) -> Inputs:
    """Make inputs as in a model: q, k and v are views of one product, with heads side by side."""
    q, k, v = (
        x.unflatten(-1, (heads, width)).transpose(1, 2)
        for x in torch.empty(batch, context, 3 * heads * width, dtype=torch.bfloat16).chunk(3, -1)
    )
    return q, k, v, torch.empty(batch, context, heads, width, dtype=torch.bfloat16).transpose(1, 2)


def step(inputs: Inputs, pattern: Pattern | list[Pattern]) -> Inputs:
    """Run a forward and a backward pass."""
    *leaves, grad_out = inputs
    leaves = q, k, v = [leaf.detach().requires_grad_() for leaf in leaves]
    out = sparse_attention(q, k, v, pattern, backend="triton")
    return out, *torch.autograd.grad(out, leaves, grad_out)


def told(launches: list[tuple[Any, ...]], inputs: Inputs) -> list[Any]:
    """Describe launches without addresses: tables by their content, other tensors by their order of appearance."""
    names = {tensor.data_ptr(): f"input {number}" for number, tensor in enumerate(inputs)}

    def of(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return repr(argument)
        if argument.dtype == torch.int32:
            return argument.tolist()
        name = names.setdefault(argument.data_ptr(), f"new {len(names)}")
        return name, list(argument.shape), list(argument.stride()), str(argument.dtype)

    return [(name, grid, [of(argument) for argument in arguments]) for name, grid, arguments in launches]


def python_calls(call: Callable[[], object]) -> dict[str, int]:
    """Count the Python functions of ours and of triton's that a call enters."""
    counts = {"longstride": 0, "triton": 0}
    roots = {str(ROOT / "kernels"): "longstride", str(Path(triton.__file__).parent): "triton"}

    def entered(frame: Any, event: str, _: Any) -> None:
        path = os.path.realpath(frame.f_code.co_filename)
        for root, name in roots.items():
            counts[name] += event == "call" and path.startswith(root)

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def main() -> None:
    """Print how many kernels each batch and context adds, and whether repeated calls launch the same."""
    card = DryCard("sm_90", compiles=False).install()
    compiled, launched = card.compiled, card.launched
    counts = {}
    for name, pattern in (("fixed", FIXED), ("strided", STRIDED)):
        for batch, context in ((1, 12288), (2, 12288), (3, 8192), (1, 4096)):
            before = len(compiled)
            step(inputs_of(batch, context), pattern)
            counts[f"{name} {batch} {context}"] = len(compiled) - before
    same = {}
    for pattern in (Local(128), Block(128), Strided(128), FIXED, STRIDED, [*STRIDED[:4], FIXED, *STRIDED[5:]]):
        backend.PLANS = BoundedCache()
        first, second = inputs_of(1, 12288), inputs_of(1, 12288)
        tensors = step(first, pattern)
        mark = len(launched)
        tensors += step(second, pattern)  # by plans of the first: what it held is still held
        again, mark = launched[mark:], len(launched)
        planned = len(backend.PLANS)
        backend.PLANS = BoundedCache()
        tensors += step(second, pattern)
        anew = launched[mark:]
        same[str(pattern)] = planned == 2 and told(again, second) == told(anew, second)
        launched.clear()
    inputs = inputs_of(1, 12288)
    entered = {}
    for name, pattern in (("one launch", Block(128)), ("several", Strided(128))):
        step(inputs, pattern)
        entered[name] = python_calls(lambda pattern=pattern: step(inputs, pattern))
    print(json.dumps({"kernels": counts, "again": same, "python": entered}))


if __name__ == "__main__":
    main()
