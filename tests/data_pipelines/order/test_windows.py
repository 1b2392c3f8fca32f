"""Windows of a score: every byte scored once, with as many bytes before it as were asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts, read_context
from tests.data_pipelines.order.test_contexts import shard_documents

DOCUMENTS = Cut(packing=False)


def windows_of(stream: bytes, context: int, min_context: int) -> list[tuple[bytes, int]]:
    """List (visible bytes, first scored byte) of each window of a stream, scored byte by byte."""
    windows, start, scored = [], 0, 0
    while scored < len(stream):
        windows.append((stream[start : start + context], scored - start))
        scored = min(start + context, len(stream))
        start = scored - min_context
    return windows


def rows_of(batches) -> dict[int, tuple[bytes, int]]:
    found = {}
    for batch in batches:
        scored = batch.scored
        rows = zip(batch.tokens.numpy(), batch.lengths.tolist(), batch.scored_from.tolist(), scored, strict=True)
        for number, (row, length, first, marks) in zip(batch.sample_ids.tolist(), rows, strict=True):
            assert not row[length:].any() and number not in found
            assert marks.nonzero().flatten().tolist() == list(range(first, length))
            if number >= 0:
                found[number] = row[:length].tobytes(), first
    return found


@settings(max_examples=15, deadline=None)
@given(context=st.integers(2, 1500), data=st.data())
def test_windows_follow_their_definition(corpus, context, data):
    min_context = data.draw(st.integers(max(0, context - 400), context - 1))
    cut = data.draw(st.sampled_from([Cut(), Cut(separator=10), DOCUMENTS, Cut(packing=False, hop=1)]))
    documents = [document for shard in shard_documents(corpus, "validation") for document in shard]
    behind = b"" if cut.separator is None else bytes([cut.separator])
    streams = documents if cut.packing is False else [b"".join(document + behind for document in documents)]
    expected = [window for stream in streams for window in windows_of(stream, context, min_context)]
    options = {"context": context, "batch_size": 5, "cut": cut, "min_context": min_context}
    found = rows_of(evaluation_contexts(corpus.folder, **options))
    assert [found[number] for number in sorted(found)] == expected
    assert sorted(found) == list(range(len(expected)))
    assert b"".join(row[first:] for row, first in found.values()) == b"".join(streams)
    assert all(first in (0, min_context) for _, first in found.values())
    assert sum(first == 0 and min_context > 0 for _, first in found.values()) in (0, len(streams))


@pytest.mark.parametrize(("min_context", "nearest"), [(-1, 0), (64, 63), (10**6, 63)])
def test_min_context_beyond_the_context_is_refused(corpus, min_context, nearest):
    with pytest.raises(DataError, match=f"^min_context={min_context}: must be from 0 to 63, .*; nearest {nearest}$"):
        evaluation_contexts(corpus.folder, context=64, batch_size=1, min_context=min_context)


def test_pictures_have_nothing_before_them(tmp_path):
    (tmp_path / "source").mkdir()
    for number in range(4):
        (tmp_path / "source" / f"{number}.ppm").write_bytes(b"P6\n4 2\n255\n" + bytes([number]) * 24)
    build([tmp_path / "source"], tmp_path / "data", modality="image", validation_fraction=0.5)
    evaluation_contexts(tmp_path / "data", context=24, batch_size=1, min_context=0)
    with pytest.raises(
        DataError, match=r"^min_context=1: must be 0, because every image of this set fills one context"
    ):
        evaluation_contexts(tmp_path / "data", context=24, batch_size=1, min_context=1)


@pytest.mark.parametrize("cut", [Cut(), DOCUMENTS], ids=str)
def test_one_context_is_the_one_of_that_number(corpus, cut):
    found = rows_of(evaluation_contexts(corpus.folder, "train", context=300, batch_size=4, cut=cut))
    for number in (0, 7, len(found) - 1):
        row = read_context(corpus.folder, "train", number, context=300, cut=cut)
        assert row.numpy().tobytes() == found[number][0] and row.numpy().dtype == np.uint8
    for number, nearest in ((-1, 0), (len(found), len(found) - 1)):
        with pytest.raises(DataError, match=f"^context_number={number}: must be from 0 .*; nearest {nearest}$"):
            read_context(corpus.folder, "train", number, context=300, cut=cut)
