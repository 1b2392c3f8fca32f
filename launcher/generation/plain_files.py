"""Files that a person names: read whole where they are plain files, and made where nothing lies yet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longstride.kernels import ConfigError


def read_file(path: Path, option: str) -> bytes:
    """The bytes of a plain file; ``option`` is what a command line calls it.

    Raises:
        ConfigError: there is none, it is a folder, a pipe or a device, or it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no plain file (a pipe or a device has no end that is known)"
            raise ConfigError(f"{option}={path}: is {what}; name a file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{option}={path}: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def named(what: str) -> Iterator[None]:
    """Names the file in what is found wrong with its content, unless it is an option that is wrong."""
    try:
        yield
    except ConfigError as error:
        told = str(error)
        raise ConfigError(told if told.startswith("--") else f"{what}: {told}") from None


def check_new(path: Path, option: str = "--output") -> None:
    """Raise ConfigError where no new file can be made: told before the work begins."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{option}={path}: exists already; nothing is overwritten")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}={path}: must lie in a folder that exists")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}={path}: {path.parent} cannot be written; name another folder")


def write_new(path: Path, content: bytes, option: str = "--output") -> None:
    """A file that appears whole, on the disk, and over nothing.

    Raises:
        ConfigError: something lies there by now, or the file cannot be written.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)  # unlike a rename, it fails where something lies
        except FileExistsError:
            raise
        except OSError:  # a file system without a second name for a file
            if path.exists() or path.is_symlink():
                raise FileExistsError from None
            partial.rename(path)
    except FileExistsError:
        raise ConfigError(f"{option}={path}: exists already; nothing is overwritten") from None
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            partial.unlink()
