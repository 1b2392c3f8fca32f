"""Runs of two processes in which one rank's step is spoilt: what becomes of it is the policy's, on all ranks alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longstride.launcher.checkpoints.manifest import add_digest, read_manifest, write_json
from longstride.launcher.checkpoints.pickles import read_pickle
from longstride.launcher.output import exit_codes
from longstride.launcher.training.guards import read_incidents
from tests.harness.runs import Ended, Run, configuration, metrics, spawn_series
from tests.launcher.conftest import Make
from tests.launcher.training.test_training import MUON

PRECISIONS = ("fp32", "fp16", "bf16")
EVERY = [
    *(
        f"zero{stage}-{precision}{kind}"
        for stage in range(4)
        for precision in PRECISIONS
        for kind in ("", "-muon", "-group")
    ),
    "zero2-bf16-offload",
    "zero3-bf16-offload",
]
BY_STAGE = [pytest.param([n for n in EVERY if f"zero{stage}" in n], marks=pytest.mark.campaign) for stage in range(4)]
SPIKE = 'train.guards.spike={"window": 2, "deviations": 6, "policy": "%s"}'
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Case:
    """A run of a DeepSpeed configuration in a folder of its own."""

    folder: Path
    name: str

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def made(self, data: Path) -> Case:
        """The same, its configuration written."""
        self.folder.mkdir(parents=True)
        content = configuration(data, self.run)
        content["model"]["ngrams"] = {"orders": [2, 3], "rows": 997}
        (self.folder / "run.json").write_text(json.dumps(content))
        return self

    def start(self, *arguments: str, spoil: str | None = None) -> Run:
        """The run's command; ``spoil``: what,rank,first step,last step,how often."""
        parts = self.name.split("-")
        chosen = [f"deepspeed={parts[0]}_{parts[1]}"]
        if "offload" in parts:
            chosen.append("deepspeed.zero_optimization.offload_optimizer.device=cpu")
        if "muon" in parts:
            chosen.append(MUON)
        if "group" in parts:
            chosen.append("train.sequence_parallel=2")
        every = ["--config", str(self.folder / "run.json"), *chosen, *arguments]
        return Run(every, 2, {"SPOIL": spoil} if spoil else {})


def verdicts(ended: Ended) -> list[str]:
    """What the ranks found of each step, which must be the same."""
    told = [[line for line in out.splitlines() if line.startswith("verdict")] for out in ended.stdout]
    assert told[0] == told[1]
    return [line.split(maxsplit=2)[2] for line in told[0]]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if line["split"] == "train"]


def saved_values(run: Path, step: int) -> dict[str, Any]:
    """All that DeepSpeed, n-gram tables and random generators have saved of a step, by file and path within it."""
    folder = run / f"checkpoints/step-{step:08d}"
    found: dict[str, Any] = {}

    def walk(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                walk(f"{place}/{key}", below)
        elif isinstance(value, list | tuple):
            for number, below in enumerate(value):
                walk(f"{place}/{number}", below)
        elif hasattr(value, "cur_scale"):
            walk(place, vars(value))
        else:
            found[place] = value

    for path in sorted(folder.rglob("*.pt")):
        walk(path.name, read_pickle(path))
    for path in sorted(folder.glob("*.safetensors")):
        walk(path.name, load_file(path))
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The places in which two checkpoints differ in a bit."""
    assert one.keys() == other.keys()
    return {
        place
        for place, value in one.items()
        if (not torch.equal(value, other[place]) if isinstance(value, torch.Tensor) else value != other[place])
    }


def kinds_of(name: str) -> list[str]:
    """What can be spoilt; in fp16 gradients that overflow are DeepSpeed's own affair."""
    return ["loss", "spike"] if "fp16" in name else ["loss", "spike", "gradient"]


SKIPS = ["train.steps=6", "train.checkpoint_every=1", "train.guards.non_finite=skip", SPIKE % "skip"]
SAMPLE = (("zero3-bf16-muon", "spike"), ("zero0-fp32", "loss"), ("zero1-fp32-group", "loss"))
REWOUND = "zero2-fp16-group"


@pytest.fixture(scope="session")
def sample(shared: Callable[[str, Make], Path], data: Path) -> tuple[Path, list[Ended]]:
    """The runs of the tests that are no campaign, one after another, made once: their folder, and how they ended."""

    def make(folder: Path) -> None:
        runs = [Case(folder / f"{n}-{kind}", n).made(data).start(*SKIPS, spoil=f"{kind},1,4,4,1") for n, kind in SAMPLE]
        options, spoil = ["train.guards.non_finite=rewind", "train.evaluate_contexts=1"], "loss,1,6,6,1"
        case = Case(folder / REWOUND, REWOUND).made(data)
        runs += [case.start(*options, spoil=spoil), case.start(*options, "--replay", "6", spoil=spoil)]
        runs.append(case.start(*options, "--replay", "8"))
        (folder / "ended.json").write_text(json.dumps([vars(ended) for ended in spawn_series(runs)]))

    folder = shared("guarded", make)
    return folder, [Ended(**each) for each in json.loads((folder / "ended.json").read_text())]


def test_skipped_step_changes_nothing_but_its_count(sample: tuple[Path, list[Ended]]) -> None:
    folder, ended = sample
    for (name, kind), end in zip(SAMPLE, ended, strict=False):
        check_skip(Case(folder / f"{name}-{kind}", name), kind, end)


@pytest.mark.parametrize("names", BY_STAGE)
def test_skipped_step_changes_nothing_in_every_stage(names: list[str], data: Path, tmp_path: Path) -> None:
    cases = [(Case(tmp_path / f"{n}-{kind}", n).made(data), kind) for n in names for kind in kinds_of(n)]
    runs = [case.start(*SKIPS, spoil=f"{kind},1,4,4,1") for case, kind in cases]
    for (case, kind), ended in zip(cases, spawn_series(runs), strict=True):
        check_skip(case, kind, ended)


def check_skip(case: Case, kind: str, ended: Ended) -> None:
    """Weights, moments, average, schedule and loss scale have the same bits before and after the spoilt step 4."""
    assert ended.codes == [0, 0], (case.name, kind, ended.stderr)
    found = verdicts(ended)
    assert found[3].startswith("skip: ") and set(found[:3] + found[4:]) == {"None"}, (case.name, kind)
    changed = {place.rsplit("/", 1)[-1] for place in differences(*(saved_values(case.run, s) for s in (3, 4)))}
    others = {"cpu", "overflow"}  # dropout was drawn for the batch, and DeepSpeed notes how its last step went
    assert changed - others == set(COUNTERS), (case.name, kind)
    assert differences(*(saved_values(case.run, s) for s in (4, 5))) - changed  # and the next step is taken
    lines = lines_of(case.run)
    assert lines[3]["guard"] == found[3] and "guard" not in lines[4]
    assert lines[4]["learning_rate"] == lines[3]["learning_rate"] != lines[2]["learning_rate"]
    assert lines[4]["loss_scale"] == lines[3]["loss_scale"]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert (lines[3]["loss_nats"] is None) == (kind == "loss") and lines[5]["loss_nats"] < lines[2]["loss_nats"]
    (incident,) = read_incidents(case.run).values()
    assert (incident.step, incident.outcome, len(incident.rank_nats)) == (4, "skip", 2)
    assert incident.sample_ids_crc32 == lines[3]["sample_ids_crc32"] and len(incident.sample_ids) == 8


def test_rewound_run_goes_on_behind_the_batch_which_is_replayed(sample: tuple[Path, list[Ended]]) -> None:
    """Step 6 is spoilt: the run goes back to step 4, and its steps 5, 6, … take the batches of 7, 8, …"""
    folder, (*_, ended, again, later) = sample
    case, other = Case(folder / REWOUND, REWOUND), Case(folder / "zero0-fp32-loss", "zero0-fp32")
    assert ended.codes == [0, 0], ended.stderr
    assert verdicts(ended) == [*["None"] * 5, "rewind: the loss is nan", *["None"] * 4]
    lines, undisturbed = lines_of(case.run), [line["sample_ids_crc32"] for line in lines_of(other.run)]
    kept = [json.loads(line) for line in (case.run / "metrics.before-rewind-1.jsonl").read_text().splitlines()]
    assert [line["sample_ids_crc32"] for line in kept if line["split"] == "train"] == undisturbed
    assert kept[-1]["guard"] == "rewind: the loss is nan"
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["sample_ids_crc32"] for line in lines][:4] == undisturbed[:4]
    assert not {line["sample_ids_crc32"] for line in lines[4:]} & set(undisturbed)
    (incident,) = read_incidents(case.run).values()
    assert (incident.rewound_to, incident.stream_after["step"]) == (4, 6)
    saved = read_manifest(case.run / "checkpoints/step-00000008")
    assert saved.stream["step"] == 10 and saved.guards == {"losses": [], "skips_in_a_row": 0, "rewinds": 0, "place": 0}
    assert again.codes == [0, 0] and json.loads(again.stdout[0].splitlines()[-1])["reproduced"], again.stderr
    assert incident.sequence_parallel == 2 and len(incident.rank_nats) == 2
    assert incident.rank_nats[1] == "nan" != incident.rank_nats[0]
    # Each context once, with what both processes have computed of it.
    whole, line = json.loads(later.stdout[0].splitlines()[-1]), lines[7]
    assert whole["reproduced"] and len(whole["contexts"]) == len({each["sample_id"] for each in whole["contexts"]}) == 8
    nats = sum(each["nats"] for each in whole["contexts"])
    assert nats / line["tokens"] == pytest.approx(line["loss_nats"], rel=2**-20)  # fp32 sums of each


def check_replays(case: Case, again: Ended, clean: Ended, later: Ended) -> None:
    """Of step 6 as it was spoilt, of the same unspoilt, and of step 7 behind the rewind."""
    (incident,) = read_incidents(case.run).values()
    assert (again.codes, clean.codes, later.codes) == ([0, 0], [1, 1], [0, 0]), [
        again.stderr,
        clean.stderr,
        later.stderr,
    ]
    reports = [json.loads(each.stdout[0].splitlines()[-1]) for each in (again, clean, later)]
    assert [report["reproduced"] for report in reports] == [True, False, True]
    assert [report["from_step"] for report in reports] == [4, 4, 4]
    assert reports[0]["loss_nats"] == "nan" and reports[0]["sample_ids_crc32"] == incident.sample_ids_crc32
    for report in reports[:2]:
        assert sorted(each["sample_id"] for each in report["contexts"]) == sorted(incident.sample_ids)
    nats = [each["nats"] for each in reports[2]["contexts"]]
    assert nats == sorted(nats, reverse=True)
    assert sum(nats) / 512 == pytest.approx(lines_of(case.run)[6]["loss_nats"], rel=2**-20)  # fp32 sums of each
    assert "another outcome" in clean.stderr[0]


@pytest.mark.parametrize("names", BY_STAGE)
def test_rewound_run_equals_one_resumed_with_the_later_batches(names: list[str], data: Path, tmp_path: Path) -> None:
    """The other run begins in new processes, from the same checkpoint, whose manifest names the batch behind."""
    cases = [Case(tmp_path / name, name).made(data) for name in names]
    options, spoil = ["train.guards.non_finite=rewind"], "loss,1,6,6,1"
    runs = [case.start(*options, spoil=spoil) for case in cases]
    runs += [case.start(*options, "--replay", "6", spoil=spoil) for case in cases]
    runs += [case.start(*options, "--replay", step) for step in ("6", "7") for case in cases]
    ended = spawn_series(runs)
    others = [Case(tmp_path / f"{name}-resumed", name).made(data) for name in names]
    for number, (case, other) in enumerate(zip(cases, others, strict=True)):
        first, *replays = ended[number :: len(cases)]
        assert first.codes == [0, 0], (case.name, first.stderr)
        check_replays(case, *replays)
        shutil.copytree(case.run, other.run)
        shutil.rmtree(other.run / "checkpoints/step-00000008")
        folder = other.run / "checkpoints/step-00000004"
        (incident,) = read_incidents(case.run).values()
        content = read_manifest(folder).model_dump(mode="json") | {"stream": incident.stream_after}
        write_json(folder / "manifest.json", add_digest(content))
    for case, other, resumed in zip(
        cases, others, spawn_series([each.start("--resume", "auto") for each in others]), strict=True
    ):
        assert resumed.codes == [0, 0], resumed.stderr
        assert metrics(other.run) == metrics(case.run), case.name
        assert not differences(saved_values(case.run, 8), saved_values(other.run, 8)), case.name


@pytest.mark.parametrize("names", BY_STAGE)
def test_stopped_run_goes_on_as_if_nothing_had_been(names: list[str], data: Path, tmp_path: Path) -> None:
    """What spoilt the step is gone when the run goes on: every line and bit is the undisturbed run's."""
    whole = [Case(tmp_path / name, name).made(data) for name in names]
    stopped = [(Case(tmp_path / f"{n}-{kind}", n).made(data), kind) for n in names for kind in kinds_of(n)]
    options = ["train.checkpoint_every=5", SPIKE % "stop"]
    runs = [case.start(*options) for case in whole]
    runs += [case.start(*options, "train.checkpoint_every=0", spoil=f"{kind},1,6,6,1") for case, kind in stopped]
    runs += [case.start(*options, "--resume", "auto") for case, _ in stopped]
    ended = spawn_series(runs)
    undisturbed = {case.name: case.run for case in whole}
    for (case, kind), first, second in zip(
        stopped, ended[len(whole) :][: len(stopped)], ended[-len(stopped) :], strict=True
    ):
        place = (case.name, kind)
        assert first.codes == [exit_codes.GUARDED] * 2, (place, first.stderr)
        reason = verdicts(first)[5].removeprefix("stop: the loss ")
        assert f"\nlongstride: stopped by a guard: step 6: the loss {reason}; " in first.stderr[0], place
        assert second.codes == [0, 0], (place, second.stderr)
        assert metrics(case.run) == metrics(undisturbed[case.name]), place
        for step in (5, 8):
            assert not differences(saved_values(case.run, step), saved_values(undisturbed[case.name], step)), place


@pytest.mark.campaign
def test_loss_scale_at_its_floor_meets_the_policy(data: Path, tmp_path: Path) -> None:
    """Gradients overflow from step 3 on: the scale falls from 4,096 to its lowest, 1,024, and at step 5 cannot fall."""
    names = [f"zero{stage}-fp16" for stage in range(4)]
    policies = ("stop", "skip", "rewind")
    cases = {(n, policy): Case(tmp_path / f"{n}-{policy}", n).made(data) for n in names for policy in policies}
    options = ["deepspeed.fp16.initial_scale_power=12", "train.checkpoint_every=2", "train.guards.max_skips_in_a_row=3"]
    runs = [
        case.start(
            *options,
            f"train.guards.loss_scale_floor={policy}",
            spoil="gradient,1,3,8,3" if policy == "rewind" else "gradient,1,3,8,9",
        )
        for (_, policy), case in cases.items()
    ]
    for ((name, policy), case), ended in zip(cases.items(), spawn_series(runs), strict=True):
        floor = "gradients overflow at the lowest loss scale, 1024"
        expected = {
            "stop": [*["None"] * 4, f"stop: {floor}"],
            "skip": [
                *["None"] * 4,
                *[f"skip: {floor}"] * 2,
                f"stop: {floor}; it is step 3 in a row, and train.guards.max_skips_in_a_row=3",
            ],
            "rewind": [*["None"] * 4, f"rewind: {floor}", *["None"] * 4],
        }[policy]
        assert verdicts(ended) == expected, (name, policy, ended.stderr)
        assert ended.codes == [0 if policy == "rewind" else exit_codes.GUARDED] * 2
        if policy != "rewind":
            scales = [line["loss_scale"] for line in lines_of(case.run)]
            assert scales == [4096.0] * 3 + [2048.0] + [1024.0] * (len(expected) - 4)
            last = len(expected) - 1
            assert read_manifest(case.run / f"checkpoints/step-{last:08d}").step == last


@pytest.mark.campaign
def test_replay_without_a_checkpoint_begins_at_the_beginning(data: Path, tmp_path: Path) -> None:
    """Two evaluations and a skipped step lie on the way, and change nothing of it."""
    cases = [Case(tmp_path / name, name).made(data) for name in ("zero0-bf16", "zero3-fp16")]
    options = ["train.guards.non_finite=skip", "train.evaluate_every=2", "data.workers=1"]
    runs = [case.start(*options, spoil="loss,0,3,3,1") for case in cases]
    assert all(ended.codes == [0, 0] for ended in spawn_series(runs))
    for case in cases:
        shutil.rmtree(case.run / "checkpoints")
    for ended in spawn_series([case.start(*options, "--replay", "6", spoil="loss,0,3,3,1") for case in cases]):
        assert ended.codes == [0, 0], ended.stderr
        assert "replaying step 6, from the beginning" in ended.stderr[0]
