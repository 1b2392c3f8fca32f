"""A profile: parts of a step that add up, with collectives told from work, and a run that it leaves as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.launcher.training.profile import (
    ATTENTION,
    BACKWARD,
    COLLECTIVES,
    COMPUTES,
    DATA,
    FORWARD,
    LINEAR,
    OPTIMIZER,
    OTHER,
    PARTS,
    REST,
    STEP,
    Interval,
    step_times,
)
from tests.harness.runs import metrics

# One step of 100 µs after something that belongs to none.
TRACE = [
    Interval(0, 10, COMPUTES),
    Interval(10, 110, STEP),
    Interval(10, 20, DATA),
    Interval(12, 18, COLLECTIVES),  # each rank says that it has its batch
    Interval(20, 50, FORWARD),
    *(Interval(25, 35, what) for what in (ATTENTION, COMPUTES)),
    *(Interval(35, 45, what) for what in (LINEAR, COMPUTES)),
    Interval(50, 80, BACKWARD),
    Interval(55, 75, COLLECTIVES),
    Interval(60, 70, COMPUTES),  # while the collective is under way: it costs nothing
    Interval(80, 95, OPTIMIZER),
]


def test_parts_of_a_step_are_told_by_what_goes_on_at_once() -> None:
    times = step_times(TRACE)
    assert times["steps"] == 1
    assert times["seconds"] == pytest.approx(100e-6)
    microseconds = {name: round(1e6 * part["seconds"]) for name, part in times["parts"].items()}
    assert microseconds == {DATA: 4, FORWARD: 30, BACKWARD: 20, COLLECTIVES: 16, OPTIMIZER: 15, OTHER: 15}
    work = {part: [round(1e6 * kinds[kind]["seconds"]) for kind in kinds] for part, kinds in times["work"].items()}
    assert work == {FORWARD: [10, 10, 10], BACKWARD: [0, 0, 20]}


def test_a_run_that_ended_in_its_first_step_has_no_profile() -> None:
    assert step_times(TRACE[:1]) == {"steps": 0}


STAGES = [0, *(pytest.param(stage, marks=pytest.mark.campaign) for stage in (1, 2, 3))]


@pytest.mark.parametrize("stage", STAGES)
def test_profiled_run_is_the_same_run_with_its_steps_told(stage: int, trained: Callable[..., Path]) -> None:
    name, section = f"zero{stage}-fp32", f"deepspeed=zero{stage}_fp32"
    plain, run = trained(name, 2, section), trained(f"{name}-profiled", 2, section, "--profile", "2")
    assert metrics(run) == metrics(plain)  # bit for bit
    told = json.loads((run / "profile/parts.json").read_text())
    assert (told["steps"], told["processes"], told["device"]) == (2, 2, "cpu")
    assert tuple(told["parts"]) == PARTS
    assert sum(part["seconds"] for part in told["parts"].values()) == pytest.approx(told["seconds"])
    assert sum(part["share"] for part in told["parts"].values()) == pytest.approx(1)
    assert all(part["seconds"] > 0 for part in told["parts"].values())
    for part, kinds in told["work"].items():
        assert sum(kind["seconds"] for kind in kinds.values()) == pytest.approx(told["parts"][part]["seconds"])
        assert list(kinds) == [ATTENTION, LINEAR, REST]
    events = json.loads((run / "profile/trace.json").read_text())["traceEvents"]
    marks = [event["name"] for event in events if event["name"].startswith("longstride: ") and event["ph"] == "X"]
    assert marks.count("longstride: step") == 2
    assert any(event["name"].startswith("gloo:") for event in events)


@pytest.mark.parametrize("number", ["0", "-3", "ten"])
def test_profile_of_no_steps_is_refused(number: str, refused: Callable[..., list[str]], config_file: Path) -> None:
    line = f"--profile={number}: must be a number of steps, at least 1; such as 10"
    assert refused("--config", str(config_file), f"--profile={number}") == [line]
