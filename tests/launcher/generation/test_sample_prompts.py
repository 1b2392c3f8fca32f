"""Prompts and options that do not fit the model are told in one line, before anything is written."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.modalities.audio import Audio
from longstride.launcher.generation.sample import read_prompts
from longstride.launcher.models.model_data import ModelData
from tests.harness.tiny_models import CONTEXT, RATE, content_of, tiny_export
from tests.launcher.conftest import Refusal

IMAGE = [
    (
        ["--prompt-image", "{folder}/9x8.png"],
        "is 9x8 (height x width), but the model's pictures are 8x8; scale it, such",
    ),
    (["--prompt-image", "none.png"], "--prompt-image=none.png: No such file or directory"),
    (["--prompt-image", "{folder}/s.wav"], "cannot be read as a picture"),
    (
        ["--prompt-image", "{folder}/8x8.png", "--keep-rows", "8"],
        "--keep-rows=8: must be from 0 to 7, fewer than a pic",
    ),
    (["--keep-rows", "4"], "--keep-rows: only works together with --prompt-image FILE; leave it out"),
    (["--bytes", "10"], "--bytes: pictures have exactly 192 bytes"),
    (["--slide"], "--slide: pictures have exactly 192 bytes"),
    (["--prompt-file", "{folder}/s.wav"], "--prompt-file: has 458 bytes, but pictures have 192; give fewer"),
    (["--prompt-image", "{folder}/8x8.png", "--count", "65536"], "--count: a grid of "),
    (["--rate", "8000"], "--rate=8000: the model writes pictures; leave it out"),
]
AUDIO = [
    (["--prompt-audio", "none.wav"], "--prompt-audio=none.wav: No such file or directory"),
    (["--prompt-audio", "{folder}/8x8.png"], "cannot be read as a sound"),
    (["--prompt-audio", "{folder}/s.wav", "--keep-seconds", "3"], "--keep-seconds=3: the sound has 0.05 seconds"),
    (["--prompt-audio", "{folder}/s.wav", "--keep-seconds", "-1"], "--keep-seconds=-1: must be above 0, in seconds"),
    (["--seconds", "nan"], "--seconds=nan: must be above 0, in seconds"),
    (["--seconds", "1"], "are 8000 tokens: they must fit in the model's context of 192; take at most --seconds 0.024"),
    (["--keep-seconds", "1"], "--keep-seconds: only works together with --prompt-audio FILE; leave it out"),
    (["--rate", "0"], "--rate=0: must be from 1 to 2**32 - 1 Hz"),
    (["--prompt-image", "{folder}/8x8.png"], "the model writes sounds; take --prompt-file for bytes as they are"),
    (
        ["--modality", "image"],
        "--modality=image: config.json does not say how large its pictures are; take --modality text",
    ),
]
TEXT = [
    (["--seconds", "1"], "--seconds=1: only applies to sound, but the model writes text; give --bytes"),
    (["--count", "0"], "--count=0: must be from 1 to 65,536"),
    (["--bytes", "0"], "--bytes=0: must be at least 1"),
    (["--output", "{folder}/x.png"], "x.png: must not be a .png file, as the model writes text"),
    (["--prompt", "x" * 200], "of 192; add --slide to continue beyond it"),
    (["--prompt-audio", "{folder}/s.wav"], "the model writes text; take --prompt-file for bytes as they are"),
    (["--modality", "audio"], "--rate: config.json lacks the sounds' rate; add it, such as --rate 12000"),
]
CASES = [(name, *case) for name, cases in (("image", IMAGE), ("audio", AUDIO), ("text", TEXT)) for case in cases]


@pytest.mark.parametrize(("modality", "options", "message"), CASES, ids=[f"{case[0]}{case[1]}"[:50] for case in CASES])
def test_options_that_do_not_fit_are_refused(
    modality: str, options: list[str], message: str, tmp_path: Path, refusal: Refusal
) -> None:
    model = tiny_export(tmp_path / "model", modality)
    for height, width in ((8, 8), (9, 8)):
        Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(tmp_path / f"{height}x{width}.png")
    sound = np.frombuffer(content_of("audio", 400, 0), dtype=np.uint8)
    (tmp_path / "s.wav").write_bytes(Audio().encode(sound, {"rate": RATE}))
    placed = [option.format(folder=tmp_path) for option in options]
    output = tmp_path / {"image": "out.png", "audio": "out.wav", "text": "out.txt"}[modality]
    assert message in refusal("sample", model, "--output", output, *placed)


@pytest.mark.parametrize("seconds", [None, 0.01, 0.02])
def test_sound_of_another_rate_is_brought_to_the_models(seconds: float | None, tmp_path: Path) -> None:
    path = tmp_path / "s.wav"
    sound = np.frombuffer(content_of("audio", 800, 0), dtype=np.uint8)
    path.write_bytes(Audio().encode(sound, {"rate": 2 * RATE}))
    data = ModelData(modality_named("audio"), {"rate": RATE})
    ([found], _) = read_prompts([path], "--prompt-audio", data, seconds, CONTEXT)
    with path.open("rb") as file:
        whole = Audio().open(path, file, {"rate": RATE, "resampled": 1}).read(0, 400)
    assert found == whole[: CONTEXT // 2 if seconds is None else round(seconds * RATE)]
