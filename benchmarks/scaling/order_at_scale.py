"""The data order of a set of many shards for thousands of ranks: cost of planning, and equality over ranks.

Letters: G contexts a global batch, W ranks.

The manifest is synthetic and its shards do not exist, as the order is a function of the manifest. The order is computed
by the stream's own code (``LanesReader``), without reading bytes.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.order.stream import ByteStream, LanesReader, StreamSettings
from longstride.data_pipelines.shards.manifest import DataManifest, SplitRecord

CONTEXT = 12_288
SHARD_BYTES = 2**27  # of content, more or less
STEPS = (0, 1, 1_000)  # of the first epoch: at its beginning, and where lanes are further on


def measure(folder: Path, shards: int, global_batch: int, world_sizes: list[int]) -> dict[str, Any]:
    """Measure the seconds of planning, and whether the ranks together read what one process would."""
    stream = ByteStream(paper_manifest(folder, shards), StreamSettings(context=CONTEXT, global_batch=global_batch))
    start = time.perf_counter()
    stream.contexts.place(0, stream.settings.seed)  # the permutation of the shards, once an epoch
    permuted = time.perf_counter() - start
    single = plan_rank(stream, 0, 1)
    rows = []
    for world_size in world_sizes:
        start = time.perf_counter()
        ranks = [plan_rank(stream, rank, world_size) for rank in range(world_size)]
        seconds = time.perf_counter() - start
        joined = [
            tuple(list(itertools.chain.from_iterable(rank[step][part] for rank in ranks)) for part in (0, 1))
            for step in range(len(STEPS))
        ]
        rows.append({"ranks": world_size, "seconds_per_rank": seconds / world_size, "equal": joined == single})
    return {
        "shards": shards,
        "context": CONTEXT,
        "global_batch": global_batch,
        "content_bytes": stream.contexts.total_units,
        "steps_compared": list(STEPS),
        "permuted_seconds": permuted,
        "ranks": rows,
    }


def paper_manifest(folder: Path, shards: int) -> Path:
    """Write a data folder that has only a manifest; its shards differ in size."""
    source, data = folder / "source", folder / "many"
    source.mkdir()
    (source / "document.txt").write_bytes(bytes(3 * CONTEXT))
    manifest = build([source], folder / "one", validation_fraction=0)
    (shard,) = manifest.splits["train"].shards
    generator = random.Random(0)
    many = tuple(
        replace(shard, name=f"train-{number:05d}.tar", content_bytes=SHARD_BYTES - generator.randrange(2**20))
        for number in range(shards)
    )
    data.mkdir()
    complete = DataManifest("text", {}, {"train": SplitRecord(shards, many)}, manifest.made)
    (data / DataManifest.FILE_NAME).write_text(complete.to_json(), encoding="utf-8")
    return data


class _Unread:
    """The contexts of a split without reading them: every row is one byte and stays unchanged."""

    context, dtype = 1, np.dtype(np.uint8)
    is_apart = has_separators = False

    def __init__(self, stream: ByteStream) -> None:
        self.split, self._context = stream.contexts.split, stream.contexts.context

    def read(self, reader: Any, first: int, rows: np.ndarray, lengths: np.ndarray, seed: int | None) -> None:
        """Report all contexts as full."""
        lengths[:] = self._context


def plan_rank(stream: ByteStream, rank: int, world_size: int) -> list[tuple[list[int], list[str]]]:
    """Return, for some steps, the contexts that a rank reads by slot, and the shards in which they begin."""
    lanes, planned = stream.lanes, []
    local_lanes = lanes.of_rank(rank, world_size)
    reader = LanesReader(_Unread(stream), lanes, local_lanes, stream.settings, stream.fingerprint)  # type: ignore[arg-type]
    for step in STEPS:
        ids = reader.take(step).sample_ids.tolist()
        planned.append(
            (ids, [stream.contexts.place(context * stream.contexts.context, stream.settings.seed) for context in ids])
        )
    return planned
