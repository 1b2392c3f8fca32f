"""Which code is installed here, so that hosts can compare."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import longstride


def code_digest() -> str:
    """SHA-256 (hexadecimal) over the Python files of this package, their places below it included.

    A version would not do: a checkout has none, and an older one of the same version is the usual mistake.
    """
    root, digest = Path(longstride.__file__).parent, hashlib.sha256()
    for parent, folders, names in os.walk(root, followlinks=True):  # in a checkout the rooms are links
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("."):  # with a dot: an editor's
                content = Path(parent, name).read_bytes()
                place = Path(parent, name).relative_to(root).as_posix()
                digest.update(f"{place}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
