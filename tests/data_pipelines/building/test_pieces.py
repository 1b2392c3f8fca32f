"""Long texts in several samples: cut between characters, the same whoever cuts, and named so that others can rejoin."""

import json
import random
import tarfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstride.data_pipelines.building import shard_writer
from longstride.data_pipelines.building.build import build, build_dataset
from longstride.data_pipelines.building.crew import Crew
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.shards import DataFolder, sample_documents, verify
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.stores import open_store
from tests.harness.data.builds import OutOfOrder, folder_bytes, numbered_files, stop_half_way, write_files
from tests.harness.data.published_files import zipped
from tests.hostile.generators.http_servers import FaultyServer

LETTERS = "a\nßé日本😀"
SAMPLE_BYTES = 50  # in place of 64 KiB


def text(characters: int, seed: int) -> bytes:
    return "".join(random.Random(seed).choices(LETTERS, k=characters)).encode()


def members(folder: Path, split: str) -> dict[str, bytes]:
    """Read the members of a split by their names, with the standard library alone."""
    found = {}
    for shard in DataManifest.load(open_store(folder)).splits[split].shards:
        with tarfile.open(folder / shard.name, "r:") as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    return found


def rejoined(folder: Path, split: str = "train") -> dict[str, bytes]:
    """Join texts of several samples by ``pieces.jsonl`` and their sources."""
    by_key = {name.partition(".")[0]: content for name, content in members(folder, split).items()}
    pieces: dict[str, dict[int, bytes]] = defaultdict(dict)
    counts = {}
    for line in (folder / "pieces.jsonl").read_text().splitlines():
        piece = json.loads(line)
        if not piece["key"].startswith(split):
            continue
        pieces[piece["source"]][piece["piece"]] = by_key[piece["key"]]
        counts[piece["source"]] = piece["of"]
    assert {source: list(each) for source, each in pieces.items()} == {
        source: list(range(1, count + 1)) for source, count in counts.items()
    }
    return {source: b"".join(each.values()) for source, each in pieces.items()}


@pytest.fixture
def small(monkeypatch):
    """Samples of a few characters."""
    monkeypatch.setattr(shard_writer, "SAMPLE_BYTES", SAMPLE_BYTES)


@pytest.fixture
def texts(tmp_path) -> Path:
    """Create texts of many samples, some longer than a shard; one is short, and one is not UTF-8."""
    files = {f"{number}.txt": text(characters, number) for number, characters in enumerate((90, 300, 40, 700, 150))}
    files["sub/fünf.txt"] = text(120, 5)
    return write_files(tmp_path / "source", {**files, "short.txt": b"short", "latin.txt": b"\xfcber " * 40})


@given(st.text(alphabet=LETTERS, min_size=1, max_size=12).map(str.encode), st.integers(0, 100))
def test_text_is_cut_between_characters(content, place):
    place %= len(content)
    cut = modality_named("text").cut(content, place)
    content[:cut].decode(), content[cut:].decode()
    assert place - 3 <= cut <= place
    if content[place] & 0xC0 != 0x80:
        assert cut == place


@given(st.binary(min_size=9, max_size=9))
def test_a_cut_follows_from_the_bytes_around_it(content):
    """Otherwise the writer of the previous piece would choose another place. Binary data are cut close to it."""
    cut = modality_named("text").cut(content, 5)
    assert 2 <= cut <= 5 and modality_named("text").cut(content[2:6], 3) == cut - 2


@pytest.mark.parametrize("shard_bytes", [2**20, 500, 120])
def test_pieces_are_texts_and_rejoin(texts, small, tmp_path, shard_bytes):
    manifest = build([texts], tmp_path / "data", validation_fraction=0, shard_bytes=shard_bytes)
    found = members(tmp_path / "data", "train")
    for name, content in found.items():
        if name.endswith(".txt"):
            content.decode()
        else:
            assert name.endswith(".bin") and b"\xfcber" in content + b"\xfcber"
            with pytest.raises(UnicodeDecodeError):
                content.decode()
    sources = {path.relative_to(texts).as_posix(): path.read_bytes() for path in texts.rglob("*.txt")}
    assert rejoined(tmp_path / "data") == {
        source: content for source, content in sources.items() if len(content) > SAMPLE_BYTES
    }
    assert b"".join(found.values()) == b"".join(
        sources[source] for source in dict.fromkeys(documents_in_order(tmp_path / "data", sources, found))
    )
    train = manifest.splits["train"]
    assert train.content_bytes == sum(map(len, sources.values())) and train.documents == len(sources)
    assert all(shard.content_bytes <= shard_bytes + 3 for shard in train.shards)  # no character is cut for the rest
    assert verify(tmp_path / "data") == []


def documents_in_order(folder: Path, sources: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """List the source of each sample."""
    lines = (folder / "pieces.jsonl").read_text().splitlines()
    named = {piece["key"]: piece["source"] for piece in map(json.loads, lines)}
    whole = {content: source for source, content in sources.items()}
    return [named.get(name.partition(".")[0]) or whole[content] for name, content in found.items()]


def test_pieces_are_the_same_whoever_writes_them(texts, small, tmp_path):
    """Ranks read the bytes around a cut for themselves; a build that goes on does not see the shard before."""
    arguments = {"validation_fraction": 0.3, "shard_bytes": 120}
    build([texts], tmp_path / "data", **arguments)
    build([texts], tmp_path / "by three", crew=OutOfOrder(), **arguments)
    assert folder_bytes(tmp_path / "by three") == folder_bytes(tmp_path / "data")
    stop_half_way(build, [texts], tmp_path / "again", **arguments)
    kept = {path.name: path.stat().st_ino for path in (tmp_path / ".again.unfinished" / "data").glob("*.npy")}
    build([texts], tmp_path / "again", crew=OutOfOrder(), **arguments)
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "data")
    assert len(kept) > 3 and kept.items() <= {p.name: p.stat().st_ino for p in (tmp_path / "again").iterdir()}.items()
    before = folder_bytes(tmp_path / "data")
    build([texts], tmp_path / "data", **arguments)  # compares with what is there
    assert folder_bytes(tmp_path / "data") == before


def test_pieces_of_a_dataset_are_cut_alike(small, tmp_path):
    """A compressed file in an archive would be read again from its beginning for every step back."""
    corpus = text(2000, 7)
    write_files(tmp_path, {"enwik8": corpus})
    zipped(tmp_path / "enwik8.zip", {"enwik8": corpus})
    for name in ("enwik8", "enwik8.zip"):
        build_dataset("enwik8", tmp_path / name, tmp_path / f"{name}.data", unpublished=True, shard_bytes=400)
    assert folder_bytes(tmp_path / "enwik8.data") == folder_bytes(tmp_path / "enwik8.zip.data")
    splits = {f"enwik8/{split}": rejoined(tmp_path / "enwik8.data", split) for split in ("train", "validation", "test")}
    assert b"".join(found[source] for source, found in splits.items()) == corpus


def test_no_step_is_read_back_by_one_process(texts, small, tmp_path, monkeypatch):
    """Decompression would start again."""
    places: list[tuple[object, int, int]] = []
    module = __import__("longstride.data_pipelines.documents", fromlist=["FileDocument"])
    read = module.FileDocument.read

    def reading(document, open_input, modality, properties, offset, size):
        places.append((document, offset, offset + size))
        return read(document, open_input, modality, properties, offset, size)

    monkeypatch.setattr(module.FileDocument, "read", reading)
    build([texts], tmp_path / "data", validation_fraction=0, shard_bytes=120, crew=Crew())
    assert len(places) > 50
    for (document, _, end), (following, offset, _) in pairwise(places):
        assert following != document or offset == end


def test_folders_of_whole_texts_have_no_list_of_pieces(tmp_path):
    write_files(tmp_path / "source", numbered_files(8))
    manifest = build([tmp_path / "source"], tmp_path / "data")
    assert manifest.pieces is None and not (tmp_path / "data" / "pieces.jsonl").exists()
    assert "pieces" not in json.loads((tmp_path / "data" / "manifest.json").read_text())["made"]


def test_a_damaged_list_of_pieces_is_found(texts, small, tmp_path, monkeypatch):
    build([texts], tmp_path / "data")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with FaultyServer(tmp_path / "data") as url:
        assert verify(url) == []
    place = tmp_path / "data" / "pieces.jsonl"
    place.write_bytes(place.read_bytes().replace(b'"piece": 1', b'"piece": 2', 1))
    (finding,) = verify(tmp_path / "data")
    assert finding.startswith(f"{place}: the list of pieces is damaged")
    with pytest.raises(DataError, match=r"pieces\.jsonl.*it is not overwritten"):
        build([texts], tmp_path / "data")
    place.unlink()
    assert "pieces.jsonl" in verify(tmp_path / "data")[0]


def test_samples_that_are_no_text_are_named_as_they_lie(texts, small, tmp_path):
    build([texts], tmp_path / "data", validation_fraction=0)
    names = members(tmp_path / "data", "train")
    shown = {sample.place.split()[0]: sample for sample in sample_documents(tmp_path / "data", "train", 1000)}
    assert set(shown) == set(names) and any(name.endswith(".bin") for name in names)
    for name, sample in shown.items():
        assert sample.content.tobytes() == names[name] and name.startswith(f"{sample.key}.")
    (name,) = [name for name in names if name.endswith(".bin")][:1]
    shard = tmp_path / "data" / "train-00000.tar"
    shard.write_bytes(shard.read_bytes().replace(names[name], names[name][::-1], 1))
    findings = verify(tmp_path / "data")
    assert any(f"sample {name} is damaged (CRC-32)" in finding for finding in findings)
    with pytest.raises(DataError, match=rf"sample {name} is damaged"):
        list(sample_documents(DataFolder(tmp_path / "data"), "train", 1000))


def test_an_unfinished_build_cut_within_characters_is_not_gone_on_with(texts, small, tmp_path, monkeypatch):
    """Shards of a build that an older version began would lose or repeat a byte beside ours."""
    text_kind = type(modality_named("text"))
    with monkeypatch.context() as older:
        older.setattr(text_kind, "cut_reach", 0)
        older.setattr(text_kind, "cut", lambda self, content, place: place)
        stop_half_way(build, [texts], tmp_path / "data", shard_bytes=120)
    with pytest.raises(DataError, match="holds an unfinished build of other settings; remove that folder"):
        build([texts], tmp_path / "data", shard_bytes=120)
