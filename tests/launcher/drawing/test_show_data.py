"""`data show`, and the options of `data build` that belong to one modality."""

import io
import random
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.shards.verify import Sample, sample_documents
from longstride.data_pipelines.stores import open_store
from longstride.launcher import cli
from longstride.launcher.drawing.samples import draw_samples, envelope, print_texts, safe_text
from tests.hostile.commands import Commands
from tests.launcher.conftest import Refusal

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data folders text, image and audio, each of several shards."""
    base = tmp_path_factory.mktemp("shown")
    for name in ("text", "image", "audio"):
        (base / f"{name}-source").mkdir()
    for number in range(30):
        words = random.Random(number)
        (base / f"text-source/{number}.txt").write_text(f"file {number}: {words.getrandbits(60):x}\n" * (1 + number))
        colour = list(COLOURS.values())[number % 3]
        Image.new("RGB", (4, 6), colour).save(base / f"image-source/{number}.png")
    for number in range(6):
        with wave.open(str(base / f"audio-source/{number}.wav"), "wb") as file:
            file.setparams((1, 2, 1000, 0, "NONE", ""))
            tone = np.sin(np.arange(500 + 1000 * number) / (3 + number)) * 20_000
            file.writeframes(tone.astype("<i2").tobytes())
    for name in ("text", "image", "audio"):
        build([base / f"{name}-source"], base / name, modality=name, shard_bytes=3000, validation_fraction=0.2)
    return base


def test_texts_are_printed_under_their_names(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "show", str(folders / "text"), "--count", "2", "--split", "validation"]) == 0
    out = capsys.readouterr().out
    for key, content, _, place, source, _ in sample_documents(folders / "text", "validation", 2):
        assert place == f"{key}.txt of {key.rpartition('-')[0]}.tar" and source is not None
        assert f"=== {place}, from {source}: {len(content):,} bytes ===\n{content.tobytes().decode()}\n" in out
    assert out.count("===") == 4


def test_text_commands_no_terminal() -> None:
    text = b"tab\tline\nred \x1b[31m bell\x07 cr\r del\x7f c1\xc2\x9b no utf\xff " + "café \u202e \u2028 👍".encode()
    assert safe_text(text) == (
        "tab\tline\nred \\x1b[31m bell\\x07 cr\\r del\\x7f c1\\x9b no utf\\xff café \\u202e \\u2028 👍"
    )
    every = safe_text(bytes(range(256)) + bytes(range(256)))
    assert every.isprintable() or set(filter(lambda c: not c.isprintable(), every)) == {"\t", "\n"}


def test_long_text_is_cut_between_characters() -> None:
    content = np.frombuffer(b"x" + "é".encode() * 5000, dtype=np.uint8)
    stream = io.StringIO()
    print_texts([Sample("train-00000-0000007", content, {}, "train-00000-0000007.txt of train-00000.tar")], stream)
    first, text, last, _ = stream.getvalue().split("\n", 3)
    assert first == "=== train-00000-0000007.txt of train-00000.tar: 10,001 bytes ==="
    assert text == "x" + "é" * 999
    assert last == "=== 8,001 more bytes ==="


def test_text_for_a_terminal_of_few_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.txt").write_text("café\n", encoding="utf-8")
    build([tmp_path / "source"], tmp_path / "data", validation_fraction=0)
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    assert cli.main(["data", "show", str(tmp_path / "data")]) == 0
    assert b"caf\\xe9\n" in terminal.getvalue()


def test_text_for_a_reader_that_has_seen_enough(folders: Path, commands: Commands) -> None:
    ended = commands("data", "show", folders / "text", stdout="closed", seconds=120.0)
    assert (ended.err, ended.code) == ("", 141)


def test_pictures_are_drawn_in_their_colours(folders: Path) -> None:
    samples = list(sample_documents(folders / "image", "train", 7))
    figure = draw_samples(samples, "image", "seven")
    panels = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in panels] == [sample.key for sample in samples]
    for axis in panels:
        (pixels,) = {tuple(pixel) for row in axis.images[0].get_array().tolist() for pixel in row}
        assert pixels in COLOURS.values()


def test_sounds_are_drawn_over_their_seconds(folders: Path) -> None:
    samples = list(sample_documents(folders / "audio", "train", 10))
    figure = draw_samples(samples, "audio", "all")
    longest = max(len(sample.content) for sample in samples)
    for axis, sample in zip(figure.axes, samples, strict=True):
        assert axis.get_xlim() == (0, longest / 1000)  # one axis for all, so that lengths can be compared
        drawn = [*axis.lines[1:], *axis.collections][0]
        points = drawn.get_xydata() if hasattr(drawn, "get_xydata") else drawn.get_paths()[0].vertices
        assert len(sample.content) / 1000 == pytest.approx(points[:, 0].max(), abs=0.01)
        assert axis.get_title(loc="left").startswith(sample.key)


def test_envelope_holds_every_extreme() -> None:
    values = np.random.default_rng(0).normal(size=1003)
    low, high = envelope(values, 50)
    assert len(low) == len(high) == 50
    assert (low.min(), high.max()) == (values.min(), values.max())
    assert all(array is values for array in envelope(values, 1003))


@pytest.mark.parametrize("name", ["image", "audio"])
def test_show_writes_a_png_and_never_over_one(
    folders: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    output = tmp_path / "samples.png"
    command = ["data", "show", f"{folders / name}/", "--output", str(output), "--count", "3"]
    assert cli.main(command) == 0
    sources = [f"{each.key}: {each.source}" for each in sample_documents(folders / name, "train", 3)]
    assert capsys.readouterr().out.splitlines() == [str(output), *sources]
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "already exists and is not overwritten" in refusal(*command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text", "--output", "a.png"], "--output=a.png: text is printed, not drawn"),
        (["image"], "--output: image is drawn into a file; name one"),
        (["image", "--output", "a.jpg"], "--output=a.jpg: must be a .png in a folder that exists"),
        (["audio", "--output", "a.png", "--count", "21"], "--count=21: one picture has room for 20 of audio"),
        (["image", "--split", "tset", "--output", "a.png"], "no split 'tset'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_show_refuses_in_one_line(
    folders: Path, tmp_path: Path, arguments: list[str], message: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal("data", "show", folders / arguments[0], *arguments[1:])


@pytest.mark.parametrize(
    ("option", "modality", "properties"),
    [
        (["--image-size", "3x2"], "image", {"height": 3, "width": 2, "channels": 3, "resized": 1}),
        (["--image-size", "2"], "image", {"height": 2, "width": 2, "channels": 3, "resized": 1}),
        ([], "image", {"height": 6, "width": 4, "channels": 3, "resized": 0}),
        (["--rate", "1000"], "audio", {"rate": 1000, "resampled": 1}),
        ([], "audio", {"rate": 1000}),
    ],
    ids=str,
)
def test_build_takes_options_of_the_modality(
    folders: Path, tmp_path: Path, option: list[str], modality: str, properties: dict[str, int]
) -> None:
    source = str(folders / f"{modality}-source")
    assert cli.main(["data", "build", source, "--output", str(tmp_path / "data"), "--modality", modality, *option]) == 0
    assert DataManifest.load(open_store(tmp_path / "data")).properties == properties


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image-size", "32"], "--image-size=32: only applies to --modality image, and this is text"),
        (["--rate", "12000"], "--rate=12000: only applies to --modality audio, and this is text"),
        (["--modality", "audio", "--image-size", "32"], "only applies to --modality image, and this is audio"),
        (["--modality", "audio", "--rate", "12k"], "--rate=12k: must be in Hz; such as 12000"),
        (["--modality", "audio", "--rate", "0"], "--rate=0: must be in Hz"),
        (["--modality", "audio", "--rate", "300000"], "has 1000 Hz, too far from 300000 to be resampled"),
        *(
            (["--modality", "image", "--image-size", value], f"--image-size={value}: must be height x width in pixels")
            for value in ("3x", "x3", "", "0", "-3", "3x-3", "3x3x3", "a", "3 x 3", "²", "1" * 50)
        ),
        (
            ["--modality", "image", "--image-size", "99999999"],
            "must be at most 67,108,864 pixels in all, such as 64x64",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_build_refuses_options_in_one_line(
    folders: Path, tmp_path: Path, options: list[str], message: str, refusal: Refusal
) -> None:
    source = folders / f"{options[1] if options[0] == '--modality' else 'text'}-source"
    assert message in refusal("data", "build", source, "--output", tmp_path / "data", *options)
