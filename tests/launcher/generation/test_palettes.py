"""Models of palettes: trained, exported, sampled and scored as pixels; what needs bytes refuses them in one line."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.palette import Palette
from longstride.data_pipelines.shards import DataFolder
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints import open_checkpoint
from longstride.launcher.config import RunConfig
from longstride.launcher.data import TrainingData
from longstride.launcher.identity import trained_on
from longstride.launcher.models import load_model
from longstride.launcher.ranks import Ranks
from tests.harness.runs import configuration, metrics, spawn
from tests.harness.tiny_models import CONTEXT, HEIGHT, WIDTH, content_of, tiny_export
from tests.launcher.conftest import Refusal
from tests.launcher.generation.test_sample_files import tile

COLOURS = np.arange(300) * 55_001  # spread over all 2**24
PALETTE = Palette(np.stack([COLOURS >> 16, COLOURS >> 8 & 255, COLOURS & 255], axis=1).astype(np.uint8))
MODEL: dict[str, Any] = {
    "context": HEIGHT * WIDTH, "attention": {"type": "dense"}, "embedding": {"type": "learned"},
    "vocabulary": len(PALETTE), "norm": "rms", "norm_epsilon": 1e-5,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_export(tmp_path / "model", "image", model=MODEL, palette=PALETTE.to_text())


def picture(path: Path, seed: int = 0) -> np.ndarray:
    pixels = np.frombuffer(content_of("image", CONTEXT, seed), dtype=np.uint8).reshape(HEIGHT, WIDTH, 3)
    Image.fromarray(pixels).save(path)
    return pixels


def test_a_picture_is_completed_in_colours_of_the_palette(model: Path, tmp_path: Path) -> None:
    pixels = picture(tmp_path / "given.png")
    given = ["--prompt-image", str(tmp_path / "given.png"), "--keep-rows", "3", "--count", "2"]
    assert cli.main(["sample", str(model), *given, "--output", str(tmp_path / "out.png")]) == 0
    paper = np.asarray(Image.open(tmp_path / "out.png"))
    assert np.array_equal(tile(paper, 0, 0), pixels)
    known = {tuple(colour) for colour in PALETTE.colours.tolist()}
    for column in (2, 3):
        made = tile(paper, 0, column)
        upper = PALETTE.content(PALETTE.tokens(pixels[:3].reshape(-1)))
        assert np.array_equal(made[:3].reshape(-1), upper)
        assert {tuple(colour) for colour in made.reshape(-1, 3).tolist()} <= known
    assert not np.array_equal(tile(paper, 0, 2), tile(paper, 0, 3))


def test_a_pipe_gets_the_pixels_bytes(model: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["sample", str(model)]) == 0
    assert len(capfdbinary.readouterr().out) == CONTEXT


def test_a_picture_is_scored_in_bits_per_pixel(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = picture(tmp_path / "given.png")
    assert cli.main(["sample", str(model), "--likelihood", str(tmp_path / "given.png"), "--decoded"]) == 0
    printed = capsys.readouterr()
    line = json.loads(printed.out)
    tokens = torch.from_numpy(PALETTE.tokens(pixels.reshape(-1)))[None]
    with torch.no_grad():
        nats = float(load_model(model)(tokens, return_nats=True).double().mean())
    assert line["bits_per_pixel"] == pytest.approx(nats / math.log(2), rel=1e-6)
    assert line["tokens"] == HEIGHT * WIDTH and "bits_per_byte" not in line
    assert "bits per pixel on" in printed.err


REFUSED = [
    (["sample", "{model}", "--likelihood", "{file}"], "scores pixels of pictures, not bytes of files; add --decoded"),
    (["sample", "{model}", "--modality", "text"], "--modality=text: the model's tokens are colours of a palette"),
    (["sample", "{model}", "--prompt", "four"], "--prompt: has 4 bytes: must be whole pixels of 3 bytes"),
    (["compress", "{file}", "--model", "{model}", "--output", "x.lsz"], "compress needs a model of bytes"),
    (["serve", "{model}"], "serve is for models of bytes"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words[:3]) for words, _ in REFUSED])
def test_what_needs_bytes_is_refused(
    words: list[str], message: str, model: Path, tmp_path: Path, refusal: Refusal
) -> None:
    picture(tmp_path / "given.png")
    assert message in refusal(*(word.format(model=model, file=tmp_path / "given.png") for word in words))


@pytest.mark.parametrize("palette", [None, "000000 ffffff", "red"])
def test_tokens_that_mean_nothing_are_refused(palette: str | None, tmp_path: Path, refusal: Refusal) -> None:
    assert refusal("sample", tiny_export(tmp_path / "model", "image", model=MODEL, palette=palette))


@pytest.mark.parametrize(
    "option", ["--palette=1", "--palette=9999", "--palette=9 --modality=text", "--palette-from=source"]
)
def test_build_refuses_palettes_in_one_line(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    for number in range(3):
        picture(tmp_path / f"source/{number}.png", number)
    words = ["data", "build", "source", "--modality=image", *option.split(), "--suffix=.png", "--output=data"]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longstride: error: {option.split()[0].split('=')[0]}") or "source" in line
    assert not (tmp_path / "data").exists()


@pytest.fixture(scope="module")
def data(shared: Callable[..., Path]) -> Path:
    """Pictures in 17 colours."""

    def make(folder: Path) -> None:
        (folder / "source").mkdir()
        for number in range(30):
            picture(folder / f"source/{number}.png", number)
        build([folder / "source"], folder / "data", modality="image", palette=17, validation_fraction=0.2)

    return shared("palette-data", make) / "data"


@pytest.fixture(scope="module")
def run(shared: Callable[..., Path], data: Path) -> Path:
    """A run of four steps on them."""

    def make(folder: Path) -> None:
        content = configuration(data, folder / "run")
        content["model"] |= MODEL | {"vocabulary": 17}
        content["train"] |= {"steps": 4, "global_batch": 4}
        (folder / "run.json").write_text(json.dumps(content))
        ended = spawn(["--config", str(folder / "run.json")], 1)
        assert ended.codes == [0], ended.stderr

    return shared("palette", make) / "run"


def test_a_run_is_told_in_bits_per_pixel(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = metrics(run)
    assert {line["split"] for line in lines} == {"train", "validation"}
    for line in lines:
        assert line["bits_per_pixel"] == line["loss_nats"] / math.log(2) and "bits_per_byte" not in line
        assert line["tokens"] % (HEIGHT * WIDTH) == 0
    assert cli.main(["evaluate", str(run), "--positions", str(tmp_path / "positions.png")]) == 0
    assert "bits per pixel on validation" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "positions.json").read_text())["positions"]["bits_per_pixel"]) == HEIGHT * WIDTH
    for what in ("loss", "attention"):
        assert cli.main(["show", what, str(run), "--output", str(tmp_path / f"{what}.png")]) == 0


def test_another_palette_of_as_many_colours_is_refused(run: Path, data: Path, tmp_path: Path, refusal: Refusal) -> None:
    colours = DataFolder(data).palette.colours ^ 1
    build([data.parent / "source"], tmp_path / "data", modality="image", palette=Palette(colours))
    assert "its palette is different" in refusal("evaluate", run, "--data", tmp_path / "data")


@pytest.mark.parametrize("gone", [False, True])
def test_an_export_has_the_palette_wherever_the_data_is(
    run: Path, tmp_path: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gone:
        monkeypatch.setattr("longstride.launcher.config.run_config.resolve_saved_path", lambda *_: "/nowhere")
    found = replace(trained_on(open_checkpoint(run, None)), splits={}, fingerprint=None)
    assert found.palette is not None and len(found.palette) == 17
    assert dict(found.properties).items() >= {"height": HEIGHT, "width": WIDTH, "channels": 3}.items()
    assert cli.main(["export", str(run), "--output", str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model/config.json").read_text())["data"] == found.to_json()
    card = (tmp_path / "model/README.md").read_text()
    assert "bits per pixel" in card and "17 colours" in card and "byte" not in card.replace("longstride", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 300}, "model.vocabulary=300: the data's palette has 17 colours; 17"),
        (
            {"embedding": {"type": "image", "height": 4, "width": 16, "channels": 1}},
            '"height": 8, "width": 8, "channel',
        ),
        ({"context": 63}, "model.context=63: must be 64, the pixels of every image of this set"),
    ],
    ids=["vocabulary", "embedding", "context"],
)
def test_a_model_that_does_not_fit_is_refused(run: Path, changes: dict[str, Any], message: str) -> None:
    content = json.loads((run / "config.json").read_text())
    content["model"] |= changes
    with pytest.raises((ConfigError, ValueError), match=message.replace("{", "\\{")):
        TrainingData(RunConfig.model_validate(content), Ranks()).check()


def test_a_pictures_two_position_tables_go_with_a_palette(run: Path) -> None:
    content = json.loads((run / "config.json").read_text())
    content["model"]["embedding"] = {"type": "image", "height": HEIGHT, "width": WIDTH, "channels": 1}
    TrainingData(RunConfig.model_validate(content), Ranks()).check()
