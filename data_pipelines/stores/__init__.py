"""Stores of the files of a data folder: a local folder, or anything that fsspec reads, through a cache.

Modules for remote files are only imported for a remote location.
"""

import re
from pathlib import Path

from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores.local import Count, LocalStore, Sha256, Store, StoredFile

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_LOCAL = re.compile(r"(file|local)://")


def open_store(location: str | Path, settings: RemoteSettings | None = None) -> Store:
    """Open the store of a data folder: a path, or a URL of any protocol that fsspec knows.

    Nothing is fetched and no connection is opened yet. Raises DataError for an unknown protocol or a missing library.
    """
    text = str(location)
    if isinstance(location, Path) or not _REMOTE.match(text):
        return LocalStore(Path(location))
    if _LOCAL.match(text):
        return LocalStore(Path(_LOCAL.sub("", text, count=1)))
    from longstride.data_pipelines.stores.remote import RemoteStore

    return RemoteStore(text, settings or RemoteSettings())
