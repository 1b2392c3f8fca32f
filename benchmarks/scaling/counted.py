"""Counts the collectives of a process, however they are called.

torch dispatches every collective as an operation of ``c10d``. A dispatch mode sees those of DeepSpeed and ours.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.scaling.collectives import DEEPSPEED, OURS

# By torch's operation: what it is here, and which argument holds S bytes (see collectives.py).
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
_WITHOUT_BYTES = ("barrier",)


class Counted(TorchDispatchMode):
    """Calls and bytes by (owner, operation) since the last ``take``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a collective, and run any operation."""
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name not in _WITHOUT_BYTES:
            operation, place = _OPERATIONS[name]  # KeyError: one that nobody has thought of
            tensors = [tensor for tensor in tree_leaves(args[place]) if isinstance(tensor, Tensor)]
            owner = DEEPSPEED if _through_deepspeed() else OURS
            self.num_bytes[owner, operation] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.calls[owner, operation] += 1
        return func(*args, **(kwargs or {}))

    def take(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts since the last call: bytes and calls by owner and operation."""
        taken: dict[str, dict[str, dict[str, int]]] = {}
        for kind, counter in (("bytes", self.num_bytes), ("calls", self.calls)):
            taken[kind] = {owner: {} for owner in (DEEPSPEED, OURS)}
            for (owner, operation), count in counter.items():
                taken[kind][owner][operation] = count
            counter.clear()
        return taken


def _through_deepspeed() -> bool:
    """Whether DeepSpeed's wrapper of torch.distributed is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "deepspeed.comm.comm":
            return True
        frame = frame.f_back
    return False
