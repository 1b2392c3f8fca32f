"""Which files a build takes: a sorted walk that does not depend on the file system's own order."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipelines.errors import DataError


@dataclass(frozen=True, slots=True)
class Document:
    """A file of the input."""

    path: Path
    relative: bytes  # path under its input, with slashes: its identity, wherever the input lies
    occurrence: int  # how many earlier inputs hold the same relative path
    size: int  # bytes


@dataclass(slots=True)
class WalkCounts:
    """What a walk left out."""

    empty: int = 0
    symlinks: int = 0


def find_documents(
    inputs: Sequence[Path], suffixes: tuple[str, ...], exclude: tuple[str, ...]
) -> tuple[list[Document], WalkCounts]:
    """The non-empty files of the inputs, sorted by relative path within each input, and what was left out.

    Raises DataError for an input that is missing or unreadable, and where no file is found.
    """
    if not inputs:
        raise DataError("inputs: none given; name at least one folder or file")
    counts = WalkCounts()
    documents = []
    seen: dict[bytes, int] = {}
    for root in inputs:
        for path in _files_of(root, suffixes, exclude, counts):
            size = _readable_size(path)
            if size == 0:
                counts.empty += 1
                continue
            relative = os.fsencode(path.name if path == root else path.relative_to(root).as_posix())
            documents.append(Document(path, relative, seen.get(relative, 0), size))
            seen[relative] = seen.get(relative, 0) + 1
    if not documents:
        wanted = " ".join(suffixes) or "any"
        raise DataError(
            f"{', '.join(map(str, inputs))}: no file to take (suffixes: {wanted}; left out: {counts.empty} empty, "
            f"{counts.symlinks} symlinks); name other suffixes or folders"
        )
    return documents, counts


def _files_of(root: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], counts: WalkCounts) -> Iterator[Path]:
    if root.is_file():
        yield root
    elif root.is_dir():
        yield from sorted(_walk(root, suffixes, exclude, counts), key=lambda path: os.fsencode(path.relative_to(root)))
    else:
        raise DataError(f"{root}: no such file or folder; name an input that exists")


def _walk(root: Path, suffixes: tuple[str, ...], exclude: tuple[str, ...], counts: WalkCounts) -> Iterator[Path]:
    def wanted(name: str) -> bool:
        return not name.startswith(".") and name != "__pycache__" and name not in exclude

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading or exclude it")

    for folder, folders, files in os.walk(root, onerror=refuse):
        names = [name for name in folders if wanted(name)]
        folders[:] = [name for name in names if not (Path(folder) / name).is_symlink()]
        counts.symlinks += len(names) - len(folders)
        for name in files:
            path = Path(folder) / name
            if not wanted(name) or (suffixes and path.suffix not in suffixes):
                continue
            if path.is_symlink():
                counts.symlinks += 1
            elif path.is_file():
                yield path


def _readable_size(path: Path) -> int:
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: the file cannot be read; allow reading or exclude it")
    return path.stat().st_size
