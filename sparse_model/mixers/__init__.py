"""Mixers, which combine rows of several positions: the letter s of an order, and `model.attention` in JSON.

Attention over a pattern has the pattern's ``type``. To add another mixer: a file with its configuration (a
``MixerConfig``) and its module, and a line in ``MIXERS``. In another package, the configuration is an entry point of
the group ``longstride.mixers``, or has the `type` "package.module:Class".
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from typing_extensions import Doc

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import GROUP as PATTERN_GROUP
from longstride.kernels.patterns import PATTERNS, Pattern, pattern_from_json
from longstride.kernels.registry import class_named, foreign_schema, import_path, registered_names
from longstride.sparse_model.mixers.adaptive_span import AdaptiveSpanConfig
from longstride.sparse_model.mixers.attention import KEY_VALUE_HEADS, Attention, HeadPatterns
from longstride.sparse_model.mixers.entmax import EntmaxConfig
from longstride.sparse_model.mixers.indexed import IndexedConfig
from longstride.sparse_model.mixers.linformer import LinformerConfig
from longstride.sparse_model.mixers.lsh import LshConfig
from longstride.sparse_model.mixers.match import MatchConfig
from longstride.sparse_model.mixers.memories.compressed import CompressedConfig
from longstride.sparse_model.mixers.memories.compressive import CompressiveConfig
from longstride.sparse_model.mixers.memories.nsa import NsaConfig
from longstride.sparse_model.mixers.memories.transformer_xl import TransformerXLConfig
from longstride.sparse_model.mixers.moba import MobaConfig
from longstride.sparse_model.mixers.recurrences.delta import DeltaConfig
from longstride.sparse_model.mixers.recurrences.gated import RecurrentConfig
from longstride.sparse_model.mixers.relative_bias import BiasedPatterns
from longstride.sparse_model.mixers.routing import RoutingConfig
from longstride.sparse_model.mixers.synthesizer import SynthesizerConfig
from longstride.sparse_model.network import MOST_HEADS, MOST_HEADS_IN_ALL, MOST_LAYERS, NetworkConfig
from longstride.sparse_model.part import MixerConfig
from longstride.sparse_model.strict import StrictModel, parse_entries

MIXERS: dict[str, type[StrictModel]] = {
    "adaptive_span": AdaptiveSpanConfig,
    "compressed": CompressedConfig,
    "compressive": CompressiveConfig,
    "delta": DeltaConfig,
    "entmax": EntmaxConfig,
    "indexed": IndexedConfig,
    "linformer": LinformerConfig,
    "lsh": LshConfig,
    "match": MatchConfig,
    "moba": MobaConfig,
    "recurrent": RecurrentConfig,
    "nsa": NsaConfig,
    "routing": RoutingConfig,
    "synthesizer": SynthesizerConfig,
    "transformer_xl": TransformerXLConfig,
}
GROUP = "longstride.mixers"  # of entry points
SHARED = "key_value_heads"
COMBINATIONS = ("merged", "interleaved", "multihead")
RESOLVED_BY_HEAD = ("index",)  # fields of a pattern that are set head by head, and so not in the configuration


def mixers_from_json(value: Any, network: NetworkConfig) -> tuple[MixerConfig, ...]:
    """Parse `model.attention`: the mixers that the layers take in turn.

    It is one object or a list of objects. Each is a pattern, such as ``{"type": "fixed", "stride": 128, "summary":
    32}``; or ``{"heads": [{"count": 4, "type": "local", "window": 256}, …]}``, with a pattern for each group of heads;
    or the type and the keys of another mixer. ``combine`` says how a pattern's factors are combined: "merged" (one
    softmax over their union, the default), "interleaved" (one factor for each layer, in turn) or "multihead" (heads
    split over them). ``key_value_heads`` is the number of heads of keys and values that serve groups of heads of
    queries.

    Raises:
        ConfigError: paths are relative to the model, as ``attention.stride`` or ``attention[1].stride``.
    """
    parse = partial(_from_entry, network=network, listed=isinstance(value, list))
    cycle = parse_entries("attention", value, parse, min(MOST_LAYERS, MOST_HEADS_IN_ALL // network.heads), "layer")
    _check_shared(cycle[: network.layers], network)
    if any(mixer.has_queries for mixer in cycle[: network.layers]):
        return cycle
    rule = "only applies to attention, and no layer uses attention; remove it or add an attention layer"
    options = "rotary", "query_key_norm", "output_gate", "sinks"
    problems = [Problem(name, rule) for name in options if getattr(network, name)]
    if network.query_key_ratio != 1:
        problems.append(Problem("query_key_ratio", rule, network.query_key_ratio))
    if problems:
        raise ConfigError(*problems)
    return cycle


def _check_shared(mixers: Sequence[MixerConfig], network: NetworkConfig) -> None:
    """Check that layers agree about the parameters that they share."""
    sharing = {mixer for mixer in mixers if isinstance(mixer, LinformerConfig) and mixer.share == "layers"}
    if len(sharing) > 1:
        rule = 'layers that share mixtures differ in other keys; make them equal, or take "share": "keys_and_values"'
        raise ConfigError(Problem("attention", rule))
    reads_all = (isinstance(mixer, BiasedPatterns) and mixer.reads_all(network.context) for mixer in mixers)
    if network.relative_bias is not None and not all(reads_all):
        rule = 'needs attention of {"type": "dense", "causal": false} in all layers, as kernels read no bias; set it to'
        raise ConfigError(Problem("relative_bias", f"{rule} null, or take that"))


def _from_entry(entry: Any, network: NetworkConfig, listed: bool) -> Sequence[MixerConfig]:
    """Return the mixers of one object before it repeats: several only if a pattern is interleaved.

    ``listed``: it is an entry of a list, an explicit cycle.
    """
    if not isinstance(entry, dict):
        raise ConfigError(Problem("", "must be a pattern object, or a list of them"))
    kind = entry.get("type")
    if (config := _mixer_class(kind)) is not None:
        if SHARED in entry and SHARED not in config.model_fields:
            raise ConfigError.at(
                SHARED, entry[SHARED], f"must be left out: in {kind} each head has keys and values of its own"
            )
        mixer: Any = config.model_validate(entry)
        mixer.check(network, network.context)
        return [mixer]
    shared = entry.get(SHARED)
    if shared is not None and (not isinstance(shared, int) or isinstance(shared, bool) or shared < 1):
        raise ConfigError.at(SHARED, shared, f"must be an integer of at least 1, which divides heads={network.heads}")
    entry = {key: value for key, value in entry.items() if key != SHARED}
    if "heads" in entry:
        layers = [_patterns_of_groups(entry, network)]
    else:
        pattern, combine = _pattern_and_combination(
            entry, network.context, [SHARED], lambda: ["heads", *MIXERS, *registered_names(GROUP)]
        )
        factors = pattern.factors()
        if combine == "interleaved" and listed and len(factors) > 1:
            raise ConfigError.at("combine", combine, "the list is a cycle already; make each factor one of its entries")
        splits: list[Sequence[Pattern]] = [factors] if combine == "multihead" else [[pattern]]
        if combine == "interleaved":
            splits = [[factor] for factor in factors]
        layers = [_split(patterns, network.heads, entry) for patterns in splits]
    mixer_type = HeadPatterns if network.relative_bias is None else BiasedPatterns
    mixers = [mixer_type(tuple(p.for_head(head) for head, p in enumerate(layer)), shared) for layer in layers]
    for mixer in mixers:
        mixer.check(network, network.context)
    return mixers


def _mixer_class(kind: object) -> type[StrictModel] | None:
    """Find the configuration class of a mixer; None: the type is a pattern's, or unknown."""
    if not isinstance(kind, str) or kind in PATTERNS:
        return None
    cls = class_named(kind, MIXERS, GROUP)
    if cls is None or dataclasses.is_dataclass(cls):
        return None
    if not (issubclass(cls, MixerConfig) and issubclass(cls, StrictModel)):
        rule = f"must name a pattern, or a MixerConfig that is a StrictModel, and {import_path(cls)} is neither"
        raise ConfigError.at("type", kind, rule)
    return cls


def _patterns_of_groups(entry: dict[str, Any], network: NetworkConfig) -> Sequence[Pattern]:
    """Return a pattern for each head from an object with ``heads``, one group of heads after the other."""
    if extra := [str(key) for key in entry if key != "heads"]:
        raise ConfigError(*(Problem(key, "must be inside the entries of heads; move it there") for key in extra))
    groups = entry["heads"]
    if not isinstance(groups, list):
        rule = 'must be a list of patterns with counts; such as [{"count": 4, "type": "dense"}]'
        raise ConfigError(Problem("heads", rule))
    patterns = parse_entries("heads", groups, partial(_patterns_of_group, network=network), network.heads, "head")
    if len(patterns) != network.heads:
        counts = [group["count"] for group in groups]
        raise ConfigError.at("heads", counts, f"counts add up to {len(patterns)}; must be heads={network.heads}")
    return patterns


def _patterns_of_group(group: Any, network: NetworkConfig) -> Sequence[Pattern]:
    """Return the patterns of the heads of one group."""
    if not isinstance(group, dict):
        raise ConfigError(Problem("", "must be a pattern object with a count"))
    if "count" not in group:
        raise ConfigError(Problem("count", "missing: how many heads have this pattern"))
    count = group["count"]
    if type(count) is not int or not 1 <= count <= network.heads:
        raise ConfigError.at("count", count, f"must be an integer from 1 to heads={network.heads}")
    pattern_keys = {key: value for key, value in group.items() if key != "count"}
    pattern, combine = _pattern_and_combination(pattern_keys, network.context, ["count"])
    if combine == "interleaved":
        rule = "takes turns by layer, but this is a group of heads; use merged or multihead"
        raise ConfigError.at("combine", combine, rule)
    return _split([pattern] if combine == "merged" else pattern.factors(), count, group)


def _pattern_and_combination(
    entry: dict[str, Any], context: int, extra_keys: Sequence[str], alternatives: Callable[[], list[str]] = list
) -> tuple[Pattern, str]:
    """Parse a pattern object and how its factors are combined.

    ``extra_keys``: keys that were removed from it. ``alternatives`` lists what could replace it, for messages.
    """
    combine = entry.get("combine", "merged")
    if combine not in COMBINATIONS:
        raise ConfigError.at("combine", combine, f"must be one of {', '.join(COMBINATIONS)}")
    pattern_keys = {key: value for key, value in entry.items() if key != "combine"}
    pattern = pattern_from_json(pattern_keys, sibling_keys=["combine", *extra_keys], alternatives=alternatives)
    for key in RESOLVED_BY_HEAD:
        if key in entry:
            raise ConfigError.at(key, entry[key], "must be left out: it follows from the number of the head")
    pattern.check(context)
    return pattern, combine


def attention_schema() -> dict[str, Any]:
    """Build the JSON schema of `model.attention` from the fields of the registered patterns and mixers."""
    how = "how a pattern's factors meet: in one softmax (merged), a factor a layer, or heads split over them"
    combine = {"combine": {"enum": list(COMBINATIONS), "default": COMBINATIONS[0], "description": how}}
    shared: dict[str, Any] = {SHARED: {"type": ["integer", "null"], "minimum": 1, "description": KEY_VALUE_HEADS}}
    count = {"count": {"type": "integer", "minimum": 1, "description": "heads that have this pattern"}}
    items = {"anyOf": [*_pattern_schemas(combine | count, "count"), foreign_schema(PATTERN_GROUP)]}
    groups = {"type": "array", "items": items, "minItems": 1, "description": "a pattern for some heads each"}
    properties = {"heads": groups, **shared}
    by_head = {"type": "object", "properties": properties, "required": ["heads"], "additionalProperties": False}
    mixers = [_inlined(mixer.model_json_schema()) for mixer in MIXERS.values()]
    choices = [*_pattern_schemas(combine | shared), *mixers, by_head, foreign_schema(PATTERN_GROUP, GROUP)]
    return {"anyOf": [*choices, {"type": "array", "items": {"anyOf": choices}, "minItems": 1}]}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a schema's references by their definitions, as they would not resolve inside another schema."""
    definitions = schema.pop("$defs", {})

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            definition = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
            return {key: filled(value) for key, value in definition.items()}
        return [filled(value) for value in part] if isinstance(part, list) else part

    complete: dict[str, Any] = filled(schema)
    return complete


def _pattern_schemas(extra: dict[str, Any], *required: str) -> list[dict[str, Any]]:
    """Build the JSON schema of each pattern's object, with extra properties, some of them required."""
    kinds = {int: {"type": "integer"}, bool: {"type": "boolean"}, str: {"type": "string"}}
    schemas = []
    for kind, cls in PATTERNS.items():
        hints, annotations = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
        summary = (cls.__doc__ or kind).partition("\n")[0].rstrip(".").replace("`", "")
        properties: dict[str, Any] = {"type": {"const": kind, "description": summary}, **extra}
        needed = ["type", *required]
        for field in dataclasses.fields(cls):
            if field.name in RESOLVED_BY_HEAD:
                continue
            if typing.get_origin(hints[field.name]) is tuple:  # any number of one type
                items = kinds[typing.get_args(hints[field.name])[0]]
                entry: dict[str, Any] = {"type": "array", "items": items, "minItems": 1}
            else:
                options = [
                    t for t in (typing.get_args(hints[field.name]) or (hints[field.name],)) if t is not type(None)
                ]
                entry = {"enum": options} if isinstance(options[0], str) else dict(kinds[options[0]])
            for note in getattr(annotations[field.name], "__metadata__", ()):
                if isinstance(note, Doc):
                    entry["description"] = note.documentation
            if field.default is dataclasses.MISSING:
                needed.append(field.name)
            else:
                entry["default"] = field.default
            properties[field.name] = entry
        schemas.append({"type": "object", "properties": properties, "required": needed, "additionalProperties": False})
    return schemas


def _split(patterns: Sequence[Pattern], heads: int, entry: dict[str, Any]) -> list[Pattern]:
    """Split heads evenly over the patterns of an entry."""
    if heads % len(patterns):
        rule = f"{entry['type']} splits over {len(patterns)} factors: heads={heads} must be a multiple of that"
        raise ConfigError.at("combine", entry["combine"], rule)
    return [pattern for pattern in patterns for _ in range(heads // len(patterns))]
