"""Bytes to WebDataset shards to batches, in an order that is a pure function of a small state.

``building`` writes data folders, ``shards`` reads and verifies them, ``order`` hands out batches. A folder, shard or
state that cannot be used raises ``errors.DataError``.
"""

import longstride

if __name__ == "data_pipelines":
    longstride.stand_aside(__name__)
