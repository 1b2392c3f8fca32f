"""Where the files of a data folder come from: a folder on this machine, or anything that fsspec can read.

A store hands out local paths of whole files. The local folder has them; a remote one (`remote.py`) fetches them into a
bounded cache first. Readers see no difference: they ask for a path, open it, read and close it.
"""

import os
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import REBUILD, RemoteSettings

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_BLOCK_BYTES = 2**20  # read at once of a file that is held nowhere
_LOCAL_PROTOCOLS = ("file://", "local://")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What the manifest says of a file."""

    name: str  # within the data folder
    size: int  # bytes
    sha256: str  # hexadecimal


class Store(Protocol):
    """The files of one data folder. It can be pickled, and goes on working in a forked process."""

    location: str  # as a person wrote it, without credentials; for messages

    def path_for_messages(self, name: str) -> str:
        """Location and name of a file, without credentials."""

    def read(self, name: str) -> bytes:
        """A small file, whole, as it is now. Raises DataError where it cannot be had."""

    def sizes(self) -> Mapping[str, int] | None:
        """Bytes of every file by name where that costs one look at a folder, else None."""

    def find(self, suffix: str) -> Mapping[str, int | None]:
        """Every file below the folder whose name ends so, and its bytes where the listing tells; no hidden ones.

        Raises DataError where the folder cannot be listed.
        """

    def size(self, name: str) -> int:
        """Bytes of one file. Raises DataError where it cannot be had."""

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        """A file of so many bytes, from its beginning, read once and held nowhere. Raises DataError on the way."""

    def bind(self, fingerprint: str, room_for: int = 0) -> None:
        """Say which data set (its manifest's fingerprint) the files belong to, before any file is asked for.

        ``room_for`` bytes are needed at the same time. Raises DataError where the cache cannot hold them.
        """

    def local(self, file: StoredFile) -> Path:
        """A local path that holds the whole file, of the size that the manifest says.

        The path may vanish later, never a file that is open: whoever finds it gone asks again. Raises DataError.
        """

    def expect(self, files: Iterable[StoredFile]) -> None:
        """These will be asked for soon, in this order: a hint, which never raises for what goes wrong on the way."""

    def discard(self, file: StoredFile) -> bool:
        """The copy at hand was found damaged: True where it was removed and ``local`` will bring a fresh one."""

    def close(self) -> None:
        """End what goes on in the background of this process."""


class LocalStore:
    """A folder on this machine, or on a file system that it mounts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.location = str(folder)

    def path_for_messages(self, name: str) -> str:
        """The file's path."""
        return str(self._folder / name)

    def read(self, name: str) -> bytes:
        """A small file, whole. Raises DataError where folder or file is missing or cannot be read."""
        if not self._folder.is_dir():
            raise DataError(f"{self._folder}: no such folder; build one with `longstride data build`")
        path = self._folder / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            what = "lacks" if any(self._folder.iterdir()) else "the folder is empty: it lacks"
            raise DataError(
                f"{self._folder}: {what} {name}, so it is no data folder; `longstride data build` makes one"
            ) from None
        except OSError as error:
            raise DataError(unreadable(path, error)) from error

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every file by name. Raises DataError where the folder cannot be listed."""
        try:
            with os.scandir(self._folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except OSError as error:
            raise DataError(f"{self._folder}: cannot be listed ({error.strerror}); check the path") from error

    def find(self, suffix: str) -> Mapping[str, int | None]:
        """See ``Store``; links to folders are not followed."""
        sizes: dict[str, int | None] = {}

        def refuse(error: OSError) -> None:
            raise DataError(f"{error.filename}: cannot be listed ({error.strerror}); allow reading it") from error

        for folder, folders, files in os.walk(self._folder, onerror=refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                path = Path(folder, name)
                if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                    sizes[path.relative_to(self._folder).as_posix()] = path.stat().st_size
        return sizes

    def size(self, name: str) -> int:
        """See ``Store``."""
        try:
            return (self._folder / name).stat().st_size
        except OSError as error:
            raise DataError(unreadable(self._folder / name, error)) from error

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        """See ``Store``."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    yield block
        except OSError as error:
            raise DataError(unreadable(path, error)) from error

    def bind(self, fingerprint: str, room_for: int = 0) -> None:
        """Nothing: the files are where they are."""

    def local(self, file: StoredFile) -> Path:
        """The file's own path. Raises DataError where it is missing or not of its size."""
        path = self._folder / file.name
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{path}: missing, yet the manifest lists it; {REBUILD}") from None
        except OSError as error:
            raise DataError(unreadable(path, error)) from error
        if size != file.size:
            raise DataError(
                f"{path}: {size} bytes, yet the manifest says {file.size}: "
                f"the shard is cut short or belongs to another set; {REBUILD}"
            )
        return path

    def expect(self, files: Iterable[StoredFile]) -> None:
        """Nothing: the files are at hand."""

    def discard(self, file: StoredFile) -> bool:
        """False: there is no other copy."""
        return False

    def close(self) -> None:
        """Nothing goes on in the background."""


def unreadable(path: str | Path, error: OSError) -> str:
    """What to tell of a file that the system does not give out: of a permission, that nothing need be built again."""
    mend = "allow reading" if isinstance(error, PermissionError) else REBUILD
    return f"{path}: cannot be read ({error.strerror}); {mend}"


def open_store(location: str | Path, remote: RemoteSettings | None = None) -> Store:
    """The store of a data folder: a path, or a URL of any protocol that fsspec knows.

    Nothing is fetched and no connection is made yet. Raises DataError for a protocol that is unknown or whose library
    is missing.
    """
    text = str(location)
    for protocol in _LOCAL_PROTOCOLS:
        if text.startswith(protocol):
            return LocalStore(Path(text.removeprefix(protocol)))
    if isinstance(location, Path) or not _REMOTE.match(text):
        return LocalStore(Path(location))
    from longstride.data_pipelines.stores.remote import RemoteStore  # which needs this module

    return RemoteStore(text, remote or RemoteSettings())
