"""Kills, disks that fail and power cuts in runs: none costs more than the steps after the newest checkpoint.

The runs save, resume from the newest or an earlier checkpoint or in another layout, or are rewound by a guard.
Checkpoints and lines are judged without Longstride's own code. The next `--resume auto` ends with the lines of an
undisturbed run.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longstride.data_pipelines.building import build
from longstride.launcher.checkpoints import open_checkpoint
from tests.harness.processes.forked import ForkServer
from tests.harness.runs import UNEQUAL, configuration
from tests.hostile.generators.faults import FAULTS, Disk, spread
from tests.hostile.generators.files import write_words

STEPS = 6
PLAIN = (f"train.steps={STEPS}", "train.evaluate_every=3", "train.evaluate_contexts=1", "train.checkpoint_every=2")


class Story(NamedTuple):
    """A run in which something happens.

    ``start``: the state of the run folder before it: a "whole" run of STEPS steps, a "torn" one, or none.
    ``floor``: the step of a checkpoint that no accident may lose.
    """

    changes: tuple[str, ...] = ()
    resume: str = "auto"
    start: str | None = None
    ranks: int = 1
    spoil: str | None = None
    floor: int = 0


STORIES = {
    "saving": Story(("train.keep_last=1", "deepspeed=zero2_fp32"), ranks=2),
    "saving in the background": Story(
        ("train.keep_last=1", "train.checkpoint_in_background=true", "deepspeed=zero1_fp32"), ranks=2
    ),
    "saving shared contexts": Story(
        ("train.keep_last=1", "train.sequence_parallel=2", "deepspeed=zero3_fp32"), ranks=2
    ),
    "saving the best": Story(
        ("train.keep_last=1", "train.keep_best=1", "train.evaluate_every=1", "train.checkpoint_every=0")
    ),
    "going on": Story(start="torn", floor=4),
    "going on from an earlier step": Story(resume="2", start="whole", floor=2),
    "going on in another layout": Story(("deepspeed=zero2_fp32",), start="torn", floor=4),
    "rewinding": Story(("train.guards.non_finite=rewind", "deepspeed=zero2_fp32"), ranks=2, spoil="loss,1,5,5,1"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks the ranks."""
    with ForkServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Path:
    """Create data, and a run of STEPS steps with a checkpoint at every second step."""
    folder = tmp_path_factory.mktemp("inputs")
    write_words(folder / "sources")
    build([folder / "sources"], folder / "data", validation_fraction=0.2)
    (folder / "run.json").write_text(json.dumps(configuration(folder / "data", folder / "whole")))
    assert server.run(["--config", str(folder / "run.json"), *PLAIN], 1) == [0], server.stderr()
    return folder


class Accidents:
    """A story in a place of its own, what becomes of it, and how the run goes on."""

    def __init__(self, server: ForkServer, inputs: Path, story: Story, place: Path) -> None:
        self._server, self._inputs, self._story, self._place = server, inputs, story, place
        self._run = place / "run"
        self._words = ["--config", str(inputs / "run.json"), *PLAIN, *story.changes, f"train.output={self._run}"]
        self._expected_from_2: list[dict[str, Any]] = []
        self.counts: list[int] = []  # of operations, by the rank; a record has those that changed something
        for rank in range(story.ranks):
            self._prepare()
            self._act({"rank": rank, "folder": str(place), "kind": "kill before", "number": 0}, 0)
            self.counts.append(len(server.log()))
        self._prepare()
        self._disk = Disk(place)
        self._act({"rank": None, "folder": str(place), "kind": "record", "number": 0}, 0)
        self.record = server.log()
        self._expected = lines(self._run)
        train = [line["step"] for line in self._expected if line["split"] == "train"]
        assert train == list(range(1, STEPS + 1))

    def fault(self, kind: str, number: int, rank: int = 0) -> None:
        """Run with a fault at an operation of a rank, and resume the run."""
        self._prepare()
        codes = self._act({"rank": rank, "folder": str(self._place), "kind": kind, "number": number})
        log = self._server.log()
        where = f"{kind} at {number} of {self.counts[rank]}, rank {rank}: {codes} {log[min(number, len(log)) - 1]}"
        where = f"{where}\n{self._stderr()}"
        # In the background threads share the operations of a rank: another run of it may have a few less.
        assert "kill" not in kind or codes[rank] == -9 or len(log) < number, where
        assert "kill" in kind or "Traceback" not in self._stderr(), where
        self._check(where)

    def power_cut(self, number: int, seed: int | None) -> None:
        """Restore what a power cut after so many operations leaves, and resume the run."""
        where = self._disk.cut(self.record, number, seed)
        if number == len(self.record):
            assert newest(self._run) == STEPS, where
        self._check(where)

    def _prepare(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        if self._story.start:
            shutil.copytree(self._inputs / "whole", self._run)
        if self._story.start == "torn":
            shutil.rmtree(self._run / "checkpoints" / f"step-{STEPS:08d}")
            text = (self._run / "metrics.jsonl").read_text()
            (self._run / "metrics.jsonl").write_text(text[: len(text) - 30])

    def _act(self, fault: dict[str, Any] | None, code: int | None = None, resume: str | None = None) -> list[int]:
        words = [*self._words, "--resume", resume or self._story.resume]
        codes = self._server.run(words, self._story.ranks, fault=fault, spoil=self._story.spoil)
        assert code is None or codes == [code] * self._story.ranks, self._stderr()
        return codes

    def _stderr(self) -> str:
        return "\n".join(self._server.stderr(rank)[-3000:] for rank in range(self._story.ranks))

    def _expected_lines(self) -> list[dict[str, Any]]:
        """Return the lines of an undisturbed run, or of one that was rewound to step 2."""
        incidents = sorted((self._run / "guards").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        if not incidents or json.loads(incidents[-1].read_bytes())["rewound_to"] != 2:
            return list(self._expected)
        if not self._expected_from_2:  # as step 4 could not be saved
            run = self._place / "from-2"
            failing = {"rank": 0, "steps": [4], "bytes": 30_000, "folder": "", "stop": None}
            words = [*self._words, f"train.output={run}"]
            codes = self._server.run(words, self._story.ranks, failing=failing, spoil=self._story.spoil)
            assert set(codes) == {0}, self._stderr()
            self._expected_from_2 = lines(run)
        return list(self._expected_from_2)

    def _check(self, where: str) -> None:
        step = newest(self._run)
        assert step >= self._story.floor, f"{where}: step {step} is the newest"
        written = [line for line in lines(self._run) if line["step"] <= step]
        expected = [line for line in self._expected_lines() if line["step"] <= step]
        if written != expected and expected and expected[-1]["split"] != "train" and expected[-1]["step"] == step:
            del expected[-1]  # an evaluation comes after the save of its step: it is made up for
        assert written == expected, f"{where}: lines to step {step} are {written}"
        if step and "train.keep_best=1" in self._story.changes:
            open_checkpoint(self._run, "best").verify()
        codes = self._act(None, resume="auto")
        assert set(codes) == {0}, f"{where}\n---- next try\n{self._stderr()}"
        going_on = f"continuing from {self._run / 'checkpoints'}/step-{step:08d}\n"
        if step == STEPS:
            going_on = f"{self._run} is finished: step-{step:08d} is its last;"
        assert (going_on in self._stderr()) == (step > 0), f"{where}\n---- next try\n{self._stderr()}"
        assert lines(self._run) == self._expected_lines(), where
        assert newest(self._run) == STEPS, where
        assert not list((self._run / "checkpoints").glob(".*")), where


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, without fields that differ between equal runs."""
    path = run / "metrics.jsonl"
    records = []
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            line = json.loads(text) if text.endswith(b"\n") else None
        except ValueError:
            line = None
        if line is not None:
            records.append({key: value for key, value in line.items() if key not in UNEQUAL})
    return records


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint, or 0, and check that all checkpoints are intact."""
    steps = [0]
    for folder in (run / "checkpoints").glob("step-????????"):
        manifest = json.loads((folder / "manifest.json").read_bytes())
        files = {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file() and path != folder / "manifest.json"
        }
        assert files == {name: file["sha256"] for name, file in manifest["files"].items()}, folder
        assert folder.name == f"step-{manifest['step']:08d}"
        steps.append(manifest["step"])
    return max(steps)


@pytest.fixture
def accidents(server: ForkServer, inputs: Path, tmp_path: Path, name: str) -> Accidents:
    """Return the accidents of a story by its name."""
    return Accidents(server, inputs, STORIES[name], tmp_path / "place")


@pytest.mark.parametrize("name", ["going on from an earlier step"])
def test_accidents_cost_a_run_only_what_was_not_saved(accidents: Accidents, name: str) -> None:
    (count,), recorded = accidents.counts, len(accidents.record)
    accidents.fault("kill before", count // 8)  # while it goes back
    accidents.fault("kill after", count // 2)  # in a save
    accidents.fault("EIO", count // 4)
    accidents.power_cut(recorded // 8, 0)
    accidents.power_cut(2 * recorded // 3, None)


@pytest.mark.campaign
@pytest.mark.parametrize("name", STORIES)
def test_many_accidents_cost_a_run_only_what_was_not_saved(accidents: Accidents, name: str) -> None:
    done = 0
    for kind in FAULTS:
        for rank, count in enumerate(accidents.counts):
            is_save_killed = kind == "kill before" and name.startswith("saving")  # at every operation
            for number in range(1, count + 1) if is_save_killed else spread(count, 6 // len(accidents.counts)):
                accidents.fault(kind, number, rank)
                done += 1
    for number in spread(len(accidents.record), 10):
        for seed in (None, 2 * number, 2 * number + 1):
            accidents.power_cut(number, seed)
            done += 1
    print(f"{name}: {done} accidents at {accidents.counts} operations of the ranks")
