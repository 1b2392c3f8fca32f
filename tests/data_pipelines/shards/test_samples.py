"""Samples to look at: which they are, and that each is what was built."""

import shutil

import numpy as np
import pytest

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards.verify import sample_documents

ALL = 10**6


def test_samples_of_a_whole_split_are_all_of_it(corpus):
    for split, record in corpus.manifest.splits.items():
        samples = list(sample_documents(corpus.folder, split, ALL))
        assert [sample.key for sample in samples] == [
            shard.key(number) for shard in record.shards for number in range(shard.samples)
        ]
        assert b"".join(sample.content.tobytes() for sample in samples) == b"".join(corpus.shard_payloads(split))


def test_samples_are_spread_and_follow_the_seed(corpus):
    keys = [sample.key for sample in sample_documents(corpus.folder, "train", ALL)]
    chosen = [[sample.key for sample in sample_documents(corpus.folder, "train", 5, seed)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    for each in chosen:
        assert [keys.index(key) * 5 // len(keys) for key in each] == [0, 1, 2, 3, 4]


def test_samples_open_only_their_own_shards(corpus, tmp_path):
    folder = shutil.copytree(corpus.folder, tmp_path / "data")
    (sample,) = sample_documents(folder, "train", 1)
    for shard in corpus.manifest.shards():
        if not sample.key.startswith(shard.name.removesuffix(".tar")):
            (folder / shard.name).write_bytes(bytes(shard.file_bytes))
    (again,) = sample_documents(folder, "train", 1)
    assert again.key == sample.key and np.array_equal(again.content, sample.content)
    with pytest.raises(DataError, match="sample train-"):
        list(sample_documents(folder, "train", ALL))


@pytest.mark.parametrize(
    ("arguments", "rule"), [(("train", 0), "count=0: must be at least 1"), (("tset", 1), "no split")]
)
def test_samples_that_cannot_be_are_refused(corpus, arguments, rule):
    with pytest.raises(DataError, match=rule):
        list(sample_documents(corpus.folder, *arguments))
