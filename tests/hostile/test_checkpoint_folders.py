"""Checkpoint folders that are damaged or faked: passed over or refused in a line, and never gone on from otherwise."""

import functools
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build
from tests.harness.data.builds import write_files
from tests.harness.runs import configuration, metrics
from tests.hostile.commands import Commands, Outcome, sampled, words_of
from tests.hostile.generators.checkpoints import AROUND, DAMAGED, FAKED, IN_THE_WAY, MODEL, newest

MOST_LINES = 6  # of a manifest with several wrong fields; or of a run without a checkpoint, one for each
VERBS = {
    "auto": "rank --config {config} train.output={run} --resume auto",
    "step": "rank --config {config} train.output={run} --resume {step}",
    "evaluate": "evaluate {run} --step {step}",
    "export": "export {run} --step {step} --output {new}",
    "newest": "export {run} --output {new}",
    "sample": "sample {run}/checkpoints/step-{step:08d} --bytes 4 --device cpu",
}


class Place:
    """A run of eight steps with checkpoints of 4 and 8, its copies, and what honest commands do with one."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self._commands, self._folder = commands, folder
        texts = {f"{number}.txt": f"{number} sparse dense stride byte long ".encode() * 50 for number in range(12)}
        write_files(folder / "texts", texts)
        build([folder / "texts"], folder / "data", validation_fraction=0.2)
        content = configuration(folder / "data", folder / "run")
        self._config = folder / "run.json"
        self._config.write_text(json.dumps(content))
        trained = self._run("auto", folder / "run", 8)
        assert trained.code == 0, trained.err
        self.metrics = metrics(folder / "run")
        self._numbers = itertools.count()
        self.intact = functools.cache(lambda verb: self._run(verb, self.copy(), 8))

    def copy(self) -> Path:
        """Copy the run, to be damaged."""
        return Path(shutil.copytree(self._folder / "run", self._folder / f"run-{next(self._numbers)}"))

    def run(self, verb: str, run: Path, step: int = 8) -> Outcome:
        """Run a verb on a damaged run, within the bounds; a refusal must be in lines, with code 2."""
        lines = run / "metrics.jsonl"
        before = lines.read_bytes() if lines.is_file() and lines.stat().st_size < 2**26 else None
        outcome = self._run(verb, run, step)
        if outcome.code == 0:
            outcome.check_bounded(self.intact(verb))
        else:
            outcome.check_refused(self.intact(verb), most_lines=MOST_LINES)
            assert before is None or lines.read_bytes() == before
        return outcome

    def _run(self, verb: str, run: Path, step: int) -> Outcome:
        names = {"config": self._config, "run": run, "step": step, "new": run / "exported"}
        return self._commands(*words_of(VERBS[verb], **names), folder=self._folder)


@pytest.fixture(scope="module")
def place(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return the working directory of the commands of this file."""
    return Place(commands, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def run(place: Place) -> Iterator[Path]:
    """Copy the run, and remove the copy: some have a sparse terabyte."""
    run = place.copy()
    yield run
    shutil.rmtree(run)


@pytest.mark.parametrize(
    "what",
    sampled(
        DAMAGED,
        [
            "manifest: pipe",
            "manifest: other line ends",
            "manifest: a step of 5,000 digits",
            "says: world_size of 10**12",
            "name: a copy of an older one",
            f"{MODEL}: link to zeros",
        ],
    ),
)
def test_damaged_checkpoint_is_passed_over_and_no_other_content_is_taken(place: Place, run: Path, what: str) -> None:
    DAMAGED[what](run)
    outcome = place.run("auto", run)
    assert outcome.code == 0, outcome.err
    assert "longstride: passed over: " in outcome.err
    going_on = f"continuing from {run}/checkpoints/step-00000004\n"
    finished = f"{run} is finished: step-00000008 is its last;"
    assert f"longstride: {finished if what.startswith('name: ') else going_on}" in outcome.err
    assert metrics(run) == place.metrics
    pointer = run / "checkpoints/latest"
    assert pointer.with_name(pointer.read_text().strip()).is_dir()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "auto"])
@pytest.mark.parametrize("what", sampled(DAMAGED, ["manifest: link to zeros", "probe.npy: pipe"]))
def test_damaged_checkpoint_is_refused_by_its_step(place: Place, run: Path, what: str, verb: str) -> None:
    DAMAGED[what](run)
    is_named = what.startswith("name: ")
    outcome = place.run(verb, run, 99 if is_named and verb != "newest" else 8)
    if verb == "newest" and outcome.code == 0:  # which goes by the manifest, and says what it passes over
        assert "longstride: passed over: " in outcome.err or what == "name: a copy with nine digits"  # which is older
        assert f"step {8 if is_named else 4} of " in outcome.err
    else:
        assert outcome.code == 2 and len(outcome.mistakes) <= (MOST_LINES if verb != "sample" else 1), outcome.err


@pytest.mark.parametrize("verb", ["auto", "step", "evaluate", "export"])
@pytest.mark.parametrize(
    "what", sampled(FAKED, [f"{MODEL}: TorchScript", "a stranger behind a damaged one", "probe: as long as 2**60"])
)
def test_faked_checkpoint_is_refused_or_computes_the_same(place: Place, run: Path, what: str, verb: str) -> None:
    FAKED[what](run)
    outcome = place.run(verb, run, 99 if what.startswith("another step") else 8)
    assert not (newest(run) / "deepspeed/ran").exists() and not (newest(run) / "ran").exists()
    if outcome.code == 0:  # what it is not asked for may be anything, and it may have been passed over
        if verb in ("auto", "step"):
            assert metrics(run) == place.metrics
        elif verb == "evaluate":
            same = ("step", "split", "tokens", "loss_nats")
            line, expected = (json.loads(result.out.splitlines()[-1]) for result in (outcome, place.intact(verb)))
            assert {name: line[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize(
    "what", sampled(AROUND, ["metrics: a step of 5,000 digits", "latest: a link out in the place of its next content"])
)
def test_what_lies_around_changes_nothing(place: Place, run: Path, what: str, step: int) -> None:
    AROUND[what](run)
    outcome = place.run("step", run, step)
    assert outcome.code == 0, outcome.err
    assert metrics(run) == place.metrics
    assert (run / "checkpoints/latest").read_text() == "step-00000008\n"
    assert not (run / "checkpoints/latest").is_symlink()
    if (run / "precious").exists():
        assert (run / "precious").read_text() == "precious"


@pytest.mark.parametrize("verb", ["auto", "evaluate", "newest"])
@pytest.mark.parametrize("what", sampled(IN_THE_WAY, ["metrics: pipe"]))
def test_what_is_in_the_way_is_named(place: Place, run: Path, what: str, verb: str) -> None:
    IN_THE_WAY[what](run)
    outcome = place.run(verb, run)
    if verb == "auto":
        assert outcome.code == 2 and len(outcome.mistakes) == 1, outcome.err
        assert ("metrics.jsonl: " if what.startswith("metrics") else "latest: ") in outcome.mistakes[0]
