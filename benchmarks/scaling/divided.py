"""What processes that share contexts exchange in a step, by formulas that know nothing of the code that exchanges.

Letters: B contexts of a micro-batch, N positions, U processes of a group, n = N / U, H heads, K heads of keys and
values, D and Dv their widths, C channels, e bytes of an element.

**Heads** (Jacobs et al. 2023, DeepSpeed Ulysses): an all_to_all makes of n positions of all heads all N positions of
H / U: B·n·(H·D + K'·(D + Dv))·e bytes, where K' is K, or more where U does not divide it: the least that both divide.
Another one, of B·n·H·Dv·e, brings the outputs back. **Keys**: process u gets the rows of keys and values that its
queries read in sections before its own, B·(D + Dv)·e bytes a row and head of keys, in one all_to_all. **Convolutions**
of k positions hand their last k - 1 rows to the next process, B·(k - 1)·C·e bytes. The backward pass sends each
gradient the way back, and a block that is recomputed exchanges once more.

Mixers that choose by content exchange heads too, and parts of their own; they are not counted here, nor experts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from benchmarks.scaling.collectives import OURS, Collective, sent_bytes
from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern
from longstride.launcher.config.run_config import RunConfig
from longstride.sparse_model import ModelConfig, SparseTransformer

HEADS, KEYS, ROWS = "heads", "keys", "rows"  # what is exchanged
# (patterns of H heads, K, N, U) -> (U, U): rows that section [0] sends to section [1], of all K heads together.
Rows = Callable[[tuple[Pattern, ...], int, int, int], Sequence[Sequence[int]]]


def rows_by_masks(patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int) -> list[list[int]]:
    """``Rows`` by looking at every pair of positions: for short contexts alone."""
    positions, group = torch.arange(context), len(patterns) // key_heads
    counts = torch.zeros(sections, sections, dtype=torch.int64)
    for head in range(key_heads):
        masks = [pattern.mask(positions[:, None], positions) for pattern in patterns[head * group : (head + 1) * group]]
        read = torch.stack(masks).any(0).unflatten(0, (sections, -1)).any(1)  # (U, N): section [0] reads position [1]
        counts += read.unflatten(1, (sections, -1)).sum(2).T
    return counts.fill_diagonal_(0).tolist()


def exchanges(config: RunConfig, rank: int, micro_batches: int, rows: Rows = rows_by_masks) -> list[Collective]:
    """Of one step of a process that has place ``rank`` among those that share its contexts.

    Raises:
        ConfigError: the run has a part whose exchanges are not counted.
    """
    model, train = config.model, config.train
    size, element = train.sequence_parallel or 1, train.micro_batch * (4 if config.precision == "fp32" else 2)
    if size == 1:
        return []
    forward = micro_batches * (2 if train.activation_checkpointing else 1)
    found = []

    def add(what: str, there: int, back: int) -> None:
        for num_bytes, times in ((there, forward), (back, micro_batches)):
            found.append(Collective("all_to_all", element * num_bytes, times, owner=OURS, what=what))

    for patterns, key_heads in _attentions(model):
        key, value = model.query_key_width // model.heads, model.width // model.heads
        if model.convolution:
            edge = (model.convolution - 1) * model.width
            add(ROWS, edge * (rank < size - 1), edge * (rank > 0))
        positions = model.context // size
        copied = math.lcm(key_heads, size)
        there, out = positions * (model.heads * key + copied * (key + value)), positions * model.heads * value
        way, sent = HEADS, [[0]]
        if train.sequence_exchange != HEADS:
            sent = rows(patterns, key_heads, model.context, size)
            by_keys, by_heads = sum(map(sum, sent)) * (key + value), (size - 1) * (there + out)
            if train.sequence_exchange == KEYS or model.heads % size or by_keys < by_heads:
                way = KEYS
        if way == HEADS:
            add(HEADS, there, there)
            add(HEADS, out, out)
        elif any(map(any, sent)):
            add(KEYS, (key + value) * sum(sent[rank]), (key + value) * sum(row[rank] for row in sent))
    return found


def sent_to_others(found: Sequence[Collective], size: int) -> float:
    """Bytes that a process sends in such exchanges: of heads it keeps its own share, all else is for others."""
    return sum(
        each.times * (sent_bytes("all_to_all", each.num_bytes, size) if each.what == HEADS else each.num_bytes)
        for each in found
    )


def shares(model: ModelConfig) -> list[int]:
    """The numbers of processes, powers of 2, that a context can be shared by: they divide heads and positions."""
    return [u for u in (2**power for power in range(20)) if model.heads % u == 0 and model.context % u == 0]


def _attentions(model: ModelConfig) -> list[tuple[tuple[Pattern, ...], int]]:
    """The patterns of each layer's heads, and K."""
    with torch.device("meta"):
        blocks = SparseTransformer(model).blocks
    found = []
    for block in blocks:
        if type(block.attention).__name__ != "Attention" or type(block.feed_forward).__name__ != "FeedForward":
            raise ConfigError("model: has parts whose exchanges are not counted; take patterns and plain feed-forward")
        found.append((block.attention.patterns, block.attention.key_value_heads))
    return found
