"""Residual blocks by torch.compile, which fuses what lies between their products; attention stays one step of its own.

Imports no deepspeed.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from longstride.kernels import ConfigError
from longstride.sparse_model import BlockContext, MixerOutput, ModelConfig, SparseTransformer


def check_compiler() -> None:
    """Whether torch.compile finds what it needs here.

    Raises:
        ConfigError: there is no C++ compiler, or no headers of Python, which what it compiles includes.
    """
    command = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(command) is None:
        rule = f"needs a C++ compiler, and there is no {command}; install it, name another by CXX, or give false"
        raise ConfigError.at("train.compile", True, rule)
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        rule = f"needs the headers of Python, and {headers} has none; install them (python3-dev), or give false"
        raise ConfigError.at("train.compile", True, rule)


def compile_blocks(model: SparseTransformer) -> None:
    """Has every residual block run compiled in training steps, one compilation for all that are alike.

    Evaluations and probes stay uncompiled, so that they give what other verbs give, and no other shape of a batch is
    ever compiled.
    """
    # torch counts all compilations of a function together, and blocks of several kinds share theirs: each is compiled
    # with gradients and without, for an input that needs them and one that does not, with padding and without, and
    # under ZeRO 3 once more.
    kinds = len(set(model.config.blocks()))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16 * kinds)
    for block in model.blocks:
        # Its forward alone: ZeRO 3 gathers its parameters by hooks, which a compiled module would take in.
        block.forward = _in_training(block, block.forward)  # type: ignore[method-assign]


def _in_training(block: nn.Module, forward: Callable[..., MixerOutput]) -> Callable[..., MixerOutput]:
    # With torch's own generator, dropout draws the masks that it would draw uncompiled: a block that is computed again
    # for its backward pass, or after a resume, meets the same.
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, options={"fallback_random": True})

    def call(h: Tensor, context: BlockContext) -> MixerOutput:
        return compiled(h, context) if block.training else forward(h, context)

    return call


def run_blocks(
    config: ModelConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recomputed: bool,
    apart: bool = False,
    padded: bool = False,
) -> None:
    """One block of each kind that a model has, compiled, forward and backward over (B, N, C) zeros.

    What it compiles, this process keeps, and others find in torch's cache folder. Under ZeRO 3 DeepSpeed puts linear
    layers of its own in place of torch's: there each process compiles again in its first step. ``recomputed``: as
    activation checkpointing runs it, which compiles the forward pass by itself as well. ``apart``: with documents.
    ``padded``: once more as batches with padding run it.
    """
    with torch.device("meta"):
        model = SparseTransformer(config, list(dict.fromkeys(config.blocks())))
    compile_blocks(model)
    places = torch.arange(config.context, device=device).expand(batch, -1) if apart else None
    for block in model.blocks:
        block.to_empty(device=device).to(dtype)
        for parameter in block.parameters():
            nn.init.zeros_(parameter)
    every = torch.ones(batch, config.context, dtype=torch.bool, device=device)
    masks = (None, every) if padded else (None,)
    contexts = [each for real in masks for each in model.block_contexts(config.context, places, real)]
    for block, context in zip([*model.blocks] * len(masks), contexts, strict=True):
        h = torch.zeros(batch, config.context, config.width, device=device, dtype=dtype, requires_grad=True)
        if recomputed:
            with torch.no_grad():  # the input of the first block needs gradients, and that of the others none
                block(h, context)
                block(h.detach(), context)
        block(h, context).rows.sum().backward()
