"""What whole calls compile and launch on a card that is not there, as JSON.

Run as a program, in a process without TRITON_INTERPRET. Nothing is compiled: a kernel counts where triton would.
"""

from __future__ import annotations

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
from longstride.kernels.backends.triton import launch
from longstride.kernels.kept import Kept
from longstride.kernels.patterns import Block, Column, Fixed, Local, Pattern, Strided
from tests.harness.dry_card import DryCard

ROOT = Path(__file__).resolve().parents[2]
Inputs = tuple[Tensor, ...]  # q, k, v, and a gradient of the output
# The paper's on enwik8, as a model has them: eight heads whose summaries differ, or of two kinds.
FIXED = Fixed(128, 32, num_summaries=4)
STRIDED = [Local(128), Column(128)] * 4


def inputs_of(batch: int, context: int, heads: int = 8, width: int = 64) -> Inputs:
    """As a model has them: q, k and v cut from one product, heads side by side."""
    q, k, v = (
        x.unflatten(-1, (heads, width)).transpose(1, 2)
        for x in torch.empty(batch, context, 3 * heads * width, dtype=torch.bfloat16).chunk(3, -1)
    )
    return q, k, v, torch.empty(batch, context, heads, width, dtype=torch.bfloat16).transpose(1, 2)


def step(inputs: Inputs, pattern: Pattern | list[Pattern]) -> Inputs:
    """A forward and a backward pass."""
    *leaves, grad_out = inputs
    leaves = q, k, v = [leaf.detach().requires_grad_() for leaf in leaves]
    out = sparse_attention(q, k, v, pattern, backend="triton")
    return out, *torch.autograd.grad(out, leaves, grad_out)


def told(launches: list[tuple[Any, ...]], inputs: Inputs, kept: set[int]) -> list[Any]:
    """Launches in words that do not depend on addresses, but for those of tensors that are kept from call to call."""
    names = {tensor.data_ptr(): f"input {number}" for number, tensor in enumerate(inputs)}

    def of(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return repr(argument)
        address = argument.data_ptr()
        if address not in kept:
            address = names.setdefault(address, f"new {len(names)}")  # type: ignore[assignment]
        return address, list(argument.shape), list(argument.stride()), str(argument.dtype)

    return [(name, grid, [of(argument) for argument in arguments]) for name, grid, arguments in launches]


def addresses(launches: list[tuple[Any, ...]]) -> set[int]:
    """Of all tensors that are launched with."""
    return {a.data_ptr() for _, _, arguments in launches for a in arguments if isinstance(a, Tensor)}


def python_calls(call: Callable[[], object]) -> dict[str, int]:
    """How many Python functions a call enters, of ours and of triton's."""
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
    """Print how many kernels come with each batch and context, whether calls made again launch the same."""
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
        launch.RECORDINGS = Kept()
        first, second = inputs_of(1, 12288), inputs_of(1, 12288)
        held = step(first, pattern)
        mark = len(launched)
        held += step(second, pattern)  # by recordings of the first: what it held is still held
        again, mark = launched[mark:], len(launched)
        recorded = [known.value.recording is not None for known in launch.RECORDINGS._entries.values()]
        launch.RECORDINGS = Kept()
        held += step(second, pattern)
        written = launched[mark:]
        kept = addresses(again) & addresses(written) - {t.data_ptr() for t in second}
        equal = told(again, second, kept) == told(written, second, kept)
        same[str(pattern)] = recorded == [True, True] and len(kept) > 0 and equal
        launched.clear()
    inputs = inputs_of(1, 12288)
    entered = {}
    for name, pattern in (("one launch", Block(128)), ("several", Strided(128))):
        step(inputs, pattern)
        entered[name] = python_calls(lambda pattern=pattern: step(inputs, pattern))
    print(json.dumps({"kernels": counts, "again": same, "python": entered}))


if __name__ == "__main__":
    main()
