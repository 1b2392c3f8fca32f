"""What an exported model says its bytes are, and what is asked instead."""

from typing import Any

import pytest

from longstride.data_pipelines.modalities import modality_named
from longstride.kernels import ConfigError
from longstride.launcher.models.model_data import ModelData
from longstride.sparse_model import ModelConfig

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
        (None, TEXT, {"modality": "audio", "rate": 5}, ("audio", {"rate": 5})),
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
        (
            {"modality": "image", "properties": {}},
            TEXT,
            "--modality=image: config.json does not say how large its pictures are",
        ),
        ({"modality": "image", "properties": PICTURE | {"width": 5}}, TEXT, "says pictures of 2 x 5 x 3, but the con"),
        ({}, model({"type": "image", "height": 3, "width": 4, "channels": 2}), "pictures of 2 channels cannot be draw"),
    ],
)
def test_pictures_that_cannot_be_are_refused(told: dict, config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelData.of({"data": told}, config)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [[], {}, 5, True, "a", ["text"], 1.5])
@pytest.mark.parametrize("name", ["", "modality", "properties", "palette", "separator", "splits", "fingerprint"])
def test_data_of_another_type_is_refused_in_a_line(name: str, value: Any) -> None:
    told = {name: value} if name else value
    fits = {"": ({},), "separator": (5,), "fingerprint": ("a",), "properties": ({},), "splits": ({},)}
    if any(type(value) is type(good) and value == good for good in fits.get(name, ())):
        ModelData.of({"data": told}, TEXT)
        return
    with pytest.raises(ConfigError) as error:
        ModelData.of({"data": told}, TEXT)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"config.json: data{'.' if name else ''}{name}")
