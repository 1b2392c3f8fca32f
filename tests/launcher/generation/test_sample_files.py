"""Samples as files: the model's own bytes in a grid of pictures, in sounds that players open, in plain files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.modalities.audio import Audio
from longstride.data_pipelines.modalities.image import grid_size
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.generation.sample import output_files
from longstride.launcher.models import ModelData
from tests.harness.tiny_models import CONTEXT, HEIGHT, RATE, WIDTH, content_of, tiny_export

GAP, SCALE = 6, 12  # of a grid of 8 x 8 pictures


def sample(model: Path, *options: object) -> None:
    assert cli.main(["sample", str(model), *map(str, options)]) == 0


def tile(paper: np.ndarray, row: int, column: int) -> np.ndarray:
    """A picture of a grid again, (8, 8, 3); each of its pixels is a square of one colour."""
    top, left = GAP + row * (HEIGHT * SCALE + GAP), GAP + column * (WIDTH * SCALE + GAP)
    large = paper[top : top + HEIGHT * SCALE, left : left + WIDTH * SCALE]
    small = large[::SCALE, ::SCALE]
    assert (large == small.repeat(SCALE, axis=0).repeat(SCALE, axis=1)).all()
    return small


def test_pictures_are_a_grid_of_exactly_the_samples(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    model = tiny_export(tmp_path / "model", "image")
    sample(model, "--count", 3, "--seed", 5)
    plain = np.frombuffer(capsysbinary.readouterr().out, dtype=np.uint8).reshape(3, HEIGHT, WIDTH, 3)
    sample(model, "--count", 3, "--seed", 5, "--output", tmp_path / "out.png")
    paper = np.asarray(Image.open(tmp_path / "out.png"))
    assert paper.shape == (*grid_size(2, 2, HEIGHT, WIDTH), 3)
    for number, picture in enumerate(plain):
        assert (tile(paper, *divmod(number, 2)) == picture).all()
    assert (tile(paper, 1, 1) == 255).all()
    assert len({picture.tobytes() for picture in plain}) == 3


@pytest.mark.parametrize(("option", "rows"), [((), 4), (("--keep-rows", 7), 7), (("--keep-rows", 0), 0)])
def test_completions_stand_beside_original_and_prompt(option: tuple, rows: int, tmp_path: Path) -> None:
    model, originals = tiny_export(tmp_path / "model", "image"), []
    for number in range(2):
        pixels = np.frombuffer(content_of("image", CONTEXT, number), dtype=np.uint8).reshape(HEIGHT, WIDTH, 3)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        originals.append(pixels)
    prompts = [tmp_path / "0.png", tmp_path / "1.png"]
    sample(model, "--prompt-image", *prompts, *option, "--count", 3, "--output", tmp_path / "out.png")
    paper = np.asarray(Image.open(tmp_path / "out.png"))
    assert paper.shape == (*grid_size(2, 5, HEIGHT, WIDTH), 3)
    for number, original in enumerate(originals):
        given = tile(paper, number, 1)
        assert (tile(paper, number, 0) == original).all()
        assert (given[:rows] == original[:rows]).all() and (given[rows:] == 128).all()
        completions = [tile(paper, number, column) for column in (2, 3, 4)]
        assert all((completion[:rows] == original[:rows]).all() for completion in completions)
        assert len({completion.tobytes() for completion in completions}) == 3


def test_sounds_are_wav_files_behind_their_prompt(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    model = tiny_export(tmp_path / "model", "audio")
    content = content_of("audio", 400, 0)
    (tmp_path / "in.wav").write_bytes(Audio().encode(np.frombuffer(content, dtype=np.uint8), {"rate": RATE}))
    options = ("--prompt-audio", tmp_path / "in.wav", "--keep-seconds", 80 / RATE, "--seconds", 100 / RATE)
    sample(model, *options, "--count", 2)
    plain = capsysbinary.readouterr().out
    sample(model, *options, "--count", 2, "--output", tmp_path / "out.wav")
    assert len(plain) == 360 and not (tmp_path / "out.wav").exists()
    for number in (0, 1):
        path = tmp_path / f"out-{number + 1}.wav"
        with path.open("rb") as file:
            properties = Audio().settle(path, file, {})
            found = Audio().open(path, file, properties).read(0, 1000)
        assert properties == {"rate": RATE}
        assert found == plain[180 * number : 180 * (number + 1)]
        assert found[:80] == content[:80]
    sample(model, "--prompt-audio", tmp_path / "in.wav", "--rate", 2 * RATE, "--output", tmp_path / "fast.wav")
    assert (tmp_path / "fast.wav").stat().st_size == 58 + CONTEXT  # half a context is given, and one comes of it
    with (tmp_path / "fast.wav").open("rb") as file:
        assert Audio().settle(tmp_path, file, {}) == {"rate": 2 * RATE}


def test_texts_are_plain_files(exported: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    sample(exported, "--prompt", "ab", "--bytes", 9, "--count", 2)
    plain = capsysbinary.readouterr().out
    sample(exported, "--prompt", "ab", "--bytes", 9, "--count", 2, "--output", tmp_path / "out.txt")
    found = [(tmp_path / f"out-{number}.txt").read_bytes() for number in (1, 2)]
    assert b"".join(found) == plain and found[0] != found[1]
    assert all(len(sample) == 11 and sample.startswith(b"ab") for sample in found)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out-2.wav").touch()
    data = ModelData(Audio(), {"rate": RATE})
    assert output_files(tmp_path / "out.wav", data, 1, 0) == [tmp_path / "out.wav"]
    with pytest.raises(ConfigError, match=r"out-2\.wav: already exists and is not overwritten"):
        output_files(tmp_path / "out.wav", data, 3, 0)
    with pytest.raises(ConfigError, match=r"out\.mp3: must be a \.wav file, as the model writes sounds"):
        output_files(tmp_path / "out.mp3", data, 1, 0)
