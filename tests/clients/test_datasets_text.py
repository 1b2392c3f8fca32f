"""Texts between `data build`, `datasets` and WebDataset: each reads what the other one writes."""

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest

from longstride.data_pipelines.building import build
from longstride.data_pipelines.shards import sample_documents
from tests.harness.clients import client
from tests.harness.data.builds import payloads_of, write_files

SHORT = "Grüße aus 日本"
LONG = "".join(random.Random(0).choices("aß日😀 \n", k=90_000))  # three samples, in two shards


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create a data folder of UTF-8 texts, one of which is several samples over several shards."""
    write_files(
        tmp_path / "texts", {"long.txt": LONG.encode()} | {f"{n}.txt": f"{SHORT} {n}".encode() for n in range(9)}
    )
    build([tmp_path / "texts"], tmp_path / "data", validation_fraction=0, shard_bytes=150_000)
    return tmp_path / "data"


def loaded(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Load the samples of a data folder by `datasets`."""
    import datasets

    files = {"train": f"{folder}/train-*.tar"}
    splits = datasets.load_dataset("webdataset", data_files=files, cache_dir=str(folder.parent / "cache"), **options)
    return list(splits["train"])


def check_texts(folder: Path, samples: list[dict[str, Any]]) -> None:
    """Check that every text is complete; ``pieces.jsonl`` joins those of several samples."""
    by_key = {sample["__key__"]: sample["txt"] for sample in samples}
    assert all(isinstance(text, str) for text in by_key.values())
    pieces = [json.loads(line) for line in (folder / "pieces.jsonl").read_text().splitlines()]
    assert {(piece["source"], piece["of"]) for piece in pieces} == {("long.txt", len(pieces))} and len(pieces) == 3
    assert "".join(by_key.pop(piece["key"]) for piece in sorted(pieces, key=lambda piece: piece["piece"])) == LONG
    assert sorted(by_key.values()) == [f"{SHORT} {n}" for n in range(9)]


@client(
    "datasets",
    '`load_dataset("webdataset", data_files=…)` of a data folder of texts, streamed and not',
    "the texts; long ones by `pieces.jsonl`",
)
@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_our_texts(data: Path, streaming: bool) -> None:
    check_texts(data, loaded(data, streaming=streaming))


@client("webdataset", "`WebDataset(…).decode()` of a data folder of texts", "strings, the same way")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_decodes_our_texts(data: Path) -> None:
    import webdataset

    tars = sorted(map(str, data.glob("*.tar")))
    assert len(tars) > 1
    check_texts(data, list(webdataset.WebDataset(tars, shardshuffle=False).decode()))
    gc.collect()  # it leaves files to the collector, which would warn of them in another test


@client(
    "datasets",
    "the same where a text is no UTF-8",
    "with `features=`: bytes under `bin`, else strings",
)
@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_other_bytes_beside_texts(tmp_path: Path, streaming: bool) -> None:
    import datasets

    texts = {f"{n}.txt": (f"{SHORT} {n}".encode() if n % 4 else b"\xfcber %d" % n) for n in range(40)}
    write_files(tmp_path / "texts", texts)
    build([tmp_path / "texts"], tmp_path / "data", validation_fraction=0)
    kinds = {"txt": "string", "bin": "binary", "__key__": "string", "__url__": "string"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    samples = loaded(tmp_path / "data", streaming=streaming, features=features)
    contents = [sample["bin"] if sample["txt"] is None else sample["txt"].encode() for sample in samples]
    assert sorted(contents) == sorted(texts.values()) and sum(sample["txt"] is None for sample in samples) == 10
    in_order = {sample.key: sample.content.tobytes() for sample in sample_documents(tmp_path / "data", "train", 40)}
    assert dict(zip((sample["__key__"] for sample in samples), contents, strict=True)) == in_order


@client(
    "datasets",
    "`to_json`, gzip too, and `to_parquet`, then `data build --field text`",
    "equal texts; null and empty ones are counted",
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_a_build_reads_what_datasets_writes(tmp_path: Path, name: str) -> None:
    import datasets

    texts = [None, "", "a\0b\r\n", SHORT, LONG, *(f"{SHORT} {n}" for n in range(3000))]
    rows = datasets.Dataset.from_dict(
        {"id": range(len(texts)), "text": texts, "meta": [{"body": text} for text in texts]}
    )
    path = tmp_path / name
    if name.endswith(".parquet"):
        rows.to_parquet(path, batch_size=700)
    else:
        rows.to_json(path, force_ascii=name.endswith(".gz"), compression="gzip" if name.endswith(".gz") else None)
    for field in ("text", "meta.body"):
        manifest = build([path], tmp_path / field, field=field, validation_fraction=0, shard_bytes=2**18)
        assert b"".join(payloads_of(tmp_path / field, "train")) == "".join(filter(None, texts)).encode()
        counts = manifest.made["left_out"]
        assert (counts["null_records"], counts["empty_records"]) == (1, 1)
        assert manifest.splits["train"].documents == len(texts) - 2
