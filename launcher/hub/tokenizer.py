"""A tokenizer for transformers whose tokens are bytes, with special tokens that are no bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AddedToken, PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from longstride.launcher.hub.configuration import Specials
from longstride.launcher.output import hub_stub

_BYTE_VALUES = 256
# How decoded text shows them. A mask replaces the start.
_SPECIALS = ("<|longstride_start|>", "<|longstride_end|>", "<|longstride_padding|>")
_NUMBERS = Specials.of(_BYTE_VALUES)
# By number. A byte's token is its printable character in byte-level tokenizers since GPT-2.
_BYTES = [bytes_to_unicode()[byte] for byte in range(_BYTE_VALUES)]
_BYTES_OF = {token: bytes([byte]) for byte, token in enumerate(_BYTES)}
_BYTES_OF |= {token: token.encode() for token in (hub_stub.MASK, *_SPECIALS)}


class LongstrideTokenizer(PreTrainedTokenizer):
    """Text as UTF-8 bytes: token n is the byte n.

    After the bytes come a start, an end and padding (``Specials``), which no text contains: text that looks like them
    is tokenized as bytes, unless a call sets ``split_special_tokens=False``. Texts begin with the start if
    ``add_bos_token`` is set. Padding is on the left by default, as generation needs.

    With a ``mask_token``, for models of masked tokens, the mask replaces the start. Text is then searched for it and
    the other special tokens, unless a call sets ``split_special_tokens=True``, and padding is on the right.

    Args:
        add_bos_token: whether texts begin with the start, the default of ``add_special_tokens=True``.
        errors: how to decode bytes that are not UTF-8, see ``bytes.decode``. With "surrogateescape" any bytes become a
            text that encodes to the same bytes.
        **options: see transformers.

    Raises:
        ValueError: tokens are to be added, or a start, for which the model has no weights.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as transformers declares it
    padding_side = "left"

    def __init__(self, add_bos_token: bool | None = None, errors: str = "replace", **options: Any) -> None:
        self.errors = errors
        self._masks = options.get("mask_token") is not None
        self._specials = (hub_stub.MASK, *_SPECIALS[1:]) if self._masks else _SPECIALS
        self._tokens = [*_BYTES, *self._specials]
        self._number_of = {token: number for number, token in enumerate(self._tokens)}
        tokens = [AddedToken(token, special=True, normalized=False) for token in self._specials]
        self._added_tokens_decoder = dict(zip(_NUMBERS, tokens, strict=True))
        first = "mask_token" if self._masks else "bos_token"
        for name, token in zip((first, "eos_token", "pad_token"), self._specials, strict=True):
            options.setdefault(name, token)
        options.setdefault("split_special_tokens", not self._masks)
        if self._masks:
            options.setdefault("padding_side", "right")
        super().__init__(errors=errors, **options)
        if add_bos_token is not None:
            self.add_bos_token = add_bos_token
        # transformers saves the current values of these names, but not `add_bos_token`.
        self.init_kwargs["special_tokens_pattern"] = self.special_tokens_pattern

    @property
    def add_bos_token(self) -> bool:
        """Whether texts begin with the start."""
        return self.special_tokens_pattern == "prefix_suffix"

    @add_bos_token.setter
    def add_bos_token(self, value: bool) -> None:
        if value and self._masks:
            raise ValueError("add_bos_token=True: a model of masked tokens has no start; leave it out")
        self.special_tokens_pattern = "prefix_suffix" if value else "none"

    @property
    def prefix_tokens(self) -> list[int]:
        """The tokens before a text or a pair of texts, for that pattern of transformers."""
        return [_NUMBERS.start]

    @property
    def vocab_size(self) -> int:
        """The number of byte values."""
        return _BYTE_VALUES

    def __len__(self) -> int:
        """Return the number of tokens. Collators draw random ones below it, which must be bytes or the mask."""
        return _NUMBERS.end if self._masks else len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return every token's number."""
        return dict(self._number_of)

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The byte tokens as an object of the library `tokenizers`.

        transformers reads it to learn that tokens are bytes, and then compares stop strings byte by byte.
        """
        numbers = {token: number for number, token in enumerate(_BYTES)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return backend

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [_BYTES[byte] for byte in text.encode("utf-8", "surrogateescape")]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the number of a token, or of each; None for unknown tokens."""
        number_of = self._number_of.get
        return number_of(tokens) if isinstance(tokens, str) else [number_of(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """Return the token of a number, or of each, optionally without the special ones.

        Raises:
            ValueError: no token has that number.
        """
        if isinstance(ids, int):
            return self._convert_id_to_token(ids)
        numbers = [int(number) for number in ids]
        if numbers:
            self._convert_id_to_token(min(numbers)), self._convert_id_to_token(max(numbers))
        end = _BYTE_VALUES if skip_special_tokens else len(self._tokens)  # bytes are never skipped
        return [self._tokens[number] for number in numbers if number < end]

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(self._tokens):
            raise ValueError(f"token {index}: does not exist; tokens are 0 to {len(self._tokens) - 1}")
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """Decode tokens to text; ``errors`` decides about bytes that are not UTF-8."""
        return b"".join([_BYTES_OF[token] for token in tokens]).decode("utf-8", self.errors)

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        unknown = [str(token) for token in new_tokens if str(token) not in self._number_of]
        if unknown:
            rule = "is not a byte, and the model has no weights for other tokens"
            raise ValueError(f"{unknown[0]!r}: {rule}; take one of {', '.join(self._specials)}")
        return super()._add_tokens(new_tokens, special_tokens)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Save like transformers, with the stub of an export.

        transformers itself would copy the file that defines this class, which does not work alone.
        """
        self._auto_class, self._auto_map = None, dict(hub_stub.TOKENIZER_AUTO_MAP)
        hub_stub.write(Path(save_directory), causal=not self._masks)
        return (*super().save_pretrained(save_directory, *args, **kwargs), str(Path(save_directory) / hub_stub.FILE))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Return no files, because there is no vocabulary file."""
        return ()
