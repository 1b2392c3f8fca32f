"""Files named on a command line: regular ones are read into memory, and new ones never replace another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longstride.data_pipelines import durable
from longstride.data_pipelines.plain_files import read_plain
from longstride.kernels import ConfigError

MOST_BYTES = 1 << 30  # a model needs hours for a hundredth of it


def read_file(path: Path, option: str) -> bytes:
    """Read a regular file, or raise ConfigError; ``option`` is its name on the command line."""
    try:
        return read_plain(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{option}={path}: {error.strerror or error}") from None


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put a file's name before each ConfigError about its content, except for one that names an option."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("--") else f"{what}: {message}") from None


def check_free(path: Path, option: str = "--output") -> None:
    """Raise ConfigError if the path exists already."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{option}={path}: already exists and is not overwritten")


def check_new(path: Path, option: str = "--output", *suffixes: str) -> None:
    """Raise ConfigError if no new file with one of the suffixes can be created. Call it before the work begins."""
    check_free(path, option)
    if suffixes and (path.suffix not in suffixes or not path.parent.is_dir()):
        raise ConfigError(f"{option}={path}: must be a {suffixes[0]} in a folder that exists; such as new{suffixes[0]}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}={path}: must lie in a folder that exists")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}={path}: {path.parent} cannot be written; name another folder")


def write_new(path: Path, content: bytes, option: str = "--output") -> None:
    """Write a new file atomically; ConfigError if it exists by now, or cannot be written."""
    try:
        durable.write_new(path, content)
    except FileExistsError:
        raise ConfigError(f"{option}={path}: already exists and is not overwritten") from None
    except OSError as error:
        rule = f"cannot be written: {error.strerror}; name a file in another folder"
        raise ConfigError(f"{option}={path}: {rule}") from None
