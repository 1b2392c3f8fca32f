"""Settings of the data room that a run's configuration names. It imports nothing of the room but the error."""

import os
from dataclasses import dataclass
from pathlib import Path

from longstride.data_pipelines.errors import DataError

ON_DAMAGE = ("abort", "substitute")
SHUFFLE_BYTES = 2**20  # of a lane's block: a few dozen source files
REBUILD = "build the folder again or fetch it again"
REPAIR = f"`longstride data verify` lists all damage; {REBUILD}"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How remote files are fetched. Credentials come from the environment of the protocol's library, never from here.

    Raises DataError for a value out of range.
    """

    cache: str | None = None  # folder of the local cache; None: see `cache_folder`
    cache_bytes: int = 32 * 2**30  # bound of the cache
    attempts: int = 8  # in a row without a byte, before the fetch fails
    timeout_seconds: float = 30.0  # of a connection, and of a read that brings nothing
    parallel: int = 4  # fetches ahead at once, per process

    def __post_init__(self) -> None:
        for name, good in (("cache_bytes", 32 * 2**30), ("attempts", 8), ("parallel", 4)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DataError(f"{name}={value!r}: must be a whole number of at least 1, such as {good}")
        if not 0 < self.timeout_seconds < float("inf"):
            raise DataError(f"timeout_seconds={self.timeout_seconds!r}: must be a positive number, such as 30")

    @property
    def cache_folder(self) -> Path:
        """The local cache: ``cache``, or ``longstride`` in XDG_CACHE_HOME or ~/.cache."""
        if self.cache is not None:
            return Path(self.cache).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "longstride"
