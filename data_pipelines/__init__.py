"""Bytes to WebDataset shards to batches, in an order that is a pure function of a small state.

``building`` writes data folders, ``shards`` reads and verifies them, ``order`` hands out batches. What is wrong with a
folder, a shard or a state is a ``DataError``.
"""

import longstride

if __name__ == "data_pipelines":
    longstride.stand_aside(__name__)

from longstride.data_pipelines.errors import DataError

__all__ = ["DataError"]
