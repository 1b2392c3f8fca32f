"""The interface of a store, and the store of a local folder.

A store returns local paths of complete files. A remote store (`remote.py`) fetches them into a bounded cache first.
Readers see no difference: they get a path, open it, read and close it.
"""

import hashlib
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.plain_files import MOST_JSON_BYTES, blocks_of, open_plain, plain_status, read_plain
from longstride.data_pipelines.settings import REBUILD

_BLOCK_BYTES = 2**20  # of a file that is read once and not kept


# Types of a manifest's fields, which pydantic checks.
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]  # below the size of any file
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The manifest's record of a file."""

    name: str  # within the data folder
    size: Count  # bytes
    sha256: Sha256

    @classmethod
    def of(cls, name: str, content: bytes) -> "StoredFile":
        """Create the record of a file from its content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest())


class Store(Protocol):
    """The files of one data folder. A store can be pickled, and works on in a forked process."""

    location: str  # as the user wrote it, without credentials; for messages
    folder: Path | None = None  # None: it is remote

    def path_for_messages(self, name: str) -> str:
        """Return location and name of a file, without credentials."""

    def read(self, name: str) -> bytes:
        """Read a small file, as it is now. Raises DataError if it cannot be read."""

    def find(self, *endings: str) -> tuple[Mapping[str, int | None], int]:
        """Find every file below the folder with one of these endings, except for hidden files.

        Return them with their bytes, if known, and the number of links to folders, which are not followed. Raises
        DataError where the folder cannot be listed.
        """

    def size(self, name: str) -> int:
        """Return the size of one file. Raises DataError if it cannot be read."""

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        """Yield a file of so many bytes, read once and held nowhere. Raises DataError on the way."""

    def bind(self, fingerprint: str, room_for: int = 0) -> None:
        """Name the data set (its manifest's fingerprint) that the files belong to. Comes before ``local``.

        ``room_for`` bytes are needed at the same time. Raises DataError where the cache cannot hold them.
        """
        return

    def local(self, file: StoredFile) -> Path:
        """Return a local path that holds the whole file, of the size that the manifest says. Raises DataError.

        The cache may remove the path later: call again then. A file that is open stays readable.
        """

    def expect(self, files: Iterable[StoredFile]) -> None:
        """Tell the store that these files are needed soon, in this order. A fetch that fails raises nothing here."""
        return

    def discard(self, file: StoredFile) -> bool:
        """Report a damaged copy. Return whether it was removed and ``local`` will fetch a new one."""
        return False

    def close(self) -> None:
        """End this process's background fetches."""
        return


class LocalStore(Store):
    """A folder on this machine, or on a file system that it mounts."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self.location = str(folder)

    def path_for_messages(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        if self.folder.is_file():
            rule = f"build one from it with `longstride data build {self.folder} --output DIR`"
            raise DataError(f"{self.folder}: is a file, not a data folder; {rule}")
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder; build one with `longstride data build`")
        with as_data_error(self.folder / name, mend=REBUILD):
            try:
                return read_plain(self.folder / name, MOST_JSON_BYTES)
            except FileNotFoundError:
                what = "lacks" if any(self.folder.iterdir()) else "the folder is empty: it lacks"
                rule = f"{what} {name}, so it is not a data folder; build one with `longstride data build`"
                raise DataError(f"{self.folder}: {rule}") from None

    def find(self, *endings: str) -> tuple[Mapping[str, int | None], int]:
        sizes: dict[str, int | None] = {}
        links = 0

        def refuse(error: OSError) -> None:
            raise DataError(f"{error.filename}: cannot be listed ({error.strerror}); allow reading it") from error

        for folder, folders, files in os.walk(self.folder, onerror=refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            links += sum(Path(folder, name).is_symlink() for name in folders)
            for name in sorted(files):
                path = Path(folder, name)
                if name.endswith(endings) and not name.startswith("."):
                    with as_data_error(path, mend=REBUILD):
                        sizes[path.relative_to(self.folder).as_posix()] = plain_status(path).st_size
        return sizes, links

    def size(self, name: str) -> int:
        with as_data_error(self.folder / name, mend=REBUILD):
            return plain_status(self.folder / name).st_size

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        path = self.folder / name
        with as_data_error(path, mend=REBUILD), open_plain(path) as file:
            yield from blocks_of(file, _BLOCK_BYTES)

    def local(self, file: StoredFile) -> Path:
        path = self.folder / file.name
        with as_data_error(path, mend=REBUILD):
            try:
                size = plain_status(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                raise DataError(f"{path}: is missing, but the manifest lists it; {REBUILD}") from None
        if size != file.size:
            raise DataError(
                f"{path}: {size} bytes, but the manifest says {file.size}: "
                f"the shard is cut short or belongs to another set; {REBUILD}"
            )
        return path
