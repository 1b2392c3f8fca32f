"""DeepSpeed's CPU accelerator without its two obstacles to training on any CPU. Imports deepspeed."""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class TrainingCpu(CPU_Accelerator):
    """The CPU, in every precision that torch computes in, without a compiled communication op."""

    def is_fp16_supported(self) -> bool:
        """True: torch computes in half precision on every CPU, where DeepSpeed asks for oneDNN's fast path."""
        return True

    def create_op_builder(self, class_name: str) -> Any:
        """DeepSpeed's builder of that op; none for the shared-memory collective.

        That op serves inference_all_reduce alone, which training never calls, and would be compiled for 20 seconds by
        the first process group.
        """
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)


def prepare_accelerator() -> bool:
    """Replaces DeepSpeed's CPU accelerator by ours where there is no GPU; returns whether training runs on the CPU."""
    if get_accelerator().device_name() != "cpu":
        return False
    set_accelerator(TrainingCpu())
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_own_cores())
    return True


def _own_cores() -> int:
    """This process's share of the cores: with every rank on all of them, each waits for the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    neighbours = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"  # deepspeed's, torchrun's
    return max(1, cores // max(1, int(neighbours)))
