"""The one error family of the data room."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What ends a line, what a terminal obeys (of Unicode's second set as well), and what turns the order of letters around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class DataError(ValueError):
    """A folder, shard or state that cannot be used: one line with the path, the value, the rule and what to do."""

    def __init__(self, message: str) -> None:
        # File names may hold line ends, and what a terminal would obey.
        super().__init__(_CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message))


@contextmanager
def os_errors_told(path: Path | None = None) -> Iterator[None]:
    """Raises DataError for an OSError inside; ``path`` is named where the system names none, as for a full disk."""
    try:
        yield
    except OSError as error:
        # Of a rename the second name is where a person asked for something to be.
        name = next((name for name in (error.filename2, error.filename) if name is not None), path)
        reason = error.strerror or str(error)
        raise DataError(reason if name is None else f"{name}: {reason}") from error
