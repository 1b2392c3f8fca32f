"""Text as bytes, as a tokenizer of transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizer

_BYTE_VALUES = 256


class LongstrideTokenizer(PreTrainedTokenizer):
    """Text as its UTF-8 bytes: token n is the byte n, and its text the character of that number.

    There are no other tokens, so none begins, ends or pads a text.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as transformers declares it

    @property
    def vocab_size(self) -> int:
        """How many values a byte has."""
        return _BYTE_VALUES

    def get_vocab(self) -> dict[str, int]:
        """Every token's number."""
        return {chr(byte): byte for byte in range(_BYTE_VALUES)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text; bytes that are no UTF-8 become the replacement character."""
        return bytes(ord(token) for token in tokens).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Nothing: there is no file."""
        return ()
