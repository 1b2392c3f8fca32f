"""Spans of contexts: put together they are the contexts, and each is read, verified and held alone."""

import contextlib
import itertools
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import Cut, Span, evaluation_contexts
from longstride.data_pipelines.order.stream import LanesReader
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader
from longstride.data_pipelines.stores import open_store
from tests.data_pipelines.conftest import Corpus
from tests.harness.data.streams import open_stream

CONTEXT = 240
REACH = 3  # positions before its own that a process looks at
CUTS = [Cut(), Cut(separator=0, apart=True), Cut(packing=False), Cut(packing=False, hop=100), Cut(packing=False, hop=7)]


def spans(parts: int, context: int = CONTEXT, reach: int = REACH) -> list[Span]:
    size = context // parts
    return [Span(part * size - reach, (part + 1) * size) for part in range(parts)]


def take(stream, count: int | None = None) -> list:
    """Read two epochs, or so many steps, and leave no worker process."""
    with contextlib.closing(iter(stream)) as batches:
        return list(itertools.islice(batches, count or stream.lanes.batches_before(2)))


def assert_spans_of(found, whole, span: Span) -> None:
    """Assert that batches only differ in tokens, which are 0 outside the span."""
    assert len(found) == len(whole)
    for batch, other in zip(found, whole, strict=True):
        tokens = torch.zeros_like(other.tokens)
        own = slice(max(span.first, 0), span.end)
        tokens[:, own] = other.tokens[:, own]
        assert batch.tokens.dtype == tokens.dtype and torch.equal(batch.tokens, tokens)
        for name in set(other.__slots__) - {"tokens"}:
            one, same = getattr(batch, name), getattr(other, name)
            assert torch.equal(one, same) if isinstance(same, torch.Tensor) else one == same, name


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_spans_are_what_contexts_hold_there(pieces, cut):
    asked = {"context": CONTEXT, "global_batch": 4, "seed": 3, "cut": cut}
    for shuffle_bytes in (0, 2000):
        whole = open_stream(pieces.folder, shuffle_bytes=shuffle_bytes, **asked)
        batches = take(whole)
        assert len(batches) > 10
        for span in [*spans(1), *spans(2), *spans(4, reach=0), Span(7, 8), Span(CONTEXT - 1, CONTEXT)]:
            stream = open_stream(pieces.folder, shuffle_bytes=shuffle_bytes, span=span, **asked)
            assert stream.fingerprint == whole.fingerprint
            assert_spans_of(take(stream), batches, span)


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
@pytest.mark.parametrize("min_context", [0, 50])
def test_spans_of_an_evaluation_are_what_its_rows_hold_there(pieces, cut, min_context):
    asked = {"context": CONTEXT, "batch_size": 3, "cut": cut, "min_context": min_context}
    whole = list(evaluation_contexts(pieces.folder, **asked))
    assert any(0 < length < CONTEXT for batch in whole for length in batch.lengths.tolist())
    for span in [*spans(2), *spans(4)]:
        assert_spans_of(list(evaluation_contexts(pieces.folder, span=span, **asked)), whole, span)


def test_spans_of_a_palette_are_pixels(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "source").mkdir()
    for number in range(8):
        Image.fromarray(random.integers(0, 256, (4, 6, 3), dtype=np.uint8)).save(tmp_path / f"source/{number}.png")
    build([tmp_path / "source"], tmp_path / "data", modality="image", palette=20, validation_fraction=0)
    whole = take(open_stream(tmp_path / "data", context=24, global_batch=2))
    for span in spans(4, context=24):
        assert_spans_of(take(open_stream(tmp_path / "data", context=24, global_batch=2, span=span)), whole, span)


@pytest.fixture
def bytes_read(monkeypatch) -> list[int]:
    """Record the bytes of every read of a shard."""
    read, found = SampleReader._read, []

    def counted(self, number, start, size):
        found.append(size)
        return read(self, number, start, size)

    monkeypatch.setattr(SampleReader, "_read", counted)
    return found


@pytest.mark.parametrize("cut", [Cut(), Cut(packing=False)], ids=str)
def test_of_spans_the_samples_that_they_meet_are_read_alone(pieces, bytes_read, cut):
    """Each is read once and completely."""
    shards = [DataFolder(pieces.folder).split("train").open(n) for n in range(len(pieces.shard_payloads("train")))]
    stream_begins = np.cumsum([0, *(shard.edges[-1] for shard in shards)])
    for span in [*spans(2), *spans(4)]:
        wanted = 0
        for begins, shard in zip(stream_begins, shards, strict=False):
            place = begins + np.arange(shard.edges[-1])  # of each byte in its stream
            if cut.packing is False:
                place = place - np.repeat(begins + shard.document_edges[:-1], np.diff(shard.document_edges))
            asked = (place % CONTEXT >= span.first) & (place % CONTEXT < span.end)
            wanted += int((shard.ends - shard.index["member"])[np.logical_or.reduceat(asked, shard.edges[:-1])].sum())
        bytes_read.clear()
        list(evaluation_contexts(pieces.folder, "train", context=CONTEXT, batch_size=2, cut=cut, span=span))
        assert sum(bytes_read) == wanted


@pytest.mark.parametrize("cut", [Cut(), Cut(packing=False)], ids=str)
def test_all_spans_together_read_little_more_than_whole_contexts(pieces, bytes_read, cut):
    asked = {"context": 600, "global_batch": 1, "cut": cut, "shuffle_bytes": 4000}
    contexts = len(take(open_stream(pieces.folder, **asked)))
    whole = sum(bytes_read)
    bytes_read.clear()
    for span in spans(4, context=600, reach=0):
        take(open_stream(pieces.folder, span=span, **asked))
    assert whole < sum(bytes_read) <= whole + 4 * contexts * 1024  # a sample more at each edge, of two blocks of tar


def test_a_lane_holds_spans_alone(pieces):
    stream = open_stream(pieces.folder, context=CONTEXT, global_batch=2, shuffle_bytes=5 * CONTEXT, span=Span(-9, 60))
    reader = LanesReader(stream.contexts, stream.lanes, [0, 1], stream.settings, stream.fingerprint)
    assert reader.take(0).tokens.shape == (2, 60) and reader._tokens.shape == (2, 5, 60)


@pytest.mark.parametrize("cut", [Cut(apart=True), Cut(packing=False)], ids=str)
def test_a_state_is_that_of_any_span_and_workers(corpus, cut):
    asked = {"context": 64, "global_batch": 4, "cut": cut, "shuffle_bytes": 500}
    whole = take(open_stream(corpus.folder, **asked), 24)
    place, state = 0, None
    for span, workers in ((Span(-2, 16), 2), (Span(14, 64), 0), (None, 0), (Span(30, 48), 3)):
        part = take(open_stream(corpus.folder, span=span, workers=workers, state=state, **asked), 6)
        assert_spans_of(part, whole[place : place + 6], span or Span(0, 64))
        place, state = place + 6, part[-1].state


@pytest.fixture
def damaged(pieces, tmp_path) -> tuple[Corpus, int]:
    """Damage a sample in the first shard; also return the content byte at which it begins."""
    shard = pieces.manifest.splits["train"].shards[0]
    row = shard.load_index(open_store(pieces.folder))
    folder = shutil.copytree(pieces.folder, tmp_path / "damaged")
    content = bytearray((folder / shard.name).read_bytes())
    content[int(row[5]["content"])] ^= 1
    (folder / shard.name).write_bytes(content)
    return Corpus(pieces.source, folder, pieces.manifest), int(row["length"][:5].sum())


def test_damage_ends_those_whose_span_meets_it(pieces, damaged):
    """Other readers get the content of the undamaged folder."""
    folder, begins = damaged[0].folder, damaged[1]
    whole = list(evaluation_contexts(pieces.folder, "train", context=400, batch_size=1))
    for first in range(0, 400, 50):
        span = Span(first, first + 50)
        meets = first < begins + 37 and begins < first + 50
        batches = evaluation_contexts(folder, "train", context=400, batch_size=1, span=span)
        if meets:
            with pytest.raises(DataError, match="sample train-00000-0000005 is damaged"):
                list(batches)
        else:
            assert_spans_of(list(batches), whole, span)


def test_training_ends_where_a_span_meets_damage(pieces, damaged):
    found = []
    asked = {"context": 200, "global_batch": 1, "cut": Cut(packing=False)}
    whole = take(open_stream(pieces.folder, **asked))
    for span in spans(4, context=200, reach=0):
        try:
            batches = take(open_stream(damaged[0].folder, span=span, **asked))
        except DataError as error:
            found.append(str(error))
        else:
            assert_spans_of(batches, whole, span)
    assert 1 <= len(found) < 4 and all("sample train-00000-0000005 is damaged" in line for line in found)


@pytest.mark.parametrize("workers", [0, 2])
def test_substitutes_agree_whatever_the_span(damaged, workers):
    folder = damaged[0].folder
    asked = {"context": 200, "global_batch": 4, "on_damage": "substitute", "cut": Cut(apart=True)}
    whole = take(open_stream(folder, **asked))
    assert sum(len(batch.substitutions) for batch in whole) > 1
    for span in spans(4, context=200) if workers == 0 else [Span(150, 200)]:
        assert_spans_of(take(open_stream(folder, span=span, workers=workers, **asked)), whole, span)


@pytest.mark.parametrize("span", [Span(0, 65), Span(64, 64), Span(9, 3), Span(-5, 0)], ids=str)
def test_spans_that_hold_no_positions_of_a_context_are_refused(corpus, span):
    rule = rf"^span={span.first}\.\.{span.end}: must be positions of the context; such as 0\.\.64$"
    with pytest.raises(DataError, match=rule):
        open_stream(corpus.folder, context=64, global_batch=4, span=span)
    with pytest.raises(DataError, match=rule):
        evaluation_contexts(corpus.folder, context=64, batch_size=4, span=span)
