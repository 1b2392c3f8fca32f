"""Files and folders that appear only after they are flushed to the disk."""

import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.errors import as_data_error

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks raise these
_FILES_ONLY = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems that cannot flush a folder raise these
_log = logging.getLogger(__name__)


@contextmanager
def durable_file(target: Path, aside: Path) -> Iterator[BinaryIO]:
    """Open a file that appears as ``target``, flushed to the disk, only if the block ends without an error.

    Until then it is in the folder ``aside``, on the same file system. Raises DataError if it cannot be written.
    """
    # A random name: a process of a killed build may still write when the next build has begun.
    partial = aside / f"{target.name}.{secrets.token_hex(4)}"
    with as_data_error(target, None), _partial_file(target, partial, lambda: partial.rename(target)) as file:
        yield file


@contextmanager
def _partial_file(path: Path, partial: Path, finish: Callable[[], object]) -> Iterator[BinaryIO]:
    """Open ``partial``; flush it and ``finish`` unless the block fails. It is then removed. Errors name ``path``."""
    try:
        with naming(path, partial):
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            finish()
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def complete_folder(output: Path) -> Iterator[Path]:
    """Create a folder that appears as ``output``, flushed to the disk, only if the block ends without an error.

    Until then it is ``.NAME.partial`` next to it. Raises OSError; FileExistsError or ENOTEMPTY if the name is taken.
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
        with suppress(OSError):  # they may hold something by now
            for parent in missing:
                parent.rmdir()
        raise


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """Provide an empty folder while the block runs; what a killed process left in it is removed.

    Raises OSError: EBUSY if another process works in it.
    """
    lock = None
    while lock is None:
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just removed it
            lock = lock_path(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if lock is None:
                raise OSError(errno.EBUSY, "another process works in it; wait for its end", str(folder))
    try:
        for path in folder.iterdir():
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        yield folder
    finally:
        with suppress(OSError):  # after a rename, this name may belong to another process
            if os.path.samestat(os.fstat(lock), folder.stat()):
                shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def lock_path(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """Open a file or folder, and return a descriptor that holds its lock; None if another process holds it.

    The system releases the lock however this process ends. Raises OSError.
    """
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            _log.warning("%s: the file system does not support locks; start no second command there", path)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # before it was locked, another process removed or replaced it


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk."""
    missing = _missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_folder(path.parent)


def _missing_folders(folder: Path) -> list[Path]:
    """Return those of a folder and its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def flush_tree(folder: Path) -> None:
    """Flush all content of a folder to the disk, its own names last. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_dir():
            flush_folder(path)
        else:
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that appears complete, flushed to the disk, and never over another file.

    A process that is killed may leave a hidden file ``.….partial`` next to it. Raises OSError: FileExistsError if the
    name is taken.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")

    def finish() -> None:
        try:
            os.link(partial, path)  # unlike a rename, it fails where a file is
        except OSError:  # the name is taken, or the file system has no hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            partial.rename(path)
        flush_folder(path.parent)

    with _partial_file(path, partial, finish) as file:
        file.write(content)


def write_over(path: Path, content: bytes) -> None:
    """Replace a file, which always holds either the old content or the new. Raises OSError on failure."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with _partial_file(path, partial, lambda: partial.replace(path)) as file:  # never into the target of a link
        file.write(content)


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Put ``path`` into an OSError that names no file, as those of writing and flushing, or that names ``partial``."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(partial)) or error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, a rename included, if the file system supports it.

    Raises OSError, with the name of the folder.
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
