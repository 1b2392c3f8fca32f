"""Builds by several MPI ranks: the same bytes as by one rank, and all ranks end together."""

import json
import sys
from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build, build_dataset
from longstride.data_pipelines.building.crew import join_crew
from longstride.data_pipelines.building.planning import FileSettings
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from tests.harness.data.builds import (
    ended,
    folder_bytes,
    numbered_files,
    outcome,
    start,
    worker_words,
    write_files,
)
from tests.harness.data.published_files import CIFAR_BATCHES, pictures, tarred, write_cifar

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mpirun comes with the dev extra on Linux")
ARGUMENTS = {"validation_fraction": 0.2, "shard_bytes": 700}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Write enough shards for several rounds of three ranks, and an incomplete last round."""
    return write_files(tmp_path_factory.mktemp("mpi") / "source", numbered_files(80))


@pytest.fixture(scope="module")
def alone(source) -> Path:
    """Build the data folder with a single process."""
    build([source], source.parent / "alone", **ARGUMENTS)
    shards = len(list((source.parent / "alone").glob("*.tar")))
    assert shards > 10 and shards % 3
    return source.parent / "alone"


def cli_words(source: Path, output: Path) -> list[str]:
    options = ["--validation-fraction", "0.2", "--shard-bytes", "700"]
    return ["-m", "longstride.launcher.cli", "data", "build", str(source), "--output", str(output), *options]


def test_build_by_two_ranks_is_byte_identical(source, alone, tmp_path):
    code, out, err = outcome(start(cli_words(source, tmp_path / "data"), ranks=2))
    assert code == 0
    assert out == "" and err.count("train") == 1  # one rank sums up
    assert folder_bytes(tmp_path / "data") == folder_bytes(alone)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.campaign) for n in (2, 4, 5, 7, 16, 40))])
def test_build_by_several_ranks_is_byte_identical(source, alone, tmp_path, ranks):
    code, out, errors = ended(start(worker_words(source, tmp_path / "data", ARGUMENTS), ranks))
    assert (code, errors) == (0, [])
    assert folder_bytes(tmp_path / "data") == folder_bytes(alone)
    calls = [tuple(call) for call in json.loads(out)["calls"]]
    total = sum(path.stat().st_size for path in source.rglob("*.py"))
    assert calls == sorted(set(calls)) and calls[-1] == (total, total)  # of all ranks' bytes


def documents_by_shard(source: Path) -> list[list[Path]]:
    """List the documents of each shard, in the order in which shards are distributed."""
    text = modality_named("text")
    settings = FileSettings(text, {}, text.suffixes, (), ARGUMENTS["validation_fraction"], ARGUMENTS["shard_bytes"], 0)
    return [[piece.document.path for piece in pieces] for _, pieces in settings.plan([source]).shards()]


@pytest.mark.parametrize(("what", "rule"), [("vanishes", "cannot be read (No such file"), ("grows", "changed since")])
def test_build_with_an_error_on_one_rank_ends_on_all(tmp_path, what, rule):
    source = write_files(tmp_path / "source", numbered_files(80))
    victim = documents_by_shard(source)[5][0]  # the second of two ranks makes it, in the third round
    words = worker_words(source, tmp_path / "data", ARGUMENTS, **{what: str(victim)})
    code, _, errors = ended(start(words, ranks=2))
    assert code == 2
    (error,) = errors
    assert error.startswith(f"longstride: error: {victim}: {rule}") and "kept in" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == [".data.unfinished", "source"]
    # The first rank's shard of that round is finished, and nothing of the next round is begun.
    assert len(list((tmp_path / ".data.unfinished" / "records").iterdir())) == 5


def test_build_with_wrong_input_tells_it_once(source, tmp_path):
    """Only the first rank of the command prints, before the launcher ends it."""
    words = cli_words(tmp_path / "missing", tmp_path / "data")
    code, _, errors = ended(start(words, ranks=2))
    assert code == 2
    assert errors == [f"longstride: error: {tmp_path}/missing: no such file or folder; name an input that exists"]


def test_build_with_a_mistake_of_ours_on_one_rank_ends_on_all(source, tmp_path):
    """An unexpected error ends the job with a traceback; otherwise the other ranks would wait for ever."""
    code, _, err = outcome(start(worker_words(source, tmp_path / "data", ARGUMENTS, fail_on=1), ranks=2))
    assert code not in (0, 2) and "RuntimeError: a mistake of ours" in err


def test_crew_without_launcher_does_not_touch_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # importing it fails
    for environment in ({}, {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        crew = join_crew(environment)
        assert (crew.rank, crew.size, crew.is_first) == (0, 1, True)


@pytest.mark.parametrize(
    ("environment", "who"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"PMIX_RANK": "3"}, "rank 3 of an MPI launcher"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_crew_refuses_launcher_without_mpi4py(monkeypatch, environment, who):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DataError, match=f"^{who}: started as one of several .*install mpi4py"):
        join_crew(environment)


def test_crew_refuses_launcher_of_another_mpi(source, tmp_path):
    """Otherwise each process would be alone, and build everything."""
    words = worker_words(source, tmp_path / "data", ARGUMENTS)
    code, _, err = outcome(start(words, PMI_SIZE="2", PMI_RANK="0"))  # as MPICH's mpirun says it
    assert code
    assert "DataError: PMI_SIZE=2: started as one of several processes, but mpi4py sees only one" in err
    assert "Open MPI" in err and not any(tmp_path.iterdir())


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("version", ["binary", "python2"])
def test_dataset_by_many_ranks_is_byte_identical(tmp_path, ranks, version):
    """Each rank opens the archive, and only reads the pictures of its own shards."""
    batches = {name: pictures(60, 32, seed) for seed, name in enumerate(CIFAR_BATCHES)}
    given = tarred(tmp_path / "cifar.tar.gz", write_cifar(tmp_path / "cifar-10-batches", batches, version))
    build_dataset("cifar10", given, tmp_path / "alone", unpublished=True, shard_bytes=50_000)
    options = ["--dataset", "cifar10", "--unpublished", "--shard-bytes", "50000", "--input", str(given)]
    words = ["-m", "longstride.launcher.cli", "data", "build", *options, "--output", str(tmp_path / "data")]
    code, _, errors = ended(start(words, ranks))
    assert (code, errors) == (0, [])
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "alone")
