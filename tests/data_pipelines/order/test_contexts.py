"""Documents to contexts, against a plain definition: packed with and without separator, alone with any hop."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut, PackedContexts
from longstride.data_pipelines.order.evaluation import evaluation_contexts, read_context
from longstride.data_pipelines.order.lanes import shard_order
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader
from longstride.data_pipelines.stores import open_store
from tests.harness.data.streams import open_stream

CONTEXT = 300


def shard_documents(corpus, split: str) -> list[list[bytes]]:
    """List the parts of documents in each shard, in canonical order."""
    shards = []
    for shard in corpus.manifest.splits[split].shards:
        ends = shard.load_index(open_store(corpus.folder))["ends"]
        parts = [b""]
        for sample, end in zip(corpus.documents_of(shard), ends, strict=True):
            parts[-1] += sample
            if end:
                parts.append(b"")
        shards.append([part for part in parts if part])
    return shards


def test_documents_in_pieces_follow_definition(pieces):
    shards = shard_documents(pieces, "train")
    record = pieces.manifest.splits["train"]
    assert record.samples > 5 * record.documents and sum(map(len, shards)) > record.documents
    order = [number for epoch in range(2) for number in shard_order(len(shards), 3, epoch)]
    ended = [shard.documents for shard in record.shards]
    for context, hop in ((50, 50), (200, 70), (64, 1)):
        contexts = [each for number in order for part in shards[number] for each in cut_document(part, context, hop)]
        found = train_contexts(pieces, Cut(packing=False, hop=hop), context, 3, epochs=2)
        assert found == dict(enumerate(contexts[: len(contexts) // 3 * 3]))
    for context, separator in ((50, None), (200, 0), (1000, 255)):
        behind = b"" if separator is None else bytes([separator])
        content = b"".join(
            part + behind * (place < ended[number]) for number in order for place, part in enumerate(shards[number])
        )
        found = train_contexts(pieces, Cut(separator=separator), context, 3, epochs=2)
        whole = [content[start : start + context] for start in range(0, len(content), context)]
        assert found == dict(enumerate(whole[: len(content) // (3 * context) * 3]))


@pytest.mark.parametrize("separator", [None, 255])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_batches_tell_where_documents_begin_and_separators_stand(pieces, monkeypatch, separator, one_by_one):
    """This holds in training for any way of reading, and in evaluation; bytes and their order do not change."""
    shards = {split: shard_documents(pieces, split) for split in ("train", "validation")}
    cut = Cut(separator=separator, apart=True)

    def marks_of(split: str, order: list[int]) -> tuple[np.ndarray, np.ndarray]:
        ended = [shard.documents for shard in pieces.manifest.splits[split].shards]
        places = [(number, place) for number in order for place in range(len(shards[split][number]))]
        behind = np.array([separator is not None and place < ended[number] for number, place in places])
        ends = np.cumsum([len(shards[split][number][place]) for number, place in places] + behind)
        begins, separators = np.zeros((2, ends[-1]), dtype=bool)
        begins[np.append(0, ends[:-1])] = True
        separators[ends[behind] - 1] = True
        return begins, separators

    if one_by_one:
        read = PackedContexts.read

        def damaged_blocks(self, reader, first, rows, lengths, seed):
            if len(rows) > 1:
                raise DataError("somewhere in it")
            read(self, reader, first, rows, lengths, seed)

        monkeypatch.setattr(PackedContexts, "read", damaged_blocks)
    order = [number for epoch in range(2) for number in shard_order(len(shards["train"]), 3, epoch)]
    wanted, separators = marks_of("train", order)
    options = {"context": 200, "global_batch": 3, "seed": 3, "shuffle_bytes": 2000, "on_damage": "substitute"}
    apart, plain = (open_stream(pieces.folder, cut=each, **options) for each in (cut, Cut(separator=separator)))
    assert apart.fingerprint == plain.fingerprint
    for batch, other in itertools.islice(zip(apart, plain, strict=True), apart.lanes.batches_before(2)):
        assert torch.equal(batch.tokens, other.tokens) and other.begins is None
        assert torch.equal(batch.content, other.content) and (separator is None) == (batch.separators is None)
        rows = zip(batch.sample_ids.tolist(), batch.begins.numpy(), batch.content.tolist(), strict=True)
        for number, row, content in rows:
            assert np.array_equal(row, wanted[number * 200 : (number + 1) * 200])
            assert content == 200 - separators[number * 200 : (number + 1) * 200].sum()
    wanted, separators = marks_of("validation", list(range(len(shards["validation"]))))
    for batch in evaluation_contexts(pieces.folder, context=200, batch_size=3, cut=cut, min_context=50):
        rows = (each.numpy() for each in (batch.begins, batch.scored, batch.content))
        for number, row, scored, content in zip(batch.sample_ids.tolist(), *rows, strict=True):
            inside = slice(number * 150, number * 150 + 200) if number >= 0 else slice(0)
            size = len(wanted[inside])
            assert np.array_equal(row[:size], wanted[inside]) and row[size:].all()
            assert np.array_equal(content[:size], scored[:size] & ~separators[inside]) and not content[size:].any()
    first = read_context(pieces.folder, "validation", 0, context=5000, cut=cut)
    behind = b"" if separator is None or pieces.manifest.splits["validation"].shards[0].documents == 0 else b"\xff"
    part = shards["validation"][0][0]
    assert first.numpy().tobytes() in (part, part + behind)


def cut_document(document: bytes, context: int, hop: int) -> list[bytes]:
    """List the contexts of a document: one every hop bytes, until all bytes are covered."""
    contexts = [document[:context]]
    while (len(contexts) - 1) * hop + context < len(document):
        start = len(contexts) * hop
        contexts.append(document[start : start + context])
    return contexts


def rows_of(batch) -> list[bytes]:
    rows = []
    for row, length in zip(batch.tokens.numpy(), batch.lengths.tolist(), strict=True):
        assert not row[length:].any()
        rows.append(row[:length].tobytes())
    return rows


def train_contexts(corpus, cut: Cut, context: int, global_batch: int, epochs: int, seed: int = 3) -> dict[int, bytes]:
    """Collect every context of so many epochs of the stream, by its number."""
    stream = open_stream(
        corpus.folder, context=context, global_batch=global_batch, seed=seed, cut=cut, shuffle_bytes=2000
    )
    found: dict[int, bytes] = {}
    for batch in itertools.islice(stream, stream.lanes.batches_before(epochs)):
        for number, row in zip(batch.sample_ids.tolist(), rows_of(batch), strict=True):
            assert number not in found
            found[number] = row
    return found


@settings(max_examples=25, deadline=None)
@given(context=st.integers(30, 3000), global_batch=st.integers(1, 12), separator=st.integers(0, 255) | st.none())
def test_packed_contexts_follow_definition(corpus, context, global_batch, separator):
    shards = shard_documents(corpus, "train")
    behind = b"" if separator is None else bytes([separator])
    content = b"".join(
        document + behind
        for epoch in range(2)
        for number in shard_order(len(shards), 3, epoch)
        for document in shards[number]
    )
    found = train_contexts(corpus, Cut(separator=separator), context, global_batch, epochs=2)
    assert sorted(found) == list(range(len(content) // (context * global_batch) * global_batch))
    assert all(found[number] == content[number * context : (number + 1) * context] for number in found)


@settings(max_examples=25, deadline=None)
@given(context=st.integers(30, 2000), global_batch=st.integers(1, 12), data=st.data())
def test_document_contexts_follow_definition(corpus, context, global_batch, data):
    hop = data.draw(st.integers(max(1, context // 5), context))
    shards = shard_documents(corpus, "train")
    contexts = [
        each
        for epoch in range(2)
        for number in shard_order(len(shards), 3, epoch)
        for document in shards[number]
        for each in cut_document(document, context, hop)
    ]
    found = train_contexts(corpus, Cut(packing=False, hop=hop), context, global_batch, epochs=2)
    assert sorted(found) == list(range(len(contexts) // global_batch * global_batch))
    assert all(found[number] == contexts[number] for number in found)


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_of_documents_counts_every_byte_once(corpus, world_size):
    """The hop of training does not matter."""
    documents = [document for shard in shard_documents(corpus, "validation") for document in shard]
    rows = {}
    for rank in range(world_size):
        for batch in evaluation_contexts(
            corpus.folder,
            context=CONTEXT,
            batch_size=2,
            rank=rank,
            world_size=world_size,
            cut=Cut(packing=False, hop=7),
        ):
            rows |= dict(zip(batch.sample_ids.tolist(), rows_of(batch), strict=True))
    rows.pop(-1, None)
    expected = [each for document in documents for each in cut_document(document, CONTEXT, CONTEXT)]
    assert [rows[number] for number in sorted(rows)] == expected


def test_document_over_several_samples_and_shards_is_cut_in_each_shard(tmp_path):
    content = bytes(range(256)) * 9000  # three samples
    (tmp_path / "source").mkdir()
    (tmp_path / "source/long.txt").write_bytes(content)
    manifest = build([tmp_path / "source"], tmp_path / "data", validation_fraction=0, shard_bytes=2**21)
    sizes = [shard.content_bytes for shard in manifest.splits["train"].shards]
    assert len(sizes) == 2 and sum(sizes) == len(content)
    rows = []
    for batch in evaluation_contexts(tmp_path / "data", "train", context=100_000, batch_size=1, cut=Cut(packing=False)):
        rows += rows_of(batch)
    parts = [content[: sizes[0]], content[sizes[0] :]]
    assert rows == [each for part in parts for each in cut_document(part, 100_000, 100_000)]


def test_what_an_epoch_carries_over_is_named(corpus):
    stream = open_stream(corpus.folder, context=64, global_batch=24)
    left = stream.lanes.total_units % (64 * 24)
    last = corpus.manifest.splits["train"].shards[shard_order(len(corpus.shard_payloads("train")), 0, 0)[-1]]
    assert stream.carried(0) is None
    assert stream.carried(1) == f"{left:,} bytes are carried over into epoch 1, from {corpus.folder / last.name} on"
    stream = open_stream(corpus.folder, context=64, global_batch=1, cut=Cut(packing=False))
    assert stream.carried(1) is None


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_reader_reads_any_range_in_any_order(corpus, data):
    """A single reader, which buffers its last sample, reads them all."""
    split = DataFolder(corpus.folder).split("train")
    reader = SampleReader(split)
    separator = data.draw(st.sampled_from([None, 0, 255]))
    behind = b"" if separator is None else bytes([separator])
    for _ in range(20):
        number = data.draw(st.integers(0, len(split.shards) - 1))
        content = b"".join(document + behind for document in corpus.documents_of(split.shards[number]))
        start = data.draw(st.integers(0, len(content) - 1))
        out = np.empty(data.draw(st.integers(1, len(content) - start)), dtype=np.uint8)
        reader.fill(number, start, out, separator)
        assert out.tobytes() == content[start : start + len(out)]
