"""Exports, checkpoints and compressed files that anybody may have made: refused in a line, or the honest result."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import ROOT
from tests.hostile.commands import Commands, Outcome
from tests.hostile.generators.files import HOSTILE_JSON, NO_FILES, replace, sparse
from tests.hostile.generators.models import (
    COMPRESSED,
    INDEXES,
    SIZES,
    WEIGHTS,
    hostile_models,
    set_model,
    shard,
)
from tests.hostile.generators.pickles import PICKLES, seal

MADE = ROOT / "tests/made_before"
STEP = "checkpoints/step-00000004"
MODELS = dict(hostile_models())
OF_NO_TENSOR = ("attention", "rotary", "norm_epsilon")  # keys that change what is computed, and no shape
MOST_LINES = 5  # a configuration's wrong fields have a line each
# Of an export {model}, into {new}. No machine has the address of `serve`, so that it ends where all is loaded.
OF_EXPORTS: dict[str, tuple[str, ...]] = {
    "sample": ("sample", "{model}", "--bytes", "8", "--temperature", "0", "--device", "cpu", "--output", "{new}"),
    "likelihood": ("sample", "{model}", "--likelihood", "{poem}", "--device", "cpu"),
    "compress": ("compress", "{poem}", "--model", "{model}", "--output", "{new}"),
    "decompress": ("decompress", "{lsz}", "--model", "{model}", "--output", "{new}"),
    "serve": ("serve", "{model}", "--host", "192.0.2.1", "--port", "0", "--device", "cpu"),
    "program": ("export", "{model}", "--format", "pt2", "--output", "{new}"),
    "refresh": ("export", "{model}", "--refresh"),
}
# Of a run {run}; the data of its configuration lie in the working directory.
OF_RUNS: dict[str, tuple[str, ...]] = {
    "export": ("export", "{run}", "--output", "{new}"),
    "evaluate": ("evaluate", "{run}"),
    "attention": ("show", "attention", "{run}", "--output", "{new}.png"),
    "pattern": ("show", "pattern", "{run}", "--text", "{poem}", "--output", "{new}.png"),
}
SAMPLED = (  # of the configurations; the others are the campaign's
    "layers of 10**9",
    "heads of 2**40",
    "width of 2**40",
    "context of 38 digits",
    "as many layers as may be",
    "as wide as may be",
    "as long as may be, and prime",
)


def _untimed(out: str, made: bytes) -> tuple[str, bytes]:
    """Return the output of a command without the seconds of a score."""
    return re.sub(r'"seconds": [0-9.e-]+', "", out), made


class Place:
    """A folder with what commands of exports and of runs need, and the honest outcome of each."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands, self.folder = commands, folder
        self.poem, self.lsz = MADE / "poem.txt", folder / "poem.lsz"
        (folder / "data").mkdir()
        shutil.copytree(MADE / "text", folder / "data/text")
        made = commands("compress", self.poem, "--model", MADE / "model", "--output", self.lsz)
        assert made.code == 0, made.err
        self._honest: dict[str, tuple[Outcome, bytes]] = {}
        self._numbers = itertools.count()

    def copy(self, name: str) -> Path:
        """Copy the result of an honest command, to be damaged."""
        return Path(shutil.copytree(MADE / name, self.folder / f"{name}-{next(self._numbers)}"))

    def honest(self, verb: str) -> tuple[Outcome, bytes]:
        """Run a verb on the intact result."""
        if verb not in self._honest:
            which = "model" if verb in OF_EXPORTS else "zero2_fp32"
            self._honest[verb] = self._run(verb, self.copy(which), None)
        return self._honest[verb]

    def check(self, verb: str, source: Path, *, lsz: Path | None = None, other: bool = False) -> Outcome:
        """Runs a verb on what is spoilt: it is refused, or does what the honest one does.

        ``other``: it may be another model, with the same tensors, which is computed as it says.
        """
        honest, expected = self.honest(verb)
        outcome, made = self._run(verb, source, lsz)
        outcome.check_bounded(honest)
        if outcome.code == 0:
            assert verb != "serve", outcome
            assert other or _untimed(outcome.out, made) == _untimed(honest.out, expected), outcome
        else:
            assert outcome.code == 2, f"{outcome.words}: {outcome.code}\n{outcome.err[-2000:]}"
            assert 1 <= len(outcome.mistakes) <= MOST_LINES, outcome.err[-2000:]
            assert max(map(len, outcome.mistakes)) <= 1000, outcome.err[:3000]
            assert not made, f"{outcome.words}: leaves a file"
        return outcome

    def _run(self, verb: str, source: Path, lsz: Path | None) -> tuple[Outcome, bytes]:
        new = self.folder / f"new-{next(self._numbers)}"
        names = {"model": source, "run": source, "new": new, "poem": self.poem, "lsz": lsz or self.lsz}
        words = (OF_EXPORTS | OF_RUNS)[verb]
        outcome = self.commands(*(word.format(**names) for word in words), folder=self.folder)
        made = b""
        for path in (new, new.with_suffix(".png"), new / "model.safetensors"):
            made += path.read_bytes() if path.is_file() else b""
        shutil.rmtree(new, ignore_errors=True)
        return outcome, made


@pytest.fixture(scope="module")
def place(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return the working directory of the commands of this file."""
    return Place(commands, tmp_path_factory.mktemp("models"))


def cases(table: dict[str, Any], *sampled: str) -> list[Any]:
    """Return all cases of a table; those outside the sample run only in the campaign."""
    return [pytest.param(name, marks=() if name in sampled else pytest.mark.campaign) for name in table]


def of_each(verbs: dict[str, Any], table: dict[str, Any], sampled: str, verb: str) -> list[Any]:
    """Combine each case of a table with a verb, in turn; the sample is one pair."""
    pairs = zip(itertools.cycle(verbs), table, strict=False)
    campaign = [pytest.param(*pair, marks=pytest.mark.campaign) for pair in pairs]
    return [pytest.param(verb, sampled), *campaign]


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        *zip(itertools.cycle(list(OF_EXPORTS)[:5]), SAMPLED, strict=False),  # a program takes seconds
        *of_each(OF_EXPORTS, MODELS, "vocabulary of 2**31", "sample"),
    ],
)
def test_configuration_of_an_export(place: Place, verb: str, what: str) -> None:
    model = place.copy("model")
    set_model(model / "config.json", MODELS[what])
    place.check(verb, model, other=what.startswith(OF_NO_TENSOR))


@pytest.mark.parametrize("what", cases(MODELS, *SAMPLED))
def test_configuration_of_a_plan(commands: Commands, tmp_path: Path, what: str) -> None:
    """Refuse what is not a network; plan any other without needing more memory than the plan says."""
    content = json.loads((MADE / "zero2_fp32/config.json").read_text())
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content | {"model": MODELS[what](content["model"])}))
    outcome = commands("plan", path, "--contexts", "1000")
    outcome.check_bounded()
    assert outcome.code in (0, 2), outcome.err[-2000:]
    assert outcome.code == 0 or 1 <= len(outcome.mistakes) <= MOST_LINES, outcome.err[-2000:]
    assert all(len(line) <= 1000 for line in outcome.mistakes), outcome.err[:3000]


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        *(("evaluate", what) for what in SAMPLED[-3:-1]),
        *of_each(
            OF_RUNS,
            {name: None for name in MODELS if name.partition(" ")[0] in SIZES or " of " not in name},
            "layers of 10**9",
            "export",
        ),
    ],
)
def test_configuration_of_a_checkpoint(place: Place, verb: str, what: str) -> None:
    """Give the checkpoint a valid manifest and valid hashes, as an attacker would."""
    run = place.copy("zero2_fp32")
    set_model(run / STEP / "config.json", MODELS[what])
    seal(run / STEP)
    place.check(verb, run)


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("sample", "a header of 100 MB"),
        ("compress", "a terabyte behind it"),
        *of_each(OF_EXPORTS, WEIGHTS, "offsets that overlap", "sample"),
    ],
)
def test_weights_of_an_export(place: Place, verb: str, what: str) -> None:
    model = place.copy("model")
    WEIGHTS[what](model / "model.safetensors")
    place.check(verb, model)


@pytest.mark.parametrize(("verb", "what"), of_each(OF_EXPORTS, INDEXES, "a file outside", "sample"))
def test_index_of_an_export(place: Place, verb: str, what: str) -> None:
    model = place.copy("model")
    INDEXES[what](model)
    place.check(verb, model)


@pytest.mark.campaign
def test_an_index_of_one_file_is_an_export(place: Place) -> None:
    model = place.copy("model")
    shard(model)
    assert place.check("sample", model).code == 0


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("model.safetensors", "pipe"),
        *(
            pytest.param(file, what, marks=pytest.mark.campaign)
            for file in ("config.json", "model.safetensors", "model.safetensors.index.json")
            for what in (*NO_FILES, *(HOSTILE_JSON if file != "model.safetensors" else ()))
        ),
    ],
)
def test_files_of_an_export(place: Place, file: str, what: str) -> None:
    model = place.copy("model")
    if file == "model.safetensors.index.json":
        shard(model)
    if what in NO_FILES:
        replace(model / file, what)
    else:
        (model / file).write_bytes(HOSTILE_JSON[what]())
    assert place.check("sample", model).code == 2


@pytest.mark.campaign
@pytest.mark.parametrize("key", ["data", "fingerprint", "origin", "dtype", "format", "notes", "model_type"])
@pytest.mark.parametrize(
    "value", [7, [], {}, "x" * 100_000, None, {"modality": 7}, {"properties": {"rate": 10**38}}, -1]
)
def test_other_fields_of_an_export(place: Place, key: str, value: object) -> None:
    model = place.copy("model")
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {key: value}))
    for verb in ("sample", "serve"):
        place.check(verb, model)


@pytest.mark.parametrize(
    ("verb", "file", "what"),
    [
        ("export", "mp_rank_00_model_states.pt", "a plain pickle that runs"),
        ("evaluate", "mp_rank_00_model_states.pt", "TorchScript"),
        *(
            pytest.param(verb, file, what, marks=pytest.mark.campaign)
            for verb in ("export", "evaluate")
            for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
            for what in PICKLES
        ),
        *(
            pytest.param(verb, "mp_rank_00_model_states.pt", what, marks=pytest.mark.campaign)
            for verb in ("attention", "pattern")
            for what in PICKLES
        ),
    ],
)
def test_pickles_of_a_checkpoint(place: Place, verb: str, file: str, what: str) -> None:
    run = place.copy("zero2_fp32")
    folder = run / STEP / "deepspeed"
    PICKLES[what](folder / file)
    seal(run / STEP)
    assert place.check(verb, run).code == 2
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("what", cases(COMPRESSED, "a size of 2**60", "another sum"))
def test_compressed_file(place: Place, tmp_path: Path, what: str) -> None:
    spoilt = tmp_path / "poem.lsz"
    spoilt.write_bytes(COMPRESSED[what](place.lsz.read_bytes()))
    place.check("decompress", MADE / "model", lsz=spoilt)


NAMED: dict[str, tuple[str, ...]] = {
    "a prompt": ("sample", "{model}", "--bytes", "4", "--prompt-file", "{file}", "--device", "cpu"),
    "a score": ("sample", "{model}", "--likelihood", "{file}", "--device", "cpu"),
    "content": ("compress", "{file}", "--model", "{model}", "--output", "{file}.new"),
    "a code": ("decompress", "{file}", "--model", "{model}", "--output", "{file}.new"),
    "a text": ("show", "pattern", "{run}", "--text", "{file}", "--output", "{file}.png"),
    "a configuration": ("show", "pattern", "{file}", "--output", "{file}.png"),
    "a plan": ("plan", "{file}"),
    "an export": ("sample", "{file}", "--bytes", "4", "--device", "cpu"),
    "a run": ("evaluate", "{file}"),
    "metrics": ("show", "loss", "{folder}", "--output", "{file}.png"),
}


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("a prompt", "link to zeros"),
        ("content", "a terabyte"),
        *(
            pytest.param(where, what, marks=pytest.mark.campaign)
            for where in NAMED
            for what in (*NO_FILES, "a terabyte", "no name")
        ),
    ],
)
def test_named_files(commands: Commands, tmp_path: Path, where: str, what: str) -> None:
    path = tmp_path / ("metrics.jsonl" if where == "metrics" else "file")
    if what == "a terabyte":
        sparse(path, 2**40)
    elif what == "no name":
        path = path.with_name("x" * 300)
    else:
        replace(path, what)
    names = {"model": MADE / "model", "run": MADE / "zero2_fp32", "file": path, "folder": tmp_path}
    outcome = commands(*(word.format(**names) for word in NAMED[where]))
    if (where, what) == ("a text", "a terabyte"):  # whose beginning alone is read
        outcome.check_bounded()
    else:
        outcome.check_refused()


@pytest.mark.campaign
@pytest.mark.parametrize("line", [*HOSTILE_JSON, "a text for a number", "a list of bits", "a step that is a text"])
def test_metrics_that_are_drawn(commands: Commands, tmp_path: Path, line: str) -> None:
    lines = {
        "a text for a number": {"step": 1, "split": "train", "bits_per_byte": "7"},
        "a list of bits": {"step": 1, "split": "train", "bits_per_byte": [7]},
        "a step that is a text": {"step": "1", "split": "train", "bits_per_byte": 7},
    }
    text = json.dumps(lines[line]).encode() if line in lines else HOSTILE_JSON[line]()
    (tmp_path / "metrics.jsonl").write_bytes(text + b"\n")
    commands("show", "loss", tmp_path, "--output", tmp_path / "loss.png").check_refused()


def test_an_export_names_no_folder_of_a_machine(place: Place) -> None:
    """Check that exports of earlier versions, which named one, are still read."""
    assert json.loads((MADE / "model/config.json").read_text())["origin"]["run"].startswith("/")
    run, new = place.copy("zero2_fp32"), place.folder / "named"
    assert place.commands("export", run, "--output", new, "--no-check", folder=place.folder).code == 0
    assert json.loads((new / "config.json").read_text())["origin"]["run"] == run.name
    for path in new.iterdir():
        assert str(place.folder).encode() not in path.read_bytes()
