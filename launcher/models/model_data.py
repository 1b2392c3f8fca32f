"""What the bytes of an exported model are: its modality, and a picture's size or a sound's rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from longstride.kernels import ConfigError
from longstride.launcher.output import file_names
from longstride.sparse_model import ImageEmbedding, ModelConfig

if TYPE_CHECKING:
    from longstride.launcher.config import RunConfig

_SIZES = ("height", "width", "channels")
_DRAWN_CHANNELS = (1, 3)


@dataclass(frozen=True, slots=True)
class ModelData:
    """The kind of a model's bytes."""

    # As in the data room, which takes a second to import.
    MODALITIES: ClassVar = ("audio", "image", "text")

    modality: str
    properties: Mapping[str, int]  # as the data room means them

    @classmethod
    def of(
        cls, content: Mapping[str, Any], config: ModelConfig, modality: str | None = None, rate: int | None = None
    ) -> ModelData:
        """From the content of an exported config.json; a command line's ``modality`` and ``rate`` go first.

        Raises:
            ConfigError: the size of pictures is unknown or not the model's context, or a rate is out of range.
        """
        data = content.get("data")
        data = data if isinstance(data, dict) else {}
        known = data.get("properties")
        known = known if isinstance(known, dict) else {}
        name = modality or data.get("modality") or config.embedding.type
        if name not in cls.MODALITIES:
            raise ConfigError(
                f"{file_names.CONFIG}: data.modality={name!r}: must be one of {', '.join(cls.MODALITIES)}"
            )
        if rate is not None and name != "audio":
            raise ConfigError(f"--rate={rate}: the model writes {cls(name, {}).words}; leave it out")
        if rate is not None and not 1 <= rate < 2**32:
            raise ConfigError(f"--rate={rate}: must be from 1 to 2**32 - 1 Hz")
        if name == "image":
            return cls(name, _picture_size(known, config))
        if name == "audio" and (rate or _is_size(known, "rate")):
            return cls(name, {"rate": rate or known["rate"]})
        return cls(name, {})

    @classmethod
    def of_run(cls, config: RunConfig) -> ModelData:
        """From a run's data folder, where it is still on this machine; else from the model's embedding.

        Nothing is downloaded for it.
        """
        from longstride.data_pipelines.errors import DataError
        from longstride.data_pipelines.shards import DataManifest
        from longstride.data_pipelines.stores import open_store

        embedding = config.model.embedding
        sizes = {name: getattr(embedding, name) for name in _SIZES} if isinstance(embedding, ImageEmbedding) else {}
        if "://" not in config.data.path:
            try:
                manifest = DataManifest.load(open_store(config.data.path))
            except (DataError, OSError):
                pass
            else:
                return cls(manifest.modality, {**manifest.properties, **sizes})
        return cls(config.data.modality or embedding.type, sizes)

    @property
    def words(self) -> str:
        """What the model writes."""
        return {"image": "pictures", "audio": "sounds"}.get(self.modality, self.modality)

    @property
    def rate(self) -> int:
        """Of sounds, in Hz; ConfigError where it is unknown."""
        if "rate" not in self.properties:
            rule = f"{file_names.CONFIG} does not tell the sounds' rate; add it, such as --rate 12000"
            raise ConfigError(f"--rate: {rule}")
        return self.properties["rate"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of pictures: height, width, channels."""
        return (self.properties["height"], self.properties["width"], self.properties["channels"])


def _picture_size(known: Mapping[str, Any], config: ModelConfig) -> dict[str, int]:
    embedding = config.embedding
    if isinstance(embedding, ImageEmbedding):
        sizes = {name: getattr(embedding, name) for name in _SIZES}
    elif all(_is_size(known, name) for name in _SIZES):
        sizes = {name: known[name] for name in _SIZES}
    else:
        rule = f"{file_names.CONFIG} tells no picture's size; take --modality text for plain bytes"
        raise ConfigError(f"--modality=image: {rule}")
    height, width, channels = sizes.values()
    if height * width * channels != config.context:
        size = f"{height} x {width} x {channels}"
        rule = f"{file_names.CONFIG} tells pictures of {size}, and the context is {config.context}"
        raise ConfigError(f"--modality=image: {rule}; take --modality text for plain bytes")
    if channels not in _DRAWN_CHANNELS:
        rule = f"pictures of {channels} channels cannot be drawn; take --modality text for plain bytes"
        raise ConfigError(f"--modality=image: {rule}")
    return sizes


def _is_size(known: Mapping[str, Any], name: str) -> bool:
    return type(known.get(name)) is int and known[name] > 0
