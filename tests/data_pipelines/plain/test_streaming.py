"""Training and evaluation from plain shards: all of an epoch arrives, nothing waits, nothing is lost unsaid."""

import io
import itertools
import pickle
import random
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import webdataset as wds

from longstride.data_pipelines import modalities
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.data_pipelines.order.lanes import shard_order
from longstride.data_pipelines.order.stream import ByteStream
from longstride.data_pipelines.plain.plain_evaluation import plain_contexts
from longstride.data_pipelines.plain.plain_shards import Turn
from longstride.data_pipelines.plain.streaming import PlainStream

DOCUMENTS = Cut(packing=False)
UNEVEN = (1, 7, 2, 12, 3)  # samples of each shard


def add(archive: tarfile.TarFile, name: str, payload: bytes) -> None:
    """One member."""
    member = tarfile.TarInfo(name)
    member.size = len(payload)
    archive.addfile(member, io.BytesIO(payload))


def write_shards(folder: Path, samples=UNEVEN, prefix="train-", sizes=(1, 200), seed=0) -> list[list[bytes]]:
    """Shards of mixed members, with tarfile and with WebDataset in turn; the texts of each."""
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for shard, count in enumerate(samples):
        path = folder / f"{prefix}{shard:03}.tar"
        # A number heads each text, so that none occurs twice.
        texts.append(
            [b"%03d%04d" % (shard, each) + generator.randbytes(generator.randint(*sizes)) for each in range(count)]
        )
        picture = generator.randbytes(900)
        if shard % 2:
            with wds.TarWriter(str(path)) as writer:
                for number, text in enumerate(texts[-1]):
                    writer.write({"__key__": f"{shard}/{number:04}", "txt": text, "json": b"{}", "jpg": picture})
        else:
            with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
                for number, text in enumerate(texts[-1]):
                    for extension, payload in (("jpg", picture), ("json", b"{}"), ("TXT", text)):
                        add(archive, f"./{shard}/{number:04}.{extension}", payload)
    return texts


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> tuple[Path, list[list[bytes]]]:
    """Five shards of 1 to 12 samples, and their texts."""
    folder = tmp_path_factory.mktemp("uneven")
    return folder, write_shards(folder)


def rows(stream, steps: int) -> list[tuple[int, bytes]]:
    """(sample id, bytes) of each row of the first steps."""
    found = []
    for batch in itertools.islice(stream, steps):
        for row, length, name in zip(
            batch.tokens.numpy(), batch.lengths.tolist(), batch.sample_ids.tolist(), strict=True
        ):
            assert not row[length:].any()
            found.append((name, row[:length].tobytes()))
    return found


def everyones_rows(folder, steps, world_size=1, **options):
    """The rows of all ranks."""
    ranks = range(world_size)
    streams = [PlainStream(folder, rank=rank, world_size=world_size, **options) for rank in ranks]
    return [each for stream in streams for each in rows(stream, steps)]


def turn_of(name: int) -> int:
    """The turn that a sample id names."""
    return name >> 40


# What arrives.


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2)])
def test_stream_even_shards_give_each_sample_of_an_epoch_once(tmp_path, world_size, workers):
    texts = write_shards(tmp_path, samples=(4,) * 12)
    options = {"context": 256, "global_batch": 12, "cut": DOCUMENTS, "workers": workers, "shuffle_bytes": 0}
    found = everyones_rows(tmp_path, 4, world_size, **options)
    assert Counter(text for _, text in found) == Counter(itertools.chain(*texts))


@pytest.mark.parametrize("shuffle_bytes", [0, 10_000])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (4, 0), (2, 1), (8, 0)])
def test_stream_gives_every_sample_of_uneven_shards(uneven, world_size, workers, shuffle_bytes):
    folder, texts = uneven
    options = {"context": 256, "global_batch": 8, "cut": DOCUMENTS, "workers": workers, "shuffle_bytes": shuffle_bytes}
    found = everyones_rows(folder, 40, world_size, **options)
    assert len(found) == 320
    counts = Counter(text for _, text in found)
    assert set(counts) == set(itertools.chain(*texts))
    # 25 samples: 12.8 epochs, of which each reader has read a few shards more or less.
    assert max(counts.values()) <= 13 + 2 * world_size


def test_stream_turns_follow_the_shard_order(uneven):
    folder, texts = uneven
    options = {"context": 256, "global_batch": 6, "cut": DOCUMENTS, "shuffle_bytes": 0, "seed": 9}
    for name, text in everyones_rows(folder, 20, 3, **options):
        epoch, index = divmod(turn_of(name), len(texts))
        shard = texts[shard_order(len(texts), 9, epoch)[index]]
        assert name & 0xFFFFF == 0
        assert shard[name >> 20 & 0xFFFFF] == text


def test_stream_readers_take_turns(uneven):
    options = {"context": 256, "global_batch": 6, "cut": DOCUMENTS, "workers": 0}
    for rank in range(3):
        stream = PlainStream(uneven[0], rank=rank, world_size=3, **options)
        assert {turn_of(name) % 3 for name, _ in rows(stream, 20)} == {rank}


def test_stream_fewer_shards_than_readers(tmp_path):
    texts = write_shards(tmp_path, samples=(9,))
    options = {"context": 256, "global_batch": 12, "cut": DOCUMENTS, "shuffle_bytes": 0}
    counts = Counter(text for _, text in everyones_rows(tmp_path, 9, 12, **options))
    assert counts == dict.fromkeys(texts[0], 12)


def test_stream_is_the_same_again_and_another_with_another_seed(uneven):
    options = {"context": 64, "global_batch": 4, "shuffle_bytes": 500}
    stream = PlainStream(uneven[0], seed=1, **options)
    first = rows(stream, 30)
    assert first == rows(stream, 30) == rows(PlainStream(uneven[0], seed=1, **options), 30)
    assert first != rows(PlainStream(uneven[0], seed=2, **options), 30)
    assert len(dict(first)) == len(first)


def test_stream_shuffle_parts_neighbours_and_long_documents(tmp_path):
    write_shards(tmp_path, samples=(50, 50), sizes=(20, 20))
    options = {"context": 27, "global_batch": 4, "cut": DOCUMENTS}
    names = [name for name, _ in rows(PlainStream(tmp_path, **options), 10)]
    assert sum(b - a == 2**20 for a, b in itertools.pairwise(names)) < 5
    write_shards(tmp_path, samples=(1,), prefix="long-", sizes=(9000, 9000))
    starts = [name & 0xFFFFF for name, _ in rows(PlainStream(tmp_path, "long", context=30, global_batch=4), 10)]
    assert sum(b - a == 1 for a, b in itertools.pairwise(starts)) < 5


def test_stream_splits_lie_in_folders_or_behind_a_prefix(tmp_path):
    inside = write_shards(tmp_path / "train", samples=(3, 4), prefix="shard")
    write_shards(tmp_path, samples=(2,), prefix="train-", seed=1)
    other = write_shards(tmp_path, samples=(5,), prefix="validation_", seed=2)
    (tmp_path / "train" / "notes.txt").write_text("no shard")
    for split, texts in (("train", inside), ("validation", other)):
        found = rows(PlainStream(tmp_path, split, context=256, global_batch=1, cut=DOCUMENTS), 50)
        assert {text for _, text in found} == set(itertools.chain(*texts))


def test_stream_takes_the_named_member_else_the_first_of_the_modality(tmp_path):
    with wds.TarWriter(str(tmp_path / "train.tar")) as writer:
        writer.write({"__key__": "a", "md": b"m", "txt": b"t", "page.html": b"h"})
        writer.write({"__key__": "b", "md": b"M", "page.html": b"H"})
    for extension, expected in ((None, b"tM"), (".page.html", b"hH"), ("MD", b"mM")):
        stream = PlainStream(tmp_path, context=2, global_batch=1, extension=extension, shuffle_bytes=0)
        assert rows(stream, 1)[0][1] == expected


# Cutting.


@pytest.mark.parametrize("separator", [None, 10])
def test_stream_packs_documents_end_to_end(uneven, separator):
    folder, texts = uneven
    options = {"context": 50, "global_batch": 1, "shuffle_bytes": 0, "seed": 4, "cut": Cut(separator=separator)}
    found = b"".join(text for _, text in rows(PlainStream(folder, **options), 120))
    behind = b"" if separator is None else bytes([separator])
    orders = [shard_order(len(texts), 4, epoch) for epoch in range(4)]
    laid = b"".join(text + behind for order in orders for shard in order for text in texts[shard])
    assert len(found) == 6000 and laid.startswith(found)


@pytest.mark.parametrize("hop", [None, 1, 7, 30])
def test_stream_cuts_documents_as_an_indexed_folder_does(tmp_path, hop):
    write_shards(tmp_path, samples=(6,), sizes=(1, 120))
    cut = Cut(packing=False, hop=hop)
    stream = PlainStream(tmp_path, context=30, global_batch=1, cut=cut, shuffle_bytes=0)
    documents = list(stream.split.documents([Turn(0, stream.split.shards[0])]))
    cuts = list(stream.cutter.cut(documents))
    for document in documents:
        own = [each for each in cuts if each.sample_id >> 20 == document.sample]
        content, step = document.content.tobytes(), hop or 30
        starts = [0, *range(step, max(0, len(content) - 30 + step), step)]
        assert [each.tokens[: each.length].tobytes() for each in own] == [content[start:][:30] for start in starts]
        assert stream.cutter.count(len(content)) == len(own)


def test_stream_passes_over_empty_documents(tmp_path):
    with wds.TarWriter(str(tmp_path / "train.tar")) as writer:
        for key, text in (("a", b""), ("b", b"xy"), ("c", b""), ("d", b"z")):
            writer.write({"__key__": key, "txt": text})
    options = {"context": 8, "global_batch": 1, "shuffle_bytes": 0}
    assert rows(PlainStream(tmp_path, cut=Cut(separator=0), **options), 1)[0][1] == b"xy\0z\0xy\0"
    assert [text for _, text in rows(PlainStream(tmp_path, cut=DOCUMENTS, **options), 3)] == [b"xy", b"z", b"xy"]


class TileContent:
    def __init__(self, file):
        self.file = file

    def read(self, offset, size):
        self.file.seek(1 + offset)
        return self.file.read(size)


class Tile:
    """A kind of document that is all of one size, after a header of one byte that says which."""

    name, extension, suffixes, asks, packing, divisible = "tile", "tile", (".tl",), (), False, False

    def settle(self, path, file, asked):
        content = file.read()
        if not content:
            raise DataError(f"{path}: is empty")
        return {"size": content[0]}

    def document_bytes(self, properties):
        return properties["size"]

    def open(self, path, file, properties):
        return TileContent(file)


def write_tiles(folder: Path, payloads: list[bytes]) -> None:
    with wds.TarWriter(str(folder / "train.tar")) as writer:
        for number, payload in enumerate(payloads):
            writer.write({"__key__": f"t{number}", "tl": payload})


def test_stream_modality_settles_by_the_first_sample_and_holds_the_others_to_it(tmp_path, monkeypatch):
    monkeypatch.setitem(modalities.MODALITIES, "tile", Tile())
    options = {"global_batch": 1, "modality": "tile", "shuffle_bytes": 0}
    write_tiles(tmp_path, [b"\x03abc", b"\x03def"])
    assert [text for _, text in rows(PlainStream(tmp_path, context=3, **options), 2)] == [b"abc", b"def"]
    with pytest.raises(DataError, match=r"^context=4: must be 3, the bytes of every tile of this set$"):
        PlainStream(tmp_path, context=4, **options)
    write_tiles(tmp_path, [b"\x03abc", b"\x03defg"])
    with pytest.raises(DataError, match=r"train\.tar/t1\.tl: 4 bytes of content; must be 3"):
        rows(PlainStream(tmp_path, context=3, **options), 2)
    write_tiles(tmp_path, [b""])
    with pytest.raises(DataError) as caught:
        PlainStream(tmp_path, context=3, **options)
    assert str(caught.value) == f"{tmp_path}/train.tar/t0.tl: is empty"


# Resuming.


@pytest.mark.parametrize(("world_size", "other"), [(1, 1), (2, 3), (4, 1)])
def test_stream_resumes_near_the_place(tmp_path, world_size, other):
    texts = write_shards(tmp_path, samples=(12, 8, 10, 9, 11, 10) * 4, sizes=(100, 300))
    options = {"context": 32, "global_batch": 12, "seed": 3, "shuffle_bytes": 0}
    stream = PlainStream(tmp_path, world_size=world_size, **options)
    steps = round(2.5 * sum(map(len, itertools.chain(*texts))) / 32 / 12)  # of two and a half epochs
    *_, last = itertools.islice(stream, steps)
    assert (last.state.step, last.state.epoch) == (steps, 2)
    resumed = PlainStream(tmp_path, world_size=other, state=last.state, **options)
    after = next(iter(resumed))
    assert after.state == replace(last.state, step=steps + 1)
    assert abs(turn_of(int(after.sample_ids[0])) - 2.5 * len(texts)) <= 2 + world_size + other
    assert len(rows(resumed, 5)) == 5 * 12 // other


def test_stream_resume_moves_on_within_a_single_large_shard(tmp_path):
    write_shards(tmp_path, samples=(200,), sizes=(200, 200))
    options = {"context": 207, "global_batch": 2, "shuffle_bytes": 0}
    stream = PlainStream(tmp_path, **options)
    for step in (10, 50, 90):
        *_, last = itertools.islice(stream, step)
        name = int(next(iter(PlainStream(tmp_path, state=last.state, **options))).sample_ids[0])
        assert abs((name >> 20) - 2 * step) <= 8


@pytest.mark.parametrize("step", [1, 7, 10**3, 10**5])
def test_stream_resume_never_fails(uneven, step):
    options = {"context": 40, "global_batch": 6, "world_size": 3, "workers": 0}
    stream = PlainStream(uneven[0], **options)
    resumed = PlainStream(uneven[0], state=replace(stream.state, step=step), **options)
    assert len(rows(resumed, 3)) == 6


def test_stream_state_fits_the_same_shards_and_cutting_alone(tmp_path):
    write_shards(tmp_path / "one")
    write_shards(tmp_path / "two")
    write_shards(tmp_path / "three", seed=1, sizes=(400, 900))
    options = {"context": 40, "global_batch": 6, "seed": 1}
    state = PlainStream(tmp_path / "one", **options).state
    assert PlainStream(tmp_path / "two", state=state, shuffle_bytes=0, workers=2, **options).state == state
    assert PlainStream(tmp_path / "two", **{**options, "seed": 2}).fingerprint == state.fingerprint
    for folder, changed, wrong in (
        ("three", {}, "fingerprint"),
        ("one", {"context": 41}, "fingerprint"),
        ("one", {"cut": DOCUMENTS}, "fingerprint"),
        ("one", {"seed": 2}, "seed"),
        ("one", {"global_batch": 12}, "global_batch"),
    ):
        with pytest.raises(DataError, match=rf"^state\.{wrong}=.*resume with the run's own$"):
            PlainStream(tmp_path / folder, state=state, **{**options, **changed})


def test_stream_readers_can_be_sent_to_a_process(uneven):
    stream = PlainStream(uneven[0], context=40, global_batch=4, workers=2)
    readers = pickle.loads(pickle.dumps(list(stream._readers(0))))
    assert [reader.take(0, 0).tokens.shape for reader in readers] == [(2, 40), (2, 40)]
    assert stream.carried(0) is None


# What a person gets wrong.


def one_line(call) -> str:
    """The one line that a call ends in."""
    with pytest.raises(DataError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "object at 0x" not in text
    return text


def read_all(folder, **options):
    options = {"context": 16, "global_batch": 1, **options}
    return lambda: rows(PlainStream(folder, **options), 200)


def test_errors_of_places_say_what_was_looked_for(tmp_path):
    (tmp_path / "train-0.tgz").write_bytes(b"x")
    assert one_line(read_all(tmp_path)).startswith(
        f"{tmp_path}: no shards of split 'train': looked for train/*.tar and"
    )
    assert "no such folder" in one_line(read_all(tmp_path / "none"))
    assert "order=streaming reads folders on this machine" in one_line(read_all("s3://bucket/set"))
    assert "no such folder" in one_line(lambda: plain_contexts(tmp_path / "none", context=4, batch_size=1))


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"context": 0}, "context=0: must be at least 1"),
        ({"global_batch": 0}, "global_batch=0: must be at least 1"),
        ({"global_batch": 5, "world_size": 2}, "global_batch=5: must be a multiple of the world size 2; nearest 4, 6"),
        ({"rank": 1}, "rank=1: must be from 0 to 0"),
        ({"seed": -1}, "seed=-1"),
        ({"workers": -1}, "workers=-1"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"shuffle_bytes": -1}, "shuffle_bytes=-1"),
        ({"modality": "smell"}, "modality='smell': not a registered modality"),
        ({"extension": ""}, "extension='': must be"),
    ],
)
def test_errors_of_arguments_are_one_line(uneven, options, start):
    assert one_line(read_all(uneven[0], **options)).startswith(start)


@pytest.mark.parametrize(
    "cut", [Cut(hop=4), Cut(separator=256), Cut(False, 10), Cut(False, None, 17), Cut(False, None, 0)]
)
def test_errors_of_cutting_are_those_of_an_indexed_folder(corpus, uneven, cut):
    options = {"context": 16, "global_batch": 1, "cut": cut}
    indexed = one_line(lambda: ByteStream(corpus.folder, **options))
    assert one_line(lambda: PlainStream(uneven[0], **options)) == indexed
    if cut.hop is None:
        indexed = one_line(lambda: evaluation_contexts(corpus.folder, context=16, batch_size=1, cut=cut))
        assert one_line(lambda: plain_contexts(uneven[0], "train", context=16, batch_size=1, cut=cut)) == indexed


def break_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = [number for number in range(512, len(content), 512) if content[number + 257 : number + 262] == b"ustar"][3]
    content[place + 5] ^= 1
    path.write_bytes(content)


def cut_short(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (break_header, "goes on behind member"),
        (lambda path: cut_short(path, 3500), "cannot be read as a WebDataset shard (unexpected end of data)"),
        (lambda path: cut_short(path, 1536), "stops behind member"),
        (lambda path: cut_short(path, 0), "is empty"),
        (lambda path: path.write_bytes(b"no tar" * 200), "cannot be read as a WebDataset shard"),
        (lambda path: path.write_bytes(path.read_bytes() * 2), "goes on behind member"),
        (lambda path: (path.unlink(), path.mkdir()), "no shards of split"),
    ],
)
def test_errors_of_shards_name_the_shard(tmp_path, damage, what, workers):
    write_shards(tmp_path, samples=(5,))
    damage(tmp_path / "train-000.tar")
    text = one_line(read_all(tmp_path, workers=workers))
    assert what in text and (str(tmp_path / "train-000.tar") in text or what == "no shards of split")


def test_errors_of_a_later_shard_reach_through_a_worker(tmp_path):
    write_shards(tmp_path, samples=(5, 5, 5))
    break_header(tmp_path / "train-002.tar")
    for workers in (0, 2):
        assert str(tmp_path / "train-002.tar") in one_line(read_all(tmp_path, global_batch=2, workers=workers))
    (tmp_path / "train-002.tar").unlink()
    stream = PlainStream(tmp_path, context=16, global_batch=1)
    (tmp_path / "train-001.tar").unlink()
    assert "train-001.tar: cannot be read" in one_line(lambda: rows(stream, 200))


def link(archive: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("b.txt")
    member.type, member.linkname = tarfile.LNKTYPE, "a.txt"
    archive.addfile(member)


@pytest.mark.parametrize(
    ("members", "what"),
    [
        (lambda archive: add(archive, "b.json", b"{}"), "sample b has no member .txt or .md or .py or .rst but .json"),
        (lambda archive: add(archive, "v1.2.txt", b"x"), "sample v1 has no member"),
        (lambda archive: add(archive, "a.txt", b"x"), "(a.txt: duplicate file name in tar file txt"),
        (lambda archive: add(archive, "README", b"x"), "member README has no extension"),
        (link, "member b.txt is a link"),
    ],
)
def test_errors_of_samples_are_told_and_not_passed_over(tmp_path, members, what):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        add(archive, "a.txt", b"abc")
        members(archive)
    text = one_line(read_all(tmp_path))
    assert what in text and str(tmp_path / "train.tar") in text


def test_hidden_members_are_no_samples(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name in ("__meta__", "._a.txt", "./.DS_Store", "a.txt"):
            add(archive, name, b"abc")
    assert [text for _, text in rows(PlainStream(tmp_path, context=3, global_batch=1), 3)] == [b"abc"] * 3


def test_errors_of_splits_without_content(tmp_path):
    with wds.TarWriter(str(tmp_path / "train.tar")):
        pass
    assert "has 1 shard and no sample" in one_line(read_all(tmp_path))
    with wds.TarWriter(str(tmp_path / "train.tar")) as writer:
        writer.write({"__key__": "a", "txt": b""})
    assert "hold no bytes" in one_line(read_all(tmp_path))
    assert "hold no bytes" in one_line(lambda: list(plain_contexts(tmp_path, "train", context=4, batch_size=1)))


# Evaluation.


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("cut", [Cut(), Cut(separator=10), DOCUMENTS, Cut(packing=False, hop=5)])
@pytest.mark.parametrize("limit", [None, 1, 40, 10**6])
def test_evaluation_counts_each_byte_once(uneven, world_size, cut, limit):
    folder, texts = uneven
    found, batches_of = {}, set()
    for rank in range(world_size):
        options = {"context": 33, "batch_size": 3, "rank": rank, "world_size": world_size, "cut": cut, "limit": limit}
        batches = list(plain_contexts(folder, "train", **options))
        batches_of.add(len(batches))
        for batch in batches:
            assert batch.tokens.shape == (3, 33)
            for row, length, name in zip(
                batch.tokens.numpy(), batch.lengths.tolist(), batch.sample_ids.tolist(), strict=True
            ):
                assert not row[length:].any() and name not in found and (name >= 0) == (length > 0)
                if length:
                    found[name] = row[:length].tobytes()
    assert len(batches_of) == 1 and sorted(found) == list(range(len(found)))
    behind = b"" if cut.separator is None else b"\n"
    expected = b"".join(text + behind for text in itertools.chain(*texts))
    content = b"".join(found[name] for name in sorted(found))
    if limit in (None, 10**6):
        assert content == expected
    else:
        assert len(found) == limit and expected.startswith(content)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"limit": 0}, "limit=0"),
        ({"rank": 1}, "rank=1"),
        ({"context": 0}, "context=0"),
    ],
)
def test_evaluation_errors_of_arguments_come_at_once(uneven, options, start):
    assert one_line(
        lambda: plain_contexts(uneven[0], "train", **{"context": 4, "batch_size": 1, **options})
    ).startswith(start)
