"""Exports, checkpoints and compressed files that anybody may have made: refused in a line, or the honest result."""

import functools
import itertools
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import ROOT
from tests.hostile.commands import Commands, Outcome, campaign, sampled, words_of
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
OF_EXPORTS = {
    "sample": "sample {model} --bytes 8 --temperature 0 --device cpu --output {new}",
    "likelihood": "sample {model} --likelihood {poem} --device cpu",
    "compress": "compress {poem} --model {model} --output {new}",
    "decompress": "decompress {lsz} --model {model} --output {new}",
    "serve": "serve {model} --host 192.0.2.1 --port 0 --device cpu",
    "program": "export {model} --format pt2 --output {new}",
    "refresh": "export {model} --refresh",
}
# Of a run {run}; the data of its configuration lie in the working directory.
OF_RUNS = {
    "export": "export {run} --output {new}",
    "evaluate": "evaluate {run}",
    "attention": "show attention {run} --output {new}.png",
    "pattern": "show pattern {run} --text {poem} --output {new}.png",
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


class Place:
    """A folder with what commands of exports and of runs need, and the intact outcome of each."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands, self.folder = commands, folder
        self.poem, self.lsz = MADE / "poem.txt", folder / "poem.lsz"
        (folder / "data").mkdir()
        shutil.copytree(MADE / "text", folder / "data/text")
        compressed = commands("compress", self.poem, "--model", MADE / "model", "--output", self.lsz)
        assert compressed.code == 0, compressed.err
        self._numbers = itertools.count()
        self._intact = functools.cache(
            lambda verb: self._run(verb, self.copy("model" if verb in OF_EXPORTS else "zero2_fp32"), self.lsz)
        )

    def copy(self, name: str) -> Path:
        """Copy an intact export or run, to be damaged."""
        return Path(shutil.copytree(MADE / name, self.folder / f"{name}-{next(self._numbers)}"))

    def check(
        self, verb: str, source: Path, *, lsz: Path | None = None, may_compute_otherwise: bool = False
    ) -> Outcome:
        """Run a verb on a damaged export or run, and check that it is refused or has the intact one's outcome.

        ``may_compute_otherwise``: it may be another model with the same tensors, which is computed as it says.
        """
        intact, expected_files = self._intact(verb)
        outcome, files = self._run(verb, source, lsz or self.lsz)
        if outcome.code == 0:
            outcome.check_bounded(intact)
            assert verb != "serve", outcome
            results = [re.sub(r'"seconds": [0-9.e-]+', "", run.out) for run in (outcome, intact)]
            assert may_compute_otherwise or (results[0] == results[1] and files == expected_files), outcome
        else:
            outcome.check_refused(intact, most_lines=MOST_LINES)
            assert not files, f"{outcome.words}: leaves a file"
        return outcome

    def _run(self, verb: str, source: Path, lsz: Path) -> tuple[Outcome, bytes]:
        """Return a verb's outcome and the content of the files that it wrote, which are removed."""
        new = self.folder / f"new-{next(self._numbers)}"
        names = {"model": source, "run": source, "new": new, "poem": self.poem, "lsz": lsz}
        outcome = self.commands(*words_of((OF_EXPORTS | OF_RUNS)[verb], **names), folder=self.folder)
        paths = (new, new.with_suffix(".png"), new / "model.safetensors")
        files = b"".join(path.read_bytes() for path in paths if path.is_file())
        shutil.rmtree(new, ignore_errors=True)
        return outcome, files


@pytest.fixture(scope="module")
def place(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return the working directory of the commands of this file."""
    return Place(commands, tmp_path_factory.mktemp("models"))


def in_turn(verbs: Iterable[str], table: Iterable[str]) -> list[Any]:
    """Return a case of the campaign for each entry of a table; the verbs take turns."""
    return campaign(zip(itertools.cycle(verbs), table, strict=False))


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        *zip(itertools.cycle(list(OF_EXPORTS)[:5]), SAMPLED, strict=False),  # a program takes seconds
        ("sample", "vocabulary of 2**31"),
        *in_turn(OF_EXPORTS, MODELS),
    ],
)
def test_configuration_of_an_export(place: Place, verb: str, what: str) -> None:
    model = place.copy("model")
    set_model(model / "config.json", MODELS[what])
    place.check(verb, model, may_compute_otherwise=what.startswith(OF_NO_TENSOR))


@pytest.mark.parametrize("what", sampled(MODELS, SAMPLED))
def test_configuration_of_a_plan(commands: Commands, tmp_path: Path, what: str) -> None:
    """Refuse what is not a network; plan any other without needing more memory than the plan says."""
    content = json.loads((MADE / "zero2_fp32/config.json").read_text())
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content | {"model": MODELS[what](content["model"])}))
    outcome = commands("plan", path, "--contexts", "1000")
    outcome.check_bounded()
    assert all(len(line) <= 1000 for line in outcome.mistakes), outcome.err[:3000]
    if outcome.code != 0:
        outcome.check_refused(most_lines=MOST_LINES)


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        *(("evaluate", what) for what in SAMPLED[-3:-1]),
        ("export", "layers of 10**9"),
        *in_turn(OF_RUNS, [name for name in MODELS if name.partition(" ")[0] in SIZES or " of " not in name]),
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
        ("sample", "offsets that overlap"),
        *in_turn(OF_EXPORTS, WEIGHTS),
    ],
)
def test_weights_of_an_export(place: Place, verb: str, what: str) -> None:
    model = place.copy("model")
    WEIGHTS[what](model / "model.safetensors")
    place.check(verb, model)


@pytest.mark.parametrize(("verb", "what"), [("sample", "a file outside"), *in_turn(OF_EXPORTS, INDEXES)])
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
        *campaign(itertools.product(("config.json", "model.safetensors.index.json"), (*NO_FILES, *HOSTILE_JSON))),
        *campaign(itertools.product(["model.safetensors"], NO_FILES)),
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
        *campaign(itertools.product(OF_RUNS, ["mp_rank_00_model_states.pt"], PICKLES)),
        *campaign(itertools.product(("export", "evaluate"), ["zero_pp_rank_1_mp_rank_00_optim_states.pt"], PICKLES)),
    ],
)
def test_pickles_of_a_checkpoint(place: Place, verb: str, file: str, what: str) -> None:
    run = place.copy("zero2_fp32")
    folder = run / STEP / "deepspeed"
    PICKLES[what](folder / file)
    seal(run / STEP)
    assert place.check(verb, run).code == 2
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("what", sampled(COMPRESSED, ["a size of 2**60", "another sum"]))
def test_compressed_file(place: Place, tmp_path: Path, what: str) -> None:
    spoilt = tmp_path / "poem.lsz"
    spoilt.write_bytes(COMPRESSED[what](place.lsz.read_bytes()))
    place.check("decompress", MADE / "model", lsz=spoilt)


NAMED = {
    "a prompt": "sample {model} --bytes 4 --prompt-file {file} --device cpu",
    "a score": "sample {model} --likelihood {file} --device cpu",
    "content": "compress {file} --model {model} --output {file}.new",
    "a code": "decompress {file} --model {model} --output {file}.new",
    "a text": "show pattern {run} --text {file} --output {file}.png",
    "a configuration": "show pattern {file} --output {file}.png",
    "a plan": "plan {file}",
    "an export": "sample {file} --bytes 4 --device cpu",
    "a run": "evaluate {file}",
    "metrics": "show loss {folder} --output {file}.png",
}


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("a prompt", "link to zeros"),
        ("content", "a terabyte"),
        *campaign(itertools.product(NAMED, (*NO_FILES, "a terabyte", "no name"))),
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
    outcome = commands(*words_of(NAMED[where], **names))
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
