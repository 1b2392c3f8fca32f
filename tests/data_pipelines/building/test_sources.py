"""What a build takes for text: compressed files unpacked, records by a field, and no other format in silence."""

import bz2
import functools
import gzip
import io
import json
import lzma
import random
import resource
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from longstride.data_pipelines.building import shard_writer
from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards import verify
from tests.harness.data.builds import OutOfOrder, ended, folder_bytes, payloads_of, start, worker_words, write_files
from tests.harness.data.published_files import zipped
from tests.harness.data.tars import write_tar

COMPRESS = {
    ".gz": functools.partial(gzip.compress, mtime=0),  # without the time of day, which would name tests differently
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXTS = {f"{number}.txt": "".join(random.Random(number).choices("aß日\n", k=900)).encode() for number in range(6)}
VALUES = ["", None, "short", "Grüße 日本 " * 400, *(f"record {number} " * (number % 40 + 1) for number in range(1, 60))]
HELD = [value.encode() for value in VALUES if value]


def lines_of(values: list[str | None]) -> bytes:
    """Write JSON Lines, alternately with plain characters and with escapes."""
    records = [{"id": n, "text": value, "meta": {"body": value}} for n, value in enumerate(values)]
    return b"".join(json.dumps(each, ensure_ascii=each["id"] % 2 == 0).encode() + b"\n" for each in records)


def table_of(values: list[str | None], kind: pyarrow.DataType) -> bytes:
    """Write a Parquet file of several row groups, with the values in a column and in a struct."""
    column = pyarrow.array([value.encode() if value and "binary" in str(kind) else value for value in values], kind)
    columns = {"id": range(len(values)), "text": column, "meta": pyarrow.StructArray.from_arrays([column], ["body"])}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=17)
    return file.getvalue()


RECORDS = {
    "a.jsonl": lines_of(VALUES),
    "no end.jsonl": lines_of(VALUES)[:-1],
    "marked.jsonl": b"\xef\xbb\xbf\n" + lines_of(VALUES).replace(b"\n", b"\r\n\n"),
    "a.jsonl.zst": COMPRESS[".zst"](lines_of(VALUES)),
    "a.jsonl.gz": COMPRESS[".gz"](lines_of(VALUES[:20])) + COMPRESS[".gz"](lines_of(VALUES[20:])),
    "string.parquet": table_of(VALUES, pyarrow.string()),
    "bytes.parquet": table_of(VALUES, pyarrow.large_binary()),
}


@pytest.fixture
def small(monkeypatch):
    """Samples of some characters, so that a record is several."""
    monkeypatch.setattr(shard_writer, "SAMPLE_BYTES", 100)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_texts_are_what_they_hold(tmp_path, small, suffix):
    """The bytes are those of the plain files with the same names, on any ranks, and after a stop."""
    arguments = {"validation_fraction": 0.3, "shard_bytes": 700, "suffixes": [suffix]}
    packed = write_files(tmp_path / "a", {name + suffix: COMPRESS[suffix](text) for name, text in TEXTS.items()})
    plain = write_files(tmp_path / "b", {name + suffix: text for name, text in TEXTS.items()})
    build([packed], tmp_path / "data", **arguments)
    build([plain], tmp_path / "plain", **arguments)
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "plain")
    build([packed], tmp_path / "by three", crew=OutOfOrder(), **arguments)
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "by three")


def test_suffixes_of_compressed_texts(tmp_path):
    files = {"a.txt.gz": gzip.compress(b"a"), "b.py.gz": gzip.compress(b"b"), "c.txt": b"c", "d.gz": gzip.compress(b"")}
    write_files(tmp_path / "source", files)
    for suffixes, taken in (([".txt.gz"], [b"a"]), ([".gz"], [b"a", b"b"]), ([".txt.gz", ".txt"], [b"a", b"c"])):
        name = " ".join(suffixes)
        manifest = build([tmp_path / "source"], tmp_path / name, suffixes=suffixes, validation_fraction=0)
        assert sorted(payloads_of(tmp_path / name, "train")) == taken
        assert manifest.made["left_out"]["empty_files"] == (suffixes == [".gz"])  # it holds nothing
    with pytest.raises(DataError, match=r"no matching file \(suffixes: \.rs\); there are \.gz, \.txt: select files"):
        build([tmp_path / "source"], tmp_path / "none", suffixes=[".rs"])


def test_a_folder_of_records_without_a_field_says_what_to_name(tmp_path):
    source = write_files(tmp_path / "source", RECORDS)
    rule = r"there are \.gz, \.jsonl, \.parquet, \.zst: name the field that holds the text with --field, or take"
    with pytest.raises(DataError, match=rule):
        build([source], tmp_path / "data")


@pytest.mark.parametrize("field", ["text", "meta.body"])
@pytest.mark.parametrize("name", RECORDS)
def test_records_are_documents(tmp_path, small, name, field):
    """Each is in one of the splits, in the order of their file."""
    source = write_files(tmp_path / "source", {name: RECORDS[name]})
    manifest = build([source], tmp_path / "data", field=field, validation_fraction=0.3, shard_bytes=1500)
    documents = {}
    for split, record in manifest.splits.items():
        content = b"".join(payloads_of(tmp_path / "data", split))
        documents[split] = [text for text in HELD if text in content]
        assert b"".join(documents[split]) == content and record.documents == len(documents[split]) > 5
    assert sorted([*documents["train"], *documents["validation"]]) == sorted(HELD)
    assert manifest.made["left_out"] == {"empty_files": 0, "symlinks": 0, "null_records": 1, "empty_records": 1}
    assert manifest.made["settings"]["field"] == field and verify(tmp_path / "data") == []
    assert f'"source": "{name}:' in (tmp_path / "data" / "pieces.jsonl").read_text()
    build([source], tmp_path / "again", field=field, validation_fraction=0.3, shard_bytes=1500, crew=OutOfOrder())
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "data")


def test_records_stay_in_their_split_when_others_are_added(tmp_path):
    few = write_files(tmp_path / "few", {"a.jsonl": lines_of(VALUES[:40])})
    more = write_files(tmp_path / "more", {"a.jsonl": lines_of(VALUES), "b.jsonl": RECORDS["a.jsonl"]})
    for name, source in (("a", few), ("b", more)):
        build([source], tmp_path / name, field="text", validation_fraction=0.3)
    for split in ("train", "validation"):
        assert set(payloads_of(tmp_path / "a", split)) < set(payloads_of(tmp_path / "b", split))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_few_records_fill_both_splits(tmp_path, fraction):
    source = write_files(tmp_path / "source", {"a.jsonl": lines_of(["one", "two", None])})
    manifest = build([source], tmp_path / "data", field="text", validation_fraction=fraction)
    assert [split.documents for split in manifest.splits.values()] == [1, 1]


def test_records_by_two_ranks_and_after_a_change(tmp_path):
    source = write_files(tmp_path / "source", RECORDS)
    arguments = {"field": "text", "validation_fraction": 0.2, "shard_bytes": 3000}
    build([source], tmp_path / "data", **arguments)
    code, _, errors = ended(start(worker_words(source, tmp_path / "by two", arguments), ranks=2))
    assert (code, errors) == (0, [])
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "by two")

    def grow(done: int, total: int) -> None:
        for path in source.iterdir():
            path.write_bytes(path.read_bytes() + b"\n")

    with pytest.raises(DataError, match="changed since the build began"):
        build([source], tmp_path / "changed", progress=grow, **arguments)


TWO_NAMES = pyarrow.table({"a": [{"b": "inside"}], "a.b": ["whole"]})
TWICE = gzip.compress(gzip.compress(b"x", mtime=0), mtime=0)
PARQUET = RECORDS["string.parquet"]


def flipped(table: pyarrow.Table) -> bytes:
    """Flip a bit of a text in a Parquet file whose pages have checksums."""
    file = io.BytesIO()
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, file, write_page_checksum=True, **plain)
    return file.getvalue().replace(b"a text", b"e text")


@pytest.mark.parametrize(
    ("name", "content", "arguments", "rule"),
    [
        ("x.txt", PARQUET, {}, r": is a Parquet file, not text; name .* such as --field text, or"),
        ("x.parquet", PARQUET, {"field": "body"}, r": field 'body' is not one of its columns; its columns of text are"),
        ("x.parquet", PARQUET, {"field": "id"}, r": field 'id' holds neither text nor bytes; its columns of text are"),
        ("x.parquet", PARQUET[:-9], {"field": "text"}, r": is a Parquet file that is damaged or cut short \("),
        ("x.parquet", flipped(TWO_NAMES), {"field": "a.b"}, r": field 'a\.b' is the name of several columns; "),
        ("x.parquet", flipped(pyarrow.table({"a": ["a text"]})), {"field": "a"}, r": is a Parquet file that is da"),
        ("x.zip", "zip", {}, r": is a zip archive, not text; unpack it first, such as with `unzip FILE`, or take"),
        ("x.tgz", "tgz", {}, r": is compressed by gzip that holds a tar archive; unpack it"),
        ("x.gz", TWICE, {}, r": is compressed by gzip that holds compressed"),
        ("x.txt", b"%PDF-1.7\n1 0 obj", {}, r": is a PDF file, not text; leave it out, such as with --exclude, or"),
        ("x.txt", b"\x89PNG\r\n\x1a\n", {}, r": is a PNG picture, not text; take it with --modality image, leave"),
        ("x.txt", b"\xff\xd8\xff\xe0", {}, r": is a JPEG picture, not text; take it with --modality image, leave"),
        ("x.txt", b"RIFF\1\0\0\0WAVEfmt \x10\0", {}, r": is a WAV sound, not text; take it with --modality audio, l"),
        ("x.txt", b"fLaC\0\0", {}, r": is a FLAC sound, not text; take it with --modality audio, leave it out, such"),
        ("x.gz", COMPRESS[".gz"](TEXTS["0.txt"])[:-5], {}, r": is compressed by gzip, and damaged or cut short \("),
        ("x.jsonl", PARQUET[4:], {"field": "text"}, r":1: is not JSON \(.+\); --field reads Parquet and JSON Lines"),
        ("x.jsonl", b'{"a": "b"}\n{"a": 1', {"field": "a"}, r":2: is not JSON \(.+\); --field reads Parquet"),
        ("x.jsonl", b'{"a": "b"}\n\n{"a": 1}', {"field": "a"}, r":3: field 'a' is a number; must be text$"),
        ("x.jsonl", b'{"a": "b", "c": {}}', {"field": "c"}, r":1: field 'c' is an object; must be text; its"),
        ("x.jsonl", b'{"a": "b", "c": {"d": 1}}', {"field": "e"}, r":1: has no field 'e'; it has a, c\.d$"),
        ("x.jsonl", b'["a"]', {"field": "a"}, r":1: is a list, not an object; --field reads one object per line"),
        ("x.jsonl", b'{"a": "\\ud83d"}', {"field": "a"}, r":1: field 'a' holds half a character \(\\ud83d alone\)"),
        ("x.jsonl", b'{"a": null}', {"field": "a"}, r": no matching file .* 1 null records\); name files that are"),
        ("x.txt", b"", {}, r": no matching file \(.* left out: 1 empty\); name files that are not empty$"),
        ("x.zip", "zip", {"field": "a"}, r": is a zip archive; --field reads only JSON Lines and Parquet"),
        ("x.jsonl", b"{}", {"field": ""}, r"^field='': must be the name"),
        ("x.jsonl", b"{}", {"field": "a", "properties": {"raw": 1}}, r"^field=a: reads the records of a file, and raw"),
        ("x.jsonl", b"{}", {"field": "a", "modality": "image"}, r"^field=a: only applies to text, and this is image"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused_in_one_line(tmp_path, name, content, arguments, rule):
    path = tmp_path / name
    if content == "zip":
        zipped(path, {"a.txt": b"a"})
    elif content == "tgz":
        path.write_bytes(gzip.compress(write_tar(tmp_path / "a.tar", [("a.txt", b"a")]).read_bytes()))
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rule) as caught:
        build([path], tmp_path / "data", validation_fraction=0, **arguments)
    assert "\n" not in str(caught.value) and str(caught.value).startswith((str(path), "field="))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("module", "name", "arguments", "rule"),
    [
        ("pyarrow", "string.parquet", {"field": "text"}, "and pyarrow, which reads such files, .*; pip install"),
        ("pyarrow", "string.parquet", {}, "is a Parquet file, not text; name the text's field with --field"),
        ("zstandard", "a.jsonl.zst", {"field": "text"}, "and zstandard, .*; pip install zstandard, or unpack the file"),
    ],
)  # fmt: skip
def test_a_missing_library_is_named(tmp_path, monkeypatch, module, name, arguments, rule):
    source = write_files(tmp_path, RECORDS) / name
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(DataError, match=rf"{name}: .*{rule}"):
        build([source], tmp_path / "data", validation_fraction=0, **arguments)


def test_raw_takes_any_file_byte_by_byte(tmp_path):
    files = {"a.gz": gzip.compress(b"a"), "b.parquet": PARQUET, "c.txt": b"c"}
    source = write_files(tmp_path / "source", files)
    manifest = build([source], tmp_path / "data", properties={"raw": 1}, suffixes=(), validation_fraction=0)
    assert sorted(payloads_of(tmp_path / "data", "train")) == sorted(files.values())
    assert manifest.made["settings"]["asked"] == {"raw": 1}


def test_numbers_beside_the_text_may_have_any_number_of_digits(tmp_path):
    line = b'{"text": "a", "number": ' + b"7" * 5000 + b"}\n"
    source = write_files(tmp_path / "source", {"a.jsonl": line})
    assert build([source], tmp_path / "data", field="text", validation_fraction=0).splits["train"].documents == 1


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["a.txt.zst", "a.jsonl.zst", "a.parquet"])
def test_a_large_file_takes_no_more_memory(tmp_path, name):
    """Measure the peak memory of a process that reads 600 MB of decompressed data."""
    path = tmp_path / name
    if name == "a.parquet":
        schema = pyarrow.schema({"text": pyarrow.string()})
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for _ in range(60):
                writer.write_table(pyarrow.table({"text": ["x" * 100_000] * 100}, schema))
    else:
        line = json.dumps({"text": "x" * 100_000}).encode() + b"\n"
        with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
            for _ in range(6_000):
                stream.write(line)
    arguments = {"validation_fraction": 0, **({} if name == "a.txt.zst" else {"field": "text"})}
    words = worker_words(path, tmp_path / "data", arguments)
    code, _, errors = ended(start(words))
    assert (code, errors) == (0, [])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 400 * 2**10
