"""The answer to `POST /v1/completions`, whole or in chunks, from bytes as they are sampled.

Text is UTF-8 that is decoded byte by byte: a character appears once it is whole, and what is no UTF-8 as the
replacement character. So chunks joined are the text that is not streamed. Bytes that may begin a stop are held back.
"""

from __future__ import annotations

import base64
import codecs
import secrets
import time
from collections.abc import Iterator
from typing import Any

from longstride.launcher.serving.completion_request import CompletionRequest
from longstride.launcher.serving.sampler import End, Piece, Score

_START = "<|longstride_start|>"  # as the exported tokenizer calls it
_Byte = tuple[int, Score | None]


class Completion:
    """All choices of one request."""

    def __init__(self, asked: CompletionRequest, about: dict[str, Any]) -> None:
        """Nothing sampled yet; ``about`` as of `GET /model`."""
        self._asked = asked
        self._common: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": about["name"],
        }
        if about["fingerprint"] is not None:
            self._common["system_fingerprint"] = f"fp_{about['fingerprint'][:16]}"
        self._choices = [_Choice(number, asked, about["modality"] == "text") for number in range(len(asked.samples))]

    @property
    def done(self) -> bool:
        """Whether every choice is whole."""
        return all(choice.end is not None for choice in self._choices)

    def add(self, number: int, event: Piece | End) -> None:
        """More of one choice, or its end; it has no problem."""
        self._choices[number].add(event)

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        return self._common | {"choices": [choice.shown() for choice in self._choices], "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """What can be shown since the last call, of each choice that has more; at the end the usage, if asked for."""
        usage = {"usage": None} if self._asked.include_usage else {}
        for choice in self._choices:
            if choice.has_more:
                yield self._common | {"choices": [choice.shown()]} | usage
        if self.done and self._asked.include_usage:
            yield self._common | {"choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """In bytes; those of a stop were sampled too."""
        prompts = sum(len(prompt.content) + prompt.started for prompt in self._asked.prompts)
        sampled = sum(choice.sampled for choice in self._choices)
        return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


class _Choice:
    """One choice as its bytes come."""

    def __init__(self, number: int, asked: CompletionRequest, is_text: bool) -> None:
        sample, started = asked.samples[number], asked.prompts[number // asked.n].started
        self._number, self._is_text = number, is_text
        self._stops, self._has_logprobs = sample.stop, sample.logprobs is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ready: list[_Byte] = []  # to be shown next
        self._held: list[_Byte] = []  # the last ones, which may be the beginning of a stop
        self._shows_start = started and sample.echo
        self._first_has_score = started  # a prompt's first byte has none at OpenAI's, as nothing stands before it
        self._offset = 0  # characters shown
        self._is_whole = False  # whether the end is shown too
        self.sampled = 0  # bytes
        self.end: End | None = None

    @property
    def has_more(self) -> bool:
        """Whether there is something that was not shown yet."""
        return bool(self._ready) or (self.end is not None and not self._is_whole)

    def add(self, event: Piece | End) -> None:
        """More bytes, or the end."""
        if isinstance(event, End):
            self.end = event
            self._ready += self._held[: len(self._held) - event.stopped]
            return
        new = list(zip(event.content, event.scores, strict=True))
        if event.is_prompt:
            if new and not self._first_has_score:
                new[0] = new[0][0], None
            self._ready += new
            return
        self.sampled += len(new)
        self._held += new
        known = bytes(byte for byte, _ in self._held)
        # Held back is the longest end with which a stop begins.
        longest = min(len(known), max((len(stop) - 1 for stop in self._stops), default=0))
        sizes = range(longest, 0, -1)
        kept = next((n for n in sizes if any(stop.startswith(known[-n:]) for stop in self._stops)), 0)
        if not any(known.endswith(stop) for stop in self._stops):  # else the end is next, and says what to leave out
            self._ready += self._held[: len(known) - kept]
            del self._held[: len(known) - kept]

    def shown(self) -> dict[str, Any]:
        """What is ready, as OpenAI describes a choice, with the bytes beside the text."""
        ready, self._ready = self._ready, []
        self._is_whole = self.end is not None
        text, offsets = "", []
        for byte, _ in ready:
            offsets.append(self._offset + len(text))
            text += self._decoder.decode(bytes([byte])) if self._is_text else ""
        if self._is_whole:
            text += self._decoder.decode(b"", final=True)
        self._offset += len(text)
        logprobs = None
        if self._has_logprobs:
            tokens, scores = [_token(byte) for byte, _ in ready], [score for _, score in ready]
            if self._shows_start:
                tokens, scores, offsets = [_START, *tokens], [None, *scores], [0, *offsets]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [None if score is None else score.logprob for score in scores],
                "top_logprobs": [
                    None if score is None else {_token(byte): logprob for byte, logprob in score.top.items()}
                    for score in scores
                ],
                "text_offset": offsets,
            }
        self._shows_start = False
        reason = None if self.end is None else "stop" if self.end.stopped else "length"
        described = {"index": self._number, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return described | {"bytes_base64": base64.b64encode(bytes(byte for byte, _ in ready)).decode()}


def _token(byte: int) -> str:
    """A byte's name among the tokens: the character, or where it is none by itself, as OpenAI names such bytes."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"
