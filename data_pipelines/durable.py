"""Files and folders that are on the disk, not only in the system's memory, before anything says that they are there."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.errors import as_data_error

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from file systems that have none
_FILES_ONLY = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # from file systems that cannot flush a folder


@contextmanager
def durable_file(target: Path, aside: Path) -> Iterator[BinaryIO]:
    """A file to write. It appears as ``target``, flushed to the disk, if the code inside ends well, else never.

    Until then it lies in the folder ``aside``, on the same file system. Raises DataError where it cannot be written.
    """
    # A random name: a process of a killed build may still write when the next build has begun.
    temporary = aside / f"{target.name}.{secrets.token_hex(4)}"
    try:
        with as_data_error(target, None):
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A folder to fill. It appears as ``output``, flushed to the disk, if the code inside ends well, else never.

    Until then it is ``.NAME.partial`` beside it. Raises OSError; FileExistsError or ENOTEMPTY where something has the
    name by now.
    """
    missing = _missing_folders(output.parent)
    make_folders(output.parent)
    try:
        with working_folder(output.with_name(f".{output.name}.partial")) as folder:
            yield folder
            flush_tree(folder)
            folder.rename(output)
            flush_folder(output.parent)
    except BaseException:
        with suppress(OSError):  # something else has come to lie there
            for each in missing:
                each.rmdir()
        raise


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for as long as the code inside runs; what a killed process has left of one is removed.

    Raises OSError: EBUSY where another process works in it.
    """
    held = _locked_folder(folder)
    try:
        for path in folder.iterdir():
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        yield folder
    finally:
        with suppress(OSError):  # by another name it is whole, and this one may be another process's
            if os.path.samestat(os.fstat(held), folder.stat()):
                shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _locked_folder(folder: Path) -> int:
    """A descriptor that holds the lock of a folder, which is made where there is none."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # whoever worked in it has just ended
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(held)
                reason = "another process works in it; wait for its end"
                raise OSError(errno.EBUSY, reason, str(folder)) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), folder.stat()):
                return held
        os.close(held)


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it that are missing, and flushes their names to the disk."""
    missing = _missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_folder(each.parent)


def _missing_folders(folder: Path) -> list[Path]:
    """A folder and those above it that are not there, from the inside out."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def flush_tree(folder: Path) -> None:
    """Flushes all that lies in a folder to the disk, its own names last. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_dir():
            flush_folder(path)
        else:
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that appears whole, flushed to the disk, and never over another.

    A process that is killed may leave a hidden file beside it, ``.….partial``. Raises OSError: FileExistsError where
    something has the name by now.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with naming(path, partial), partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)  # unlike a rename, it fails where a file is
        except OSError:  # it is there, or the file system has no hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            partial.rename(path)
        flush_folder(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink()


def write_over(path: Path, content: bytes) -> None:
    """Writes a file that holds the old content or the new, never a part; OSError where it cannot."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with naming(path, partial), partial.open("xb") as file:  # not into what a link there leads to
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with naming(path, partial):
            partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Puts a name into an OSError that has none, as those of writing and flushing have, or that of a hidden file."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(partial)) or error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, a rename included, where the file system can.

    Raises OSError, naming the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FILES_ONLY:
            raise
    finally:
        os.close(descriptor)
