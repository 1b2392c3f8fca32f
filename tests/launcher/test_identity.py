"""What a run was trained on, held against the data at hand: every verb that reads both, by each thing that differs.

Runs are made by hand, with a checkpoint that has a manifest and no weights: nothing of it is needed to compare.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.modalities.audio import Audio
from longstride.data_pipelines.palette import Palette
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import SavedState, open_checkpoint, write_json
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunSetup, TrainingData, WeightSource
from longstride.launcher.drawing.attention import draw_attention
from longstride.launcher.evaluation import evaluate
from longstride.launcher.identity import check_matches, open_data, trained_on
from longstride.launcher.models import ModelData
from longstride.launcher.ranks import Ranks
from longstride.launcher.training.initial import InitialWeights
from longstride.launcher.training.replay import find_sources
from tests.harness.lines import manifest_of
from tests.harness.runs import configuration
from tests.harness.tiny_models import tiny_export

PIXELS = 48  # of a picture: 4 x 12, or as many otherwise arranged
COLOURS = Palette(np.arange(48, dtype=np.uint8).reshape(16, 3) * 5)
OTHER_COLOURS = Palette(COLOURS.colours ^ 1)
MODELS: dict[str, dict[str, Any]] = {
    "text": {"context": 64, "embedding": {"type": "learned"}},
    "sounds": {"context": 64, "embedding": {"type": "learned"}},
    "pictures": {"context": 3 * PIXELS, "embedding": {"type": "learned"}},
    "colours": {"context": PIXELS, "embedding": {"type": "learned"}, "vocabulary": 16},
}
# Data built under a name, by how it differs; of which a run of the kind may read the last ones where they are named.
OTHERS: dict[str, dict[str, set[str]]] = {
    "text": {"text-seed": {"data"}, "text-split": {"data"}, "sounds": {"modality", "data"}},
    "sounds": {"sounds-seed": {"data"}, "sounds-rate": {"rate", "data"}, "text": {"modality", "data"}},
    "pictures": {"pictures-seed": {"data"}, "pictures-wide": {"arrangement", "data"}, "text": {"modality", "data"}},
    "colours": {
        "colours-seed": {"data"},
        "colours-other": {"palette", "data"},
        "colours-wide": {"arrangement", "data"},
        "pictures-few": {"palette", "data"},
    },
}
CASES = [
    pytest.param(kind, other, before, id=f"{kind} to {other}{', made before' * before}")
    for kind, others in OTHERS.items()
    for other in others
    for before in (False, True)
    if not (before and kind == "colours")  # every run on a palette has a data.json
]


@pytest.fixture(scope="module")
def folders(shared: Callable[..., Path]) -> Path:
    """Data of every kind, and of each kind built otherwise."""

    def make(folder: Path) -> None:
        random = np.random.default_rng(0)
        for name, rate in (("sounds", 4000), ("sounds-rate", 8000)):
            (folder / f"files-{name}").mkdir()
            for number in range(12):
                content = Audio().encode(random.integers(0, 256, 300), {"rate": rate})
                (folder / f"files-{name}/{number}.wav").write_bytes(content)
        for name, (height, width) in {"pictures": (4, 12), "pictures-wide": (8, 6)}.items():
            (folder / f"files-{name}").mkdir()
            for number in range(12):
                pixels = random.integers(0, 256, 3 * PIXELS).astype(np.uint8).tobytes()
                head = f"P6\n{width} {height}\n255\n".encode()
                (folder / f"files-{name}/{number}.ppm").write_bytes(head + pixels)
        (folder / "files-text").mkdir()
        for number in range(12):
            (folder / f"files-text/{number}.txt").write_bytes(bytes(random.integers(32, 127, 300).tolist()))
        built: dict[str, dict[str, Any]] = {
            "text": {}, "text-seed": {"seed": 1}, "text-split": {"validation_fraction": 0.5},
            "sounds": {"modality": "audio"}, "sounds-seed": {"modality": "audio", "seed": 1},
            "sounds-rate": {"modality": "audio"},
            "pictures": {"modality": "image"}, "pictures-seed": {"modality": "image", "seed": 1},
            "pictures-wide": {"modality": "image"}, "pictures-few": {"modality": "image"},
            "colours": {"modality": "image", "palette": COLOURS},
            "colours-seed": {"modality": "image", "palette": COLOURS, "seed": 1},
            "colours-other": {"modality": "image", "palette": OTHER_COLOURS},
            "colours-wide": {"modality": "image", "palette": COLOURS},
        }  # fmt: skip
        for name, options in built.items():
            files = {"colours-wide": "pictures-wide", "sounds-rate": name, "pictures-wide": name}.get(name)
            files = files or {"colours": "pictures"}.get(name.partition("-")[0], name.partition("-")[0])
            build([folder / f"files-{files}"], folder / name, **{"validation_fraction": 0.25, **options})

    return shared("identity-data", make)


class Made:
    """A run of a kind whose data folder can be changed for another one, under its name."""

    def __init__(self, folder: Path, folders: Path, kind: str, *, before: bool, **data: Any) -> None:
        self.folder, self.link, self._folders, self.kind = folder / "run", folder / "data", folders, kind
        self.put(kind)
        content = configuration(self.link, self.folder)
        content["model"] |= {"attention": {"type": "dense"}, **MODELS[kind]}
        content["data"] |= data
        content["deepspeed"] = {}
        self.config = RunConfig.model_validate(content)
        self.save(self.config)
        if not before:
            write_json(self.folder / "data.json", TrainingData(self.config, Ranks()).identity.to_json())

    def save(self, config: RunConfig) -> None:
        """A checkpoint without weights, of the run's data."""
        saved = self.folder / "checkpoints/step-00000001"
        saved.mkdir(parents=True, exist_ok=True)
        (saved / "manifest.json").unlink(missing_ok=True)
        write_json(saved / "config.json", config.to_json())
        manifest_of(saved, step=1, stream=TrainingData(self.config, Ranks()).stream().state.to_json())

    @property
    def checkpoint(self) -> Any:
        return open_checkpoint(self.folder, None)

    def put(self, name: str) -> None:
        """Another folder takes the data's place."""
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self._folders / name)

    def source(self, **options: Any) -> WeightSource:
        return WeightSource(self.folder, **options)


def arguments_of(made: Made, data: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    from longstride.launcher.verbs.look import add_evaluate_arguments

    add_evaluate_arguments(parser)
    return parser.parse_args([str(made.folder), *([] if data is None else ["--data", data])])


def find_way(made: Made) -> None:
    """A replay up to where it would read weights."""
    find_sources(RunSetup(made.config, Ranks(), TrainingData(made.config, Ranks())), 1)
    raise ReadError


VERBS: dict[str, Callable[[Made], object]] = {
    "evaluate": lambda made: evaluate.run(arguments_of(made, None)),
    "show attention": lambda made: draw_attention(made.folder),
    "resume": lambda made: check_matches(made.checkpoint, made.config, TrainingData(made.config, Ranks()).identity),
    "replay": find_way,
}
NAMED: dict[str, Callable[[Made], object]] = {
    "evaluate": lambda made: evaluate.run(arguments_of(made, str(made.link))),
    "show attention": lambda made: draw_attention(made.folder, data=str(made.link)),
}


class ReadError(Exception):
    """The comparison let the verb pass: the weights are asked for."""


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has verbs take checkpoints without weights, up to where they would read these."""

    def read(*_: Any, **__: Any) -> None:
        raise ReadError

    monkeypatch.setattr(SavedState, "check_size", staticmethod(lambda _: None))
    monkeypatch.setattr("longstride.launcher.evaluation.evaluate.compile_kernels", read)
    monkeypatch.setattr("longstride.launcher.evaluation.evaluate.master_weights", read)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("kind", "other", "before"), CASES)
def test_a_folder_that_was_built_anew_under_its_name_is_refused(
    kind: str, other: str, verb: str, before: bool, folders: Path, tmp_path: Path, weightless: None
) -> None:
    made = Made(tmp_path, folders, kind, before=before)
    made.put(other)
    with pytest.raises(ConfigError) as refused:
        VERBS[verb](made)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("data.path=")
    if verb in NAMED:
        assert "--data FOLDER" in line
    if not before:
        known = json.loads((made.folder / "data.json").read_text())
        whole = ModelData.from_json(known, made.config.model)
        for clause in whole.differences(TrainingData(made.config, Ranks()).identity).values():
            assert clause in line


@pytest.mark.parametrize("verb", NAMED)
@pytest.mark.parametrize(("kind", "other", "before"), CASES)
def test_other_data_that_is_named_is_read_where_tokens_mean_the_same(
    kind: str, other: str, verb: str, before: bool, folders: Path, tmp_path: Path, weightless: None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = Made(tmp_path, folders, kind, before=before)
    made.put(other)
    expected = {"data"} if before else OTHERS[kind][other]  # what nobody wrote down is not known
    if expected & {*ModelData.MEANING}:
        with pytest.raises(ConfigError, match=r"^--data=.*; name data of the run's palette and size"):
            NAMED[verb](made)
        return
    with pytest.raises(ReadError):
        NAMED[verb](made)
    notices = [line for line in capsys.readouterr().err.splitlines() if "is not what the run was trained on" in line]
    assert len(notices) == 1
    assert open_data(made.checkpoint, str(made.link), Ranks())[1].keys() == expected


@pytest.mark.parametrize("verb", [*VERBS, *(f"{name} --data" for name in NAMED)])
@pytest.mark.parametrize("before", [False, True], ids=["", "made before"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_runs_own_data_is_read_by_every_verb(
    kind: str, before: bool, verb: str, folders: Path, tmp_path: Path, weightless: None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = Made(tmp_path, folders, kind, before=before and kind != "colours")
    run = {**VERBS, **{f"{name} --data": each for name, each in NAMED.items()}}[verb]
    if verb == "resume":
        run(made)
    else:
        with pytest.raises(ReadError):
            run(made)
    assert "is not what" not in capsys.readouterr().err


@pytest.mark.parametrize("left", ["own", "gone", "other"])
@pytest.mark.parametrize(("kind", "other", "before"), CASES)
def test_an_export_says_what_the_run_was_trained_on(
    kind: str, other: str, left: str, before: bool, folders: Path, tmp_path: Path
) -> None:
    """And no more than can be known, where a run made before finds its data gone or built anew."""
    made = Made(tmp_path, folders, kind, before=before)
    trained = replace(TrainingData(made.config, Ranks()).identity, splits={}, fingerprint=None)
    made.put({"own": kind, "gone": "nowhere", "other": other}[left])
    said = replace(trained_on(made.checkpoint), splits={}, fingerprint=None)
    if left != "own" and not (made.folder / "data.json").exists():
        trained = ModelData.from_json({}, made.config.model)
    assert said == trained


def taken(source: WeightSource, made: Made, **model: Any) -> InitialWeights:
    config = made.config.model.model_copy(update=model)
    return InitialWeights(source, config, TrainingData(made.config, Ranks()).identity, trusted=False)


@pytest.mark.parametrize("form", ["run", "export"])
@pytest.mark.parametrize(("kind", "other", "before"), CASES)
def test_weights_are_taken_where_tokens_mean_the_same_or_it_is_said(
    kind: str, other: str, before: bool, form: str, folders: Path, tmp_path: Path, weightless: None
) -> None:
    (tmp_path / "source").mkdir()
    made = Made(tmp_path / "source", folders, kind, before=before)
    (tmp_path / "next").mkdir()
    following = Made(tmp_path / "next", folders, kind, before=False)
    following.put(other)
    source = made.source()
    if form == "export":
        data, model = TrainingData(made.config, Ranks()).identity.to_json(), made.config.model.model_dump(mode="json")
        source = WeightSource(tiny_export(tmp_path / "model", data.pop("modality"), model=model, **data))
    expected = OTHERS[kind][other] - {"data"}
    if expected & {*ModelData.MEANING}:
        way = "--palette-from" if "palette" in expected else "--from-positions fresh"
        with pytest.raises(ConfigError, match=rf"^--from=.*{way}"):
            taken(source, following)
        fresh = replace(source, positions="fresh")
        if "palette" in expected:
            with pytest.raises(ConfigError, match="palette"):
                taken(fresh, following)
        else:
            assert "its pictures are 8 x 6 x 3 and the model's 4 x 12 x 3" in taken(fresh, following).lines()[-1]
        return
    *_, last = taken(source, following).lines()
    assert ("notice: " in last) == bool(expected)


@pytest.mark.parametrize("separators", [(10, None), (None, 10), (10, 32)])
def test_another_separator_is_said_and_at_a_resume_refused(
    separators: tuple[int | None, int | None], folders: Path, tmp_path: Path, weightless: None
) -> None:
    for name in ("source", "next"):
        (tmp_path / name).mkdir()
    before, now = (
        Made(tmp_path / name, folders, "text", before=False, separator=separator)
        for name, separator in zip(("source", "next"), separators, strict=True)
    )
    shown = ["none" if each is None else str(each) for each in separators]
    assert f"its separator is {shown[1]} and the model's {shown[0]}" in taken(before.source(), now).lines()[-1]
    with pytest.raises(ConfigError, match=r"^data\.separator="):
        check_matches(before.checkpoint, now.config, TrainingData(now.config, Ranks()).identity)


def test_swapped_splits_are_refused_at_a_resume(folders: Path, tmp_path: Path) -> None:
    made = Made(tmp_path, folders, "text", before=False)
    swapped = made.config.to_json()
    swapped["data"] |= {"train_split": "validation", "validation_split": "train"}
    config = RunConfig.model_validate(swapped)
    with pytest.raises(ConfigError, match=r"^data\.train_split="):
        check_matches(made.checkpoint, config, TrainingData(config, Ranks()).identity)


def test_a_folder_of_the_name_in_the_working_directory_is_read_only_where_it_is_the_runs(
    folders: Path, tmp_path: Path, weightless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    made = Made(tmp_path, folders, "text", before=True)
    content = made.config.to_json()
    content["data"]["path"] = "data"
    made.save(RunConfig.model_validate(content))
    (here / "data").symlink_to(folders / "text-seed")
    with pytest.raises(ConfigError, match=r'^data\.path="data": is not what the run was trained on'):
        VERBS["evaluate"](made)
    (here / "data").unlink()
    (here / "data").symlink_to(folders / "text")
    with pytest.raises(ReadError):
        VERBS["evaluate"](made)


def test_a_replay_before_the_first_checkpoint_goes_by_the_runs_own_file(folders: Path, tmp_path: Path) -> None:
    made = Made(tmp_path, folders, "text", before=False)
    (made.folder / "checkpoints/step-00000001/manifest.json").unlink()
    made.put("text-seed")
    with pytest.raises(ConfigError, match=r"^data\.path=.*is not what the run was trained on: it is another split"):
        VERBS["replay"](made)
