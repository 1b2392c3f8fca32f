"""An index of others' tars: what it reads, what it refuses, and that it trains and is checked as a built folder."""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import tarfile
from pathlib import Path

import fsspec
import pytest
import torch

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder, sample_documents
from longstride.data_pipelines.shards.indexing import PIECE_BYTES, index_tars
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.shards.verify import check_split, verify
from longstride.data_pipelines.stores import open_store
from tests.harness.data.streams import open_stream
from tests.harness.data.tars import add, gnu_tar, peak_of_indexing, write_shards, write_tar
from tests.hostile.generators.http_servers import FaultyServer

ALL = {"validation_fraction": 0}
DOCUMENTS = Cut(packing=False)


def tree(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def indexed(places, output, **options) -> list[bytes]:
    """List the documents of the train split in canonical order, and verify the folder."""
    if not isinstance(places, list):
        places = [places]
    index_tars([str(place) for place in places], output, **{**ALL, **options})
    assert verify(output) == []
    return documents(output)


def documents(folder, split="train", **options) -> list[bytes]:
    """List the documents of a split, with the contexts of evaluation."""
    found = evaluation_contexts(DataFolder(folder, **options), split, context=10**6, batch_size=1, cut=DOCUMENTS)
    return [batch.tokens[0, : int(batch.lengths[0])].numpy().tobytes() for batch in found]


def refusal(places, output, **options) -> str:
    """Return the one line of the error, and assert that nothing is written."""
    with pytest.raises(DataError) as caught:
        index_tars([str(place) for place in places], output, **{**ALL, **options})
    assert "\n" not in str(caught.value)
    assert not (output / "manifest.json").exists() or options.get("keep")
    return str(caught.value)


@pytest.fixture
def tars(tmp_path) -> tuple[Path, list[list[bytes]]]:
    """Write five tars of 1 to 12 samples."""
    return tmp_path / "tars", write_shards(tmp_path / "tars")


# What is read.


def test_index_leaves_the_tars_untouched_and_holds_their_documents(tars, tmp_path):
    folder, texts = tars
    before = tree(folder)
    assert indexed(folder, tmp_path / "index") == list(itertools.chain(*texts))
    assert tree(folder) == before
    names = set(tree(tmp_path / "index"))
    assert names == {"manifest.json", *(f"train-00{number}.index.npy" for number in range(5))}
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["tars"]) == (3, "../tars")
    assert manifest["splits"]["train"]["shards"][1]["sha256"] == before["train-001.tar"]


def test_index_beside_the_tars_is_a_data_folder_that_moves_as_a_whole(tars, tmp_path):
    folder, texts = tars
    assert indexed(folder, folder) == list(itertools.chain(*texts))
    folder.rename(tmp_path / "moved")
    assert verify(tmp_path / "moved") == []
    assert documents(tmp_path / "moved") == list(itertools.chain(*texts))


@pytest.mark.parametrize("form", ["ustar", "gnu", "pax", "oldgnu", "posix"])
def test_tars_of_gnu_tar_are_read(tmp_path, form):
    texts = {f"part/{'long' * 20}/{number:03}.txt": b"text %d" % number * number for number in range(1, 20)}
    files = {name: payload for text in texts for name, payload in ((text, texts[text]), (text[:-3] + "json", b"{}"))}
    gnu_tar(tmp_path / "tars" / "train.tar", files, form, tmp_path / "files")
    assert indexed(tmp_path / "tars", tmp_path / "index") == list(texts.values())


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_tarfile_are_read_whatever_their_headers(tmp_path, form):
    """Names are long or not ASCII; pax tars have a global header and one per member."""
    long = "l" * (90 if form == tarfile.USTAR_FORMAT else 300)
    path = tmp_path / "tars" / "train.tar"
    path.parent.mkdir()
    headers = {"comment": "made by hand"} if form == tarfile.PAX_FORMAT else {}
    with tarfile.open(path, "w", format=form, pax_headers=headers) as archive:
        add(archive, "folder", b"", type=tarfile.DIRTYPE)
        add(archive, f"folder/{long}.txt", b"long")
        add(archive, "folder/ümläut.txt", b"foreign", mtime=1.5)
        add(archive, "folder/link.json", b"", type=tarfile.SYMTYPE, linkname="x")
        add(archive, "folder/plain.txt", b"plain")
    assert indexed(tmp_path / "tars", tmp_path / "index") == [b"long", b"foreign", b"plain"]
    keys = [sample.key for sample in sample_documents(tmp_path / "index", "train", 10)]
    assert keys == [f"folder/{long}.txt", "folder/ümläut.txt", "folder/plain.txt"]


def test_members_lie_in_any_order_and_missing_ones_are_counted(tmp_path):
    members = [("b.json", b"{}"), ("a.txt", b"A"), ("b.txt", b"B"), ("a.json", b"{}"), ("c.json", b"{}")]
    members += [("d.txt", b""), ("README", b"words"), (".hidden.txt", b"no"), ("__meta__", b"no"), ("e.txt", b"E")]
    write_tar(tmp_path / "tars" / "train.tar", members)
    write_tar(tmp_path / "tars" / "train2.tar", [("x.json", b"{}")])
    assert indexed(tmp_path / "tars", tmp_path / "index") == [b"A", b"B", b"E"]
    left_out = DataFolder(tmp_path / "index").manifest.made["left_out"]
    assert left_out == {
        "samples_without_txt": 2,
        "empty_samples": 1,
        "tars_without_txt": 1,
        "tars_of_no_split": 0,
        "members_of_other_extensions": 4,
        "members_without_extension": 1,
        "hidden_members": 1,
        "meta_members": 1,
    }
    line = refusal([tmp_path / "tars"], tmp_path / "other", complete=True)
    assert "tars/train.tar: sample c has no member .txt; add it, or leave out --complete" in line


def test_long_members_become_pieces_of_one_document(tmp_path):
    content = random.Random(0).randbytes(3 * PIECE_BYTES + 777)
    write_tar(tmp_path / "tars" / "train.tar", [("a.txt", content), ("a.bin", b"x" * 3000), ("b.txt", content[::-1])])
    assert indexed(tmp_path / "tars", tmp_path / "index") == [content, content[::-1]]
    (shard,) = DataFolder(tmp_path / "index").manifest.splits["train"].shards
    assert (shard.samples, shard.documents) == (8, 2)


def test_no_more_than_a_block_of_a_long_member_is_held(tmp_path):
    assert peak_of_indexing(tmp_path / "train.tar", "w", tmp_path / "index", **ALL) < 2**23


# The same order as a built folder.


@pytest.mark.parametrize("cut", [Cut(), Cut(separator=3), DOCUMENTS, Cut(packing=False, hop=20)], ids=str)
def test_batches_are_those_of_the_folder_that_we_built(corpus, tmp_path, cut):
    index_tars([str(corpus.folder)], tmp_path / "index")
    options = {"context": 64, "global_batch": 6, "seed": 4, "cut": cut, "shuffle_bytes": 500}
    streams = [open_stream(folder, **options) for folder in (corpus.folder, tmp_path / "index")]
    assert streams[0].lanes == streams[1].lanes
    for ours, others in itertools.islice(zip(*streams, strict=True), streams[0].lanes.batches_before(2)):
        assert torch.equal(ours.tokens, others.tokens) and torch.equal(ours.sample_ids, others.sample_ids)
    for split in ("train", "validation"):
        assert list(split_bytes(tmp_path / "index", split)) == list(split_bytes(corpus.folder, split))


def test_gaps_between_long_members_are_read_over(tmp_path, monkeypatch):
    """Contents are read straight to their places, although other members are between them."""
    generator = random.Random(1)
    texts = [generator.randbytes(generator.randint(20_000, 40_000)) for _ in range(12)]
    members = [
        each for n, text in enumerate(texts) for each in ((f"{n}.jpg", generator.randbytes(9_999)), (f"{n}.txt", text))
    ]
    write_tar(tmp_path / "tars" / "train.tar", members)
    index_tars([str(tmp_path / "tars")], tmp_path / "index", **ALL)
    assert b"".join(split_bytes(tmp_path / "index", "train")) == b"".join(texts)
    stream = open_stream(tmp_path / "index", context=50_000, global_batch=1, shuffle_bytes=0)
    assert (
        b"".join(batch.tokens.numpy().tobytes() for batch in itertools.islice(stream, 5)) == b"".join(texts)[:250_000]
    )


# Damage.


@pytest.mark.parametrize("number", range(12))
def test_damage_is_found_by_verify_and_content_before_it_is_read(tars, tmp_path, number):
    folder, texts = tars
    index_tars([str(folder)], tmp_path / "index", **ALL)
    generator = random.Random(number)
    path = folder / f"train-00{generator.randrange(5)}.tar"
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)
    assert any(f"{path}: its SHA-256 is not the manifest's" in line for line in verify(tmp_path / "index"))
    try:
        found = documents(tmp_path / "index")
    except DataError as error:
        assert f"{path}: " in str(error)
    else:  # it lies in a foreign member
        assert found == list(itertools.chain(*texts))


def test_damage_names_the_member_and_another_may_stand_in(tars, tmp_path):
    folder, texts = tars
    index_tars([str(folder)], tmp_path / "index", **ALL)
    path = folder / "train-003.tar"
    content = path.read_bytes()
    path.write_bytes(content.replace(texts[3][4], texts[3][4][::-1]))
    check_split(tmp_path / "index", "train")
    assert (
        f"{path}: member 3/0004.txt is damaged, or another than was indexed (CRC-32)" in verify(tmp_path / "index")[1]
    )
    with pytest.raises(DataError, match=r"train-003\.tar: member 3/0004\.txt is damaged, or another than was indexed"):
        documents(tmp_path / "index")
    options = {"context": 256, "global_batch": 5, "cut": DOCUMENTS, "on_damage": "substitute"}
    taken = list(itertools.islice(open_stream(tmp_path / "index", **options), 5))
    assert len([each for batch in taken for each in batch.substitutions]) == 1


@pytest.mark.parametrize("harm", ["missing", "shorter", "index", "tars"])
def test_what_is_gone_is_named(tars, tmp_path, harm):
    folder, _ = tars
    index_tars([str(folder)], tmp_path / "index", **ALL)
    victim = folder / "train-001.tar"
    if harm == "missing":
        victim.unlink()
    elif harm == "shorter":
        victim.write_bytes(victim.read_bytes()[:-512])
    elif harm == "index":
        victim = tmp_path / "index" / "train-001.index.npy"
        victim.write_bytes(b"x" * victim.stat().st_size)
    else:
        folder.rename(tmp_path / "elsewhere")
        victim = Path(os.path.join(tmp_path, "index/../tars/train-001.tar"))  # noqa: PTH118
    with pytest.raises(DataError):
        check_split(tmp_path / "index", "train")
        documents(tmp_path / "index")
    assert any(victim.name in line for line in verify(tmp_path / "index"))


def test_tars_that_moved_are_found_where_the_manifest_is_told(tars, tmp_path):
    folder, texts = tars
    index_tars([str(folder)], tmp_path / "index", **ALL)
    state = open_stream(tmp_path / "index", context=32, global_batch=4).state
    folder.rename(tmp_path / "elsewhere")
    path = tmp_path / "index" / "manifest.json"
    path.write_text(path.read_text().replace('"../tars"', json.dumps(str(tmp_path / "elsewhere"))))
    assert documents(tmp_path / "index") == list(itertools.chain(*texts))
    assert open_stream(tmp_path / "index", context=32, global_batch=4, state=state).state == state
    for tars_key in ('""', "3", "null"):
        path.write_text(path.read_text().replace(json.dumps(str(tmp_path / "elsewhere")), tars_key))
        with pytest.raises(DataError, match=r"tars=.*: must be the location of the tars|edited"):
            DataFolder(tmp_path / "index")
        path.write_text(path.read_text().replace(f'"tars": {tars_key}', f'"tars": "{tmp_path / "elsewhere"}"'))


def test_a_name_that_leaves_the_folder_is_refused(tars, tmp_path):
    index_tars([str(tars[0])], tmp_path / "index", **ALL)
    manifest = DataManifest.load(open_store(tmp_path / "index"))
    shards = list(manifest.splits["train"].shards)
    shards[0] = dataclasses.replace(shards[0], name="../tars/train-000.tar")
    split = dataclasses.replace(manifest.splits["train"], shards=tuple(shards))
    text = dataclasses.replace(manifest, splits={"train": split}).to_json()
    with pytest.raises(DataError, match="is not a shard name"):
        DataManifest.parse("manifest.json", text.encode())


# Elsewhere.


def test_tars_behind_a_failing_server_are_indexed_and_read(tars, tmp_path, quick_servers):
    folder, texts = tars
    settings = RemoteSettings(cache=str(tmp_path / "cache"), cache_bytes=10**6, timeout_seconds=0.3)
    server = FaultyServer(folder.parent, share=0.2, seed=1, stall_seconds=1)
    with server as url:
        place = f"{url}/tars/train-{{000..004}}.tar"
        index_tars([place], tmp_path / "index", remote=settings, **ALL)
        assert DataFolder(tmp_path / "index", settings).manifest.tars == f"{url}/tars"
        assert documents(tmp_path / "index", remote=settings) == list(itertools.chain(*texts))
        # A manifest on the server beside the tars, which it names by a relative path.
        shutil.copytree(tmp_path / "index", tmp_path / "served")
        path = tmp_path / "served" / "manifest.json"
        path.write_text(path.read_text().replace(f'"{url}/tars"', '"../tars"'))
        assert documents(f"{url}/served", remote=settings) == list(itertools.chain(*texts))
        assert verify(f"{url}/served") == []
    index_tars([str(folder)], tmp_path / "local", **ALL)
    assert DataFolder(tmp_path / "local").manifest.fingerprint == DataFolder(tmp_path / "served").manifest.fingerprint


def test_each_remote_tar_is_read_once(tars, tmp_path, quick_servers):
    folder, _ = tars
    server = FaultyServer(folder)
    with server as url:
        index_tars([f"{url}/train-00{{0,1}}.tar"], tmp_path / "index", **ALL)
    for name in ("train-000.tar", "train-001.tar"):
        assert sum(request.sent for request in server.of(name)) == (folder / name).stat().st_size


def test_tars_in_nested_folders_of_any_protocol_are_cached(tmp_path):
    """Their names are paths, which cannot be names of files in the cache."""
    texts = {
        f"base/{split}/{number} of 3.tar": b"%d %s" % (number, split.encode())
        for split in ("train", "validation")
        for number in range(3)
    }
    memory = fsspec.filesystem("memory")
    for name, text in texts.items():
        write_tar(tmp_path / "one.tar", [("a.txt", text)])
        memory.pipe(f"/indexing/{name}", (tmp_path / "one.tar").read_bytes())
    settings = RemoteSettings(cache=str(tmp_path / "cache"))
    index_tars(["memory://indexing/base"], tmp_path / "index", remote=settings)
    found = [documents(tmp_path / "index", split, remote=settings) for split in ("train", "validation")]
    assert found == [
        [text for name, text in texts.items() if f"/{split}/" in name] for split in ("train", "validation")
    ]
    index_tars(["memory://indexing/base/train/*.tar"], tmp_path / "part", remote=settings, **ALL)
    assert len(documents(tmp_path / "part", remote=settings)) == 3


@pytest.mark.parametrize(
    ("places", "rule"),
    [
        (["http://me:secret@host/shards/a.tar"], "has a user or a query"),
        (["http://host/shards/a.tar?key=secret"], "has a user or a query"),
        (["http://host/a.tar", "s3://b/a.tar"], "are partly local and partly remote"),
        (["pipe:curl -s http://host/a.tar"], "pipes are not run, because they run a command; name the URL"),
        (["ftpx://host/a.tar"], "not a protocol that fsspec knows"),
        (["memory://nowhere"], "lists no file \\*.tar; name the files themselves"),
    ],
)
def test_urls_that_cannot_be_are_refused_without_secrets(tmp_path, places, rule):
    with pytest.raises(DataError, match=rule) as caught:
        index_tars(places, tmp_path / "index")
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "index").exists()


# What is refused.


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"extension": "md"}, "has a member .md with content; members are .jpg, .json, .txt; name the one"),
        ({"extension": "a/b"}, "extension='a/b': must be what follows a member's first dot, such as txt"),
        ({"splits": ["train"]}, "split=train: must be NAME=PATTERN"),
        ({"splits": ["train=other*"]}, "split=train=other*: matches none of the 5 tars, such as train-000.tar"),
        ({"validation_fraction": 1}, "validation_fraction=1: must be at least 0 and less than 1"),
        ({"modality": "smell"}, "modality='smell': not a registered modality"),
    ],
)
def test_options_that_cannot_be_are_refused(tars, tmp_path, options, rule):
    assert rule in refusal([tars[0]], tmp_path / "index", **options)
    assert not (tmp_path / "index").exists()


def test_places_without_tars_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.zip").write_bytes(b"x")
    rules = {"empty": "contains no tar", "nowhere": "no such file or folder", "file.zip": "name of a tar"}
    for place, rule in rules.items():
        assert rule in refusal([tmp_path / place], tmp_path / "index")


def test_an_output_that_is_taken_is_refused_and_stays(tars, tmp_path):
    folder, _ = tars
    index_tars([str(folder)], tmp_path / "index", **ALL)
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"manifest.json: already exists and is not overwritten"):
        index_tars([str(folder)], tmp_path / "index", **ALL)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "train-004.index.npy").write_bytes(b"mine")
    assert "train-004.index.npy: already exists" in refusal([folder], tmp_path / "taken")
    assert "already exists and is not a folder" in refusal([folder], folder / "train-000.tar")
    assert {name: digest for name, digest in tree(tmp_path).items() if "taken" not in name} == before


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        (lambda content: content[:-1024], "ends after member 3/0011.txt, without the zeros that end a tar"),
        (lambda content: content[: len(content) // 2 + 100], "cut short|invalid tar header"),
        (lambda content: content + content, "continues after member 3/0011.txt without a member header"),
        (
            lambda content: content[:124] + b"xxxx" + content[128:],
            "invalid tar header after its beginning, at b",
        ),
        (lambda content: b"\x1f\x8b\x08" + content[3:], "is compressed by gzip, and cannot be read from the middle"),
        (lambda content: b"", "ends after its beginning"),
    ],
)
def test_tars_that_are_none_are_refused(tars, tmp_path, harm, rule):
    path = tars[0] / "train-003.tar"
    content = path.read_bytes()
    stripped = content[: len(content.rstrip(b"\0")) // 512 * 512 + 512] + bytes(1024)
    path.write_bytes(harm(stripped))
    with pytest.raises(DataError, match=rf"{path}: .*({rule})"):
        index_tars([str(tars[0])], tmp_path / "index", **ALL)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "twice", "sparse", "fifo"])
def test_members_that_have_no_bytes_of_their_own_are_refused(tmp_path, kind):
    path = tmp_path / "tars" / "train.tar"
    path.parent.mkdir()
    if kind == "sparse":
        (tmp_path / "a.txt").write_bytes(b"x")
        os.truncate(tmp_path / "a.txt", 2**20)
        os.system(f"tar --sparse -C {tmp_path} -cf {path} a.txt")
    else:
        with tarfile.open(path, "w") as archive:
            add(archive, "b.txt", b"text")
            fields = {
                "symlink": {"type": tarfile.SYMTYPE, "linkname": "b.txt"},
                "hard link": {"type": tarfile.LNKTYPE, "linkname": "b.txt"},
                "fifo": {"type": tarfile.FIFOTYPE},
            }.get(kind, {})
            add(archive, "b.txt" if kind == "twice" else "a.txt", b"" if fields else b"other", **fields)
    rule = {"twice": "occurs twice in this tar", "sparse": "is a sparse file"}.get(kind, "is a link or a special file")
    name = "b.txt" if kind == "twice" else "a.txt"
    assert f"{path}: member {name} {rule}" in refusal([tmp_path / "tars"], tmp_path / "index")


def test_index_that_cannot_be_laid_down_leaves_the_tars_alone(tars, tmp_path, monkeypatch):
    folder, _ = tars
    before, rename = tree(folder), Path.rename

    def full(path: Path, target: Path) -> Path:
        if target == folder / "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DataError, match="No space left on device"):
        index_tars([str(folder)], folder, **ALL)
    assert tree(folder) == before


def test_index_that_was_killed_is_gone_on_from_and_nothing_else_is_replaced(tars, tmp_path):
    """Files of the killed run stay if they are identical."""
    folder, _ = tars
    index_tars([str(folder)], tmp_path / "wanted", **ALL)
    laid = folder / "train-000.index.npy"
    laid.write_bytes((tmp_path / "wanted" / laid.name).read_bytes())
    (folder / ".index.partial").mkdir()
    with pytest.raises(DataError, match="no sample of split 'train'"):
        index_tars([str(folder)], folder, **ALL | {"extension": "lacks"})
    index_tars([str(folder)], folder, **ALL)
    assert verify(folder) == [] and not (folder / ".index.partial").exists()
    (folder / "manifest.json").unlink()
    laid.write_bytes(b"mine")
    (folder / ".index.partial").mkdir()
    with pytest.raises(DataError, match=r"train-000\.index\.npy: already exists and is not overwritten"):
        index_tars([str(folder)], folder, **ALL)
    assert laid.read_bytes() == b"mine" and not (folder / "manifest.json").exists()
