"""Documents inside one file: the lines of JSON Lines, compressed or not, or the rows of a Parquet file, by one field.

Both are gone through once to measure what each record holds, and then read forwards, a record at a time. A Parquet file
is read by groups of rows, so that reading can begin in its middle. pyarrow is imported where a file needs it.
"""

import json
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.formats import HEAD_BYTES, PARQUET, FileFormat, UnpackedContent, file_format, unpacked
from longstride.data_pipelines.plain_files import collection_paused

SUFFIXES = (".jsonl", ".jsonl.bz2", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")  # of files with records
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs put before the first line
_BLOCK_BYTES = 2**18
_MOST_LINE_BYTES = 2**25  # a line is held whole, lists in it take twenty times their bytes, and a file without line
# ends would be one
_BATCH_ROWS = 64  # of a Parquet file, held at once
_BUFFER_BYTES = 2**20
# Numbers are passed over: they would take memory, and int() refuses those of many digits.
_JSON = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0)
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Records:
    """The records of a file that hold anything, in order. (n,) int64 each."""

    numbers: np.ndarray  # of the line or row, from 1 on
    starts: np.ndarray  # of a line: its first byte in what is unpacked; of a row: its number from 0 on
    lengths: np.ndarray  # bytes of the line; 0 of a row
    sizes: np.ndarray  # content bytes
    null: int  # records that hold null
    empty: int  # records that hold an empty text

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, chosen: np.ndarray) -> "Records":
        """Those that are chosen, (n,) bool."""
        kept = [column[chosen] for column in (self.numbers, self.starts, self.lengths, self.sizes)]
        return Records(kept[0], kept[1], kept[2], kept[3], self.null, self.empty)


class RecordReader(Protocol):
    """Reads records of an open file."""

    def content(self, start: int, length: int) -> bytes:
        """What the field of a record holds. Reading on is cheap. Raises DataError where it holds none."""


def find_records(path: Path, file: BinaryIO, field: str) -> Records:
    """The records of an open file that is not empty.

    ``field`` is a name, or names behind each other with dots between them where objects lie in objects. Raises
    DataError, with the line, for what is no JSON Lines and no Parquet, for a record without the field, and for one
    that holds anything but text (in Parquet: or bytes) or null there.
    """
    kind = _format(file)
    found = _parquet_rows(path, file, field) if _is_parquet(kind) else _lines_found(path, file, kind, field)
    rows, null, empty = array("q"), 0, 0  # there may be millions
    for *place, size in found:
        if size is None:
            null += 1
        elif size == 0:
            empty += 1
        else:
            rows.extend((*place, size))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Records(columns[0], columns[1], columns[2], columns[3], null, empty)


def record_reader(path: Path, file: BinaryIO, field: str) -> RecordReader:
    """Reads the records of an open file, which stays open as long."""
    kind = _format(file)
    return _RowReader(path, file, field) if _is_parquet(kind) else _LineReader(path, file, kind, field)


def _format(file: BinaryIO) -> FileFormat | None:
    file.seek(0)
    kind = file_format(file.read(HEAD_BYTES))
    file.seek(0)
    return kind


def _is_parquet(kind: FileFormat | None) -> bool:
    return kind is not None and kind.name == PARQUET


# JSON Lines.


def _lines_found(
    path: Path, file: BinaryIO, kind: FileFormat | None, field: str
) -> Iterator[tuple[int, int, int, int | None]]:
    """(number, start, length, content bytes) of each line that is not blank."""
    if kind is not None and kind.unpack is None:
        raise DataError(f"{path}: is {kind.name}; --field reads JSON Lines and Parquet: leave it out, or unpack it")
    blocks = iter(lambda: file.read(_BLOCK_BYTES), b"") if kind is None else unpacked(path, file, kind)
    start = 0
    for number, line in enumerate(_lines(path, blocks), 1):
        content = line if start else line.removeprefix(_BYTE_ORDER_MARK)
        if content.strip():
            value = _line_content(f"{path}:{number}", content, field)
            yield number, start, len(line), None if value is None else len(value)
        start += len(line)


def _lines(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their ends. In time that is linear in the bytes, however long a line is."""
    parts: list[bytes] = []
    held = number = 0
    for block in blocks:
        first, *rest = block.split(b"\n")
        parts.append(first)
        held += len(first)
        if held > _MOST_LINE_BYTES:
            raise DataError(f"{path}:{number + 1}: a line of more than {_MOST_LINE_BYTES:,} bytes; is it JSON Lines?")
        for part in rest:
            number += 1
            yield b"".join(parts) + b"\n"
            parts, held = [part], len(part)
    if held:
        yield b"".join(parts)


def _line_content(where: str, line: bytes, field: str) -> bytes | None:
    """What the field of a line holds; None: null."""
    try:
        with collection_paused():
            record = _JSON.decode(line.decode())
    except (RecursionError, ValueError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: is no JSON ({' '.join(reason.split())}); --field reads Parquet and JSON Lines, an object a "
            "line, as `jq -c` writes them"
        ) from error
    if not isinstance(record, dict):
        what = "text" if isinstance(record, str) else _KINDS.get(type(record), "null")
        rule = "--field reads an object a line, as `jq -c '.[]'` makes them of a list"
        raise DataError(f"{where}: is {what}, and no object; {rule}")
    value: Any = record
    for name in [field] if field in record else field.split("."):
        if value is None:
            break
        if not isinstance(value, dict) or name not in value:
            raise DataError(f"{where}: has no field {field!r}; it has {', '.join(_json_fields(record)) or 'none'}")
        value = value[name]
    if value is None:
        return None
    if not isinstance(value, str):
        texts = [name for name, each in record.items() if isinstance(each, str)]
        good = f"; of texts it has {', '.join(texts[:9])}" if texts else ""
        raise DataError(f"{where}: field {field!r} is {_KINDS[type(value)]}, and must be text{good}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        rule = f"holds half a character (\\u{ord(value[_lone(value)]):04x} alone)"
        raise DataError(f"{where}: field {field!r} {rule}, which no bytes stand for; mend the line") from None


def _lone(text: str) -> int:
    return next(place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")


def _json_fields(record: dict[str, Any]) -> list[str]:
    """Names of a record, and of objects in it, as --field takes them."""
    names = []
    for name, value in list(record.items())[:20]:
        names += [f"{name}.{inner}" for inner in list(value)[:20]] if isinstance(value, dict) else [name]
    return names


class _LineReader:
    """Of a file with a record a line."""

    def __init__(self, path: Path, file: BinaryIO, kind: FileFormat | None, field: str) -> None:
        self._path, self._file, self._field = path, file, field
        self._unpacked = None if kind is None else UnpackedContent(path, file, kind)
        self._held = -1, b""  # the start and the content of the last line

    def content(self, start: int, length: int) -> bytes:
        """See ``RecordReader``."""
        if self._held[0] != start:
            if self._unpacked is None:
                self._file.seek(start)
                line = self._file.read(length)
            else:
                line = self._unpacked.read(start, length)
            where = f"{self._path}: line at byte {start}"
            self._held = start, _line_content(where, line.removeprefix(_BYTE_ORDER_MARK), self._field) or b""
        return self._held[1]


# Parquet.


def parquet_fields(path: Path, file: BinaryIO) -> list[str] | None:
    """The columns of an open Parquet file that hold text or bytes, as --field takes them; None without pyarrow."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return None
    with _parquet_errors(path):
        return _columns(_parquet(file).schema_arrow)


def _parquet_errors(path: Path) -> AbstractContextManager[None]:
    """Raise DataError for what pyarrow says of a file that it cannot read, or where pyarrow is missing."""
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise DataError(
            f"{path}: is a Parquet file, and pyarrow, which reads it, cannot be imported ({error}); pip install "
            "pyarrow, or write JSON Lines"
        ) from error
    return as_data_error(path, damage=(ArrowException,), damaged="is a Parquet file that is damaged or cut short")


def _parquet(file: BinaryIO) -> Any:
    """Return a ``pyarrow.parquet.ParquetFile`` over an open file."""
    from pyarrow.parquet import ParquetFile

    file.seek(0)
    # Columns are read in small buffers: a group of rows may have gigabytes.
    return ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)


def _columns(schema: Any) -> list[str]:
    """Names of columns of text or bytes, also inside structs."""
    import pyarrow

    def named(prefix: str, fields: Any) -> Iterator[str]:
        for field in fields:
            if pyarrow.types.is_struct(field.type):
                yield from named(f"{prefix}{field.name}.", (field.type.field(n) for n in range(field.type.num_fields)))
            elif _holds_bytes(field.type):
                yield prefix + field.name

    return list(named("", schema))


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(test(kind) for test in tests) or str(kind) in ("string_view", "binary_view")


def _check_column(path: Path, schema: Any, field: str) -> None:
    """Raises DataError for a column that is not there, or holds neither text nor bytes."""
    fields = _columns(schema)
    if fields.count(field) == 1:
        return
    rule = "holds neither text nor bytes" if field in schema.names else "is no column of it"
    rule = "is the name of several columns" if field in fields else rule
    good = f"; those of text are {', '.join(fields)}" if fields else "; it has none of text"
    raise DataError(f"{path}: field {field!r} {rule}{good}")


def _batches(table: Any, group: int, field: str) -> Iterator[Any]:
    """Arrays of bytes, ``large_binary``: what the column holds in a group of rows."""
    import pyarrow
    import pyarrow.compute

    inner = [] if field in table.schema_arrow.names else field.split(".")[1:]
    for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[field], use_threads=False):
        values = batch.column(0)
        for name in inner:
            values = pyarrow.compute.struct_field(values, name)
        if pyarrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        yield values.cast(pyarrow.large_binary())


def _parquet_rows(path: Path, file: BinaryIO, field: str) -> Iterator[tuple[int, int, int, int | None]]:
    """(number, number from 0 on, 0, content bytes) of each row."""
    with _parquet_errors(path):
        table = _parquet(file)
        from pyarrow import compute

        _check_column(path, table.schema_arrow, field)
        row = 0
        for group in range(table.num_row_groups):
            for values in _batches(table, group, field):
                for size in compute.binary_length(values).to_pylist():
                    yield row + 1, row, 0, size
                    row += 1


class _RowReader:
    """Of a Parquet file."""

    def __init__(self, path: Path, file: BinaryIO, field: str) -> None:
        self._path, self._file, self._field = path, file, field
        with _parquet_errors(path):
            self._table = table = _parquet(file)
            rows = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        self._ends = np.cumsum(rows, dtype=np.int64)  # of the groups
        self._group, self._first = -1, 0  # the group that is being read, and the row that ``values`` begin with
        self._values: Any = ()
        self._batches: Iterator[Any] = iter(())

    def content(self, start: int, length: int) -> bytes:
        """See ``RecordReader``."""
        with _parquet_errors(self._path):
            group = int(np.searchsorted(self._ends, start, side="right"))
            if group != self._group or start < self._first:
                self._group, self._first, self._values = group, int(self._ends[group - 1]) if group else 0, ()
                self._batches = _batches(self._table, group, self._field)
            while start >= self._first + len(self._values):
                self._first += len(self._values)
                self._values = next(self._batches)
            return self._values[start - self._first].as_py() or b""
