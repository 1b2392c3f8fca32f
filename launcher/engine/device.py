"""The device of a run: DeepSpeed's accelerator, torch.compile, kernels compiled before ranks meet, random generators.

torch.compile fuses a residual block's operations between matrix products; attention stays one operation. Imports
deepspeed.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import socket
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor, nn

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.models import DTYPES
from longstride.launcher.ranks import LoneDivision
from longstride.sparse_model import BlockContext, Division, MixerOutput, ModelConfig, SparseTransformer, Table

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class TrainingCpu(CPU_Accelerator):
    """DeepSpeed's CPU accelerator without two obstacles to training on any CPU."""

    def is_fp16_supported(self) -> bool:
        """Return True: torch computes in half precision on every CPU. DeepSpeed requires oneDNN's fast path."""
        return True

    def create_op_builder(self, class_name: str) -> Any:
        """Return DeepSpeed's builder of an op, or None for the shared-memory collective.

        Only inference_all_reduce uses that op, and compiling it would delay the first process group by 20 seconds.
        """
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)


def prepare_accelerator(config: RunConfig | None = None) -> None:
    """Replace DeepSpeed's CPU accelerator by ours if there is no GPU, and limit its log to warnings.

    The log is unchanged without a configuration, or if that has deepspeed.log_level.
    """
    if config is not None:
        if "log_level" not in config.deepspeed:
            deepspeed.utils.logger.setLevel(logging.WARNING)
        # DeepSpeed calls two collectives by names that torch is about to retire.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if get_accelerator().device_name() != "cpu":
        return
    set_accelerator(TrainingCpu())
    _keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        # Use a share of the cores. If every rank used all of them, each would wait for the others.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        sharing = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"  # deepspeed's, torchrun's
        torch.set_num_threads(max(1, cores // max(1, int(sharing))))


def _keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory, and serve blocks of less than 32 MiB from it.

    A step frees what the next one allocates. Memory that goes back to the system in between is zeroed page by page:
    17,000 pages and a fifth of a small model's step.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators for dropout: the CPU's and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what ``random_states`` returned."""
    torch.set_rng_state(states["cpu"])
    if "device" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)


def compile_kernels(
    model: ModelConfig,
    batch: int,
    precision: str,
    device: torch.device,
    *,
    train: TrainConfig | None = None,
    apart: bool = False,
    padded: bool = False,
    division: Division | None = None,
) -> None:
    """Compile what a run's batches will launch on a GPU, and with ``train.compile`` its blocks on any device.

    Called before the processes meet, so that none waits in a collective for another's compiler. Kernels depend on the
    context, the number of programs, and sizes and strides that are 1 or multiples of 16. Therefore the model's
    attention runs once at the run's own sizes. One process of a host compiles; the others find the result in Triton's
    or torch's cache.

    Args:
        train: None if there is no backward pass.
        apart: whether contexts hold documents that do not see each other.
        padded: whether contexts may be short, and are padded.
        division: the place of this process among those that share a context. They need not have met.
    """
    is_cpu, dtype = device.type == "cpu", DTYPES[precision]
    if is_cpu and not (train and train.compile):
        return
    with _one_at_a_time():
        if not is_cpu:
            run_parts(model, batch, dtype, device, training=train is not None, apart=apart, division=division)
        if train is not None and train.compile:
            recomputed = train.activation_checkpointing
            run_parts(model, batch, dtype, device, compiled=True, recomputed=recomputed, apart=apart, padded=padded)
        if not is_cpu:
            torch.accelerator.synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_compiler() -> None:
    """Raise ConfigError if there is no C++ compiler for torch.compile, or Python's headers are missing."""
    command = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(command) is None:
        rule = f"needs a C++ compiler, and there is no {command}; install it, name another by CXX, or give false"
        raise ConfigError.at("train.compile", True, rule)
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        rule = f"needs the headers of Python, and {headers} has none; install them (python3-dev), or give false"
        raise ConfigError.at("train.compile", True, rule)


def compile_blocks(model: SparseTransformer) -> None:
    """Compile every residual block without a table for training steps, once for all blocks of a kind.

    Evaluations and probes stay uncompiled, so that they agree with other verbs, and no other batch shape is compiled.
    """
    # torch counts the compilations of all blocks together. Each kind is compiled with and without gradients, for inputs
    # that need them or not, with and without padding, and under ZeRO 3 once more.
    kinds = len(set(model.config.blocks()))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16 * kinds)
    # This cache on disk knows forward passes alone: its backward pass may be one of another version of our operations.
    torch._functorch.config.enable_autograd_cache = False
    for block in model.blocks:
        if any(isinstance(module, Table) for module in block.modules()):
            continue  # its rows are read, and gradients stored, outside of the block
        # Compile only forward, since ZeRO 3 gathers parameters by hooks, which a compiled module would include.
        block.forward = _compile_for_training(block, block.forward)  # type: ignore[method-assign]


def _compile_for_training(block: nn.Module, forward: Callable[..., MixerOutput]) -> Callable[..., MixerOutput]:
    # With torch's own generator, dropout draws the same masks as uncompiled, also when a block is recomputed or a run
    # is resumed.
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, options={"fallback_random": True})

    def call(h: Tensor, context: BlockContext, *shared: Tensor) -> MixerOutput:
        return compiled(h, context, *shared) if block.training else forward(h, context, *shared)

    return call


def run_parts(
    model: ModelConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    training: bool = True,
    compiled: bool = False,
    recomputed: bool = False,
    apart: bool = False,
    padded: bool = False,
    division: Division | None = None,
) -> None:
    """Run each kind of mixer once, or each kind of block, over zeros, forward and for training backward.

    With a ``division``, run this process's share over a section of zeros (B, n, C). Nothing is exchanged.

    Args:
        compiled: run blocks, and compile them. This process keeps the results, and others find them in torch's cache
            folder. Under ZeRO 3 DeepSpeed replaces torch's linear layers, so each compiles again in its first step.
        recomputed: whether activation checkpointing is on, which also compiles the forward pass alone.
        apart: whether contexts hold documents that do not see each other.
        padded: whether batches may have padding, which compiles once more.
    """
    network = SparseTransformer.empty(model, list(dict.fromkeys(model.blocks())))
    if compiled:
        compile_blocks(network)
    if division is not None:
        network.divide(LoneDivision(division.rank, division.size, None, division.exchange))
    parts: list[Any] = [block if compiled else block.attention for block in network.blocks]  # None: without a mixer
    for part in filter(None, [*parts, network.shared]):
        part.to_empty(device=device).to(dtype)
        for parameter in part.parameters():
            nn.init.zeros_(parameter)
    section = network.division.section(model.context)
    length = section.stop - section.start
    shape = (batch, model.objective.num_rows(length), model.width)
    tokens = torch.zeros(batch, model.context, dtype=torch.uint8, device=device)
    positions = torch.arange(model.context, device=device).expand(batch, -1) if apart else None
    for real in [None, torch.ones(batch, length, dtype=torch.bool, device=device)] if padded else [None]:
        layout = model.objective.layout(tokens, tokens, torch.zeros_like(tokens), real)
        if layout is None:
            contexts = network.block_contexts(tokens, positions, real)
        else:
            contexts = network.layout_contexts(layout)
        for part, context in zip(parts, contexts, strict=True):
            if part is None:
                continue
            h = torch.zeros(shape, device=device, dtype=dtype, requires_grad=training)
            if recomputed:
                with torch.no_grad():  # only the first block's input needs gradients
                    part(h, context)
                    part(h.detach(), context)
            with torch.set_grad_enabled(training):
                output = part(h, context).rows
            if training:
                output.sum().backward(retain_graph=network.shared is not None)  # which all parts have


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let only one process of this user on this host run the block at a time."""
    with ExitStack() as stack:
        # Without a lock each process compiles for itself, which only costs time. A RuntimeError means that the user has
        # no home folder.
        with suppress(OSError, RuntimeError):
            cache = os.environ.get("TRITON_CACHE_DIR")
            folder = Path(cache) if cache else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
            folder.mkdir(parents=True, exist_ok=True)
            # In the user's own folder, since any user could block a shared one. Hosts may share a home folder.
            lock = stack.enter_context((folder / f"longstride-{socket.gethostname()}.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
