"""The device that a run computes on: DeepSpeed's accelerator, kernels compiled before ranks meet, random generators.

Importing it imports deepspeed.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.engine.compiled import run_blocks
from longstride.launcher.models import DTYPES
from longstride.sparse_model import Division, ModelConfig, SparseTransformer

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class TrainingCpu(CPU_Accelerator):
    """DeepSpeed's CPU without its two obstacles to training on any CPU."""

    def is_fp16_supported(self) -> bool:
        """True: torch computes in half precision on every CPU, where DeepSpeed asks for oneDNN's fast path."""
        return True

    def create_op_builder(self, class_name: str) -> Any:
        """DeepSpeed's builder of that op; none for the shared-memory collective.

        That op serves inference_all_reduce alone, which training never calls, and would be compiled for 20 seconds by
        the first process group.
        """
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)


def prepare_accelerator(config: RunConfig | None = None) -> None:
    """Replaces DeepSpeed's CPU accelerator by ours where there is no GPU, and leaves its log to warnings.

    The log is left as it is without a configuration, or where that gives deepspeed.log_level.
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
        # This process's share of the cores: with every rank on all of them, each waits for the others.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        sharing = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"  # deepspeed's, torchrun's
        torch.set_num_threads(max(1, cores // max(1, int(sharing))))


def _keep_freed_memory() -> None:
    """Has glibc keep what is freed up to 1 GiB, and not ask the system anew for blocks of less than 32 MiB.

    A step frees what the next one allocates. Handed back and asked for again, every page of it is zeroed by the system:
    some 17,000 pages and a fifth of the time of a small model's step.
    """
    with suppress(OSError, AttributeError):  # another C library keeps its own ways
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of a rank's random generators, from which dropout draws: the CPU's and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores what ``random_states`` returned."""
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
    """Compiles what batches of so many contexts will launch on a GPU, and what ``train.compile`` asks for anywhere.

    Called before the processes meet, so that none waits in a collective for another one's compiler. Kernels are
    compiled for what they meet: tiles and slices follow from the context and the number of programs, and sizes and
    strides that are 1 or multiples of 16 are compiled in. So the model's own attention is run once at the run's own
    sizes. Of the processes of a host one compiles; the others find the result in Triton's or torch's cache folder.
    ``train`` is None where no backward pass follows. ``apart``: contexts hold documents that do not see each other.
    ``padded``: contexts may be short, and are filled up.
    ``division``: the place of this process among those that share a context, which need not have met.
    """
    blocks = train is not None and train.compile
    if device.type == "cpu" and not blocks:
        return
    with _one_at_a_time():
        if device.type != "cpu":
            training = train is not None
            run_attention(model, batch, DTYPES[precision], device, training=training, apart=apart, division=division)
        if train is not None and blocks:
            recomputed = train.activation_checkpointing
            dtype = DTYPES[precision]
            run_blocks(model, batch, dtype, device, recomputed=recomputed, apart=apart, padded=padded)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_attention(
    model: ModelConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    training: bool = True,
    apart: bool = False,
    division: Division | None = None,
) -> None:
    """Each of the model's kinds of mixers once, forward and, for training, backward, over (B, N, C) zeros.

    Of a ``division`` what its process would compute, over a section of zeros (B, n, C). It exchanges nothing.
    """
    with torch.device("meta"):
        network = SparseTransformer(model, list(dict.fromkeys(model.blocks())))
    if division is not None:
        network.divide(_Unmet(division.rank, division.size, None, division.exchange))
    own = network.division.section(model.context)
    places = torch.arange(model.context, device=device).expand(batch, -1) if apart else None
    for block, context in zip(network.blocks, network.block_contexts(model.context, places), strict=True):
        mixer = block.attention
        if mixer is None:
            continue
        mixer.to_empty(device=device).to(dtype)
        for parameter in mixer.parameters():
            torch.nn.init.zeros_(parameter)
        h = torch.zeros(batch, own.stop - own.start, model.width, device=device, dtype=dtype, requires_grad=training)
        with torch.set_grad_enabled(training):
            out = mixer(h, context).rows
        if training:
            out.sum().backward()


class _Unmet(Division):
    """Processes that have not met: what the others would send is zeros."""

    def swap(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """As many zeros as would come."""
        return values.new_zeros(self.size if received is None else sum(received), *values.shape[1:])


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Among the processes of this user on this host."""
    with ExitStack() as held:
        # Where nothing can be locked, each process compiles for itself, which only costs time. A RuntimeError says that
        # the user has no home folder.
        with suppress(OSError, RuntimeError):
            cache = os.environ.get("TRITON_CACHE_DIR")
            folder = Path(cache) if cache else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
            folder.mkdir(parents=True, exist_ok=True)
            # In the user's own folder: in a shared one any user could put a file of that name. Hosts may share it.
            lock = held.enter_context((folder / f"longstride-{socket.gethostname()}.lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
