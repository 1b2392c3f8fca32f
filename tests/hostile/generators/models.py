"""Hostile models: what may lie in the place of a model's configuration, of an export's weights, or of a `.lsz`."""

import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from longstride.kernels.patterns import PATTERNS
from longstride.sparse_model.feed_forwards import FEED_FORWARDS
from longstride.sparse_model.mixers import MIXERS
from tests.harness.oracles import example_of
from tests.hostile.generators.files import replace, sparse

Damage = Callable[[Path], object]  # of a folder, in place

# Values in the place of any number of a configuration.
NUMBERS: dict[str, object] = {
    "10**18": 10**18,
    "38 digits": int("9" * 38),
    "2**40": 2**40,
    "10**9": 10**9,
    "2**31": 2**31,
    "10**6": 10**6,
    "0": 0,
    "-1": -1,
    "1.5e300": 1.5e300,
    "a text": "64",
    "null": None,
    "true": True,
    "a list": [64],
    "an object": {"a": 64},
}
# Numbers at the top of a `model` object.
SIZES = ("context", "layers", "heads", "width", "vocabulary", "feed_forward_ratio", "query_key_ratio")
# Other places of values by name: a path, and what an honest object has around it.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{part}.{kind}.{key}": (f"{part}.{key}", {part: example_of(kind, cls)})
        for part, registry in (("attention", PATTERNS | MIXERS), ("feed_forward", FEED_FORWARDS))
        for kind, cls in registry.items()
        for key in (cls.model_fields if issubclass(cls, BaseModel) else cls.__dataclass_fields__)
        if key not in ("type", "causal", "align", "index")
    },
    **{
        f"attention.synthesizer.{key} of {kind}": (
            f"attention.{key}", {"attention": {"type": "synthesizer", "kind": kind, key: 8}}
        )
        for kind, key in (("factorized_random", "rank"), ("dense", "hidden"), ("factorized_dense", "blocks"))
    },
    "attention.dense.key_value_heads": ("attention.key_value_heads", {"attention": {"type": "dense"}}),
    **{
        path: (path, {"attention": {"heads": [{"count": 2, "type": "dense"}]}})
        for path in ("attention.heads", "attention.heads.0.count")
    },
    **{
        path: (path, {"embedding": {"type": "image", "height": 8, "width": 8, "channels": 1}})
        for path in ("embedding.height", "embedding.channels")
    },
    **{
        path: (path, {"ngrams": {"rows": 16, "orders": [2, 3]}})
        for path in ("ngrams.rows", "ngrams.orders", "ngrams.orders.1")
    },
    "embedding.row_width": ("embedding.row_width", {}),
    "rotary.base": ("rotary.base", {"rotary": {"base": 1000}}),
    **{key: (key, {}) for key in (*SIZES, "convolution", "norm_epsilon", "dropout", "order")},
}  # fmt: skip
# Objects that are wrong as a whole.
WHOLE: dict[str, dict[str, Any]] = {
    "a million layers in an order": {"order": "(sf)1000000"},
    "nested groups of an order": {"order": "(" * 5000 + "sf" + ")9" * 5000},
    "half a million patterns": {"attention": [{"type": "dense"}] * 500_000},
    "half a million feed-forwards": {"feed_forward": [{"type": "dense"}] * 500_000},
    "a thousand groups of heads": {"attention": {"heads": [{"count": 4096, "type": "dense"}] * 1000}},
    "a hundred thousand segments": {"attention": {"type": "longnet", "segments": [2] * 100_000, "dilations": [1]}},
    "many heads in many layers": {"layers": 10_000, "heads": 4096, "width": 4096},
    "as many layers as may be": {"layers": 10_000},
    "as wide as may be": {"width": 2**20},
    "as long as may be": {"context": 2**30, "embedding": {"type": "text", "row_width": 2**15}},
    "as long as may be, and prime": {"context": 2**30 - 35, "attention": {"type": "strided", "stride": 1000}},
    "as long as may be, in entmax": {
        "context": 2**30,
        "embedding": {"type": "tokens"},
        "attention": {"type": "entmax", "pattern": {"type": "local", "window": 8}},
    },
    "scores of all pairs of a long context": {
        "context": 2**30,
        "embedding": {"type": "tokens"},
        "attention": {"type": "synthesizer", "kind": "random"},
    },
    "experts as wide as may be": {
        "width": 2**20,
        "feed_forward_ratio": 16.0,
        "feed_forward": {"type": "experts", "count": 2**16},
    },
    "an unknown key": {"layer": 1},
}


def changed(model: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """Copy a `model` object with another value at one of PLACES."""
    path, around = PLACES[name]
    content: dict[str, Any] = json.loads(json.dumps(model | around))
    *parents, last = path.split(".")
    place: Any = content
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return content


def hostile_models() -> Iterator[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]]:
    """Names of wrong `model` objects, and what makes each of an honest one."""
    for place in PLACES:
        for name, value in NUMBERS.items():
            yield f"{place} of {name}", lambda model, place=place, value=value: changed(model, place, value)
    for name, changes in WHOLE.items():
        yield name, lambda model, changes=changes: json.loads(json.dumps(model | changes))


def set_model(config: Path, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Puts another `model` object into a config.json."""
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"model": make(content["model"])}))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and its data."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def with_header(path: Path, header: dict[str, Any] | bytes, content: bytes, length: int | None = None) -> None:
    """Writes such a file; ``length`` is what it says of its header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content)


def _changed_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(path: Path) -> None:
        header, content = header_of(path)
        change(header)
        with_header(path, header, content)

    return damage


def _first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header[min(name for name in header if name != "__metadata__")]
    return entry


def _set_first(**changes: object) -> Damage:
    return _changed_header(lambda header: _first(header).update(changes))


def _overlapping(header: dict[str, Any]) -> None:
    places = [entry for name, entry in header.items() if name != "__metadata__"]
    for entry in places:
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [0, size]


def _doubled(path: Path) -> None:
    header, content = header_of(path)
    name = min(key for key in header if key != "__metadata__")
    text = json.dumps(header).encode()
    with_header(path, text[:-1] + b", " + json.dumps({name: header[name]}).encode()[1:], content)


def _long(path: Path) -> None:
    header, content = header_of(path)
    entries = b"".join(b', "%d": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(1_700_000))
    with_header(path, json.dumps(header).encode()[:-1] + entries + b"}", content)


# Of a file of weights, in place.
WEIGHTS: dict[str, Damage] = {
    "a header of 2**64 - 1 bytes": lambda path: with_header(path, *header_of(path), length=2**64 - 1),
    "a header longer than the file": lambda path: with_header(path, *header_of(path), length=10**6),
    "a header of no bytes": lambda path: with_header(path, *header_of(path), length=0),
    "a header cut short": lambda path: with_header(path, *header_of(path), length=100),
    "a header of 100 MB": _long,
    "a header of spaces": lambda path: with_header(path, b" " * 1000, b""),
    "a header of a terabyte that takes no room": lambda path: (
        path.write_bytes((2**40).to_bytes(8, "little")),
        sparse(path, 2**41),
    ),
    "a terabyte behind it": lambda path: sparse(path, 2**40),
    "a header that is no object": lambda path: with_header(path, b"[]", b""),
    "a header that is no JSON": lambda path: with_header(path, b'{"a": ', b""),
    "a header a hundred thousand deep": lambda path: with_header(path, b'{"a":' * 100_000 + b"}" * 100_000, b""),
    "a header of no UTF-8": lambda path: with_header(path, b'{"\xff": 1}', b""),
    "nothing": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(bytes(7)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "all but its last byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "offsets that overlap": _changed_header(_overlapping),
    "offsets that run backwards": _set_first(data_offsets=[8, 0]),
    "offsets beyond the end": _set_first(data_offsets=[2**40, 2**40 + 128]),
    "offsets of 2**64": _set_first(data_offsets=[0, 2**64]),
    "offsets below 0": _set_first(data_offsets=[-128, 0]),
    "offsets that are texts": _set_first(data_offsets=["0", "128"]),
    "a shape of 2**62 rows": _set_first(shape=[2**62, 2**62]),
    "a shape of 0": _set_first(shape=[0]),
    "a shape below 0": _set_first(shape=[-32]),
    "a shape of a thousand axes": _set_first(shape=[1] * 1000),
    "no shape": _changed_header(lambda header: _first(header).pop("shape")),
    "no type": _changed_header(lambda header: _first(header).pop("dtype")),
    "a type that is none": _set_first(dtype="F33"),
    "a type of another size": _set_first(dtype="F64"),
    "a name twice": _doubled,
    "a tensor of a long name": _changed_header(
        lambda header: header.update({"x" * 500_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    ),
    "metadata that are no texts": _changed_header(lambda header: header.update(__metadata__={"a": {"b": 1}})),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
}


def shard(folder: Path) -> Path:
    """Gives the weights of an export an index, which it returns."""
    path = folder / "model.safetensors"
    header, _ = header_of(path)
    path.rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    places = {name: "a.safetensors" for name in header if name != "__metadata__"}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def _indexed(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        index = shard(folder)
        content = json.loads(index.read_text())
        change(content)
        index.write_text(json.dumps(content))

    return damage


def _all_in(file: object) -> Damage:
    return _indexed(lambda content: content["weight_map"].update(dict.fromkeys(content["weight_map"], file)))


# Of the folder of an export, whose weights get an index.
INDEXES: dict[str, Damage] = {
    "a file outside": _all_in("../../../../etc/passwd"),
    "the folder": _all_in("."),
    "a zero byte": _all_in("a\0"),
    "a name of 100,000 characters": _all_in("a" * 100_000),
    "a pipe": lambda folder: (_all_in("pipe")(folder), replace(folder / "pipe", "pipe")),
    "zeros without end": lambda folder: (_all_in("zeros")(folder), replace(folder / "zeros", "link to zeros")),
    "another file for one tensor": _indexed(lambda content: content["weight_map"].update({"norm.bias": "config.json"})),
    "a list": _indexed(lambda content: content.update(weight_map=["a.safetensors"])),
    "a hundred thousand tensors more": _indexed(
        lambda content: content["weight_map"].update({f"more.{number}": "a.safetensors" for number in range(100_000)})
    ),
}


def _lsz_varint(number: int) -> bytes:
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _checked(content: bytes) -> bytes:
    return content[:-4] + zlib.crc32(content[:-4]).to_bytes(4, "little")


def _sized(size: int) -> Callable[[bytes], bytes]:
    """Change the stated size of the content, below 16,384 bytes and from 128 on, with a valid check."""
    return lambda content: _checked(content[:20] + _lsz_varint(size) + content[22:])


def _flipped(place: int) -> Callable[[bytes], bytes]:
    """Flip a bit of a byte, with a valid check."""
    return lambda content: _checked(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])


# Of a compressed file.
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "a size of 2**60": _sized(2**60),
    "a size of 2**63": _sized(2**63 - 1),
    "a size of 0": _sized(0),
    "a size of one more": lambda content: _checked(content[:20] + bytes([content[20] ^ 1]) + content[21:]),
    "another format": lambda content: _checked(content[:3] + b"\x03" + content[4:]),
    "the older format": lambda content: _checked(content[:3] + b"\x01" + content[4:]),
    "no format": lambda content: _checked(content[:3] + b"\x00" + content[4:]),
    "a long name of its machine": lambda content: _checked(content[:27] + b"\x7fx" + content[28:]),
    "other bits": lambda content: _checked(content[: 28 + content[27]] + bytes(4) + content[32 + content[27] :]),
    "another model": _flipped(6),
    "another sum": _flipped(23),
    "a varint without end": lambda content: _checked(content[:20] + b"\xff" * 40 + content[-4:]),
    "zeros behind it": lambda content: _checked(content[:-4] + bytes(100_000) + content[-4:]),
    **{f"a bit of byte {place}, and a check": _flipped(place) for place in (21, 26, 27, 30, 45, 60, 80)},
}
