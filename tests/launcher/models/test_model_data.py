"""What an exported model says its bytes are, and what is asked instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.modalities.audio import Audio
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig
from longstride.launcher.models.model_data import ModelData
from longstride.sparse_model import ModelConfig
from tests.harness.runs import configuration

PICTURE = {"height": 2, "width": 4, "channels": 3}


def model(embedding: dict[str, Any], context: int = 24) -> ModelConfig:
    attention = {"type": "local", "window": 4}
    return ModelConfig.model_validate(
        {"context": context, "layers": 1, "heads": 1, "width": 8, "attention": attention, "embedding": embedding}
    )


TEXT, IMAGE = model({"type": "text", "row_width": 4}), model({"type": "image", **PICTURE})


@pytest.mark.parametrize(
    ("told", "config", "asked", "expected"),
    [
        ({}, TEXT, {}, ("text", {})),
        ({}, IMAGE, {}, ("image", PICTURE)),
        ({}, IMAGE, {"modality": "text"}, ("text", {})),
        ({"modality": "image", "properties": {**PICTURE, "resized": 1}}, TEXT, {}, ("image", PICTURE)),
        ({"modality": "audio", "properties": {"rate": 8000}}, TEXT, {}, ("audio", {"rate": 8000})),
        ({"modality": "audio", "properties": {"rate": 8000}}, TEXT, {"rate": 9000}, ("audio", {"rate": 9000})),
        ({"modality": "audio", "properties": {"rate": "much"}}, TEXT, {}, ("audio", {})),
        ("nonsense", TEXT, {"modality": "audio", "rate": 5}, ("audio", {"rate": 5})),
    ],
)
def test_data_is_what_is_told_unless_asked(
    told: Any, config: ModelConfig, asked: dict, expected: tuple[str, dict[str, int]]
) -> None:
    name, properties = expected
    assert ModelData.of({"data": told}, config, **asked) == ModelData(modality_named(name), properties)


@pytest.mark.parametrize(
    ("told", "config", "message"),
    [
        ({"modality": "smell"}, TEXT, "config.json: data.modality='smell': must be one of audio, image, text"),
        ({"modality": "image", "properties": {}}, TEXT, "--modality=image: config.json tells no picture's size"),
        ({"modality": "image", "properties": PICTURE | {"width": 5}}, TEXT, "tells pictures of 2 x 5 x 3, and the con"),
        ({}, model({"type": "image", "height": 3, "width": 4, "channels": 2}), "pictures of 2 channels cannot be draw"),
    ],
)
def test_pictures_that_cannot_be_are_refused(told: dict, config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelData.of({"data": told}, config)
    assert message in str(error.value)


def run_config(data: Path | str, **model: Any) -> RunConfig:
    content = configuration(Path("data"), Path("run"))
    content["data"]["path"] = str(data)
    content["model"].update(model)
    content["deepspeed"] = {}
    return RunConfig.model_validate(content)


def test_export_tells_what_the_data_folder_says(data: Path, tmp_path: Path) -> None:
    assert ModelData.of_run(run_config(data)) == ModelData(modality_named("text"), {})
    sounds = tmp_path / "sounds"
    sounds.mkdir()
    for name in "abcdef":
        (sounds / f"{name}.wav").write_bytes(Audio().encode(np.arange(200) % 256, {"rate": 4000}))
    build([sounds], tmp_path / "audio", modality="audio", validation_fraction=0.3)
    assert ModelData.of_run(run_config(tmp_path / "audio")) == ModelData(modality_named("audio"), {"rate": 4000})


def test_export_tells_what_it_can_where_the_data_is_gone() -> None:
    assert ModelData.of_run(run_config("/nowhere")) == ModelData(modality_named("text"), {})
    audio = {"type": "audio", "row_width": 8}
    assert ModelData.of_run(run_config("s3://bucket/data", embedding=audio)) == ModelData(modality_named("audio"), {})
    picture = {"type": "image", "height": 4, "width": 4, "channels": 4}
    expected = ModelData(modality_named("image"), {"height": 4, "width": 4, "channels": 4})
    assert ModelData.of_run(run_config("/nowhere", embedding=picture)) == expected
