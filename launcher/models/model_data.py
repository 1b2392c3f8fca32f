"""What the bytes of an exported model are: its modality, and a picture's size or a sound's rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, Modality
from longstride.kernels.errors import ConfigError
from longstride.launcher.output import CONFIG
from longstride.sparse_model.config import ImageEmbedding, ModelConfig

if TYPE_CHECKING:  # which knows of deepspeed's configurations
    from longstride.launcher.config import RunConfig


@dataclass(frozen=True, slots=True)
class ModelData:
    """The kind of a model's bytes."""

    modality: Modality
    properties: Mapping[str, int]  # those that are known

    @classmethod
    def of(
        cls, content: Mapping[str, Any], config: ModelConfig, modality: str | None = None, rate: int | None = None
    ) -> ModelData:
        """By the content of an exported config.json, unless a command line says something else.

        Raises:
            ConfigError: pictures of unknown size, or of another than the model's context; a rate out of range.
        """
        data = content.get("data")
        data = data if isinstance(data, dict) else {}
        known = data.get("properties")
        known = (known if isinstance(known, dict) else {}) | _picture_size(config)
        name = modality or data.get("modality") or config.embedding.type
        if name not in MODALITIES:
            names = ", ".join(sorted(MODALITIES))
            raise ConfigError(f"{CONFIG}: data.modality={name!r}: must be one of {names}")
        kind = MODALITIES[name]
        if rate is not None:
            if "rate" not in kind.asks:
                raise ConfigError(f"--rate={rate}: the model writes {kind.words}; leave it out")
            if not 1 <= rate < 2**32:
                raise ConfigError(f"--rate={rate}: must be from 1 to 2**32 - 1 Hz")
            known["rate"] = rate
        try:
            return cls(kind, kind.model_properties(known, config.context))
        except DataError as error:
            rule = f"{CONFIG} {error}; take --modality text for plain bytes"
            raise ConfigError(f"--modality={name}: {rule}") from None

    @property
    def file_properties(self) -> Mapping[str, int]:
        """The properties, with all that a file of the modality needs; ConfigError where one is not known."""
        for name in self.modality.asks:
            if name not in self.properties:
                rule = f"{CONFIG} does not tell the {self.modality.words}' {name}; add it, such as --{name} 12000"
                raise ConfigError(f"--{name}: {rule}")
        return self.properties


def describe(config: RunConfig) -> dict[str, Any]:
    """What an exported config.json says of the data: by the folder, where it still is; else by the model's positions.

    Nothing is fetched for it.
    """
    from longstride.data_pipelines.shards import load_manifest
    from longstride.data_pipelines.stores import open_store

    properties = _picture_size(config.model)
    modality = config.data.modality or config.model.embedding.type
    if config.data.order == "exact" and "://" not in config.data.path:
        try:
            manifest = load_manifest(open_store(config.data.path))
        except (DataError, OSError):
            pass
        else:
            modality, properties = manifest.modality, {**manifest.properties, **properties}
    return {"modality": modality, "properties": properties}


def _picture_size(config: ModelConfig) -> dict[str, int]:
    """Of a model whose positions are a picture's; else nothing."""
    embedding = config.embedding
    if not isinstance(embedding, ImageEmbedding):
        return {}
    return {name: getattr(embedding, name) for name in ("height", "width", "channels")}
