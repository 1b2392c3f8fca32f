"""Accidents of files: a process that dies at its k-th operation below a folder, a disk that fails there, lost power.

A process that was started with `library` preloaded calls `arm`. Operations are what makes, fills, empties, renames,
removes or flushes a file or a folder; reading is none. Linux and a C compiler are needed.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_name("file_faults.c")
# By name: which fault, as file_faults.c numbers them, and the number of the system's error.
KINDS = {
    "kill before": (1, 0),  # a write is done by half
    "kill after": (2, 0),
    "EIO": (3, errno.EIO),  # once
    "ENOSPC": (4, errno.ENOSPC),  # from there on whatever takes room; the first write is done by half
    "EDQUOT": (4, errno.EDQUOT),
    "ENOSPC once": (3, errno.ENOSPC),
    "record": (5, 0),  # what `Disk` makes states of
}
FAULTS = tuple(kind for kind in KINDS if kind != "record")


def library(folder: Path) -> Path:
    """Compiles what is to be preloaded, into a folder."""
    path = folder / "file_faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(_SOURCE), "-ldl"], check=True)
    return path


def arm(folder: Path | str, kind: str, number: int, log: Path | str | None) -> None:
    """Start to count operations below a folder, and cause the fault at the one with a number (0: at none).

    ``log`` is a log of operations to which these are added; `read_log` reads it. Each forked process counts for
    itself, and all record in one order.
    """
    fault, error = KINDS[kind]
    file = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    under = os.fsencode(folder)
    ctypes.CDLL(None).faults_arm(under, fault, ctypes.c_long(number), error, file)


def spread(count: int, most: int) -> list[int]:
    """Numbers from 1 to ``count``, all of them or at ``most`` so many from the first to the last."""
    return sorted({1 + round(index * (count - 1) / max(1, most - 1)) for index in range(most)})


class Operation(NamedTuple):
    """One line of a log; of a record, ``file`` tells files apart, and ``content`` was written at ``offset``."""

    name: str
    path: str
    origin: str  # of what was renamed or linked
    file: int
    offset: int
    size: int
    content: bytes

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


def read_log(path: Path) -> list[Operation]:
    """Read the operations in order, without an incomplete one at the end."""
    content, operations, at = path.read_bytes(), [], 0
    while (end := content.find(b"\n", at)) >= 0:
        name, first, second, *numbers = content[at:end].decode().split("\t")
        file, offset, size = map(int, numbers)
        at = end + 1
        name, path_of, origin = (name, second, first) if name in ("rename", "link") else (name, first, second)
        written = content[at : at + size] if name == "write" else b""
        at += len(written)
        operations.append(Operation(name, path_of, origin, file, offset, size, written))
    return operations


@dataclass
class _File:
    """The content that is on the disk, and the changes since, in order: (offset, bytes), or (size, None)."""

    flushed: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def flush(self) -> None:
        for change in self.pending:
            _apply(self.flushed, *change)
        self.pending.clear()

    def after_cut(self, fate: random.Random | None) -> bytes:
        """Return what a power cut may leave: all that was flushed, and of the rest nothing, a part, or zeros."""
        content = bytearray(self.flushed)
        how = fate.choice(("kept", "lost", "torn", "zeros", "some")) if fate and self.pending else "lost"
        if how == "lost":
            return bytes(content)
        changes = self.pending
        if how == "torn":
            number = fate.randrange(len(changes))
            offset, written = changes[number]
            torn = (offset, written[: fate.randint(0, len(written))] if written is not None else None)
            changes = [*changes[:number], torn]
        for offset, written in changes:
            if how == "some" and fate.random() < 0.5 and written is not None:
                written = bytes(len(written))
            _apply(content, offset, bytes(len(written)) if how == "zeros" and written is not None else written)
        return bytes(content)


def _apply(content: bytearray, offset: int, written: bytes | None) -> None:
    end = offset + len(written or b"")
    if written is None:
        del content[offset:]
    content.extend(bytes(max(0, end - len(content))))
    if written is not None:
        content[offset:end] = written


@dataclass(eq=False)
class _Folder:
    """The names that are on the disk, and what each means."""

    flushed: dict[str, _Folder | _File] = field(default_factory=dict)


@dataclass(eq=False)
class _Change:
    """A change of names that happens completely or not at all: the new meaning of each, None to remove it.

    It is on the disk once its folder is.
    """

    folder: _Folder
    names: dict[tuple[_Folder, str], _Folder | _File | None]


class Disk:
    """A folder as a disk holds it while the operations of a record go by, and what a power cut leaves of it.

    Content is safe once its file was flushed, and a name once its folder was: what is not may be lost, each name for
    itself, and content may be torn or zeros. A rename is whole or has not happened.
    """

    def __init__(self, folder: Path) -> None:
        """Begin with ``folder`` as it was before, all of it on the disk."""
        self._root = folder
        self._now: dict[str, _Folder | _File] = {}  # what each path means to running processes
        self._by_number: dict[int, _Folder | _File] = {}
        self._changes: list[_Change] = []  # in order, none of them flushed
        self._take_in(folder)

    def _take_in(self, path: Path) -> _Folder | _File:
        node: _Folder | _File
        if path.is_dir():
            node = _Folder({entry.name: self._take_in(entry) for entry in path.iterdir()})
        else:
            node = _File(bytearray(path.read_bytes()))
        self._now[str(path)] = self._by_number[path.stat().st_ino] = node
        return node

    def operate(self, operation: Operation) -> None:
        """Takes the next operation of the record."""
        name, path, number = operation.name, operation.path, operation.file
        if name in ("create", "mkdir"):
            self._by_number[number] = _File() if name == "create" else _Folder()
            self._change({path: self._by_number[number]})
        elif name == "remove":
            self._change({path: None})
        elif name == "link":
            self._change({path: self._by_number[number]})
        elif name == "rename":
            below = f"{operation.origin}/"
            inside = {child: self._now.pop(child) for child in list(self._now) if child.startswith(below)}
            self._change({operation.origin: None, path: self._now[operation.origin]})
            self._now |= {f"{path}/{child.removeprefix(below)}": node for child, node in inside.items()}
        else:
            node = self._by_number[number]
            if isinstance(node, _Folder):
                assert name == "fsync", operation
                self._flush(node)
            elif name == "fsync":
                node.flush()
            else:
                assert name in ("write", "truncate"), operation
                change = (operation.offset, operation.content) if name == "write" else (operation.size, None)
                node.pending.append(change)

    def _change(self, paths: dict[str, _Folder | _File | None]) -> None:
        names, folder = {}, None
        for path, meant in paths.items():
            folder = self._now[str(Path(path).parent)]
            assert isinstance(folder, _Folder)
            names[folder, Path(path).name] = meant
            if meant is None:
                self._now.pop(path)
            else:
                self._now[path] = meant
        assert folder is not None
        self._changes.append(_Change(folder, names))

    def _flush(self, folder: _Folder) -> None:
        for change in [entry for entry in self._changes if entry.folder is folder]:
            at = self._changes.index(change)
            for earlier in self._changes[:at]:  # what a later change has settled they no longer say
                for name in change.names.keys() & earlier.names.keys():
                    del earlier.names[name]
            _settle(change.names, None)
            del self._changes[at]

    def cut(self, record: Sequence[Operation], number: int, seed: int | None) -> str:
        """Puts in the folder's place what a power cut after so many operations of a record may leave; says which.

        The disk itself stays as it is. ``seed``: of what is lost of all that was not flushed; None: the whole of it.
        """
        disk = copy.deepcopy(self)
        for operation in record[:number]:
            disk.operate(operation)
        disk.write(None if seed is None else random.Random(seed))
        return f"power cut after {number} of {len(record)}, {seed}: {record[number - 1]}"

    def write(self, fate: random.Random | None) -> None:
        """Puts what a cut now leaves in the folder's place; None: what was flushed, and nothing else."""
        lasting: dict[_Folder, dict[str, _Folder | _File]] = {}
        likely = fate.choice((0.0, 0.5, 1.0)) if fate else 0.0
        for change in self._changes:
            if fate and fate.random() < likely:
                _settle(change.names, lasting)
        contents: dict[int, bytes] = {}

        def put(path: Path, node: _Folder | _File) -> None:
            if isinstance(node, _Folder):
                path.mkdir()
                for name, each in lasting.get(node, node.flushed).items():
                    put(path / name, each)
            else:
                path.write_bytes(contents.setdefault(id(node), node.after_cut(fate)))

        root = self._now[str(self._root)]
        shutil.rmtree(self._root)
        put(self._root, root)


def _settle(
    names: dict[tuple[_Folder, str], _Folder | _File | None], copies: dict[_Folder, dict[str, _Folder | _File]] | None
) -> None:
    """Apply a change of names, on the disk or in copies."""
    for (folder, name), meant in names.items():
        entries = folder.flushed if copies is None else copies.setdefault(folder, dict(folder.flushed))
        if meant is None:
            entries.pop(name, None)
        else:
            entries[name] = meant
