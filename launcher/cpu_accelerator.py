"""DeepSpeed's CPU accelerator without its two obstacles to training on any CPU. Imports deepspeed."""

from __future__ import annotations

from typing import Any

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
    return True
