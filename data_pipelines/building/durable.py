"""Files and folders that are on the disk, not only in the system's memory, before anything says that they are there."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.errors import os_errors_told

_NO_FOLDERS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # from file systems that flush files alone


@contextmanager
def durable_file(target: Path, aside: Path) -> Iterator[BinaryIO]:
    """A file to write that appears as ``target``, flushed to the disk, when all went well, and never otherwise.

    Until then it lies in the folder ``aside``, on the same file system. Raises DataError where it cannot be written.
    """
    # A name of its own: a process of a killed build may still be writing when the next build has begun.
    temporary = aside / f"{target.name}.{secrets.token_hex(4)}"
    try:
        with os_errors_told(target):
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def flush_folder(folder: Path) -> None:
    """Flush to the disk which files a folder holds, where the file system can. Raises DataError where that fails."""
    with os_errors_told(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDERS:
                raise
        finally:
            os.close(descriptor)
