"""Sparse attention on a CPU: batched dense products over chunks, and a softmax over rows of a cache."""

from longstride.kernels.backends.cpu.attention import backward, forward, visited_pairs, why_not
from longstride.kernels.backends.cpu.decode import PreparedCache
from longstride.kernels.backends.cpu.indexed import indexed_backward, indexed_forward
from longstride.kernels.backends.cpu.selected import selected_backward, selected_forward

prepare = PreparedCache

__all__ = ["backward", "forward", "prepare", "selected_backward", "selected_forward", "visited_pairs", "why_not"]
