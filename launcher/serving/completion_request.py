"""What `POST /v1/completions` asks for: OpenAI's fields, held against model and limits."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from longstride.kernels import ConfigError, Problem
from longstride.launcher.serving.request import SampleRequest, load_object
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
