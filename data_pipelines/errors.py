"""``DataError``, the error of this package, and how other errors become one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

READ = "cannot be read"
_MOST_CHARACTERS, _LAST = 900, 300  # lengths of a message, and of its end, which says what to do
# Line ends, control characters of terminals (C1 as well), and marks that reverse the order of letters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class DataError(ValueError):
    """A folder, shard or state that cannot be used: one line with the path, the value, the rule and what to do."""

    def __init__(self, message: str) -> None:
        # File names may hold line ends and control characters, and text from a file may have any length.
        message = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), message)
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[: _MOST_CHARACTERS - _LAST]} … {message[-_LAST:]}"
        super().__init__(message)


@contextmanager
def as_data_error(
    where: object = None,
    what: str | None = READ,
    mend: str = "",
    *,
    damage: tuple[type[Exception], ...] = (),
    damaged: str = "is damaged or cut short",
) -> Iterator[None]:
    """Raise DataError for an OSError in the block, and for a library's exceptions about a damaged file.

    Args:
        where: the beginning of the message.
        what: the failed action; None to begin with the file that the system names, followed by its reason.
        mend: advice; a missing permission to read has its own.
        damage: the library's exceptions.
        damaged: their meaning.
    """
    caught: tuple[type[Exception], ...] = (OSError, *damage)
    try:
        yield
    except DataError:
        raise
    except caught as error:
        if damage and not (isinstance(error, OSError) and error.errno is not None):  # gzip's OSErrors have no number
            words = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{where}: {damaged} ({words}); fetch it again") from error
        assert isinstance(error, OSError), error
        reason = error.strerror or str(error)
        if what is None:
            # A rename has two names: the second one is the place that the user chose.
            name = next((name for name in (error.filename2, error.filename) if name is not None), where)
            raise DataError(reason if name is None else f"{name}: {reason}") from error
        if what == READ and isinstance(error, PermissionError):  # rebuilding would not help
            mend = "allow reading"
        raise DataError(f"{where}: {what} ({reason}){mend and f'; {mend}'}") from error
