"""The one error family of the data room."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Ends of lines, control characters of terminals (C1 as well), and marks that reverse the order of letters.
_MOST_CHARACTERS, _LAST = 900, 300  # of a message, and of its end, which says what to do
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class DataError(ValueError):
    """A folder, shard or state that cannot be used: one line with the path, the value, the rule and what to do."""

    def __init__(self, message: str) -> None:
        # A file's name may hold line ends and control characters, and what a file says of itself any number of letters.
        message = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), message)
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[: _MOST_CHARACTERS - _LAST]} … {message[-_LAST:]}"
        super().__init__(message)


@contextmanager
def os_errors_as_data_errors(path: Path | None = None) -> Iterator[None]:
    """Raises DataError for an OSError inside. ``path`` is named where the system names none, as for a full disk."""
    try:
        yield
    except OSError as error:
        # A rename has two names: the second one is the place that the user chose.
        name = next((name for name in (error.filename2, error.filename) if name is not None), path)
        reason = error.strerror or str(error)
        raise DataError(reason if name is None else f"{name}: {reason}") from error
