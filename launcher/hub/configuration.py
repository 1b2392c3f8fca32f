"""What transformers reads of an export's config.json, and the numbers of the tokens that are no bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from longstride.launcher.output import hub_stub
from longstride.sparse_model import ModelConfig


class Specials(NamedTuple):
    """Tokens behind the V of a vocabulary, which no model predicts.

    The start stands before a text: the network has a row for it. The end and padding are for the tools that ask for
    them: no weights stand behind either.
    """

    start: int
    end: int
    padding: int

    @classmethod
    def of(cls, vocabulary: int) -> Specials:
        """Those of a vocabulary of that many tokens."""
        return cls(vocabulary, vocabulary + 1, vocabulary + 2)


class LongstrideConfig(PreTrainedConfig):
    """config.json of an export; ``model`` is the network's configuration.

    ``from_pretrained(folder, trust_code=True)`` lets a model import the packages that define parts of it.
    """

    trust_code = False  # set by from_pretrained alone, never by the file
    model_type = "longstride"  # as an export's config.json has it

    def __init__(self, model: dict[str, Any] | None = None, **others: Any) -> None:
        others.setdefault("tie_word_embeddings", False)
        others.pop("trust_code", None)
        others.pop("vocab_size", None)  # told below: transformers warns where special tokens exceed one that it knows
        vocabulary = (model or {}).get("vocabulary", ModelConfig.model_fields["vocabulary"].default)
        specials = Specials.of(vocabulary)
        for name, token in zip(("bos", "eos", "pad"), specials, strict=True):
            others.setdefault(f"{name}_token_id", token)
        super().__init__(**others)
        self.model = model
        if model is not None:  # transformers makes one without a model to see the defaults
            # By the names that the tools of transformers look for.
            self.vocab_size = vocabulary
            # How many tokens have a row behind the last one, where no start stands before them.
            self.max_position_embeddings = model["context"] - 1
            self.hidden_size = model["width"]
            self.num_hidden_layers = model["layers"]
            self.num_attention_heads = model["heads"]

    def validate(self) -> None:
        """As transformers has it, but that special tokens may stand behind the vocabulary, where it would warn."""
        for each in type(self).__class_validators__:
            if each.__name__ != "validate_token_ids":
                each(self)

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json gets: all but ``trust_code``, which holds for this process alone."""
        return {name: value for name, value in super().to_dict().items() if name != "trust_code"}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """As transformers has it, and the stub beside config.json, as in an export.

        transformers itself would copy the file that defines this class, which is of no use alone.
        """
        self.auto_map = dict(hub_stub.AUTO_MAP)
        self._auto_class = None
        hub_stub.write(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
