"""Lines on standard error, mistakes of the user in one line, and settings of libraries before they are imported."""

from __future__ import annotations

import errno
import getpass
import importlib.metadata
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from longstride.launcher.output.exit_codes import WRONG_INPUT

_FIRST_RANK_SECONDS = 30.0  # long enough for a slow start of rank 0
_NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # errors of a write without a file name
_SLOW_SECONDS = 5.0
_MOST_CHARACTERS = 900  # per line: quoted values may have any length


def say(text: str) -> None:
    """Write ``longstride: text`` to standard error; the line is lost if the terminal is closed or the disk full."""
    with suppress(OSError):
        print(f"longstride: {text}", file=sys.stderr, flush=True)


@contextmanager
def print_if_slow(what: str) -> Iterator[None]:
    """Print what the block does if it takes more than five seconds. Only rank 0 prints."""
    timer = threading.Timer(_SLOW_SECONDS, say, [f"{what} …"])
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class AgreedError(ValueError):
    """A mistake of the user that all ranks raise together, so that rank 0 can report it for all of them."""


def mistake(error: BaseException) -> str | None:
    """Return the message for a mistake that the user can correct, one line per problem; None for any other error.

    Such mistakes are ConfigError, DataError, AgreedError, and files that cannot be read or written.
    """
    if isinstance(error, OSError):
        if error.strerror is None or (error.filename is None and error.errno not in _NAMELESS):
            return None
        if error.errno == errno.EFBIG:
            name = _printable(str(error.filename or "a file"))
            return f"{name}: is larger than this process may write; raise the limit on file sizes (`ulimit -f`)"
        if not error.filename:
            return f"standard output, or a file: cannot be written: {error.strerror}; write to a disk with free space"
        return f"{_printable(str(error.filename))}: {error.strerror}"
    # Only in modules that are loaded already: importing them would slow down every verb.
    families = (("longstride.kernels.errors", "ConfigError"), ("longstride.data_pipelines.errors", "DataError"))
    classes = [getattr(sys.modules[module], name) for module, name in families if module in sys.modules]
    return str(error) if isinstance(error, (AgreedError, *classes)) else None


def report(error: Exception) -> int:
    """Print a mistake of the user, one line per problem; return the exit code 2.

    All ranks find the same mistake at the same time. Rank 0 reports it; the others wait for the launcher to end them,
    and only report it themselves after 30 seconds.

    Raises:
        Exception: the error itself, if it is not a mistake of the user.
    """
    if mistake(error) is None:
        raise error
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_FIRST_RANK_SECONDS)
    _say_mistake(error)
    return WRONG_INPUT


@contextmanager
def exit_on_mistake(meet: Callable[[], None]) -> Iterator[None]:
    """Report a mistake of the user inside the block and exit with code 2.

    A mistake of only one rank, such as a bad sample, is reported at once: the other ranks wait in a collective and
    would bring the run down first. An ``AgreedError`` is reported by rank 0. Then all ranks exit together; ``meet``
    waits for the others.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if mistake(error) is None:
            raise
        agreed = isinstance(error, AgreedError)
        if not agreed or os.environ.get("RANK", "0") == "0":
            _say_mistake(error)
        if agreed:
            meet()  # the launcher ends all ranks after the first exit: rank 0 must have reported before
        sys.exit(WRONG_INPUT)


def _say_mistake(error: Exception) -> None:
    for line in (mistake(error) or "").split("\n"):
        half = _MOST_CHARACTERS // 2
        say(f"error: {_printable(line if len(line) <= 2 * half else f'{line[:half]} … {line[-half:]}')}")


def _printable(text: str) -> str:
    """Escape all characters that a terminal would obey instead of showing them."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


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
