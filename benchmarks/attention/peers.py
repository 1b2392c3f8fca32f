"""Peers of our attention: torch's dense causal attention by each of its kernels, and FlexAttention."""

from __future__ import annotations

import contextlib
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
LAST_RESORT = {"efficient": SDPBackend.EFFICIENT_ATTENTION}  # if neither runs, as in fp32
REASON_CHARACTERS = 200
FLEX_COMPILATIONS = 64


def dense_attention(kernel: SDPBackend | None = None) -> Attention:
    """Return torch's dense causal attention, by one of its kernels or by torch's choice."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def dense_contenders(inputs: Inputs) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the dense kernels that run on such inputs, and the reasons why others do not."""
    if inputs.grad_out.device.type != "cuda":
        return {"torch": Contender(dense_attention())}, {}
    running: dict[str, Contender] = {}
    reasons: dict[str, str] = {}
    for kernels in (DENSE_KERNELS, LAST_RESORT):
        for name, kernel in kernels.items():
            contender = Contender(dense_attention(kernel))
            reason = why_not(contender, inputs)
            if reason is None:
                running[name] = contender
            else:
                reasons[name] = reason
        if running:
            break
    return running, reasons


def why_not(contender: Contender, inputs: Inputs) -> str | None:
    """Run a contender once; return None, or the reason why it cannot run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what each kernel does not support
            if contender.backward:
                torch.autograd.grad(
                    contender.attention(*inputs.leaves), inputs.leaves, inputs.grad_out, retain_graph=True
                )
            else:
                with torch.no_grad():
                    contender.attention(*(x.detach() for x in inputs.leaves))
        synchronize(inputs.grad_out.device)
    except Exception as error:  # a peer that cannot run is a dash in the table
        return reason_of(error)
    return None


def reason_of(error: Exception) -> str:
    """Return the reason of an error in a short line; frees memory if a card ran out of it."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:REASON_CHARACTERS]


@dataclass(frozen=True)
class Flex:
    """FlexAttention with one pattern."""

    contender: Contender | None = None
    block_mask_seconds: float | None = None  # of create_block_mask, after a first call
    block_mask_compiled: bool | None = None  # compiled, because memory ran out
    reason: str | None = None  # why there is no contender

    def fields(self) -> dict[str, Any]:
        """Return the fields of a row of a result file."""
        return {
            "flex_block_mask_seconds": rounded(self.block_mask_seconds),
            "flex_block_mask_compiled": self.block_mask_compiled,
            "flex_reason": self.reason,
        }


def flex(pattern: Pattern | Sequence[Pattern], inputs: Inputs, limit: int) -> Flex:
    """Compile FlexAttention with a block mask of the pattern; on a CPU it has no backward pass."""
    context, device = inputs.grad_out.shape[2], inputs.grad_out.device
    if not isinstance(pattern, Pattern):
        return Flex(reason="heads differ")
    if context > limit:
        return Flex(reason=f"beyond --flex-limit {limit}")
    try:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = FLEX_COMPILATIONS
        torch._functorch.config.donated_buffer = False  # as there are several backward passes
        mask, seconds, compiled_mask = _block_mask(pattern, context, device)
        # Without fullgraph, torch would silently fall back to an eager version of all pairs.
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        contender = Contender(functools.partial(compiled, block_mask=mask), backward=device.type == "cuda")
    except Exception as error:
        return Flex(reason=reason_of(error))
    reason = why_not(contender, inputs)
    return Flex(None if reason else contender, seconds, compiled_mask, reason)


def forget_compiled() -> None:
    """Drop compiled code of finished sizes."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _block_mask(pattern: Pattern, context: int, device: torch.device) -> tuple[Any, float, bool]:
    """Return the block mask, its seconds, and whether it was compiled: uncompiled it needs memory for all pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return pattern.mask(i, j)

    def create_mask(compiled: bool) -> tuple[Any, float, bool]:
        create = torch.compile(create_block_mask) if compiled else create_block_mask
        for _ in range(2):  # the first includes initialisation
            synchronize(device)
            start = time.perf_counter()
            mask = create(allowed, None, None, context, context, device=str(device))
            synchronize(device)
            seconds = time.perf_counter() - start
        return mask, seconds, compiled

    try:
        return create_mask(False)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return create_mask(True)
