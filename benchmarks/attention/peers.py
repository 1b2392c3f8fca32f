"""The peers: torch's dense causal attention by each of its kernels, and FlexAttention under the same pattern."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention.gate import Attention
from benchmarks.attention.timing import Contender, Inputs
from benchmarks.machine import synchronize
from benchmarks.report import rounded
from longstride.kernels.patterns import Pattern

DENSE_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LAST_RESORT = {"efficient": SDPBackend.EFFICIENT_ATTENTION}  # where neither runs, as in fp32
REASON_CHARACTERS = 200
FLEX_COMPILATIONS = 64


def dense_attention(kernel: SDPBackend | None = None) -> Attention:
    """Torch's own dense causal attention, by one of its kernels or by torch's choice."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kernel is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def dense_contenders(one: Inputs) -> tuple[dict[str, Contender], dict[str, str]]:
    """Each dense kernel that runs on such inputs, and of each that does not the reason."""
    if one.grad_out.device.type != "cuda":
        return {"torch": Contender(dense_attention())}, {}
    running: dict[str, Contender] = {}
    reasons: dict[str, str] = {}
    for kernels in (DENSE_KERNELS, LAST_RESORT):
        for name, kernel in kernels.items():
            contender = Contender(dense_attention(kernel))
            reason = why_not(contender, one)
            if reason is None:
                running[name] = contender
            else:
                reasons[name] = reason
        if running:
            break
    return running, reasons


def why_not(contender: Contender, one: Inputs) -> str | None:
    """Runs a contender once: None, or the reason that it cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at length what each kernel does not like
            if contender.backward:
                torch.autograd.grad(contender.attention(*one.leaves), one.leaves, one.grad_out, retain_graph=True)
            else:
                with torch.no_grad():
                    contender.attention(*(x.detach() for x in one.leaves))
        synchronize(one.grad_out.device)
    except Exception as error:  # a peer that cannot run is a dash in the table, not our failure
        return reason_of(error)
    return None


def reason_of(error: Exception) -> str:
    """One short line."""
    if out_of_memory(error):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:REASON_CHARACTERS]


def out_of_memory(error: Exception) -> bool:
    """Whether a card's memory ran out, and frees what is held for the next attempt."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    torch.cuda.empty_cache()
    return True


@dataclass(frozen=True)
class Flex:
    """FlexAttention under one pattern."""

    contender: Contender | None = None
    block_mask_seconds: float | None = None  # of create_block_mask, after a first call
    block_mask_compiled: bool | None = None  # whether it had to be compiled for want of memory
    reason: str | None = None  # why there is no contender

    def described(self) -> dict[str, Any]:
        """What stands in a row of a result file."""
        return {
            "flex_block_mask_seconds": rounded(self.block_mask_seconds),
            "flex_block_mask_compiled": self.block_mask_compiled,
            "flex_reason": self.reason,
        }


def flex(pattern: Pattern | Sequence[Pattern], one: Inputs, limit: int) -> Flex:
    """FlexAttention, compiled, with a block mask of the pattern; on a CPU it has no backward."""
    context, device = one.grad_out.shape[2], one.grad_out.device
    if not isinstance(pattern, Pattern):
        return Flex(reason="heads differ")
    if context > limit:
        return Flex(reason=f"beyond --flex-limit {limit}")
    try:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = FLEX_COMPILATIONS
        torch._functorch.config.donated_buffer = False  # a graph that is kept for several backward passes cannot give
        mask, seconds, compiled_mask = _block_mask(pattern, context, device)
        # fullgraph: without it, torch would fall back to an eager version of all pairs and say nothing.
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        contender = Contender(functools.partial(compiled, block_mask=mask), backward=device.type == "cuda")
    except Exception as error:
        return Flex(reason=reason_of(error))
    reason = why_not(contender, one)
    return Flex(None if reason else contender, seconds, compiled_mask, reason)


def forget_compiled() -> None:
    """Drops what was compiled for sizes that are done."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _block_mask(pattern: Pattern, context: int, device: torch.device) -> tuple[Any, float, bool]:
    """The block mask, the seconds it took, and whether it was compiled: uncompiled it holds all pairs in memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return pattern.mask(i, j)

    def made(compiled: bool) -> tuple[Any, float, bool]:
        create = torch.compile(create_block_mask) if compiled else create_block_mask
        for _ in range(2):  # the second without what happens once a process
            synchronize(device)
            start = time.perf_counter()
            mask = create(allowed, None, None, context, context, device=str(device))
            synchronize(device)
            seconds = time.perf_counter() - start
        return mask, seconds, compiled

    try:
        return made(False)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return made(True)
