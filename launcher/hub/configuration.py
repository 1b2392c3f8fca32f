"""The configuration class for an export's config.json, and the numbers of the special tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from longstride.launcher.output import hub_stub
from longstride.sparse_model import ModelConfig


class Specials(NamedTuple):
    """Special tokens after the V of a vocabulary, which no model predicts.

    The start stands before a text, and the network has a row for it. A model of masked tokens has no start, but the
    mask in its place. The end and padding have no weights; they exist for tools that require them.
    """

    start: int  # or the mask
    end: int
    padding: int

    @classmethod
    def of(cls, vocabulary: int) -> Specials:
        """Return the special tokens of a vocabulary of that size."""
        return cls(vocabulary, vocabulary + 1, vocabulary + 2)


class LongstrideConfig(PreTrainedConfig):
    """An export's config.json; ``model`` is the network's configuration.

    ``from_pretrained(folder, trust_code=True)`` lets a model import packages that define parts of it.
    """

    trust_code = False  # only set by from_pretrained, never by the file
    model_type = "longstride"  # in an export's config.json

    def __init__(self, model: dict[str, Any] | None = None, **others: Any) -> None:
        others.setdefault("tie_word_embeddings", bool(((model or {}).get("output") or {}).get("tied")))
        others.pop("trust_code", None)
        others.pop("vocab_size", None)  # set below, since transformers warns if special tokens exceed it
        vocabulary = (model or {}).get("vocabulary", ModelConfig.model_fields["vocabulary"].default)
        for name, token in zip(("bos", "eos", "pad"), Specials.of(vocabulary), strict=True):
            others.setdefault(f"{name}_token_id", token)
        super().__init__(**others)
        self.model = model
        if not self.causal:
            self.bos_token_id = None
        if model is not None:  # transformers makes a configuration without a model for the defaults
            # Names that the tools of transformers look for.
            self.vocab_size = vocabulary
            # If causal, the most tokens without a start that still leave a row after the last one.
            self.max_position_embeddings = model["context"] - self.causal
            self.hidden_size = model["width"]
            self.num_hidden_layers = model["layers"]
            self.num_attention_heads = model["heads"]

    @property
    def causal(self) -> bool:
        """Whether the model predicts each token from those before it, and not masked tokens from both sides."""
        objective = (self.model or {}).get("objective") or {}
        return bool(objective.get("type", "autoregressive") == "autoregressive")

    def validate(self) -> None:
        """Validate like transformers, but without its warning about special tokens after the vocabulary."""
        for validator in type(self).__class_validators__:
            if validator.__name__ != "validate_token_ids":
                validator(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json: all fields but ``trust_code``, which only holds for this process."""
        return {name: value for name, value in super().to_dict().items() if name != "trust_code"}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save config.json like transformers, and the stub of an export.

        transformers itself would copy the file that defines this class, which does not work alone.
        """
        self.auto_map = hub_stub.auto_map(self.causal)
        self._auto_class = None
        hub_stub.write(Path(save_directory), self.causal)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
