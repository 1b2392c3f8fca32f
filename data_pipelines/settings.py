"""Data settings of a run's configuration. This module only imports light modules of the package."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.plain_files import MOST_JSON_BYTES

MOST_SECONDS = 10**6  # largest time-out, 11 days; also the largest ``least_bytes_per_second``
ON_DAMAGE = ("abort", "substitute")
SHUFFLE_BYTES = 2**20  # a lane's block: a few dozen source files
REBUILD = "build the folder again or fetch it again"
REPAIR = f"`longstride data verify` lists all damage; {REBUILD}"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Settings of fetching remote files. Credentials come from the environment of the protocol's library.

    Raises DataError for a value out of range.
    """

    cache: str | None = None  # folder of the local cache; None: see `cache_folder`
    cache_bytes: int = 32 * 2**30  # largest size of the cache
    attempts: int = 8  # attempts in a row without a byte before the fetch fails
    timeout_seconds: float = 30.0  # for a connection, response headers, and a read without data
    parallel: int = 4  # concurrent prefetches per process
    most_bytes: int = MOST_JSON_BYTES  # largest file of unknown size: the manifest or a directory page
    least_bytes_per_second: float = 1000.0  # slowest fetch, all its attempts and pauses included
    window_seconds: float = 360.0  # longest delay of a fetch; eight attempts that time out take 340

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("cache_bytes", "attempts", "parallel", "most_bytes"):
            value, good = getattr(self, name), defaults[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DataError(f"{name}={value!r}: must be an integer of at least 1, such as {good}")
        for name in ("timeout_seconds", "least_bytes_per_second", "window_seconds"):
            value, good = getattr(self, name), defaults[name]
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_SECONDS:
                rule = f"must be a positive number of at most {MOST_SECONDS}, such as {good:g}"
                raise DataError(f"{name}={value!r}: {rule}")

    @property
    def cache_folder(self) -> Path:
        """The local cache: ``cache``, or ``longstride`` in XDG_CACHE_HOME or ~/.cache.

        Raises:
            DataError: its home folder does not exist.
        """
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return Path(f"{base}/longstride" if self.cache is None else self.cache).expanduser()
        except RuntimeError:
            shown = "null" if self.cache is None else self.cache
            rule = "there is no such home folder; name a folder by its full path"
            if self.cache is None:
                rule = "this user has no home folder; name another folder, or set XDG_CACHE_HOME"
            raise DataError(f"cache={shown}: {rule}") from None
