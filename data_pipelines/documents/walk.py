"""Which files a build takes: a sorted walk that does not depend on the file system's own order."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from longstride.data_pipelines.documents.documents import FileDocument
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties


@dataclass(slots=True)
class WalkCounts:
    """What a walk left out."""

    empty: int = 0
    symlinks: int = 0


def find_documents(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...], modality: Modality, asked: Properties
) -> tuple[list[FileDocument], dict[str, int], WalkCounts]:
    """The documents of the inputs that are not empty, their common properties, and what was left out.

    Documents are sorted by relative path within each input. Raises DataError for an input that is missing or
    unreadable, for a document that does not fit the others, and where none is found.
    """
    if not inputs:
        raise DataError("inputs: none given; name at least one folder or file")
    counts = WalkCounts()
    documents: list[FileDocument] = []
    properties: dict[str, int] | None = None
    seen: dict[bytes, int] = {}
    for given in inputs:
        folder, names = _files_of(given, suffixes, exclude, counts)
        for relative in names:
            path = Path(folder, os.fsdecode(relative))
            status = _readable(path)
            if status.st_size and properties is None:
                with path.open("rb") as file:
                    properties = modality.settle(path, file, asked)
            size = modality.measure(path, properties) if status.st_size and properties is not None else 0
            if size == 0:
                counts.empty += 1
                continue
            occurrence = seen.get(relative, 0)
            documents.append(FileDocument(folder, relative, occurrence, size, status.st_size, status.st_mtime_ns))
            seen[relative] = occurrence + 1
    if not documents or properties is None:
        wanted = " ".join(suffixes) or "any"
        raise DataError(
            f"{', '.join(map(str, inputs))}: no file to take (suffixes: {wanted}; left out: {counts.empty} empty, "
            f"{counts.symlinks} symlinks); name other suffixes or folders"
        )
    return documents, properties, counts


def _files_of(
    given: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], counts: WalkCounts
) -> tuple[str, list[bytes]]:
    """A folder, and the paths under it of the files that an input stands for."""
    try:
        is_file, is_folder = given.is_file(), given.is_dir()
    except OSError as error:
        raise DataError(f"{given}: cannot be looked at ({error.strerror}); allow reading the folders above") from error
    if is_file:
        return str(given.parent), [os.fsencode(given.name)]
    if is_folder:
        return str(given), sorted(_walk(given, suffixes, exclude, counts))
    raise DataError(f"{given}: no such file or folder; name an input that exists")


def _walk(root: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], counts: WalkCounts) -> Iterator[bytes]:
    def wanted(name: str) -> bool:
        return not name.startswith(".") and name != "__pycache__" and name not in exclude

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading or exclude it")

    for folder, folders, files in os.walk(root, onerror=refuse):
        names = [name for name in folders if wanted(name)]
        folders[:] = [name for name in names if not Path(folder, name).is_symlink()]
        counts.symlinks += len(names) - len(folders)
        under = PurePath(folder).relative_to(root)
        for name in files:
            if not wanted(name) or (suffixes and PurePath(name).suffix not in suffixes):
                continue
            path = Path(folder, name)
            if path.is_symlink():
                counts.symlinks += 1
            elif path.is_file():
                yield os.fsencode((under / name).as_posix())


def _readable(path: Path) -> os.stat_result:
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: the file cannot be read; allow reading or exclude it")
    return path.stat()
