"""Compiles a run's kernels before its processes meet, so that none waits in a collective for another one's compiler.

Kernels are compiled for what they meet: tiles and slices follow from the context and the number of programs, and sizes
and strides that are 1 or multiples of 16 are compiled in. So the model's own attention is run once, forward and
backward, at the run's own sizes, for every pattern that a layer has; a step needs more memory than that.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from longstride.sparse_model import Attention, ModelConfig


def compile_kernels(
    model: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device, *, training: bool = True
) -> None:
    """Compiles what batches of so many contexts will launch on a GPU; on a CPU nothing is compiled, and nothing done.

    Of the processes of a host one compiles, and the others find it done: Triton keeps what it compiled in a folder.
    """
    if device.type == "cpu":
        return
    with _one_at_a_time():
        run_attention(model, batch, dtype, device, training=training)
        torch.accelerator.synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_attention(
    model: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device, *, training: bool = True
) -> None:
    """Each of the model's kinds of attention once, forward and, for training, backward, over (B, N, C) zeros."""
    for patterns in dict.fromkeys(model.layer_patterns()):
        attention = Attention(model, patterns).to(device, dtype)
        h = torch.zeros(batch, model.context, model.width, device=device, dtype=dtype, requires_grad=training)
        with torch.set_grad_enabled(training):
            out = attention(h)
        if training:
            out.sum().backward()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Among the processes of this user on this host."""
    with ExitStack() as held:
        # Where nothing can be locked, each compiles for itself, which costs time and no more.
        with suppress(OSError):
            folder = _compiler_folder()
            folder.mkdir(parents=True, exist_ok=True)
            # A name that any user may foresee must not be in a folder where any may put a file. Hosts may share it.
            lock = held.enter_context((folder / f"longstride-{socket.gethostname()}.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiler_folder() -> Path:
    """Where Triton keeps what it compiled, by its own variables."""
    told = os.environ.get("TRITON_CACHE_DIR")
    return Path(told) if told else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
