"""Files that a command line names: plain ones are read whole, and new ones never replace another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longstride.data_pipelines import durable
from longstride.data_pipelines.plain_files import read_plain
from longstride.kernels import ConfigError

MOST_BYTES = 1 << 30  # of a named file, which is held in memory: a model takes hours for a hundredth of it


def read_file(path: Path, option: str) -> bytes:
    """The bytes of a plain file; ``option`` is what a command line calls it.

    Raises:
        ConfigError: there is none, it is a folder, a pipe or a device, too long, or it cannot be read.
    """
    try:
        return read_plain(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{option}={path}: {error.strerror or error}") from None


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Puts a file's name before what is found wrong with its content; an option that is wrong has its own name."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("--") else f"{what}: {message}") from None


def check_free(path: Path, option: str = "--output") -> None:
    """Raise ConfigError where something has the name already."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{option}={path}: exists already; nothing is overwritten")


def check_new(path: Path, option: str = "--output", suffix: str = "") -> None:
    """Raise ConfigError where no new file of a suffix can be made: before the work begins."""
    check_free(path, option)
    if suffix and (path.suffix != suffix or not path.parent.is_dir()):
        raise ConfigError(f"{option}={path}: must be a {suffix} in a folder that exists; such as new{suffix}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}={path}: must lie in a folder that exists")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}={path}: {path.parent} cannot be written; name another folder")


def write_new(path: Path, content: bytes, option: str = "--output") -> None:
    """Write a file that appears whole, and never over another.

    Raises:
        ConfigError: a file of that name is there by now, or it cannot be written.
    """
    try:
        durable.write_new(path, content)
    except FileExistsError:
        raise ConfigError(f"{option}={path}: exists already; nothing is overwritten") from None
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written: {error.strerror}") from None
