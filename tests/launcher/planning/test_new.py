"""`longstride new`: what it writes fits the data and the machine and trains, and what it refuses."""

import json
import random
import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.building import build
from longstride.launcher import cli
from longstride.launcher.config import EXPERIMENTS, load_config
from longstride.launcher.planning import new, recipes
from longstride.launcher.planning.costs import parameter_parts
from longstride.sparse_model import ModelConfig
from tests.harness.runs import metrics, spawn
from tests.launcher.conftest import Refusal

KINDS = ("text", "pictures", "palette", "sounds")


@pytest.fixture(scope="session")
def folders(shared: Callable[..., Path]) -> Path:
    """A folder with a data folder of each kind, and one with too little text."""

    def make(folder: Path) -> None:
        words, noise = random.Random(0), np.random.default_rng(0)
        for name in ("text", "pictures", "sounds", "short"):
            (folder / "source" / name).mkdir(parents=True)
        for number in range(20):
            text = " ".join(words.choice(["sparse", "dense", "stride"]) for _ in range(200))
            (folder / "source/text" / f"{number}.txt").write_text(text)
            (folder / "source/text" / f"{number}.cls").write_text(str(number % 2))
            (folder / "source/short" / f"{number}.txt").write_text("few")
            Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
                folder / "source/pictures" / f"{number}.png"
            )
        build([folder / "source/text"], folder / "text", validation_fraction=0.2)
        build([folder / "source/text"], folder / "labelled", labels=True, validation_fraction=0.2)
        build([folder / "source/short"], folder / "short", validation_fraction=0.2)
        pictures = [folder / "source/pictures"]
        build(pictures, folder / "pictures", modality="image", validation_fraction=0.2)
        build(pictures, folder / "palette", modality="image", palette=16, validation_fraction=0.2)
        for number in range(10):
            with wave.open(str(folder / "source/sounds" / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, 8_000, 0, "NONE", None))
                tone = np.sin(np.arange(1_000) * (0.1 + 0.02 * number))
                file.writeframes((20_000 * tone).astype("<i2").tobytes())
        build([folder / "source/sounds"], folder / "sounds", modality="audio", validation_fraction=0.2)

    return shared("new", make)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a schema, which takes time to write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / new.SCHEMA_FILE).write_text("{}")
    return tmp_path


def written(place: Path, *words: str) -> dict[str, Any]:
    """What `longstride new mine` writes."""
    assert cli.main(["new", "mine", *words]) == 0
    return json.loads((place / "mine.json").read_text())


ROUTING = ["--like", "enwik8_routing", "--size", "tiny"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("text", []), ("text", ROUTING), *(pytest.param(kind, [], marks=pytest.mark.campaign) for kind in KINDS[1:])],
)
def test_a_new_run_trains_on_its_data(kind: str, words: list[str], folders: Path, place: Path) -> None:
    content = written(place, "--data", str(folders / kind), "--processes", "1", *words)
    rows = ["model.ngrams.rows=1024"] if "ngrams" in content["model"] else []
    rows += ["train.steps=2", "train.log_every=1", "train.warmup_steps=1", f"train.output={place / 'runs/mine'}"]
    ended = spawn(["--config", str(place / "mine.json"), *rows], 1)
    assert ended.codes == [0], ended.stderr
    lines = [line for line in metrics(place / "runs/mine") if line["split"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]


PRESETS = sorted(file.stem for file in EXPERIMENTS.glob("*.json"))
READ = {
    "bert_labels": "labelled",
    "cifar10": "pictures",
    "imagenet64": "pictures",
    "pictures_miniature": "pictures",
    "image_gpt": "palette",
    "music": "sounds",
}


def data_of(preset: str, folders: Path) -> str:
    """The folder of data of the kind that a preset reads."""
    return str(folders / next((kind for start, kind in READ.items() if preset.startswith(start)), "text"))


def parts_of(config: ModelConfig) -> set[object]:
    """The kinds of a model's parts and of its embedding, and its options."""
    parts = [part.type if part else None for block in config.blocks() for part in block]
    patterns = [type(pattern) for block in config.blocks() for pattern in getattr(block.mixer, "patterns", ())]
    options = [
        (name, getattr(config, name)) for name in ("norm", "bias", "convolution", "reversible", "query_key_ratio")
    ]
    return {*parts, *patterns, *options, ("embedding", config.embedding.type), ("rotary", config.rotary is not None)}


# All of their parts are in the other presets.
VARIANTS = {"bytes_base", "bytes_small", "cifar10_dense", "cifar10_routing", "dense_16384", "enwik8_dense"}
VARIANTS |= {"enwik8_fixed", "enwik8_longformer", "enwik8_strided", "image_gpt_small", "imagenet64_routing"}
VARIANTS |= {"imagenet64_strided", "music_1m", "music_1m_152m", "music_262k", "paper_small", "pg19_routing"}
VARIANTS |= {"pictures_miniature"}


@pytest.mark.parametrize(
    "preset", [pytest.param(each, marks=pytest.mark.campaign if each in VARIANTS else ()) for each in PRESETS]
)
def test_every_preset_fits_in_tiny_with_parts_of_its_kinds(preset: str, folders: Path, place: Path) -> None:
    content = written(place, "--like", preset, "--data", data_of(preset, folders), "--processes", "1")
    assert f"the preset {preset}, shrunk to size tiny: " in content["notes"]
    config, whole = load_config(place / "mine.json"), load_config(preset)
    assert config.model.width <= 128 and config.model.layers <= 4 and config.model.heads <= 4
    assert parts_of(config.model) == parts_of(whole.model)
    assert type(config.train.optimizer) is type(whole.train.optimizer)
    assert sum(parameter_parts(config.model).values()) < 10_000_000


SMALL = [("text", "tiny"), ("palette", "tiny")]
MORE = [(kind, size) for kind in KINDS for size in recipes.SIZES if (kind, size) not in SMALL]


@pytest.mark.parametrize("kind, size", [*SMALL, *(pytest.param(*each, marks=pytest.mark.campaign) for each in MORE)])
def test_every_size_is_planned_for_every_kind(kind: str, size: str, folders: Path, place: Path) -> None:
    content = written(place, "--data", str(folders / kind), "--size", size, "--processes", "8", "--memory", "80")
    config = load_config(place / "mine.json")
    assert config.precision == "bf16" and config.train.global_batch % (8 * config.train.micro_batch) == 0
    assert config.model.vocabulary == (16 if kind == "palette" else 256)
    assert content["train"]["steps"] * content["train"]["global_batch"] * config.model.context > 0
    assert config.train.warmup_steps < config.train.steps
    peak = float(re.search(r"planned at ([0-9.]+) GiB a process", content["notes"])[1])
    assert peak < new.FREE_SHARE["cuda"] * 80


@pytest.mark.parametrize("processes, more", [("2", []), ("8", ["--memory", "80"])])
def test_plan_has_the_peak_that_new_told(
    processes: str,
    more: list[str],
    folders: Path,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the very words that `new` says to go on with, of a CPU and of GPUs as told, but without timing blocks."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    content = written(place, "--data", str(folders / "text"), "--processes", processes, *more)
    told = re.search(r"longstride (plan mine\.json .*?)  +#", capsys.readouterr().out)
    assert told is not None
    words = told[1].split()
    assert ("--measure" in words) == (not more)  # what is not here cannot be timed
    assert cli.main([*(word for word in words if word != "--measure"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (row,) = (row for row in plan["memory"] if (row["processes"], row["stage"]) == (int(processes), 1))
    peak = row["peak_recomputed" if content["train"]["activation_checkpointing"] else "peak_kept"]
    assert f"planned at {peak / 2**30:.2f} GiB a process" in content["notes"]
    assert plan["device"] == ("cuda" if more else "cpu") and (peak < 10**9) == (not more)


def test_what_fits_the_data_is_chosen(folders: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(place, "--data", str(folders / "text"), "--modality", "text")
    told = capsys.readouterr().out
    assert text["train"]["output"] == "runs/mine"
    assert all(f"  {sentence}" in told for sentence in ("Data: ", "Model: ", "Context: ", "Length: ", "Machine: "))
    assert "  longstride train --config mine.json" in told and "  longstride plan mine.json" in told
    data = recipes.Data.read(str(folders / "text"))
    assert text["model"]["context"] * recipes.LEAST_CONTEXTS <= data.train_bytes < 2**21
    seen = text["train"]["steps"] * text["train"]["global_batch"] * text["model"]["context"]
    assert seen <= data.train_bytes or text["train"]["steps"] == recipes.LEAST_STEPS  # once, with n-gram tables
    assert text["train"]["global_batch"] * text["model"]["context"] < recipes.SIZES["tiny"].step_bytes
    for name, kind, context in (("a", "pictures", 192), ("b", "palette", 64), ("c", "sounds", 256)):
        capsys.readouterr()
        assert cli.main(["new", name, "--data", str(folders / kind)]) == 0
        assert load_config(place / f"{name}.json").model.context == context
        assert (" steps of up to " in capsys.readouterr().out) == (kind == "sounds")  # which may end within a context


def test_less_memory_takes_smaller_batches_and_then_recomputes(
    folders: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(new.MOST_MICRO_BATCH, "cuda", 16)
    monkeypatch.setattr(recipes, "most_bytes", lambda *_: 2**40)  # large data has large batches
    words = ["--data", str(folders / "pictures"), "--size", "small", "--memory"]
    assert cli.main(["new", "none", *words, "1"]) == 2
    least = float(re.search(r"takes ([0-9.]+) GiB per process at least", capsys.readouterr().err)[1])
    assert cli.main(["new", "much", *words, "80"]) == 0
    much = load_config(place / "much.json").train
    peak = float(re.search(r"planned at ([0-9.]+) GiB", (place / "much.json").read_text())[1])
    assert cli.main(["new", "less", *words, f"{0.97 * peak / new.FREE_SHARE['cuda']}"]) == 0
    assert load_config(place / "less.json").train.micro_batch < much.micro_batch
    assert cli.main(["new", "little", *words, f"{(least + 0.06) / new.FREE_SHARE['cuda']}"]) == 0
    little = load_config(place / "little.json").train
    assert little.micro_batch < much.micro_batch and not much.activation_checkpointing
    assert little.global_batch == much.global_batch and peak > least


def test_schema_lies_beside_and_is_shared(folders: Path, place: Path) -> None:
    (place / new.SCHEMA_FILE).unlink()
    content = written(place, "--data", str(folders / "text"))
    schema = place / content["$schema"]
    properties = json.loads(schema.read_text())["properties"]
    assert set(content) <= set(properties)
    schema.write_text("{}")
    assert cli.main(["new", "other", "--data", str(folders / "text")]) == 0
    assert schema.read_text() == "{}"  # nothing is written over


@pytest.mark.parametrize(
    "words, line",
    [
        (["mine", "--like", "enwik8_routin"], "--like=enwik8_routin: no preset of that name; nearest enwik8_routing"),
        (["mine", "--like", "demo", "--size", "small"], "--size=small: --like shrinks a preset to tiny; leave --size"),
        (["mine", "--like", "enwik8_fixed"], "data/enwik8: no such folder; build it with `longstride data build "),
        (["mine", "--like", "cifar10_dense", "--data", "{text}"], "--like=cifar10_dense: the preset reads image, and"),
        (
            ["mine", "--like", "image_gpt_small", "--data", "{pictures}"],
            "--like=image_gpt_small: the preset reads image in colours of a palette, and {pictures} holds image in byt",
        ),
        (["mine", "--data", "{short}"], "--data={short}: has "),
        (
            ["mine", "--data", "taken.d"],
            "taken.d: the folder is empty: it lacks manifest.json, so it is not a data folder;",
        ),
        (["mine", "--data", "{text}", "--size", "base", "--memory", "1"], "--size=base: takes "),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: list[str], line: str, folders: Path, place: Path, refusal: Refusal
) -> None:
    (place / "taken.json").write_text("{}")
    (place / "taken.d").mkdir()
    places = {name: folders / name for name in ("text", "short", "pictures")}
    assert refusal("new", *(word.format(**places) for word in words)).startswith(line.format(**places))
