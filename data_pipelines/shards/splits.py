"""Deal the tars of an index to splits: by the rules of ``--split``, or by the words in their names.

A word stands between characters that are no letters: ``cc12m-train-0001.tar``, ``pile_val_00.tar``, ``val2017/0.tar``.
"""

import glob
import hashlib
import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from urllib.parse import unquote

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards.places import FoundTar

_SPLIT = re.compile(r"[A-Za-z0-9_-]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_KINDS = {  # of data, by the words that name them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val"),
    "dev": ("dev",),
    "eval": ("eval", "evaluation"),
    "test": ("test", "testing"),
}
_KIND_OF = {f"{word}{end}": kind for kind, words in _KINDS.items() for word in words for end in ("", "set", "data")}
_VALIDATING = ("validation", "dev", "eval")  # kinds that become the split validation, where there is but one
_SHOWN_PATTERNS = 8  # of a split, in a message


def deal_tars(tars: list[FoundTar], splits: Sequence[str], fraction: float | None) -> dict[str, list[FoundTar]]:
    """The tars of each split, in order of their names; arguments as ``index_tars`` has them.

    Raises DataError for a rule that fits nothing, for a tar that fits two, and for names that leave open which tars are
    held out.
    """
    if fraction is not None and not 0 <= fraction < 1:
        raise DataError(f"validation_fraction={fraction}: must be at least 0 and less than 1, such as 0.05")
    by_name = _by_rules(tars, splits) if splits else _by_words(tars)
    if fraction is None:
        fraction = 0.0 if splits else 0.05
    elif fraction and "validation" in by_name:
        raise DataError(
            f"validation_fraction={fraction}: {by_name['validation'][0].source} is of that split; leave it out"
        )
    if fraction and "validation" not in by_name and "train" in by_name:
        by_name |= _share(by_name["train"], fraction)
    return {name: by_name[name] for name in sorted(by_name)}


def _by_rules(tars: Sequence[FoundTar], splits: Sequence[str]) -> dict[str, list[FoundTar]]:
    rules = []
    for split in splits:
        name, _, pattern = split.partition("=")
        if not pattern or not _SPLIT.fullmatch(name):
            raise DataError(f"split={split}: must be NAME=PATTERN, such as validation='val-*.tar'")
        if not any(_fits(tar, pattern) for tar in tars):
            raise DataError(f"split={split}: fits none of the {len(tars)} tars, such as {tars[0].source}")
        rules.append((name, pattern))
    by_name: dict[str, list[FoundTar]] = {}
    for tar in tars:
        fitting = sorted({name for name, pattern in rules if _fits(tar, pattern)})
        if len(fitting) > 1:
            rule = f"fits {' and '.join(fitting)}; give patterns of which one fits, such as {fitting[0]}='{tar.source}'"
            raise DataError(f"split: {tar.source} {rule}")
        if fitting:
            by_name.setdefault(fitting[0], []).append(tar)
    return by_name


def _by_words(tars: Sequence[FoundTar]) -> dict[str, list[FoundTar]]:
    """Tars that no word names are of train, unless others are named so; they are of no split then.

    Raises DataError for a tar with words of two kinds, where two kinds could validate, and where all are held out. It
    names the options that say so.
    """
    by_kinds: dict[tuple[str, ...], list[FoundTar]] = {}
    for tar in tars:
        words = [word.lower() for word in _LETTERS.findall(unquote(tar.source))]
        named = {_KIND_OF[word] for word in words if word in _KIND_OF}
        by_kinds.setdefault(tuple(kind for kind in _KINDS if kind in named), []).append(tar)
    unnamed = by_kinds.pop((), [])
    if unnamed and ("train",) not in by_kinds:
        by_kinds["train",] = unnamed
    validating = [kind for kind in _VALIDATING if any(kind in kinds for kinds in by_kinds)]
    split_of = {kind: kind for kind in _KINDS} | dict.fromkeys(validating[:1], "validation")
    by_name = {split_of[kinds[0]]: members for kinds, members in by_kinds.items() if len(kinds) == 1}
    options = " ".join(_options(name, by_name[name], tars) for name in sorted(by_name))
    mixed = {kinds: members for kinds, members in by_kinds.items() if len(kinds) > 1}
    if mixed:
        choices = [options] if options else []
        for kinds, members in mixed.items():
            choices.append(" or ".join(_options(split_of[kind], members, tars) for kind in kinds))
        kinds, members = next(iter(mixed.items()))
        rule = f"has {' and '.join(kinds)} in its name; give {', and '.join(choices)}"
        raise DataError(f"split: {members[0].source} {rule}")
    if len(validating) > 1:
        first, second = (by_kinds[kind,][0].source for kind in validating[:2])
        rule = f"are both named like a split to validate with; give {options}, or other names"
        raise DataError(f"split: {first} and {second} {rule}")
    if "train" not in by_name:
        rule = (
            f"is held out by its name, as all are; give {options}, or to train on them {_options('train', tars, tars)}"
        )
        raise DataError(f"split: {tars[0].source} {rule}")
    return by_name


def _options(name: str, members: Sequence[FoundTar], tars: Sequence[FoundTar]) -> str:
    """The options by which these of the tars, and no others, are of a split: by one pattern, or by several."""

    def are_fitted(patterns: Iterable[str]) -> bool:
        return {tar for tar in tars if any(_fits(tar, pattern) for pattern in patterns)} == set(members)

    sources = [tar.source for tar in members]
    begin, end = (os.path.commonprefix(names) for names in (sources, [name[::-1] for name in sources]))  # noqa: RUF071
    digits = "0123456789"
    patterns = [f"{glob.escape(begin.rstrip(digits))}*{glob.escape(end.rstrip(digits)[::-1])}"]
    if len(sources) == 1 or not are_fitted(patterns):
        patterns = list(dict.fromkeys(re.sub(r"\d+", "[0-9]*", glob.escape(source)) for source in sources))
    if len(sources) == 1 or (len(patterns) <= _SHOWN_PATTERNS and not are_fitted(patterns)):
        patterns = [glob.escape(source) for source in sources]
    if len(patterns) <= _SHOWN_PATTERNS and not are_fitted(patterns):  # names of tars in folders as well
        patterns = [pattern if "/" in pattern else f"./{pattern}" for pattern in patterns]
    shown = [f"--split {name}={shlex.quote(pattern)}" for pattern in patterns[:_SHOWN_PATTERNS]]
    return " ".join([*shown, *(["…"] if len(patterns) > len(shown) else [])])


def _fits(tar: FoundTar, pattern: str) -> bool:
    """Whether a pattern fits the path that a tar has, or would have as a plain tar; without a slash also its name."""
    names = {tar.source, tar.name}
    if "/" not in pattern:
        names |= {posixpath.basename(name) for name in names}
    return any(fnmatchcase(name, pattern.removeprefix("./")) for name in names)


def _share(tars: list[FoundTar], fraction: float) -> dict[str, list[FoundTar]]:
    """Train and validation: a tar stays where it is when others are added, as its name alone decides."""
    if len(tars) == 1:
        rule = f"the only tar, {tars[0].source}, cannot be in both splits; add tars or set it to 0"
        raise DataError(f"validation_fraction={fraction}: {rule}")
    place = {tar: int.from_bytes(hashlib.sha256(f"split\0{tar.name}".encode()).digest()[:8], "big") for tar in tars}
    held_out = {tar for tar in tars if place[tar] < fraction * 2**64} or {min(tars, key=place.__getitem__)}
    if len(held_out) == len(tars):
        held_out.discard(max(tars, key=place.__getitem__))
    train = [tar for tar in tars if tar not in held_out]
    return {"train": train, "validation": [tar for tar in tars if tar in held_out]}
