"""What a program settles before it imports DeepSpeed, torch or Triton, once, as it starts; and their versions."""

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
    """The version of a package, or "not installed": a checkout runs where only PYTHONPATH names it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def settle_libraries(environment: MutableMapping[str, str]) -> None:
    """Keep DeepSpeed's line off standard output, and name folders for compilers where their defaults are none.

    DeepSpeed prints "Setting accelerator to CPU" as it is imported, among a verb's results.
    """
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    _name_compiler_caches(environment)


def _name_compiler_caches(environment: MutableMapping[str, str]) -> None:
    """Set the variables that name the caches of Triton and torch for users without a home folder or a name.

    A container that runs as some user id has such users. Triton would write into a folder called ~ in the working
    directory, or fail at the root; older versions of torch fail without a user's name.
    """
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
        folder = _private_folder()
        environment.update({name: str(folder / name.lower()) for name in missing})


def _private_folder() -> Path:
    """Return the user's folder among the temporary ones, or a new one where somebody else has taken its name.

    What lies there is run, so nobody else may write there.
    """
    folder = Path(tempfile.gettempdir(), f"longstride-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="longstride-"))
