"""Documents in one file: one field of the lines of JSON Lines, compressed or not, or of the rows of a Parquet file.

A first pass measures all records; then they are read one by one in order. A Parquet file is read by row groups, so
reading can start in the middle. pyarrow is imported only for files that need it.
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
from longstride.data_pipelines.formats import (
    HEAD_BYTES,
    PARQUET,
    FileFormat,
    decompress,
    decompressed_content,
    file_format,
)
from longstride.data_pipelines.plain_files import blocks_of, pause_collection

SUFFIXES = (".jsonl", ".jsonl.bz2", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")  # of files with records
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8; some programs write it before the first line
_MOST_LINE_BYTES = 2**25  # lists of a line take twenty times their bytes, and a file without line ends is one line
_BATCH_ROWS = 64  # rows of a Parquet file in memory at once
_BUFFER_BYTES = 2**20
# Numbers are ignored: they would take memory, and int() rejects those of many digits.
_JSON = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0)
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Records:
    """The records of a file that are not empty, in order; arrays are (n,) int64."""

    numbers: np.ndarray  # line or row, counted from 1
    starts: np.ndarray  # decompressed byte offset of a line; index of a row from 0
    lengths: np.ndarray  # bytes of the line; 0 for a row
    sizes: np.ndarray  # content bytes
    null: int  # number of null records
    empty: int  # number of empty texts

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, mask: np.ndarray) -> "Records":
        """Select records by a mask, (n,) bool."""
        columns = (self.numbers[mask], self.starts[mask], self.lengths[mask], self.sizes[mask])
        return Records(*columns, self.null, self.empty)


class RecordReader(Protocol):
    """Reads records of an open file."""

    def content(self, start: int, length: int) -> bytes:
        """Return the content of a record. Sequential reads are cheap. Raises DataError if it has none."""


def find_records(path: Path, file: BinaryIO, field: str) -> Records:
    """Measure the records of an open file that is not empty.

    ``field`` is a name, or names joined by dots for nested objects. Raises DataError, with the line, for a file that is
    neither JSON Lines nor Parquet, and for a record without the field. The field must hold text (in Parquet also bytes)
    or null.
    """
    kind = _format(file)
    measured = _measure_rows(path, file, field) if _is_parquet(kind) else _measure_lines(path, file, kind, field)
    rows, null, empty = array("q"), 0, 0  # there may be millions
    for *place, size in measured:
        if size is None:
            null += 1
        elif size == 0:
            empty += 1
        else:
            rows.extend((*place, size))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Records(columns[0], columns[1], columns[2], columns[3], null, empty)


def record_reader(path: Path, file: BinaryIO, field: str) -> RecordReader:
    """Return a reader of the records of an open file, which must stay open."""
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


def _measure_lines(
    path: Path, file: BinaryIO, kind: FileFormat | None, field: str
) -> Iterator[tuple[int, int, int, int | None]]:
    """Yield (number, start, length, content bytes) of each line that is not blank."""
    if kind is not None and kind.begin is None:
        rule = f"is {kind.name}; --field reads only JSON Lines and Parquet; leave it out, or unpack the file"
        raise DataError(f"{path}: {rule}")
    blocks: Iterator[bytes] = blocks_of(file)
    if kind is not None:
        blocks = decompress(path, blocks, kind)
    start = 0
    for number, line in enumerate(_lines(path, blocks), 1):
        content = line if start else line.removeprefix(_BYTE_ORDER_MARK)
        if content.strip():
            value = _line_content(f"{path}:{number}", content, field)
            yield number, start, len(line), None if value is None else len(value)
        start += len(line)


def _lines(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Split blocks into lines with their ends, in linear time however long a line is."""
    parts: list[bytes] = []
    size = number = 0
    for block in blocks:
        first, *following = block.split(b"\n")
        parts.append(first)
        size += len(first)
        if size > _MOST_LINE_BYTES:
            raise DataError(f"{path}:{number + 1}: a line of more than {_MOST_LINE_BYTES:,} bytes; is it JSON Lines?")
        for part in following:
            number += 1
            yield b"".join(parts) + b"\n"
            parts, size = [part], len(part)
    if size:
        yield b"".join(parts)


def _line_content(where: str, line: bytes, field: str) -> bytes | None:
    """Return the content of a line's field; None for null."""
    try:
        with pause_collection():
            record = _JSON.decode(line.decode())
    except (RecursionError, ValueError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: is not JSON ({' '.join(reason.split())}); --field reads Parquet and JSON Lines, one "
            "object per line, as `jq -c` writes them"
        ) from error
    if not isinstance(record, dict):
        what = "text" if isinstance(record, str) else _KINDS.get(type(record), "null")
        rule = "--field reads one object per line, as `jq -c '.[]'` writes a list"
        raise DataError(f"{where}: is {what}, not an object; {rule}")
    value: Any = record
    for name in [field] if field in record else field.split("."):
        if value is None:
            break
        if not isinstance(value, dict) or name not in value:
            names = []  # in the form of --field
            for key, item in list(record.items())[:20]:
                names += [f"{key}.{inner}" for inner in list(item)[:20]] if isinstance(item, dict) else [key]
            raise DataError(f"{where}: has no field {field!r}; it has {', '.join(names) or 'none'}")
        value = value[name]
    if value is None:
        return None
    if not isinstance(value, str):
        texts = [name for name, item in record.items() if isinstance(item, str)]
        good = f"; its fields of text are {', '.join(texts[:9])}" if texts else ""
        raise DataError(f"{where}: field {field!r} is {_KINDS[type(value)]}; must be text{good}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        lone = next(letter for letter in value if "\ud800" <= letter <= "\udfff")
        rule = f"holds half a character (\\u{ord(lone):04x} alone)"
        raise DataError(f"{where}: field {field!r} {rule}, which has no UTF-8 encoding; correct the line") from None


class _LineReader:
    """Reads the records of JSON Lines."""

    def __init__(self, path: Path, file: BinaryIO, kind: FileFormat | None, field: str) -> None:
        self._path, self._file, self._field = path, file, field
        self._unpacked = None if kind is None else decompressed_content(path, file, kind)
        self._last = -1, b""  # start and content of the last line

    def content(self, start: int, length: int) -> bytes:
        if self._last[0] != start:
            if self._unpacked is None:
                self._file.seek(start)
                line = self._file.read(length)
            else:
                line = self._unpacked.read(start, length)
            where = f"{self._path}: line at byte {start}"
            self._last = start, _line_content(where, line.removeprefix(_BYTE_ORDER_MARK), self._field) or b""
        return self._last[1]


# Parquet.


def _parquet_errors(path: Path) -> AbstractContextManager[None]:
    """Raise DataError for pyarrow's errors about a file, or if pyarrow is missing."""
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise DataError(
            f"{path}: is a Parquet file, and pyarrow, which reads such files, cannot be imported ({error}); pip "
            "install pyarrow, or write JSON Lines"
        ) from error
    return as_data_error(path, damage=(ArrowException,), damaged="is a Parquet file that is damaged or cut short")


def _parquet(file: BinaryIO) -> Any:
    from pyarrow.parquet import ParquetFile

    file.seek(0)
    # Columns are read in small buffers: a group of rows may have gigabytes.
    return ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)


def _columns(schema: Any) -> list[str]:
    """List the names of text and bytes columns, also inside structs."""
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)

    def names(prefix: str, fields: Any) -> Iterator[str]:
        for field in fields:
            kind = field.type.value_type if types.is_dictionary(field.type) else field.type
            if types.is_struct(kind):
                yield from names(f"{prefix}{field.name}.", (kind.field(n) for n in range(kind.num_fields)))
            elif any(test(kind) for test in tests) or str(kind) in ("string_view", "binary_view"):
                yield prefix + field.name

    return list(names("", schema))


def _batches(table: Any, group: int, field: str) -> Iterator[Any]:
    """Yield a column of a row group as arrays of bytes, ``large_binary``."""
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


def _measure_rows(path: Path, file: BinaryIO, field: str) -> Iterator[tuple[int, int, int, int | None]]:
    """Yield (number from 1, index from 0, 0, content bytes) of each row. Raises DataError for an unusable column."""
    with _parquet_errors(path):
        table = _parquet(file)
        from pyarrow import compute

        fields = _columns(table.schema_arrow)
        if fields.count(field) != 1:
            rule = "holds neither text nor bytes" if field in table.schema_arrow.names else "is not one of its columns"
            rule = "is the name of several columns" if field in fields else rule
            good = f"; its columns of text are {', '.join(fields)}" if fields else "; it has no columns of text"
            raise DataError(f"{path}: field {field!r} {rule}{good}")
        row = 0
        for group in range(table.num_row_groups):
            for values in _batches(table, group, field):
                for size in compute.binary_length(values).to_pylist():
                    yield row + 1, row, 0, size
                    row += 1


class _RowReader:
    """Reads the records of a Parquet file."""

    def __init__(self, path: Path, file: BinaryIO, field: str) -> None:
        self._path, self._file, self._field = path, file, field
        with _parquet_errors(path):
            self._table = table = _parquet(file)
            rows = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        self._ends = np.cumsum(rows, dtype=np.int64)  # of the row groups
        self._group, self._first = -1, 0  # the current group, and the row of the first of ``_values``
        self._values: Any = ()
        self._batches: Iterator[Any] = iter(())

    def content(self, start: int, length: int) -> bytes:
        with _parquet_errors(self._path):
            group = int(np.searchsorted(self._ends, start, side="right"))
            if group != self._group or start < self._first:
                self._group, self._first, self._values = group, int(self._ends[group - 1]) if group else 0, ()
                self._batches = _batches(self._table, group, self._field)
            while start >= self._first + len(self._values):
                self._first += len(self._values)
                self._values = next(self._batches)
            return self._values[start - self._first].as_py() or b""
