"""Files and folders that are on the disk, not only in the system's memory, before anything says that they are there."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.errors import os_errors_as_data_errors

_FILES_ONLY = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # from file systems that cannot flush a folder


@contextmanager
def durable_file(target: Path, aside: Path) -> Iterator[BinaryIO]:
    """A file to write. It appears as ``target``, flushed to the disk, if the code inside ends well, else never.

    Until then it lies in the folder ``aside``, on the same file system. Raises DataError where it cannot be written.
    """
    # A random name: a process of a killed build may still write when the next build has begun.
    temporary = aside / f"{target.name}.{secrets.token_hex(4)}"
    try:
        with os_errors_as_data_errors(target):
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
    """Flushes the names in a folder to the disk, a rename included, where the file system can.

    Raises OSError, naming the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FILES_ONLY:
            raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)
