"""The benchmark of reading, on small sets, and the docs' table of what it measured."""

import json
from pathlib import Path

import pytest

from benchmarks.training import data

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # WebDataset leaves its shards open


def test_a_small_run_writes_a_row_a_set_and_reader(tmp_path: Path) -> None:
    output = tmp_path / "data.json"
    sizes = ["--set-bytes", "300000", "--shards", "40", "--repeats", "1", "--folder", str(tmp_path)]
    assert data.main([*sizes, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert {"device", "torch", "date", "threads"} <= set(found)
    assert {row["set"] for row in found["throughput"]} == set(data.SETS)
    assert all(row["bytes_per_second"] > 0 for row in found["throughput"])
    assert found["start"]["shards"] == 40
    assert 0 < found["start"]["opened_seconds"] < found["start"]["first_batch_seconds"]
    assert list(tmp_path.iterdir()) == [output]
    with pytest.raises(SystemExit):
        data.read_options(["--output", str(output)])


@pytest.mark.parametrize("kind", data.SETS)
def test_readers_read_the_whole_set(tmp_path: Path, kind: str) -> None:
    folder = data.make_set(kind, tmp_path, 400_000)
    whole = data.read_samples(folder)
    step = data.CONTEXT * data.BATCH
    assert whole >= 400_000
    for read in (data.read_cut_samples, data.read_stream, data.read_in_sequence):
        assert read(folder) == whole // step * step
