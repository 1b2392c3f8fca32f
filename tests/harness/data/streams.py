"""Streams with their settings as keyword arguments."""

from pathlib import Path
from typing import Any

from longstride.data_pipelines.order.lanes import StreamState
from longstride.data_pipelines.order.stream import ByteStream, StreamSettings
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.reading import DataFolder


def open_stream(
    location: str | Path | DataFolder,
    split: str = "train",
    *,
    remote: RemoteSettings | None = None,
    state: StreamState | None = None,
    **asked: Any,
) -> ByteStream:
    """Open a stream with these settings."""
    return ByteStream(location, StreamSettings(**asked), split, remote=remote, state=state)
