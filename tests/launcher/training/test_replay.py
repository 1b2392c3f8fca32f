"""Which batches a replay takes where the run was rewound on the way."""

import itertools
from pathlib import Path

import pytest
import torch

from longstride.data_pipelines.order.lanes import StreamState
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run import RunSetup
from longstride.launcher.data.run_data import GlobalBatch, TrainingData
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training.guards import Incident, write_incident
from longstride.launcher.training.replay import check_processes, find_record, way_batches
from tests.harness.lines import incident, step_line, write_metrics

ALONE, CPU = Ranks(), torch.device("cpu")


def rewound(step: int, back: int | None, before: StreamState, taken: GlobalBatch) -> Incident:
    """Return the incident of a step that took a batch, and went back to an earlier step."""
    after = taken.part.state.to_json()
    return incident(
        step=step, outcome="rewind" if back else "skip", rewound_to=back, stream=before.to_json(), stream_after=after,
        origin={"step": 0, "stream": before.to_json()}, sample_ids=list(taken.sample_ids),
        sample_ids_crc32=taken.sample_ids_crc32,
    )  # fmt: skip


@pytest.fixture
def config(config_file: Path, tmp_path: Path) -> RunConfig:
    (tmp_path / "run").mkdir()
    return load_config(config_file, [])


@pytest.fixture
def run(config: RunConfig) -> RunSetup:
    return RunSetup(config, ALONE, TrainingData(config, ALONE))


def batches(run: RunSetup, count: int) -> list[GlobalBatch]:
    return list(itertools.islice(run.data.batches(None, 0, CPU), count))


def way(run: RunSetup, count: int) -> list[int]:
    """The check sums of the first batches of a replay from the beginning."""
    taken = way_batches(run, None, find_record(run.folder, count), CPU)
    return [batch.sample_ids_crc32 for batch in itertools.islice(taken, count)]


def write_lines(run: Path, sums: list[int]) -> None:
    write_metrics(run, (step_line(step, sample_ids_crc32=crc32) for step, crc32 in enumerate(sums, 1)))


def test_rewinds_between_the_checkpoint_and_the_step_are_gone_through(run: RunSetup) -> None:
    """Rewound from step 4 to 2, from the new step 5 to 2 again, and from the newest step 6 to 4."""
    start = run.data.stream().state
    taken = batches(run, 14)
    write_incident(run.folder, rewound(4, 2, start, taken[3]))  # steps 3, 4, 5 take batches 5, 6, 7
    write_incident(run.folder, rewound(5, 2, start, taken[6]))  # steps 3 to 6 take batches 8 to 11
    write_incident(run.folder, rewound(6, 4, start, taken[10]))  # steps 5, 6 and 7 take batches 12 to 14
    sums = [taken[number - 1].sample_ids_crc32 for number in (1, 2, 8, 9, 12, 13, 14)]
    write_lines(run.folder, sums)
    assert way(run, 7) == sums
    sums = [each.sample_ids_crc32 for each in taken[:7]]  # begun anew by a person: no rewind lies on this way
    write_lines(run.folder, sums)
    assert way(run, 7) == sums


def test_guarded_step_is_replayed_by_as_many_processes(run: RunSetup) -> None:
    guarded = rewound(3, None, run.data.stream().state, batches(run, 1)[0])
    check_processes(guarded, 2, None)
    shared = guarded.model_copy(update={"sequence_parallel": 2})
    check_processes(shared, 2, 2)
    for taken, others, who in (
        (guarded, [(1, None), (2, 1)], "2 processes"),
        (shared, [(2, 1), (4, 2)], "2 processes, 2 to a context"),
    ):
        line = f"--replay=3: the step was taken by {who}; a replay needs as many"
        for other in others:
            with pytest.raises(ConfigError) as caught:
                check_processes(taken, *other)
            assert str(caught.value) == line
    assert "sequence_parallel" not in guarded.model_dump() and shared.model_dump()["sequence_parallel"] == 2
