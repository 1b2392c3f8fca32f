"""What the guards decide from a step's figures, and the files in which a run tells it."""

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.config import GuardsConfig
from longstride.launcher.config.deepspeed_keys import check_keys
from longstride.launcher.engine.step import Overflow
from longstride.launcher.training.guards import Guards, GuardStopError, read_incidents, spike_reason, write_incident
from longstride.launcher.training.replay import Record, compare, find_record, outcome_line
from tests.harness.lines import incident, step_line, write_metrics

SPIKE = {"deviations": 3, "window": 4, "policy": "skip"}


def guards(memory: dict[str, Any] | None = None, **settings: Any) -> Guards:
    return Guards(GuardsConfig.model_validate(settings), memory)


def take(judge: Guards, step: int, loss: float, overflow: Overflow | None = None) -> str | None:
    """Judges a whole step, as the loop does; the outcome."""
    verdict = judge.judge_loss(loss) or judge.judge_gradients(step, loss, overflow, 1024.0)
    assert judge.verdict == verdict
    return verdict and verdict.outcome


def test_spike_is_held_against_mean_and_deviation_of_the_window_alone() -> None:
    numbers = random.Random(0)
    losses = [100.0, *(numbers.gauss(2.0, 0.1) for _ in range(50))]
    limit = statistics.mean(losses[-20:]) + 4 * statistics.stdev(losses[-20:])
    assert spike_reason(math.nextafter(limit, 0) - 1e-12, losses, 4, 20) is None
    assert spike_reason(limit + 1e-12, losses, 4, 20) is not None
    assert spike_reason(0.0, losses, 4, 20) is None  # lower is better
    assert spike_reason(50.0, losses, 4, 51) is None  # the first loss is within this window
    assert spike_reason(50.0, losses, 4, 52) is None  # which is not full
    assert spike_reason(9.0, [2.0, 2.0, 3.0, 3.0], 3, 4) == "the loss 9 > 2.5 + 3 × 0.57735 of the last 4 steps"


def test_skipped_spikes_do_not_move_the_limit() -> None:
    judge = guards(spike=SPIKE, max_skips_in_a_row=100)
    for step, loss in enumerate((2.0, 2.1, 2.0, 2.1), start=1):
        assert take(judge, step, loss) is None
    assert [take(judge, step, 5.0) for step in range(5, 30)] == ["skip"] * 25
    assert take(judge, 30, 2.05) is None


def test_memory_decides_as_the_guards_that_went_on() -> None:
    """After every step, guards made from what a manifest holds come to the same as those that were there."""
    numbers = random.Random(1)
    judge = guards(spike=SPIKE, max_skips_in_a_row=4)
    for step in range(1, 200):
        loss = 50.0 if step % 7 < 2 else numbers.gauss(2.0, 0.3)
        again = guards(json.loads(json.dumps(judge.memory())), spike=SPIKE, max_skips_in_a_row=4)
        assert take(again, step, loss) == take(judge, step, loss)
        assert again.verdict == judge.verdict and again.memory() == judge.memory()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["skip", "rewind", "stop"])
def test_loss_that_is_no_number_meets_its_policy(loss: float, policy: str) -> None:
    assert take(guards(non_finite=policy), 1, loss) == policy


def test_skipping_for_ever_ends_the_run() -> None:
    judge = guards(non_finite="skip", max_skips_in_a_row=3)
    assert [take(judge, step, math.nan) for step in (1, 2)] == ["skip", "skip"]
    assert take(judge, 3, 2.0) is None  # in a row alone
    assert [take(judge, step, 2.0, Overflow.GRADIENT) for step in (4, 5, 6)] == ["skip", "skip", "stop"]
    assert judge.verdict is not None
    assert judge.verdict.reason == (
        "the loss is finite, but its gradients are not; it is step 3 in a row, and train.guards.max_skips_in_a_row=3"
    )
    assert take(judge, 6, math.nan) == "stop"  # a run that goes on from there has not moved


def test_loss_scale_that_falls_is_no_fault_and_one_that_cannot_is() -> None:
    judge = guards(max_skips_in_a_row=3)
    assert [take(judge, step, 2.0, Overflow.SCALE) for step in range(1, 33)] == [None] * 32
    assert take(judge, 33, 2.0, Overflow.FLOOR) == "stop"
    assert take(guards(loss_scale_floor="rewind"), 1, 2.0, Overflow.FLOOR) == "rewind"


def test_fixed_loss_scale_may_overflow_but_not_for_ever() -> None:
    judge = guards(max_skips_in_a_row=3)
    outcomes = [take(judge, step, 2.0, Overflow.FIXED) for step in (1, 2)]
    outcomes.append(take(judge, 3, 2.0))
    outcomes += [take(judge, step, 2.0, Overflow.FIXED) for step in (4, 5, 6)]
    assert outcomes == [None, None, None, None, None, "stop"]


def test_rewinds_are_counted_until_the_run_gets_beyond_the_place() -> None:
    judge = guards(non_finite="rewind", max_rewinds=2)
    assert take(judge, 9, math.nan) == "rewind"
    judge.rewound(9, {"losses": []})
    assert take(judge, 8, math.nan) == "rewind"  # before the place: no progress
    judge.rewound(8, None)
    assert take(judge, 9, 2.0) is None
    assert take(judge, 10, math.nan) == "stop"
    assert judge.verdict is not None and judge.verdict.reason.endswith("max_rewinds=2 did not get beyond step 9")
    assert take(judge, 10, 2.0) is None  # beyond it
    assert take(judge, 11, math.nan) == "rewind"


def test_stop_tells_step_figure_policy_and_the_way_on() -> None:
    judge = guards()
    take(judge, 7, math.nan)
    assert judge.verdict is not None
    assert str(GuardStopError(7, judge.verdict)) == (
        "step 7: the loss is nan; --replay 7 shows the batch; --resume auto train.guards.non_finite=skip continues "
        "without it, =rewind from the last checkpoint"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--replay", "0"], "--replay=0: must be the number of a step, at least 1"),
        (["--replay", "last"], "--replay=last: must be the number of a step, at least 1"),
        (["--replay", "3", "--resume", "auto"], "--resume=auto: a replay chooses its own checkpoint; leave it out"),
        (["--replay", "3"], "train.output=RUN: holds no run to replay a step of; name one that does"),
    ],
)
def test_replay_that_cannot_be_is_refused(
    options: list[str], line: str, refused: Callable[..., list[str]], config_file: Path, tmp_path: Path
) -> None:
    told = refused("--config", str(config_file), *options)
    assert [each.replace(json.dumps(str(tmp_path / "run")), "RUN") for each in told] == [line]


def test_what_finds_wrong_gradients_cannot_be_switched_off() -> None:
    section = {
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"compute_grad_norm": False},
    }
    with pytest.raises(ConfigError) as found:
        check_keys(section)
    assert [problem.path for problem in found.value.problems] == [
        "bf16.check_grad_overflow",
        "zero_optimization.compute_grad_norm",
    ]


def test_incidents_of_one_step_stand_side_by_side_and_read_back(tmp_path: Path) -> None:
    written = [incident(tokens=number) for number in range(12)]
    paths = [write_incident(tmp_path, each) for each in written]
    assert [path.name for path in paths[:3]] == ["step-00000005.json", "step-00000005-2.json", "step-00000005-3.json"]
    assert list(read_incidents(tmp_path).values()) == written[::-1]
    assert math.isnan(float(written[0].loss_nats)) and float(written[0].rank_nats[1]) == -math.inf
    json.loads(paths[0].read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def test_record_of_a_step_is_the_newest_file_of_a_guard_or_the_line(tmp_path: Path) -> None:
    write_metrics(tmp_path, map(step_line, (5, 6)))
    write_incident(tmp_path, incident())
    newest = write_incident(tmp_path, incident(sample_ids_crc32=18))
    found = find_record(tmp_path, 5)
    assert found is not None and found.source == str(newest) and found.figures["sample_ids_crc32"] == 18
    line = find_record(tmp_path, 6)
    assert line is not None and line.incident is None and line.figures["sample_ids_crc32"] == 6
    assert find_record(tmp_path, 7) is None


def test_replay_is_the_same_only_where_every_figure_is() -> None:
    figures = {"loss_nats": "nan", "grad_norm": None, "sample_ids_crc32": 17}
    report = {"step": 5, "guard": None} | figures
    recorded = Record("metrics.jsonl", figures, None)
    assert compare(report, recorded)["reproduced"] is True
    for name, other in (("loss_nats", 2.0), ("grad_norm", 1.0), ("sample_ids_crc32", 18)):
        different = compare(report | {name: other}, recorded)
        assert different["reproduced"] is False
        assert (
            outcome_line(different)
            == f"step 5: another outcome than in metrics.jsonl: {name} {other} instead of {figures[name]}"
        )
    assert compare(report, None)["reproduced"] is None
