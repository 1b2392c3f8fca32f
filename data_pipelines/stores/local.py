"""What every store does, and the store of a folder on this machine.

A store hands out local paths of whole files. A remote store (`remote.py`) fetches them into a bounded cache first.
Readers see no difference: they ask for a path, open it, read and close it.
"""

import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import REBUILD

_BLOCK_BYTES = 2**20  # of a file that is read once and not kept


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What the manifest says of a file."""

    name: str  # within the data folder
    size: int  # bytes
    sha256: str  # hexadecimal


class Store(Protocol):
    """The files of one data folder. A store can be pickled, and works on in a forked process."""

    location: str  # as the user wrote it, without credentials; for messages

    def path_for_messages(self, name: str) -> str:
        """Location and name of a file, without credentials."""

    def read(self, name: str) -> bytes:
        """The content of a small file, as it is now. Raises DataError where it cannot be read."""

    def sizes(self) -> Mapping[str, int] | None:
        """Bytes of every file by name. None where listing them would cost more than one call."""

    def find(self, suffix: str) -> Mapping[str, int | None]:
        """Every file below the folder whose name ends so, and its bytes where the listing tells; no hidden ones.

        Raises DataError where the folder cannot be listed.
        """

    def size(self, name: str) -> int:
        """Bytes of one file. Raises DataError where it cannot be had."""

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        """A file of so many bytes, from its beginning, read once and held nowhere. Raises DataError on the way."""

    def bind(self, fingerprint: str, room_for: int = 0) -> None:
        """Names the data set (its manifest's fingerprint) that the files belong to. Comes before ``local``.

        ``room_for`` bytes are needed at the same time. Raises DataError where the cache cannot hold them.
        """

    def local(self, file: StoredFile) -> Path:
        """A local path that holds the whole file, of the size that the manifest says. Raises DataError.

        The cache may remove the path later: call again then. A file that is open stays readable.
        """

    def expect(self, files: Iterable[StoredFile]) -> None:
        """A hint that these files are needed soon, in this order. It never raises for a fetch that fails."""

    def discard(self, file: StoredFile) -> bool:
        """Called for a damaged copy. True where the copy was removed and ``local`` will fetch a fresh one."""

    def close(self) -> None:
        """Ends this process's background fetches."""


class LocalStore:
    """A folder on this machine, or on a file system that it mounts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.location = str(folder)

    def path_for_messages(self, name: str) -> str:
        """The file's path."""
        return str(self._folder / name)

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises DataError where folder or file is missing or cannot be read."""
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
        """Does nothing: the files are here."""

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
        """Does nothing: the files are here."""

    def discard(self, file: StoredFile) -> bool:
        """False: there is no other copy."""
        return False

    def close(self) -> None:
        """Does nothing: no fetch runs in the background."""


def unreadable(path: str | Path, error: OSError) -> str:
    """The message for a file that cannot be read. Where a permission is missing, rebuilding would not help."""
    mend = "allow reading" if isinstance(error, PermissionError) else REBUILD
    return f"{path}: cannot be read ({error.strerror}); {mend}"
