"""What the bytes of an exported model are: its modality, and a picture's size or a sound's rate."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, Modality
from longstride.kernels import ConfigError
from longstride.launcher.output import file_names
from longstride.sparse_model import ImageEmbedding, ModelConfig

if TYPE_CHECKING:
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
        """From the content of an exported config.json; a command line's ``modality`` and ``rate`` go first.

        Raises:
            ConfigError: pictures of unknown size, or of another than the model's context; a rate out of range.
        """
        data = content.get("data")
        data = data if isinstance(data, dict) else {}
        known = data.get("properties")
        known = (known if isinstance(known, dict) else {}) | _picture_size(config)
        name = modality or data.get("modality") or config.embedding.modality
        if name not in MODALITIES:
            rule = f"must be one of {', '.join(sorted(MODALITIES))}"
            raise ConfigError(f"{file_names.CONFIG}: data.modality={name!r}: {rule}")
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
            rule = f"{file_names.CONFIG} {error}; take --modality text for plain bytes"
            raise ConfigError(f"--modality={name}: {rule}") from None

    @classmethod
    def of_run(cls, config: RunConfig) -> ModelData:
        """From a run's data folder, where it is still on this machine; else from the model's embedding.

        Nothing is downloaded for it.
        """
        from longstride.data_pipelines.shards import DataManifest
        from longstride.data_pipelines.stores import open_store

        sizes = _picture_size(config.model)
        if "://" not in config.data.path:
            with contextlib.suppress(DataError, OSError):
                manifest = DataManifest.load(open_store(config.data.path))
                return cls(MODALITIES[manifest.modality], {**manifest.properties, **sizes})
        return cls(MODALITIES[config.data.modality or config.model.embedding.modality], sizes)

    @property
    def file_properties(self) -> Mapping[str, int]:
        """The properties, with all that a file of the modality needs; ConfigError where one is not known."""
        for name in self.modality.asks:
            if name not in self.properties:
                rule = f"does not tell the {self.modality.words}' {name}; add it, such as --{name} 12000"
                raise ConfigError(f"--{name}: {file_names.CONFIG} {rule}")
        return self.properties


def _picture_size(config: ModelConfig) -> dict[str, int]:
    """Of a model whose positions are a picture's; else nothing."""
    embedding = config.embedding
    if not isinstance(embedding, ImageEmbedding):
        return {}
    return {name: getattr(embedding, name) for name in ("height", "width", "channels")}
