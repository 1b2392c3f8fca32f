"""Reading untrusted files: plain files only, up to a size, and bounded JSON.

Pipes, sockets and devices have no known end and may block, so they are rejected before a byte is read. Errors are
OSErrors with the file's name, and ``JSONError``; callers turn both into their own one-line errors.
"""

import errno
import gc
import json
import os
import re
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

MOST_JSON_BYTES = 2**26  # a manifest of 100,000 shards has half of it
_MOST_JSON_VALUES = 4_000_000  # about 100 bytes of memory per value; that manifest has a quarter of them
_DEEPEST = 64  # levels of nested objects and lists
_MOST_DIGITS = 39  # of a 128-bit integer
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")  # a variable of a shell
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "is a folder, not a plain file"),
    (stat.S_ISLNK, errno.ELOOP, "is a link, not a plain file"),
    (stat.S_ISFIFO, errno.EINVAL, "is a pipe, not a plain file"),
    (stat.S_ISSOCK, errno.EINVAL, "is a socket, not a plain file"),
    (stat.S_ISCHR, errno.EINVAL, "is a device, not a plain file"),
    (stat.S_ISBLK, errno.EINVAL, "is a device, not a plain file"),
)


class JSONError(ValueError):
    """A text is not JSON or exceeds a bound. The message follows a file's name; ``line`` and ``column`` start at 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def expand_path(text: str) -> str:
    """Replace a leading ``~`` or ``~name`` of a path by the home folder; a URL and ``./~`` stay unchanged.

    Shells do not expand ``~`` after ``=``, and nothing does in JSON. Variables are never replaced, because a run would
    then depend on the environment of the reader of its configuration.

    Raises:
        ValueError: there is no such home folder, or the path contains a variable and does not exist literally. The
            message follows ``path=text: ``.
    """
    if "://" in text:
        return text
    expanded = text
    if text.startswith("~"):
        try:
            expanded = str(Path(text).expanduser())
        except RuntimeError:
            if not os.path.lexists(text.partition("/")[0]):
                rule = f"there is no such home folder; for a file name that begins with ~, write ./{text}"
                raise ValueError(rule) from None
    if (variable := _VARIABLE.search(expanded)) is None:
        return expanded
    end = expanded.find("/", variable.start())
    if os.path.lexists(expanded if end < 0 else expanded[:end]):
        return expanded
    meant = _VARIABLE.sub(lambda match: os.environ.get(match[1] or match[2], match[0]), expanded)
    good = f"{variable[0]} is not set here; write the path" if _VARIABLE.search(meant) else f"write {meant}"
    raise ValueError(f"variables are not replaced here; {good}")


def plain_status(path: Path) -> os.stat_result:
    """Return size and times of a plain file without opening it; links are followed.

    Raises:
        OSError: the file does not exist or is not plain; with the file's name.
    """
    status = path.stat()
    _refuse_kind(path, status.st_mode)
    return status


def open_plain(path: Path, mode: str = "rb", *, follow_links: bool = True) -> BinaryIO:
    """Open a plain file. Nothing is read into a buffer yet.

    Args:
        mode: "rb"; or "ab" and "a+b", which append without a buffer and create the file if it is missing.
        follow_links: whether to follow links to plain files. Hub caches and many data folders consist of links; run
            folders and checkpoints have none.

    Raises:
        OSError: the file does not exist, cannot be opened, or is not plain; with the file's name.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer. It has no effect on a plain file.
    flags = {"rb": os.O_RDONLY}.get(mode, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        with nullcontext() if mode == "rb" else suppress(FileNotFoundError):
            _refuse_kind(path, (os.stat if follow_links else os.lstat)(path).st_mode)  # opening a device may act
        descriptor = os.open(path, flags, 0o666)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode)  # the path may have been replaced before it was opened
        return cast(BinaryIO, os.fdopen(descriptor, mode, buffering=-1 if mode == "rb" else 0))
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, at_most: int, *, follow_links: bool = True) -> bytes:
    """Read a plain file of ``at_most`` so many bytes.

    Raises:
        OSError: as ``open_plain``; or the file is longer, which is checked before reading.
    """
    with open_plain(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= at_most:
            content = file.read(at_most + 1)  # the file may grow, and files in /proc report a size of 0
            size = len(content)
        if size > at_most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes; at most {at_most:,} are allowed", str(path))
        return content


def blocks_of(file: BinaryIO, size: int = 2**18) -> Generator[bytes, None, None]:
    """Yield the rest of a file in blocks of at most ``size`` bytes."""
    while block := file.read(size):
        yield block


def parse_json(text: str | bytes, *, keys_once: bool = False) -> Any:
    """Parse JSON with finite numbers, integers up to 128 bits, and bounds on the number of values and on nesting.

    The last value of a repeated key counts, unless ``keys_once`` rejects repeated keys.

    Raises:
        JSONError: the text breaks one of these rules, or is not JSON; then ``line`` and ``column`` are set.
            Also for a repeated key, if ``keys_once`` is set.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JSONError(f"must be UTF-8; byte {error.start} is not valid") from None
    if sum(map(text.count, ",:[{")) > _MOST_JSON_VALUES:
        raise JSONError(f"has more than {_MOST_JSON_VALUES:,} values")
    try:
        with pause_collection():
            value = json.loads(
                text,
                parse_constant=_refuse_constant,
                parse_int=_integer,
                parse_float=_number,
                object_pairs_hook=_distinct if keys_once else None,
            )
            level = [value] if type(value) in (dict, list) else []
            for _ in range(_DEEPEST):
                items = (item for parent in level for item in (parent.values() if type(parent) is dict else parent))
                level = [item for item in items if type(item) in (dict, list)]
            is_too_deep = bool(level)
    except json.JSONDecodeError as error:
        raise JSONError(f"not JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise JSONError(f"objects and lists nested more than {_DEEPEST} deep")
    return value


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection: creating many objects would trigger it again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_kind(path: Path, mode: int) -> None:
    for is_kind, number, what in _KINDS:
        if is_kind(mode):
            raise OSError(number, what, str(path))


def _refuse_constant(name: str) -> NoReturn:
    raise JSONError(f"{name} is not JSON; give a finite number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            shown = " and as ".join(json.dumps(each)[:40] for each in (content[key], value))
            raise JSONError(f'key "{key[:80]}" occurs twice in one object, as {shown}; keep one')
        content[key] = value
    return content


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise JSONError(f"an integer of {len(digits.lstrip('-')):,} digits; at most {_MOST_DIGITS} are allowed")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise JSONError(f"{digits[:20]} is beyond the largest number; give a finite one")
    return number


def dotted_paths(content: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys of nested objects."""
    for key, value in content.items() if isinstance(content, dict) else ():
        path = f"{prefix}.{key}" if prefix else key
        yield path
        yield from dotted_paths(value, path)
