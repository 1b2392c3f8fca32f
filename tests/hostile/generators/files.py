"""Files that are no files, and JSON that is too much: what may lie in the place of any file that is read."""

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

# What takes a path's place; each makes something that can be opened and has no end, or no beginning.
NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": lambda path: _bind(path),
    "link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "link to a terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("the-pipe")), path.symlink_to("the-pipe")),
}
# Texts in the place of one JSON object.
HOSTILE_JSON: dict[str, Callable[[], bytes]] = {
    "an integer of 5,000 digits": lambda: b'{"step": ' + b"9" * 5000 + b"}",
    "an integer of 400 digits": lambda: b'{"step": ' + b"9" * 400 + b"}",
    "a number beyond the largest": lambda: b'{"step": 1e999}',
    "NaN": lambda: b'{"step": NaN}',
    "a hundred thousand lists deep": lambda: b'{"step": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a hundred thousand objects deep": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "ten million lists": lambda: b'{"step": [' + b"[]," * 10_000_000 + b"[]]}",
    "300 MB of a string": lambda: b'{"step": "' + b"x" * 300_000_000 + b'"}',
    "a list": lambda: b"[]",
    "a number": lambda: b"7",
    "null": lambda: b"null",
    "nothing": lambda: b"",
    "half of it": lambda: b'{"format_version": 2, "st',
    "a key twice": lambda: b'{"step": 1, "step": 2}',
    "zero bytes": lambda: bytes(4096),
    "no UTF-8": lambda: b'{"step": "\xff\xfe"}',
    "a surrogate": lambda: b'{"step": "\\ud800"}',
    "a mark of byte order": lambda: b'\xef\xbb\xbf{"step": 1}',
}


def replace(path: Path, kind: str) -> None:
    """Puts one of NO_FILES in the place of a file."""
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)


def write_words(folder: Path) -> None:
    """Make a folder of six texts of about 1,500 bytes."""
    words = random.Random(0)
    folder.mkdir()
    for number in range(6):
        text = " ".join(words.choice(["sparse", "dense", "stride", "byte", "long"]) for _ in range(300))
        (folder / f"{number}.txt").write_text(text)


def sparse(path: Path, size: int) -> None:
    """Extend or create a file to so many bytes that take no disk space."""
    with path.open("ab") as file:
        file.truncate(size)


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        folder = os.open(path.parent, os.O_RDONLY)
        try:  # by way of the folder: the path of a socket has 107 bytes at most
            listening.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
