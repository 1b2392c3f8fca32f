"""Settings of the data room that a run's configuration names. It imports nothing of the room but what is as light."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.plain_files import MOST_JSON_BYTES

MOST_SECONDS = 10**6  # of a time-out, 11 days; and bytes a second that a fetch must bring at least
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
    timeout_seconds: float = 30.0  # of a connection, of the head of an answer, and of a read that brings nothing
    parallel: int = 4  # fetches ahead at once, per process
    most_bytes: int = MOST_JSON_BYTES  # of a file whose size nothing tells before: the manifest, a page that lists
    least_bytes_per_second: float = 1000.0  # of a fetch, all its attempts and the waits between them included
    window_seconds: float = 360.0  # that a fetch may fall behind; eight attempts that time out take 340

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("cache_bytes", "attempts", "parallel", "most_bytes"):
            value, good = getattr(self, name), defaults[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DataError(f"{name}={value!r}: must be a whole number of at least 1, such as {good}")
        for name in ("timeout_seconds", "least_bytes_per_second", "window_seconds"):
            value, good = getattr(self, name), defaults[name]
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_SECONDS:
                raise DataError(
                    f"{name}={value!r}: must be a positive number of at most {MOST_SECONDS}, such as {good:g}"
                )

    @property
    def cache_folder(self) -> Path:
        """The local cache: ``cache``, or ``longstride`` in XDG_CACHE_HOME or ~/.cache.

        Raises:
            DataError: it lies in a home folder that there is not.
        """
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return Path(f"{base}/longstride" if self.cache is None else self.cache).expanduser()
        except RuntimeError:
            shown = "null" if self.cache is None else self.cache
            rule = "there is no such home folder; name a folder by its whole path"
            if self.cache is None:
                rule = "this user has no home folder for it; name another folder, or set XDG_CACHE_HOME"
            raise DataError(f"cache={shown}: {rule}") from None
