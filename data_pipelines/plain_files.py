"""Files that anybody may have made, read with care: plain ones alone, no longer than they may be; and bounded JSON.

What a file says of itself is not believed before it is held against what is there. A pipe, a socket or a device has no
end that is known, and may never answer: it is refused before a byte is read. Errors are OSErrors that name the file,
and ``JSONError``; rooms make their own one-line errors of both.
"""

import errno
import gc
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

MOST_JSON_BYTES = 2**26  # a manifest of 100,000 shards has half of it
_MOST_JSON_VALUES = 4_000_000  # about 100 bytes of memory each; such a manifest has a quarter of them
_DEEPEST = 64  # objects and lists within each other
_MOST_DIGITS = 39  # of an integer: 128 bits
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")  # as a shell replaces it
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "is a folder, not a plain file"),
    (stat.S_ISLNK, errno.ELOOP, "is a link, not a plain file"),
    (stat.S_ISFIFO, errno.EINVAL, "is a pipe, not a plain file"),
    (stat.S_ISSOCK, errno.EINVAL, "is a socket, not a plain file"),
    (stat.S_ISCHR, errno.EINVAL, "is a device, not a plain file"),
    (stat.S_ISBLK, errno.EINVAL, "is a device, not a plain file"),
)


class JSONError(ValueError):
    """A text that is no JSON, or more than is taken, worded to follow a file's name; ``line`` and ``column`` from 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


class RepeatedKeyError(JSONError):
    """A key stands twice in one object."""


def expand_path(text: str) -> str:
    """Return a path with its leading ``~`` or ``~name`` replaced by that home folder; a URL and ``./~`` as they are.

    Shells leave ``~`` alone behind ``=``, and JSON always does. Variables are never replaced: a run would depend on the
    environment of whoever reads its configuration.

    Raises:
        ValueError: there is no such home folder, or the path names a variable; worded to follow ``path=text: ``.
            A name that is there, letter by letter, is taken as it is.
    """
    if "://" in text:
        return text
    expanded = text
    if text.startswith("~"):
        try:
            expanded = str(Path(text).expanduser())
        except RuntimeError:
            if not os.path.lexists(text.partition("/")[0]):
                rule = f"there is no such home folder; for a name that begins so write ./{text}"
                raise ValueError(rule) from None
    if (variable := _VARIABLE.search(expanded)) is None:
        return expanded
    end = expanded.find("/", variable.start())
    if os.path.lexists(expanded if end < 0 else expanded[:end]):
        return expanded
    meant = _VARIABLE.sub(lambda each: os.environ.get(each[1] or each[2], each[0]), expanded)
    good = f"{variable[0]} is not set here; write the path" if _VARIABLE.search(meant) else f"write {meant}"
    raise ValueError(f"variables are not replaced here; {good}")


def plain_status(path: Path) -> os.stat_result:
    """The size and times of a plain file, links followed; nothing is opened.

    Raises:
        OSError: there is none, or it is no plain file; with the file's name.
    """
    status = path.stat()
    _refuse_kind(path, status.st_mode)
    return status


def open_plain(path: Path, mode: str = "rb", *, follow_links: bool = True) -> BinaryIO:
    """Open a plain file without a buffer, or with one from which nothing has been read yet.

    Links to plain files are followed unless ``follow_links`` is False: a hub's cache and many data folders are made of
    them, a run folder and a checkpoint have none.

    Args:
        mode: "rb"; or "ab" and "a+b", which append to a file and make one where there is none, without a buffer.

    Raises:
        OSError: there is none, it cannot be opened, or it is no plain file; with the file's name.
    """
    # Without O_NONBLOCK opening a pipe waits for whoever writes to it. It does nothing to a plain file.
    flags = {"rb": os.O_RDONLY}.get(mode, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        with nullcontext() if mode == "rb" else suppress(FileNotFoundError):
            _refuse_kind(path, (os.stat if follow_links else os.lstat)(path).st_mode)  # opening a device may act
        descriptor = os.open(path, flags, 0o666)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode)  # of what was opened: the name may lead elsewhere by now
        return cast(BinaryIO, os.fdopen(descriptor, mode, buffering=-1 if mode == "rb" else 0))
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, at_most: int, *, follow_links: bool = True) -> bytes:
    """The content of a plain file of ``at_most`` so many bytes.

    Raises:
        OSError: as ``open_plain``, or the file is longer, which is seen before it is read.
    """
    with open_plain(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= at_most:
            content = file.read(at_most + 1)  # it may grow meanwhile; and files of /proc say that they are empty
            size = len(content)
        if size > at_most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, where {at_most:,} are the most", str(path))
        return content


def parse_json(text: str | bytes, *, keys_once: bool = False) -> Any:
    """The value of a JSON text: numbers are finite, integers fit 128 bits, and it is neither larger nor deeper than
    a manifest may be.

    Where a key stands twice in an object its last value counts, unless ``keys_once`` refuses it.

    Raises:
        JSONError: it is not; ``line`` is known where it is no JSON at all. RepeatedKeyError where a key is refused.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JSONError(f"must be UTF-8; byte {error.start} is not") from None
    if sum(map(text.count, ",:[{")) > _MOST_JSON_VALUES:
        raise JSONError(f"has more than {_MOST_JSON_VALUES:,} values")
    try:
        with collection_paused():
            value = json.loads(
                text,
                parse_constant=_refuse_constant,
                parse_int=_integer,
                parse_float=_number,
                object_pairs_hook=_distinct if keys_once else None,
            )
            is_too_deep = _is_deeper(value, _DEEPEST)
    except json.JSONDecodeError as error:
        raise JSONError(f"not JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise JSONError(f"objects and lists nested more than {_DEEPEST} deep")
    return value


@contextmanager
def collection_paused() -> Iterator[None]:
    """Makes many objects in a fraction of the time: Python would look for cycles among them over and over."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_deeper(value: Any, most: int) -> bool:
    """Whether objects and lists lie within each other more than ``most`` deep."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(most):
        inside = (each.values() if type(each) is dict else each for each in level)
        level = [item for items in inside for item in items if type(item) in (dict, list)]
    return bool(level)


def _refuse_kind(path: Path, mode: int) -> None:
    for is_kind, number, what in _KINDS:
        if is_kind(mode):
            raise OSError(number, what, str(path))


def _refuse_constant(name: str) -> NoReturn:
    raise JSONError(f"{name} is not JSON; give a finite number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise RepeatedKeyError("a key stands twice in one object")
    return content


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise JSONError(f"an integer of {len(digits.lstrip('-')):,} digits; {_MOST_DIGITS} are the most")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise JSONError(f"{digits[:20]} is beyond the largest number; give a finite one")
    return number
