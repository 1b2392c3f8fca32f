"""Settings that a program makes once, before it imports DeepSpeed, torch or Triton; and versions of packages."""

from __future__ import annotations

import getpass
import importlib.metadata
import logging
import os
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path


def version_of(package: str) -> str:
    """Return the version of a package, or "not installed", as for a checkout that is only on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def settle_libraries(environment: MutableMapping[str, str]) -> None:
    """Keep DeepSpeed's lines off standard output, and set the compilers' caches for users without a home or a name.

    DeepSpeed prints "Setting accelerator to CPU" among a verb's results when it is imported. A container under an
    arbitrary user id has neither home nor name: Triton would write into a folder called ~ in the working directory, or
    fail at the root, and older versions of torch fail without a user's name.
    """
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    missing = []
    try:
        has_home = os.access(Path.home(), os.W_OK | os.X_OK)
    except RuntimeError:
        has_home = False
    if not has_home and "TRITON_HOME" not in environment:
        missing.append("TRITON_CACHE_DIR")
    try:
        getpass.getuser()
    except (KeyError, ImportError, OSError):
        missing.append("TORCHINDUCTOR_CACHE_DIR")
    missing = [name for name in missing if name not in environment]
    if missing:
        folder = Path(tempfile.gettempdir(), f"longstride-{os.getuid()}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            folder = Path(tempfile.mkdtemp(prefix="longstride-"))  # nobody else may write there: content is executed
        environment.update({name: str(folder / name.lower()) for name in missing})
