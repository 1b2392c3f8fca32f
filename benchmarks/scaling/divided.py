"""The exchanges of processes that share contexts in one step, by formulas independent of the code that exchanges.

Letters: B contexts of a micro-batch, N positions, U processes of a group, n = N / U, H heads, K heads of keys and
values, D and Dv their widths, C channels, e bytes of an element.

- **Heads** (Jacobs et al. 2023, DeepSpeed Ulysses): an all_to_all turns n positions of all heads into all N positions
  of H / U: B·n·(H·D + K'·(D + Dv))·e bytes, where K' is the least common multiple of K and U. Another one, of
  B·n·H·Dv·e, brings the outputs back.
- **Keys**: process u gets the rows of keys and values that its queries read in earlier sections, B·(D + Dv)·e bytes for
  each row and head of keys, in one all_to_all.
- **Convolutions** of k positions hand their last k - 1 rows to the next process, B·(k - 1)·C·e bytes.
- **Columns** of a stride l, if a layer reads only within them, l is a multiple of U, and N is one of U·l: its rows are
  divided by columns, in an all_to_all of B·n·C·e bytes before it and another after it, which belong to no block. After
  the last layer, targets and nats are exchanged instead.

The way that sends least is taken. The backward pass sends each gradient back, and a recomputed block exchanges once
more.

Mixers that choose by content also exchange heads, and parts of their own. These and experts are not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.scaling.collectives import OURS, Collective, sent_bytes
from longstride.kernels import ConfigError
from longstride.kernels.patterns import Column, Pattern
from longstride.launcher.config import RunConfig
from longstride.sparse_model import ModelConfig, SparseTransformer

EVENLY, LISTED = "evenly", "listed"  # a U-th for every process, the own one too; or what is for others alone
# (patterns of H heads, K, N, U) -> (U, U): rows that section [0] sends to section [1], of all K heads together.
Rows = Callable[[tuple[Pattern, ...], int, int, int], Sequence[Sequence[int]]]


def rows_by_masks(patterns: tuple[Pattern, ...], key_heads: int, context: int, sections: int) -> list[list[int]]:
    """Compute ``Rows`` from every pair of positions, for short contexts."""
    positions, group = torch.arange(context), len(patterns) // key_heads
    counts = torch.zeros(sections, sections, dtype=torch.int64)
    for head in range(key_heads):
        masks = [pattern.mask(positions[:, None], positions) for pattern in patterns[head * group : (head + 1) * group]]
        read = torch.stack(masks).any(0).unflatten(0, (sections, -1)).any(1)  # (U, N): section [0] reads position [1]
        counts += read.unflatten(1, (sections, -1)).sum(2).T
    return counts.fill_diagonal_(0).tolist()


def exchanges(config: RunConfig, rank: int, micro_batches: int, rows: Rows = rows_by_masks) -> list[Collective]:
    """Return the exchanges of one step for process ``rank`` of those that share its contexts.

    Raises:
        ConfigError: the run has a part whose exchanges are not counted.
    """
    model, train = config.model, config.train
    size, number = train.sequence_parallel or 1, 4 if config.precision == "fp32" else 2
    if size == 1:
        return []
    width, positions = model.width, model.context // size
    key, value = model.query_key_width // model.heads, width // model.heads
    passes = 2 if train.activation_checkpointing else 1
    collectives = []

    def add(what: str, there: int, back: int, times: int = passes, element: int = number) -> None:
        for numbers, count in ((there, times), (back, 1)):
            num_bytes = train.micro_batch * element * numbers
            collectives.append(Collective("all_to_all", num_bytes, micro_batches * count, owner=OURS, what=what))

    divided_by = 0  # the stride of the columns; 0: sections
    for patterns, key_heads in _attentions(model):
        there = positions * (model.heads * key + math.lcm(key_heads, size) * (key + value))
        out = positions * model.heads * value
        sent: Sequence[Sequence[int]] = [[0]]
        ways: dict[str, int] = {}
        if model.heads % size == 0:
            ways["heads"] = (size - 1) * (there + out)
        if train.sequence_exchange != "heads":
            sent = rows(patterns, key_heads, model.context, size)
            ways["keys"] = (key + value) * sum(map(sum, sent))
            if train.sequence_exchange == "keys":
                ways.pop("heads", None)
        way = min(ways, key=ways.__getitem__)
        strides = {p.stride if isinstance(p, Column) and p.align == "row" else 0 for p in patterns}
        stride = max(strides) if len(strides) == 1 and not model.convolution else 0
        fits = stride > 0 and stride % size == 0 and model.context % (stride * size) == 0
        if fits and train.sequence_exchange != "heads" and 2 * (size - 1) * positions * width <= ways[way]:
            way = "columns"
        before, divided_by = divided_by, stride if way == "columns" else 0
        if before != divided_by:
            for _ in range(bool(before) + bool(divided_by)):
                add(EVENLY, positions * width, positions * width, times=1)
        if model.convolution:
            edge = (model.convolution - 1) * width
            add(LISTED, edge * (rank < size - 1), edge * (rank > 0))
        if way == "heads":
            add(EVENLY, there, there)
            add(EVENLY, out, out)
        elif way == "keys" and any(map(any, sent)):
            add(LISTED, (key + value) * sum(sent[rank]), (key + value) * sum(row[rank] for row in sent))
    if divided_by:
        num_bytes = train.micro_batch * positions
        collectives.append(Collective("all_to_all", num_bytes, micro_batches, owner=OURS, what=EVENLY))
        add(EVENLY, positions, positions, times=1, element=4)
    return collectives


def sent_to_others(collectives: Sequence[Collective], size: int) -> float:
    """Sum the bytes that a process sends in these exchanges."""
    return sum(
        x.times * (sent_bytes("all_to_all", x.num_bytes, size) if x.what == EVENLY else x.num_bytes)
        for x in collectives
    )


def shares(model: ModelConfig) -> list[int]:
    """Return the numbers of processes, powers of 2, that can share a context: they divide heads and positions."""
    return [u for u in (2**power for power in range(20)) if model.heads % u == 0 and model.context % u == 0]


def _attentions(model: ModelConfig) -> list[tuple[tuple[Pattern, ...], int]]:
    """Return the patterns of each layer's heads, and K."""
    with torch.device("meta"):
        blocks = SparseTransformer(model).blocks
    layers = []
    block: Any
    for block in blocks:
        if type(block.attention).__name__ != "Attention" or type(block.feed_forward).__name__ != "DenseFeedForward":
            raise ConfigError("model: has parts whose exchanges are not counted; take patterns and plain feed-forward")
        layers.append((block.attention.patterns, block.attention.key_value_heads))
    return layers
