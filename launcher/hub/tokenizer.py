"""Text as bytes, as a tokenizer of transformers, with special tokens that are no bytes."""

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
# As text shows them, where it shows them at all. No text is searched for them.
_SPECIALS = ("<|longstride_start|>", "<|longstride_end|>", "<|longstride_padding|>")
_NUMBERS = Specials.of(_BYTE_VALUES)
# By number: a byte's token is the character that byte-level tokenizers since GPT-2 write for it, so that all print.
_TOKENS = [*(bytes_to_unicode()[byte] for byte in range(_BYTE_VALUES)), *_SPECIALS]
_NUMBER_OF = {token: number for number, token in enumerate(_TOKENS)}
_BYTES_OF = {token: bytes([byte]) for byte, token in enumerate(_TOKENS[:_BYTE_VALUES])}
_BYTES_OF |= {written: written.encode() for written in _SPECIALS}


class LongstrideTokenizer(PreTrainedTokenizer):
    """Text as its UTF-8 bytes: token n is the byte n.

    Behind the bytes come a start, an end and padding (``Specials``), which no text holds: what is written like one of
    them is bytes, as all else, unless a call asks for it by ``split_special_tokens=False``. Texts begin
    with the start if ``add_bos_token`` is set. Padding stands in front by default, as generating asks for.

    Args:
        add_bos_token: whether texts begin with the start, which is the default of ``add_special_tokens=True``.
        errors: what becomes of bytes that are no UTF-8, as ``bytes.decode`` has it. With "surrogateescape" any bytes
            are a text, which has the same bytes.
        **options: as transformers has them.

    Raises:
        ValueError: tokens are to be added, for which the model has no weights.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as transformers declares it
    padding_side = "left"

    def __init__(self, add_bos_token: bool | None = None, errors: str = "replace", **options: Any) -> None:
        self.errors = errors
        tokens = [AddedToken(written, special=True, normalized=False) for written in _SPECIALS]
        self._added_tokens_decoder = dict(zip(_NUMBERS, tokens, strict=True))
        for name, token in zip(("bos_token", "eos_token", "pad_token"), _SPECIALS, strict=True):
            options.setdefault(name, token)
        options.setdefault("split_special_tokens", True)
        super().__init__(errors=errors, **options)
        if add_bos_token is not None:
            self.add_bos_token = add_bos_token
        # transformers saves the values that these names have by then; it leaves `add_bos_token` out by itself.
        self.init_kwargs["special_tokens_pattern"] = self.special_tokens_pattern

    @property
    def add_bos_token(self) -> bool:
        """Whether texts begin with the start."""
        return self.special_tokens_pattern == "prefix_suffix"

    @add_bos_token.setter
    def add_bos_token(self, value: bool) -> None:
        self.special_tokens_pattern = "prefix_suffix" if value else "none"

    @property
    def prefix_tokens(self) -> list[int]:
        """What stands before a text, or a pair of them, by that pattern of transformers."""
        return [_NUMBERS.start]

    @property
    def vocab_size(self) -> int:
        """How many values a byte has."""
        return _BYTE_VALUES

    def get_vocab(self) -> dict[str, int]:
        """Every token's number."""
        return dict(_NUMBER_OF)

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The same tokens of bytes for the library `tokenizers`.

        transformers looks at it to learn that tokens are bytes: stop strings are then compared byte by byte.
        """
        bytes_alone = {token: number for token, number in _NUMBER_OF.items() if number < _BYTE_VALUES}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(bytes_alone, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return backend

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [_TOKENS[byte] for byte in text.encode("utf-8", "surrogateescape")]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The number of a token, or of each; None for what is no token."""
        return _NUMBER_OF.get(tokens) if isinstance(tokens, str) else [_NUMBER_OF.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """The token of a number, or of each; without the start, the end and padding, if they are to be skipped.

        Raises:
            ValueError: a number that no token has.
        """
        if isinstance(ids, int):
            return self._convert_id_to_token(ids)
        numbers = [int(number) for number in ids]
        if numbers:
            self._convert_id_to_token(min(numbers)), self._convert_id_to_token(max(numbers))
        end = _BYTE_VALUES if skip_special_tokens else len(_TOKENS)  # a byte is never skipped, whatever it is taken for
        return [_TOKENS[number] for number in numbers if number < end]

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(_TOKENS):
            raise ValueError(f"token {index}: there is none of that number; they are 0 to {len(_TOKENS) - 1}")
        return _TOKENS[index]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text of tokens; bytes that are no UTF-8 as ``errors`` has it."""
        return b"".join([_BYTES_OF[token] for token in tokens]).decode("utf-8", self.errors)

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        unknown = [str(token) for token in new_tokens if str(token) not in _NUMBER_OF]
        if unknown:
            rule = "is no byte, and the model has no weights for other tokens"
            raise ValueError(f"{unknown[0]!r}: {rule}; take one of {', '.join(_SPECIALS)}")
        return super()._add_tokens(new_tokens, special_tokens)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *given: Any, **named: Any) -> tuple[str, ...]:
        """As transformers has it, and the stub of an export beside it.

        transformers itself would copy the file that defines this class, which is of no use alone.
        """
        self._auto_class, self._auto_map = None, dict(hub_stub.TOKENIZER_AUTO_MAP)
        hub_stub.write(Path(save_directory))
        return (*super().save_pretrained(save_directory, *given, **named), str(Path(save_directory) / hub_stub.FILE))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Nothing: there is no file."""
        return ()
