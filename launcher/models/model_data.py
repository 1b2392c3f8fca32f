"""What the bytes of an exported model are: its modality, and a picture's size or a sound's rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longstride.kernels.errors import ConfigError
from longstride.launcher.output import CONFIG
from longstride.sparse_model.config import ImageEmbedding, ModelConfig

if TYPE_CHECKING:  # which knows of deepspeed's configurations
    from longstride.launcher.config import RunConfig

MODALITIES = ("audio", "image", "text")  # the data room's, which is imported only where it is needed: it takes a second
_SIZES = ("height", "width", "channels")
_DRAWN_CHANNELS = (1, 3)


@dataclass(frozen=True, slots=True)
class ModelData:
    """The kind of a model's bytes."""

    modality: str
    properties: Mapping[str, int]  # as the data room means them

    @classmethod
    def of(
        cls, content: Mapping[str, Any], config: ModelConfig, modality: str | None = None, rate: int | None = None
    ) -> ModelData:
        """By the content of an exported config.json, unless a command line says something else.

        Raises:
            ConfigError: pictures whose size nothing tells, or that are not the model's context; a rate out of range.
        """
        told = content.get("data")
        told = told if isinstance(told, dict) else {}
        known = told.get("properties")
        known = known if isinstance(known, dict) else {}
        name = modality or told.get("modality") or config.embedding.type
        if name not in MODALITIES:
            raise ConfigError(f"{CONFIG}: data.modality={name!r}: must be one of {', '.join(MODALITIES)}")
        if rate is not None and (name != "audio" or not 1 <= rate < 2**32):
            rule = (
                "must be from 1 to 2**32 - 1 Hz"
                if name == "audio"
                else f"the model writes {cls(name, {}).words}; leave it out"
            )
            raise ConfigError(f"--rate={rate}: {rule}")
        if name == "image":
            return cls(name, _picture_size(known, config))
        return cls(
            name, {"rate": rate or known["rate"]} if name == "audio" and (rate or _is_size(known, "rate")) else {}
        )

    @property
    def words(self) -> str:
        """What the model writes."""
        return {"image": "pictures", "audio": "sounds"}.get(self.modality, self.modality)

    @property
    def rate(self) -> int:
        """Of sounds, in Hz; ConfigError where nothing tells it."""
        if "rate" not in self.properties:
            raise ConfigError(f"--rate: {CONFIG} does not tell the sounds' rate; add it, such as --rate 12000")
        return self.properties["rate"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of pictures: height, width, channels."""
        return (self.properties["height"], self.properties["width"], self.properties["channels"])


def describe(config: RunConfig) -> dict[str, Any]:
    """What an exported config.json says of the data: by the folder, where it still is; else by the model's positions.

    Nothing is fetched for it.
    """
    from longstride.data_pipelines.errors import DataError
    from longstride.data_pipelines.shards import DataManifest
    from longstride.data_pipelines.stores import open_store

    embedding = config.model.embedding
    properties = {name: getattr(embedding, name) for name in _SIZES} if isinstance(embedding, ImageEmbedding) else {}
    modality = config.data.modality or embedding.type
    if "://" not in config.data.path:
        try:
            manifest = DataManifest.load(open_store(config.data.path))
        except (DataError, OSError):
            pass
        else:
            modality, properties = manifest.modality, {**manifest.properties, **properties}
    return {"modality": modality, "properties": properties}


def _picture_size(known: Mapping[str, Any], config: ModelConfig) -> dict[str, int]:
    embedding = config.embedding
    if isinstance(embedding, ImageEmbedding):
        sizes = {name: getattr(embedding, name) for name in _SIZES}
    elif all(_is_size(known, name) for name in _SIZES):
        sizes = {name: known[name] for name in _SIZES}
    else:
        raise ConfigError(f"--modality=image: {CONFIG} tells no picture's size; take --modality text for plain bytes")
    height, width, channels = sizes.values()
    if height * width * channels != config.context:
        rule = f"{CONFIG} tells pictures of {height} x {width} x {channels}, and the context is {config.context}"
        raise ConfigError(f"--modality=image: {rule}; take --modality text for plain bytes")
    if channels not in _DRAWN_CHANNELS:
        rule = f"pictures of {channels} channels cannot be drawn; take --modality text for plain bytes"
        raise ConfigError(f"--modality=image: {rule}")
    return sizes


def _is_size(known: Mapping[str, Any], name: str) -> bool:
    return type(known.get(name)) is int and known[name] > 0
