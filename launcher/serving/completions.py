"""`POST /v1/completions`: parse and check requests with OpenAI's fields, and answer them, streamed or not.

Text is decoded byte by byte from UTF-8. A character appears once it is complete, and invalid UTF-8 as the replacement
character, so joined chunks equal the text that is not streamed. Bytes that may begin a stop are delayed.
"""

from __future__ import annotations

import base64
import codecs
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from longstride.kernels import ConfigError, Problem
from longstride.launcher.serving.request import (
    SampleRequest,
    check_known,
    encode_text,
    load_object,
    most_bytes,
    setting_problems,
)
from longstride.launcher.serving.sampler import End, Piece, Score
from longstride.sparse_model import ModelConfig, StrictModel

MOST_CHOICES = 128  # of one request, as OpenAI has it
MOST_STOPS = 16
_MAX_TOKENS = 16  # the default
_MOST_LOGPROBS = 256
_MOST_SCORES = 1 << 22  # of one request; each takes about 100 bytes of memory
_SEEDS = 2**63
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class _StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(StrictModel):
    """The fields, by OpenAI's names; `null` is the default of each."""

    model: str
    prompt: Any = None  # None begins a text
    best_of: int | None = None
    echo: bool | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: _Penalty | None = None
    seed: Any = None
    stop: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    suffix: str | None = None
    temperature: Any = None
    top_k: Any = None  # an extension that many servers have
    top_p: Any = None
    user: str | None = None  # ignored


class Prompt(NamedTuple):
    """A prompt."""

    content: bytes
    has_start: bool = False  # whether it began with the start token, so that its first byte has a score


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions."""

    prompts: list[Prompt]
    n: int  # choices per prompt
    samples: list[SampleRequest]  # one per choice; those of a prompt are adjacent
    stream: bool
    include_usage: bool  # in a stream


class TooLongError(ConfigError):
    """Prompt and sample do not fit in the context."""


class UnknownModelError(ValueError):
    """The request names another model than the one that is served."""


def parse_completion(body: bytes, config: ModelConfig, name: str, max_bytes: int) -> CompletionRequest:
    """Parse a request from its JSON body.

    Args:
        body: the body.
        config: of the model; its vocabulary has at most 256 tokens.
        name: of the model.
        max_bytes: the most bytes to sample per choice.

    Raises:
        MalformedError: the body is not a JSON object.
        UnknownModelError: the request names another model.
        ConfigError: a problem for each wrong field; a TooLongError if that is the only one.
    """
    fields = _Body.model_validate(load_object(body))
    if fields.model != name:
        raise UnknownModelError(f"model={fields.model[:80]!r} is not served here; take {name!r}")
    problems = list(_field_problems(fields, config))
    prompts: list[Prompt] = []
    stop: tuple[bytes, ...] = ()
    try:
        prompts = _parse_prompts(fields.prompt, config)
        stop = _parse_stops(fields.stop)
    except ConfigError as error:
        problems += error.problems
    n = fields.n or 1
    if len(prompts) * n > MOST_CHOICES:
        problems.append(Problem("n", f"{len(prompts)} prompts have {len(prompts) * n} choices; at most {MOST_CHOICES}"))
    longest = max((len(prompt.content) for prompt in prompts), default=0)
    room = most_bytes(config)
    fitting = min(max_bytes, room - longest)
    count = max(1, min(_MAX_TOKENS, fitting)) if fields.max_tokens is None else fields.max_tokens
    if problems:
        raise ConfigError(*problems)
    if count > fitting:
        rule = f"this model's maximum context length is {room} tokens, which are bytes: "
        rule += f"the prompt has {longest}, and at most {max(0, fitting)} can be sampled"
        raise TooLongError(Problem("max_tokens", rule, count))
    places = n * sum(count + len(prompt.content) * bool(fields.echo) for prompt in prompts)
    most = max(_MOST_SCORES, 4 * config.context) // ((fields.logprobs or 0) + 1)
    if fields.logprobs is not None and places > most:
        rule = f"is too much for {places:,} bytes in one request; at most {most:,} are allowed with it"
        raise ConfigError(Problem("logprobs", rule, fields.logprobs))
    samples = [
        SampleRequest(
            prompt=prompt.content,
            count=count,
            temperature=1.0 if fields.temperature is None else float(fields.temperature),
            top_k=fields.top_k,
            top_p=fields.top_p,
            # Equal seeds give equal bytes in any batch. Choices without a seed all differ.
            seed=secrets.randbits(63) if fields.seed is None else (fields.seed + choice) % _SEEDS,
            stop=stop,
            echo=bool(fields.echo),
            logprobs=fields.logprobs,
            bias=tuple((int(token), bias) for token, bias in (fields.logit_bias or {}).items()),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
        )
        for prompt in prompts
        for choice in range(n)
    ]
    options = fields.stream_options
    return CompletionRequest(prompts, n, samples, bool(fields.stream), bool(options and options.include_usage))


def _field_problems(fields: _Body, config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of single fields other than `prompt` and `stop`."""
    if fields.best_of not in (None, fields.n or 1):
        yield Problem("best_of", "choices are not ranked here; leave it out", fields.best_of)
    if fields.suffix:
        yield Problem("suffix", "the model continues the prompt and cannot see a suffix; leave it out")
    if fields.stream_options is not None and not fields.stream:
        yield Problem("stream_options", "only applies to streams; leave it out, or add stream=true")
    yield from setting_problems({name: value for name, value in vars(fields).items() if value is not None})
    if len(fields.logit_bias or {}) > config.vocabulary:  # "1" and "01" are the same token, and each costs time
        yield Problem("logit_bias", f"has {len(fields.logit_bias or {}):,} tokens; there are {config.vocabulary}")
        return
    for token in fields.logit_bias or {}:
        if not (token.isascii() and token.isdigit() and int(token[:9]) < config.vocabulary and len(token) < 9):
            yield Problem("logit_bias", f'{token[:20]!r} is not a token; tokens are "0" to "{config.vocabulary - 1}"')


def _parse_prompts(value: Any, config: ModelConfig) -> list[Prompt]:
    """Parse a text, a list of texts, a list of tokens, or a list of lists of tokens."""
    if value is None:
        return [Prompt(b"")]
    rule = "must be a string, a list of strings, a list of tokens, or a list of lists of tokens; none is empty"
    if isinstance(value, str):
        return [_text_prompt(value, "prompt", config)]
    if not isinstance(value, list) or not value:
        raise ConfigError(Problem("prompt", rule))
    if len(value) <= MOST_CHOICES:
        if all(isinstance(prompt, str) for prompt in value):
            return [_text_prompt(prompt, f"prompt[{i}]", config) for i, prompt in enumerate(value)]
        if all(isinstance(prompt, list) for prompt in value):
            return [_token_prompt(prompt, f"prompt[{i}]", config) for i, prompt in enumerate(value)]
    if not all(type(token) is int for token in value):
        many = isinstance(value[0], str | list) and len(value) > MOST_CHOICES
        raise ConfigError(Problem("prompt", f"has {len(value)} prompts; at most {MOST_CHOICES}" if many else rule))
    return [_token_prompt(value, "prompt", config)]


def _token_prompt(tokens: list[Any], path: str, config: ModelConfig) -> Prompt:
    """Parse a prompt of tokens. The start token, whose number follows those of all bytes, may come first."""
    has_start = bool(tokens) and tokens[0] == config.vocabulary and type(tokens[0]) is int
    tokens = tokens[1:] if has_start else tokens
    if not all(type(token) is int and 0 <= token < config.vocabulary for token in tokens):
        rule = f"must be numbers from 0 to {config.vocabulary - 1}, which are bytes"
        raise ConfigError(Problem(path, f"{rule}; the first may be {config.vocabulary}, the start"))
    return Prompt(bytes(tokens), has_start)


def _text_prompt(text: str, path: str, config: ModelConfig) -> Prompt:
    content = encode_text(text, path, "; give bytes as a list of tokens")
    check_known(content, path, config)
    return Prompt(content)


def _parse_stops(value: Any) -> tuple[bytes, ...]:
    """Parse a string, or a list of strings, into bytes."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    rule = f"must be a string that is not empty, or a list of at most {MOST_STOPS}"
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ConfigError(Problem("stop", rule))
    return tuple(encode_text(stop, "stop") for stop in stops)


_START = "<|longstride_start|>"  # as the exported tokenizer calls it
_Byte = tuple[int, Score | None]


class Completion:
    """All choices of a request. ``about`` is the answer to `GET /model`."""

    def __init__(self, request: CompletionRequest, about: dict[str, Any]) -> None:
        self._request = request
        self._common: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": about["name"],
        }
        if about["fingerprint"] is not None:
            self._common["system_fingerprint"] = f"fp_{about['fingerprint'][:16]}"
        is_text = about["modality"] == "text"
        self._choices = [_Choice(number, request, is_text) for number in range(len(request.samples))]

    @property
    def done(self) -> bool:
        """Whether every choice is complete."""
        return all(choice.end is not None for choice in self._choices)

    def add(self, number: int, event: Piece | End) -> None:
        """Add bytes of a choice, or its end without a problem."""
        self._choices[number].add(event)

    def answer(self) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        return self._common | {"choices": [choice.take() for choice in self._choices], "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the new text of each choice since the last call, and at the end the usage if requested."""
        usage = {"usage": None} if self._request.include_usage else {}
        for choice in self._choices:
            if choice.has_more:
                yield self._common | {"choices": [choice.take()]} | usage
        if self.done and self._request.include_usage:
            yield self._common | {"choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """Count the bytes of prompts and samples, including those of stops."""
        prompts = sum(len(prompt.content) + prompt.has_start for prompt in self._request.prompts)
        sampled = sum(choice.sampled for choice in self._choices)
        return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


class _Choice:
    """A choice while its bytes come."""

    def __init__(self, number: int, request: CompletionRequest, is_text: bool) -> None:
        sample, has_start = request.samples[number], request.prompts[number // request.n].has_start
        self._number, self._is_text = number, is_text
        self._stops, self._has_logprobs = sample.stop, sample.logprobs is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ready: list[_Byte] = []  # for the next chunk
        self._pending: list[_Byte] = []  # the last bytes, which may begin a stop
        self._shows_start = has_start and sample.echo
        self._first_has_score = has_start  # OpenAI's API has no score for a prompt's first byte
        self._offset = 0  # characters taken
        self._is_complete = False  # whether the end has been taken too
        self.sampled = 0  # bytes
        self.end: End | None = None

    @property
    def has_more(self) -> bool:
        """Whether something has not been taken yet."""
        return bool(self._ready) or (self.end is not None and not self._is_complete)

    def add(self, event: Piece | End) -> None:
        """Add bytes, or the end."""
        if isinstance(event, End):
            self.end = event
            self._ready += self._pending[: len(self._pending) - event.stopped]
            return
        new = list(zip(event.content, event.scores, strict=True))
        if event.is_prompt:
            if new and not self._first_has_score:
                new[0] = new[0][0], None
            self._ready += new
            return
        self.sampled += len(new)
        self._pending += new
        pending = bytes(byte for byte, _ in self._pending)
        # Keep the longest end with which a stop begins.
        longest = min(len(pending), max((len(stop) - 1 for stop in self._stops), default=0))
        sizes = range(longest, 0, -1)
        size = next((n for n in sizes if any(stop.startswith(pending[-n:]) for stop in self._stops)), 0)
        if not any(pending.endswith(stop) for stop in self._stops):  # otherwise the End follows, with the stop's length
            self._ready += self._pending[: len(pending) - size]
            del self._pending[: len(pending) - size]

    def take(self) -> dict[str, Any]:
        """Return what is ready as a choice in OpenAI's format, plus its bytes in base64."""
        ready, self._ready = self._ready, []
        self._is_complete = self.end is not None
        text, offsets = "", []
        for byte, _ in ready:
            offsets.append(self._offset + len(text))
            text += self._decoder.decode(bytes([byte])) if self._is_text else ""
        if self._is_complete:
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
    """Return a byte's token: its character if it is ASCII, otherwise OpenAI's notation for bytes."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"
