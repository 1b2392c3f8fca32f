"""Kills, disks that fail and power cuts under verbs that make files: what they make is complete or absent.

A retry makes the same bytes as an undisturbed run and leaves nothing else, or says in one line what to do.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from longstride.data_pipelines.building import build
from longstride.data_pipelines.shards import index_tars
from tests.harness.data.tars import write_shards, write_tar
from tests.harness.processes.forked import ForkServer
from tests.harness.runs import UNEQUAL, configuration
from tests.harness.tiny_models import random_export
from tests.hostile.commands import Commands
from tests.hostile.generators.faults import FAULTS, Disk, spread
from tests.hostile.generators.files import write_words


class Verb(NamedTuple):
    """A command line whose outputs lie below {place}; what it reads, and must not change, lies in {inputs}."""

    line: str
    outputs: tuple[str, ...]
    copied_input: str | None = None  # copied into the place before


VERBS = {
    "data build": Verb("data build {inputs}/sources --output {place}/made/data --shard-bytes 4000", ("made/data",)),
    "data index": Verb("data index {place}/tars --output {place}/tars --split train=*", ("tars",), copied_input="tars"),
    "data index elsewhere": Verb("data index {inputs}/tars --output {place}/made/data --split train=*", ("made/data",)),
    "data index --unpack": Verb("data index {inputs}/packed --unpack --output {place}/data --split train=*", ("data",)),
    "export": Verb("export {trained} --output {place}/made/model --shard-size 50KB", ("made/model",)),
    "export --format": Verb("export {inputs}/model --format pt2 --no-check --output {place}/program", ("program",)),
    "compress": Verb("compress {inputs}/short --model {inputs}/model --output {place}/made.lsz", ("made.lsz",)),
    "decompress": Verb("decompress {inputs}/short.lsz --model {inputs}/model --output {place}/made", ("made",)),
    "show": Verb("show pattern paper_small --output {place}/made.png", ("made.png",)),
    "report": Verb("report {trained} --quick --output {place}/made.html", ("made.html",)),
    "slurm": Verb(
        "slurm --config demo --nodes 2 --processes-per-node 1 --time 1:00:00 --output-dir {place}/made --job-name job",
        ("made/job.sbatch",),
    ),
    "evaluate": Verb("evaluate {trained} --positions {place}/made.png", ("made.png", "made.json")),
    "probe": Verb("probe {inputs}/model --data {inputs}/labelled --output {place}/made/probe", ("made/probe",)),
}
SAMPLE = ("data build", "data index", "compress")
MEASURED = "made.json"  # of `evaluate`: beside the scores it has the seconds that they took
MOST = 24  # operations of a verb that the campaign tries, spread over all


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """Create the inputs of the verbs."""
    folder = tmp_path_factory.mktemp("inputs")
    write_words(folder / "sources")
    random_export(folder / "model")
    (folder / "short").write_bytes(bytes(range(60)))
    compressed = commands("compress", folder / "short", "--model", folder / "model", "--output", folder / "short.lsz")
    assert compressed.code == 0, compressed.err
    write_shards(folder / "tars", samples=(2, 3))
    for split in ("train", "validation"):
        members = [(f"{label}.{kind}", b"%d" % label) for label in range(2) for kind in ("txt", "cls")]
        write_tar(folder / "labelled" / f"{split}.tar", members)
    index_tars([str(folder / "labelled")], folder / "labelled", labels=True)
    (folder / "packed").mkdir()
    for tar in (folder / "tars").iterdir():
        (folder / "packed" / f"{tar.name}.gz").write_bytes(gzip.compress(tar.read_bytes(), mtime=0))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    """Train a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    build([inputs / "sources"], folder / "data", validation_fraction=0.2)
    (folder / "run.json").write_text(json.dumps(configuration(folder / "data", folder / "run")))
    with ForkServer(folder) as server:
        assert server.run(["--config", str(folder / "run.json"), "train.steps=4"], 1) == [0], server.stderr()
    return folder / "run"


class Accidents:
    """One verb, and what becomes of it and of the next try."""

    def __init__(self, commands: Commands, verb: Verb, words: list[str], inputs: Path, place: Path) -> None:
        self._commands, self._verb, self._words, self._inputs, self._place = commands, verb, words, inputs, place
        self._prepare()
        outcome = commands(*words, fault=(place, "kill before", 0))
        assert outcome.code == 0, outcome.err
        self.count = len(commands.log())  # of operations: a record has no more than those that changed something
        self._expected = contents(place)
        self._prepare()
        self._disk = Disk(place)
        assert commands(*words, fault=(place, "record", 0)).code == 0
        self.record = commands.log()
        assert contents(place) == self._expected

    def fault(self, kind: str, number: int) -> None:
        """Run the verb with a fault at one of its operations, then again without."""
        self._prepare()
        outcome = self._commands(*self._words, fault=(self._place, kind, number))
        where = f"{kind} at {number} of {self.count}: {self._commands.log()[number - 1]}\n{outcome.err}"
        if "kill" in kind:
            assert outcome.code == -9, where
        elif outcome.code == 0:
            assert all(self._is_complete(output) for output in self._verb.outputs), where
        else:
            outcome.check_refused()
        self._check_retry(where)

    def power_cut(self, number: int, seed: int | None) -> None:
        """Restore what a power cut after so many operations leaves, and run the verb again.

        Without a seed, only flushed data remain.
        """
        where = self._disk.cut(self.record, number, seed)
        if number == len(self.record):  # it was said to be done
            assert all(self._is_complete(output) for output in self._verb.outputs), where
        self._check_retry(where)

    def _prepare(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        if self._verb.copied_input:
            shutil.copytree(self._inputs / self._verb.copied_input, self._place / self._verb.copied_input)

    def _is_complete(self, output: str) -> bool:
        def below(files: dict[str, object]) -> dict[str, object]:
            return {name: content for name, content in files.items() if f"{name}/".startswith(f"{output}/")}

        return below(contents(self._place)) == below(self._expected)

    def _check_retry(self, where: str) -> None:
        files = contents(self._place)
        for output in self._verb.outputs:
            is_there = (self._place / output).exists() and output != self._verb.copied_input
            assert not is_there or self._is_complete(output), f"{where}: neither complete nor absent: {sorted(files)}"
        retry = self._commands(*self._words)
        if retry.code != 0:  # an output is complete: it is not overwritten, and the line says so
            complete = [output for output in self._verb.outputs if (self._place / output).exists()]
            refusal = retry.check_refused()
            assert complete and " already" in refusal, f"{where}\n{sorted(files)}\n{refusal}"
            if len(complete) < len(self._verb.outputs):
                (self._place / complete[0]).unlink()
                assert self._commands(*self._words).code == 0, where
        final = contents(self._place)
        assert final == self._expected, f"{where}: {sorted(final)} {sorted(self._expected)}"


def contents(folder: Path) -> dict[str, object]:
    """Return every file and empty folder by its relative path, without the hidden ones that a killed process leaves."""
    files: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file():
            files[name] = json.loads(path.read_bytes()) if name == MEASURED else path.read_bytes()
        elif not any(path.iterdir()):
            files[name] = None
    if isinstance(measured := files.get(MEASURED), dict):
        files[MEASURED] = {key: value for key, value in measured.items() if key not in UNEQUAL}
    return {name: content for name, content in files.items() if ".partial" not in name}


@pytest.fixture
def accidents(commands: Commands, inputs: Path, tmp_path: Path, name: str, request: pytest.FixtureRequest) -> Accidents:
    """Return the accidents of a verb by its name."""
    verb, place = VERBS[name], tmp_path / "place"
    run = request.getfixturevalue("trained") if "{trained}" in verb.line else None
    words = verb.line.format(inputs=inputs, place=place, trained=run).split()
    return Accidents(commands, verb, words, inputs, place)


@pytest.mark.parametrize("name", SAMPLE)
def test_what_verbs_make_is_complete_or_absent(accidents: Accidents, name: str) -> None:
    """Place the faults towards the end, where the result gets its name."""
    accidents.fault("kill before", accidents.count - 1)
    accidents.fault("ENOSPC", accidents.count // 2)
    accidents.power_cut(len(accidents.record), None)
    accidents.power_cut(len(accidents.record) - 2, 1)


@pytest.mark.campaign
@pytest.mark.parametrize("name", VERBS)
def test_what_verbs_make_is_complete_or_absent_after_all_accidents(accidents: Accidents, name: str) -> None:
    done = 0
    for number in spread(accidents.count, MOST):
        for kind in FAULTS:
            accidents.fault(kind, number)
            done += 1
    for number in spread(len(accidents.record), MOST):
        for seed in (None, 2 * number, 2 * number + 1):
            accidents.power_cut(number, seed)
            done += 1
    print(f"{name}: {done} accidents at {accidents.count} operations")
