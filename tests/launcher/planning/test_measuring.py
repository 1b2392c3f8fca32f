"""`longstride plan --measure`: a step from one block of each kind, against the step of the whole by the same engine."""

import json
from pathlib import Path

import torch

from longstride.launcher.config import load_config
from longstride.launcher.planning.measuring import Timed
from tests.hostile.commands import Commands
from tests.launcher.conftest import Refusal


def test_a_step_is_made_of_its_parts() -> None:
    """Blocks by their kinds, what is around them by the micro-batch, the update by the parameters."""
    kinds = 'model.attention=[{"type": "local", "window": 128}, {"type": "fixed", "stride": 128, "summary": 8}]'
    config = load_config("demo", ["model.layers=2", kinds])
    first, second = config.model.blocks()
    timed = Timed({first: 1.0, second: 10.0}, around=100.0, update=1_000.0, parameters=329_216)
    assert timed.step_seconds(config, 2) == 2 * (1 + 10 + 100) + 1_000
    deeper = load_config("demo", ["model.layers=6", kinds])
    assert 2 * (3 * 11 + 100) + 1_000 < timed.step_seconds(deeper, 2) < 2 * (3 * 11 + 100) + 3_000


def test_a_plan_is_timed_here(commands: Commands, config_file: Path) -> None:
    """In a process of its own, as DeepSpeed remembers a process's group; on two kinds of blocks, of six."""
    words = [str(config_file), "model.layers=6", "--measure", "--json", "--processes", "1", "2"]
    words += ['model.attention={"type": "fixed", "stride": 8, "summary": 2, "combine": "interleaved"}']
    ended = commands("plan", *words, seconds=200.0)
    assert ended.code == 0, ended.err
    plan = json.loads(ended.out.splitlines()[-1])
    pace = plan["pace"]
    assert plan["device"] == ("cuda" if torch.cuda.is_available() else "cpu")  # of what is timed
    one, two = pace["rows"]
    assert pace["origin"] == "by blocks timed on this machine"
    assert 0 < two["step_seconds"] < one["step_seconds"] < 10  # half as many micro-batches each
    assert one["run_seconds"] == 8 * one["step_seconds"]


def test_a_plan_is_not_timed_on_another_device(refusal: Refusal) -> None:
    here, other = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    line = f"--device={other}: --measure times this machine, which computes on {here}; leave one of the two out"
    assert refusal("plan", "paper_small", "--measure", "--device", other) == line
