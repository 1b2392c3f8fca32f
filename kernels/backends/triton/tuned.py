"""Configurations that were measured on one card, in place of rows of ``configurations``: a JSON file a card.

``benchmarks/attention/tune.py`` writes it, launches on that card read it. The files lie in the folder ``tuned`` beside
this one and are shipped with it: tables as the others are, so that nothing around a user chooses. A file's name has the
card and the triton that it was measured with, as another triton makes other code of the same row; other cards and
versions have no file, and take the tables.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import triton

from longstride.kernels.backends.triton.configurations import Configuration, Kernel, Widest
from longstride.kernels.errors import ConfigError

FOLDER = Path(__file__).parent / "tuned"
FACTS = {"device": str, "triton": str, "rows": list}  # what a file must have; what else it says is for people
POWERS_OF_TWO = {"block_q": (16, 256), "block_k": (16, 256), "num_warps": (1, 16)}
MOST_STAGES = 8

Rows = dict[tuple[Kernel, Widest], tuple[Configuration, ...]]


def file_of(device_name: str) -> Path:
    """Where the rows of a card lie, for the triton that runs."""
    card = "-".join(re.findall(r"[a-z0-9]+", device_name.lower()))
    return FOLDER / f"{card}-triton-{triton_version()}.json"


def triton_version() -> str:
    """Major and minor: what decides how code is generated."""
    return ".".join(triton.__version__.split(".")[:2])


@lru_cache(maxsize=16)
def rows_on(device_name: str) -> Rows:
    """The rows of a card; none where it has no file. Read once a process.

    Raises:
        ConfigError: the file is damaged, or not this card's.
    """
    path = file_of(device_name)
    if not path.exists():
        return {}
    facts, rows = read(path)
    for name, wanted in (("device", device_name), ("triton", triton_version())):
        if facts[name] != wanted:
            raise ConfigError.at(f"{path}: {name}", facts[name], f"must be what runs here; nearest {wanted}")
    return rows


def write(path: Path, device_name: str, rows: Rows, **about: object) -> None:
    """Write what ``rows_on`` reads, in one step; ``about`` says what else is worth knowing of the measurement."""
    listed = [
        {"kernel": kernel, **widest._asdict(), "candidates": [one._asdict() for one in some]}
        for (kernel, widest), some in rows.items()
    ]
    content = {"device": device_name, "triton": triton_version(), **about, "rows": listed}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    read(partial)  # what cannot be read must not be put in force
    partial.replace(path)


def read(path: Path) -> tuple[dict[str, Any], Rows]:
    """What a file says, and its rows.

    Raises:
        ConfigError: it is not what ``write`` writes.
    """
    try:
        facts = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError.at(str(path), ..., f"must be JSON ({error}); remove it, or measure again") from None
    _demand(isinstance(facts, dict), str(path), facts, "must be an object; remove it, or measure again")
    for name, kind in FACTS.items():
        _demand(isinstance(facts.get(name), kind), f"{path}: {name}", facts.get(name), f"must be a {kind.__name__}")
    rows: Rows = {}
    for number, row in enumerate(facts["rows"]):
        where = f"{path}: rows[{number}]"
        names = {"kernel", *Widest._fields, "candidates"}
        _demand(isinstance(row, dict) and set(row) == names, where, row, f"must have {', '.join(sorted(names))}")
        widest = Widest(row["bytes_an_element"], row["width"])
        _demand(widest in {Widest(b, w) for b in (2, 4) for w in (64, 128, 256)}, where, list(widest), "is no case")
        _demand(row["kernel"] in get_args(Kernel), f"{where}.kernel", row["kernel"], "must be a kernel's name")
        some = row["candidates"]
        _demand(isinstance(some, list) and bool(some), f"{where}.candidates", some, "must hold a configuration")
        found = tuple(_configuration(one, f"{where}.candidates[{place}]") for place, one in enumerate(some))
        square = not row["kernel"].startswith("closed") or all(one.block_q == one.block_k for one in found)
        _demand(square, f"{where}.candidates", ..., "must have square tiles, as closed runs have")
        rows[row["kernel"], widest] = found
    return facts, rows


def _configuration(fields: Any, where: str) -> Configuration:
    """A configuration that a launch can take."""
    needed = set(Configuration._fields) - set(Configuration._field_defaults)
    named = isinstance(fields, dict) and needed <= set(fields) <= set(Configuration._fields)
    _demand(named, where, fields, f"must have {', '.join(Configuration._fields)}")
    for name, value in fields.items():
        default = Configuration._field_defaults.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in POWERS_OF_TWO:
            least, most = POWERS_OF_TWO[name]
            good = whole and least <= value <= most and value & (value - 1) == 0
            rule = f"must be a power of two from {least} to {most}"
        elif name == "num_stages":
            good, rule = whole and 1 <= value <= MOST_STAGES, f"must be a whole number from 1 to {MOST_STAGES}"
        elif name == "rate":
            number = whole or isinstance(value, float)
            good, rule = number and 0 < value < math.inf, "must be a number above 0"
        elif isinstance(default, bool):
            good, rule = isinstance(value, bool), "must be true or false"
        else:  # a limit, or none
            good, rule = value is None or (whole and value > 0), "must be a whole number above 0, or null"
        _demand(good, f"{where}.{name}", value, rule)
    return Configuration(**fields)


def _demand(good: bool, path: str, value: object, rule: str) -> None:
    """Raise the one line of what is wrong."""
    if not good:
        raise ConfigError.at(path, value, rule)
