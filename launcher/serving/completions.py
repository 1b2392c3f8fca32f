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
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from longstride.kernels import ConfigError, Problem
from longstride.launcher.serving.request import SampleRequest, load_object
from longstride.launcher.serving.sampler import End, Piece, Score
from longstride.sparse_model import ModelConfig, StrictModel, wrong_settings

MOST_CHOICES = 128  # of one request, as OpenAI has it
MOST_STOPS = 16
_MAX_TOKENS = 16  # where the request says nothing
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
    prompt: Any = None  # the beginning of a text
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
    top_k: Any = None  # not OpenAI's, and wide-spread
    top_p: Any = None
    user: str | None = None  # means nothing here


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    content: bytes
    started: bool = False  # the start stood before it, so that its first byte has a score


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What is to be sampled, and how it is to be answered."""

    prompts: list[Prompt]
    n: int  # choices of each prompt
    samples: list[SampleRequest]  # of each choice; those of one prompt stand together
    stream: bool
    include_usage: bool  # in a stream


class TooLongError(ConfigError):
    """Prompt and sample do not fit in the context."""


class UnknownModelError(ValueError):
    """Another model than the one that is served."""


def parse_completion(body: bytes, config: ModelConfig, name: str, max_bytes: int) -> CompletionRequest:
    """A request from its JSON body.

    Args:
        body: as it came.
        config: of the model; at most 256 tokens.
        name: of the model.
        max_bytes: that one choice may sample.

    Raises:
        MalformedError: no JSON object.
        UnknownModelError: the request names another model.
        ConfigError: a problem for each wrong field; a TooLongError if that is the only one.
    """
    content = load_object(body)
    asked = _Body.model_validate(content)
    if asked.model != name:
        raise UnknownModelError(f"model={asked.model[:80]!r} is not served here; take {name!r}")
    problems = list(_problems(asked, config))
    prompts: list[Prompt] = []
    stop: tuple[bytes, ...] = ()
    try:
        prompts = _prompts(asked.prompt, config)
        stop = _stops(asked.stop)
    except ConfigError as error:
        problems += error.problems
    n = asked.n or 1
    if len(prompts) * n > MOST_CHOICES:
        problems.append(Problem("n", f"{len(prompts)} prompts have {len(prompts) * n} choices; at most {MOST_CHOICES}"))
    longest = max((len(prompt.content) for prompt in prompts), default=0)
    fitting = min(max_bytes, config.context - longest)
    count = max(1, min(_MAX_TOKENS, fitting)) if asked.max_tokens is None else asked.max_tokens
    if problems:
        raise ConfigError(*problems)
    if count > fitting:
        rule = f"this model's maximum context length is {config.context} tokens, which are bytes: "
        rule += f"the prompt has {longest}, and at most {max(0, fitting)} can be sampled"
        raise TooLongError(Problem("max_tokens", rule, count))
    places = n * sum(count + len(prompt.content) * bool(asked.echo) for prompt in prompts)
    most = max(_MOST_SCORES, 4 * config.context) // ((asked.logprobs or 0) + 1)
    if asked.logprobs is not None and places > most:
        rule = f"is too much for {places:,} bytes in one request; with it {most:,} are the most"
        raise ConfigError(Problem("logprobs", rule, asked.logprobs))
    samples = [
        SampleRequest(
            prompt=prompt.content,
            count=count,
            temperature=1.0 if asked.temperature is None else float(asked.temperature),
            top_k=asked.top_k,
            top_p=asked.top_p,
            # Equal seeds give the same whatever stands beside; choices without one are all different.
            seed=secrets.randbits(63) if asked.seed is None else (asked.seed + choice) % _SEEDS,
            stop=stop,
            echo=bool(asked.echo),
            logprobs=asked.logprobs,
            bias=tuple((int(token), bias) for token, bias in (asked.logit_bias or {}).items()),
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
        )
        for prompt in prompts
        for choice in range(n)
    ]
    options = asked.stream_options
    return CompletionRequest(prompts, n, samples, bool(asked.stream), bool(options and options.include_usage))


def _problems(asked: _Body, config: ModelConfig) -> Iterator[Problem]:
    """Of single fields, but prompts and stops."""
    if asked.best_of not in (None, asked.n or 1):
        yield Problem("best_of", "no choice is better than another here; leave it out", asked.best_of)
    if asked.suffix:
        yield Problem("suffix", "the model goes on from what stands before, and sees no suffix; leave it out")
    if asked.stream_options is not None and not asked.stream:
        yield Problem("stream_options", "is of a stream; leave it out, or add stream=true")
    temperature = 1.0 if asked.temperature is None else asked.temperature
    for name, rule in wrong_settings(temperature, asked.top_k, asked.top_p):
        yield Problem(name, rule, getattr(asked, name))
    if asked.seed is not None and (type(asked.seed) is not int or not 0 <= asked.seed < _SEEDS):
        yield Problem("seed", "must be a whole number from 0 to 2**63 - 1; leave it out to have one drawn", asked.seed)
    if len(asked.logit_bias or {}) > config.vocabulary:  # the same token in many ways: each is added at every byte
        yield Problem("logit_bias", f"has {len(asked.logit_bias or {}):,} tokens; there are {config.vocabulary}")
        return
    for token in asked.logit_bias or {}:
        if not (token.isascii() and token.isdigit() and int(token[:9]) < config.vocabulary and len(token) < 9):
            yield Problem("logit_bias", f'{token[:20]!r} is no token; they are "0" to "{config.vocabulary - 1}"')


def _prompts(given: Any, config: ModelConfig) -> list[Prompt]:
    """A text, a list of texts, a list of tokens, or a list of lists of tokens."""
    if given is None:
        return [Prompt(b"")]
    rule = "must be a string, a list of strings, a list of tokens, or a list of lists of tokens; none is empty"
    if isinstance(given, str):
        return [Prompt(_encoded(given, "prompt", config))]
    if not isinstance(given, list) or not given:
        raise ConfigError(Problem("prompt", rule))
    if len(given) <= MOST_CHOICES:
        if all(isinstance(each, str) for each in given):
            return [Prompt(_encoded(each, f"prompt[{i}]", config)) for i, each in enumerate(given)]
        if all(isinstance(each, list) for each in given):
            return [_tokens(each, f"prompt[{i}]", config) for i, each in enumerate(given)]
    if not all(type(each) is int for each in given):
        many = isinstance(given[0], str | list) and len(given) > MOST_CHOICES
        raise ConfigError(Problem("prompt", f"has {len(given)} prompts; at most {MOST_CHOICES}" if many else rule))
    return [_tokens(given, "prompt", config)]


def _tokens(given: list[Any], path: str, config: ModelConfig) -> Prompt:
    """A prompt of tokens; the start, which is the number behind all bytes, may stand first."""
    started = bool(given) and given[0] == config.vocabulary and type(given[0]) is int
    tokens = given[1:] if started else given
    if not all(type(token) is int and 0 <= token < config.vocabulary for token in tokens):
        rule = f"must be numbers from 0 to {config.vocabulary - 1}, which are bytes"
        raise ConfigError(Problem(path, f"{rule}; the first may be {config.vocabulary}, the start"))
    return Prompt(bytes(tokens), started)


def _encoded(text: str, path: str, config: ModelConfig) -> bytes:
    """The bytes of a text. Raises ConfigError where it has none, or some that the model does not know."""
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            Problem(path, "holds half a character (a surrogate); give bytes as a list of tokens")
        ) from None
    if content and max(content) >= config.vocabulary:
        raise ConfigError(Problem(path, f"has a byte of {max(content)}; this model knows 0 to {config.vocabulary - 1}"))
    return content


def _stops(given: Any) -> tuple[bytes, ...]:
    """The bytes of one string, or of a list of them."""
    stops = [] if given is None else [given] if isinstance(given, str) else given
    rule = f"must be a string that is not empty, or a list of at most {MOST_STOPS}"
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ConfigError(Problem("stop", rule))
    try:
        return tuple(stop.encode() for stop in stops)
    except UnicodeEncodeError:
        raise ConfigError(Problem("stop", "holds half a character (a surrogate)")) from None


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
