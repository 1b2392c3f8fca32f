"""Pickled batches: read in every form that Python wrote them in, without running any other code."""

import os
import pickle
import subprocess
import tracemalloc

import numpy as np
import pytest

from longstride.data_pipelines.datasets.cifar10 import PickledBatch, read_batch
from longstride.data_pipelines.datasets.members import whole_file
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError
from tests.harness.data.published_files import in_planes, pictures, python2_pickle, python3_pickle

BATCH = pictures(3, 32)


def test_batch_pickle_by_python2_is_the_array():
    """The file that the test writes is one that numpy itself reads to the same array."""
    content = python2_pickle(BATCH)
    assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"], in_planes(BATCH))
    assert np.array_equal(read_batch("a", content, 3072)[0], in_planes(BATCH))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batch_pickle_by_python3_is_the_array(protocol):
    assert np.array_equal(read_batch("a", python3_pickle(BATCH, protocol), 3072)[0], in_planes(BATCH))


@pytest.mark.parametrize("protocol", ["python2", 2, 3, 4])
def test_labels_of_a_batch_are_those_that_pickle_reads(protocol):
    """A list is pickled in parts of a thousand, between other numbers and texts."""
    numbers = [place * 7 % 10 for place in range(2500)]
    batch = {b"num_cases": 9, b"labels": numbers, b"data": in_planes(BATCH), b"coarse": [3], b"names": ["a", "labels"]}
    content = python2_pickle(BATCH) if protocol == "python2" else pickle.dumps(batch, protocol)
    assert read_batch("a", content, 3072)[1] == pickle.loads(content, encoding="bytes")[b"labels"]


@pytest.mark.parametrize("labels", [[0, 10], [0, -1], [0]])
def test_picture_without_a_class_is_refused(tmp_path, labels):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"labels": labels, b"data": in_planes(BATCH)}, 2))
    batch = PickledBatch(whole_file(path), 32)
    with OpenInput() as open_input:
        assert batch.label(open_input, 0) == 0
        with pytest.raises(DataError, match=rf"^{path}: has no label from 0 to 9 for picture 1; fetch it again$"):
            batch.label(open_input, 3072)


class _Runs:
    """Unpickling it by pickle itself would make a file."""

    def __init__(self, call, *arguments):
        self._reduced = call, arguments

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [os.system, subprocess.getoutput], ids=["system", "getoutput"])
def test_batch_pickle_runs_nothing(tmp_path, call, protocol):
    content = pickle.dumps({b"data": _Runs(call, f"touch {tmp_path}/ran")}, protocol=protocol)
    with pytest.raises(DataError, match="is not a batch"):
        read_batch("a", content, 3072)
    assert list(tmp_path.iterdir()) == []
    pickle.loads(content)  # what would have run
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((2, 3071), np.uint8),
        np.zeros((2, 3072), np.int8),
        np.zeros((2, 3072), np.uint16),
        np.asfortranarray(np.zeros((2, 3072), np.uint8)),
        np.zeros(3072, np.uint8),
        np.array([None, {}], dtype=object),
        b"0" * 3072,
        None,
    ],
    ids=["short", "signed", "wide", "by columns", "flat", "objects", "bytes", "none"],
)
def test_batch_pickle_of_another_array_is_refused(data):
    with pytest.raises(DataError):
        read_batch("a", pickle.dumps({b"data": data}, protocol=2), 3072)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1]), python2_pickle(BATCH)[:-9]])
def test_batch_pickle_that_is_none_is_refused(content):
    with pytest.raises(DataError, match=r"cannot be read as a pickle|is not a batch"):
        read_batch("a", content, 3072)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x0f.",
        b"\x80\x05\x96" + (2**31).to_bytes(8, "little") + b".",
        b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b".",
        b"\x80\x02c_codecs\nencode\nq\0X\xe8\x03\0\0"
        + b"a" * 1000
        + b"X\x06\0\0\0latin1\x86q\x01R"
        + b"h\0h\x01R" * 900
        + b".",
    ],
    ids=["a place to remember", "an array", "a frame", "a text many times"],
)
def test_batch_pickle_takes_no_more_than_it_holds(content):
    """Each claims a length, or repeats something long, which would take gigabytes, or 200 times its own size."""
    tracemalloc.start()
    with pytest.raises(DataError):
        read_batch("a", content, 3072)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**19
