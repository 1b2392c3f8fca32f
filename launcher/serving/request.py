"""Parse requests to sample or score from JSON, and check them against the model and the limits."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.plain_files import JSONError, parse_json
from longstride.kernels import ConfigError, Problem
from longstride.sparse_model import ModelConfig, wrong_settings

_FIELDS = ("prompt", "prompt_base64", "bytes", "temperature", "top_k", "top_p", "seed")
_SCORE_FIELDS = ("text", "text_base64", "min_context")
MOST_CONTEXTS = 4  # the longest text to score, in contexts of the model
CARRIED_CONTEXTS = 64  # the longest prompt with its sample, or text to score, of a model that carries state


class MalformedError(ValueError):
    """A body is not a JSON object."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Everything but the model that determines a sample."""

    prompt: bytes
    count: int  # bytes to sample
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    # `POST /sample` has none of these.
    stop: tuple[bytes, ...] = ()  # the sample ends after the first of them
    echo: bool = False  # deliver the prompt too
    logprobs: int | None = None  # likely bytes to score at each position, in addition to the byte; None: no scores
    bias: tuple[tuple[int, float], ...] = ()  # added to the logits of bytes
    presence_penalty: float = 0.0  # subtracted from the logits of bytes that were sampled before
    frequency_penalty: float = 0.0  # the same, once per occurrence


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A text whose likelihood is requested."""

    content: bytes
    min_context: int  # earlier bytes that each byte sees, if there are so many


def most_bytes(config: ModelConfig) -> int:
    """Return the most bytes of a prompt and its sample: a context, or several if the model carries state."""
    return config.context * (CARRIED_CONTEXTS if config.carries else 1)


def largest_body(config: ModelConfig, prompts: int) -> int:
    """Return the most bytes of a body: for so many prompts of ``most_bytes``, at 6 bytes each, and 16 KiB.

    It is at most 64 MiB, as a body and its content are in memory, but always enough for four prompts.
    """
    longest = 6 * most_bytes(config)
    return max(4 * longest, min(prompts * longest, 1 << 26)) + 16_384


def parse_request(body: bytes, config: ModelConfig, max_bytes: int) -> SampleRequest:
    """Parse a request to sample from its JSON body.

    Args:
        body: the body.
        config: of the model; its vocabulary has at most 256 tokens.
        max_bytes: the most bytes to sample.

    Raises:
        MalformedError: the body is not a JSON object.
        ConfigError: a problem for each wrong field.
    """
    content = load_object(body)
    problems, room = [*_unknown_fields(content, _FIELDS), *setting_problems(content)], most_bytes(config)
    place = f"{CARRIED_CONTEXTS} contexts" if config.carries else "the context"
    reason = f"as {place} have {room}" if config.carries else f"as {place} has {room}"
    try:
        prompt = _read_bytes(content, "prompt", config, room - 1, reason)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    fitting = min(max_bytes, room - len(prompt))
    default = modality_named(config.embedding.modality).sample_bytes or config.context
    count = content.get("bytes", min(fitting, default))
    if type(count) is not int or not 1 <= count <= fitting:
        rule = f"must be an integer from 1 to {fitting}"
        if fitting < max_bytes:
            rule += f": prompt and sample must fit in {place} of {config.context}"
        problems.append(Problem("bytes", rule, count))
    if problems:
        raise ConfigError(*problems)
    seed = content.get("seed")
    return SampleRequest(
        prompt=prompt,
        count=count,
        temperature=float(content.get("temperature", 1.0)),
        top_k=content.get("top_k"),
        top_p=content.get("top_p"),
        seed=secrets.randbits(32) if seed is None else seed,  # a browser's numbers hold 32 bits exactly
    )


def parse_score(body: bytes, config: ModelConfig) -> ScoreRequest:
    """Parse a request for a text's likelihood from its JSON body; raises like ``parse_request``."""
    content = load_object(body)
    problems = _unknown_fields(content, _SCORE_FIELDS)
    contexts = CARRIED_CONTEXTS if config.carries else MOST_CONTEXTS
    try:
        place = f"{contexts} contexts of {config.context}"
        text = _read_bytes(content, "text", config, contexts * config.context, place)
        if not text:
            problems.append(Problem("text", "is empty; give bytes to score"))
    except ConfigError as error:
        problems += error.problems
    most = 0 if config.carries else config.context // 2
    min_context = content.get("min_context", most)
    if type(min_context) is not int or not 0 <= min_context <= most:
        rule = f"must be an integer from 0 to {most}, half the context"
        if config.carries:
            rule = "must be 0, as the model carries what came before; leave it out"
        problems.append(Problem("min_context", rule, min_context))
    if problems:
        raise ConfigError(*problems)
    return ScoreRequest(text, min_context)


def load_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object with bounded numbers and unique keys. Raises MalformedError."""
    try:
        content = parse_json(body, keys_once=True)
    except JSONError as error:
        place = "" if error.line is None else f" (line {error.line}, column {error.column})"
        raise MalformedError(f"the body: {error}{place}") from None
    if not isinstance(content, dict):
        raise MalformedError('the body must be a JSON object, such as {"prompt": "Once"}')
    return content


def _unknown_fields(content: dict[str, Any], fields: tuple[str, ...]) -> list[Problem]:
    unknown = [name for name in content if name not in fields][:5]
    return [Problem(name[:80], f"unknown field; fields are {', '.join(fields)}") for name in unknown]


def _read_bytes(content: dict[str, Any], field: str, config: ModelConfig, most: int, reason: str) -> bytes:
    """Return the bytes of a text field, or of its base64; at most ``most``, for a ``reason``.

    Raises:
        ConfigError: they cannot be decoded, are too many, or are outside the model's vocabulary.
    """
    encoded = f"{field}_base64"
    if field in content and encoded in content:
        raise ConfigError(Problem(encoded, f"conflicts with {field}; give one of them"))
    name = encoded if encoded in content else field
    value = content.get(name, "")
    if not isinstance(value, str):
        raise ConfigError.at(name, value, "must be a string")
    if name == field:
        decoded = encode_text(value, name, f"; give bytes as {encoded}")
    else:
        try:
            decoded = base64.b64decode(value, validate=True)
        except ValueError:
            raise ConfigError(Problem(name, "must be base64, with its padding")) from None
    if len(decoded) > most:
        raise ConfigError(Problem(name, f"has {len(decoded)} bytes; give at most {most}, {reason}"))
    check_known(decoded, name, config)
    return decoded


def encode_text(text: str, path: str, advice: str = "") -> bytes:
    """Encode a text as UTF-8; ConfigError if it is not valid Unicode."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ConfigError(Problem(path, f"holds half a character (a surrogate){advice}")) from None


def check_known(content: bytes, path: str, config: ModelConfig) -> None:
    """Raise ConfigError for bytes outside the model's vocabulary."""
    if content and max(content) >= config.vocabulary:
        raise ConfigError(Problem(path, f"contains byte {max(content)}; this model knows 0 to {config.vocabulary - 1}"))


def setting_problems(content: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of temperature, top_k, top_p and seed; null leaves out the last three."""
    top_k, top_p, seed = (content.get(name) for name in ("top_k", "top_p", "seed"))
    rules = list(wrong_settings(content.get("temperature", 1.0), top_k, top_p))
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        rules.append(("seed", "must be an integer from 0 to 2**63 - 1; leave it out for a random one"))
    return [Problem(name, rule, content[name]) for name, rule in rules]
