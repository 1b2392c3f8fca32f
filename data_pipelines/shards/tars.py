"""The tars of an index: find them, and assign them to splits by the rules of ``--split`` or by words in their names.

A word stands between characters that are not letters: ``cc12m-train-0001.tar``, ``pile_val_00.tar``, ``val2017/0.tar``.
"""

import glob
import hashlib
import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from braceexpand import braceexpand

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.manifest import is_tar_name
from longstride.data_pipelines.stores import open_store

# Suffixes of plain and compressed tars; the content of a file decides how it is read.
_PLAIN = ".tar"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.lz4")
_ENDINGS = (_PLAIN, *_COMPRESSED)
_SPLIT = re.compile(r"[A-Za-z0-9_-]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_KINDS = {  # kinds of data, with the words for them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val"),
    "dev": ("dev",),
    "eval": ("eval", "evaluation"),
    "test": ("test", "testing"),
}
_KIND_OF = {f"{word}{end}": kind for kind, words in _KINDS.items() for word in words for end in ("", "set", "data")}
_VALIDATING = ("validation", "dev", "eval")  # kinds that become the split validation, if there is only one of them
_SHOWN_PATTERNS = 8  # of a split, in a message


@dataclass(frozen=True, slots=True)
class FoundTar:
    """A tar to index, maybe compressed."""

    source: str  # path below the common folder of all
    size: int  # bytes

    @property
    def name(self) -> str:
        """The name as a plain tar."""
        ending = next((ending for ending in _COMPRESSED if self.source.endswith(ending)), None)
        return self.source if ending is None else self.source.removesuffix(ending) + _PLAIN


def find_tars(places: Sequence[str], remote: RemoteSettings | None) -> tuple[str, list[FoundTar], int]:
    """Return the common folder or URL, the tars in order of their names, and the number of links not followed.

    ``places`` are folders, tars, patterns or URLs of these. Raises DataError for a place without tars, for a URL with
    a secret, and for tars with the same name.
    """
    spelled = [name.removeprefix("file://") for place in places for name in _braces(place)]
    if not all(spelled) or not spelled:
        raise DataError("DIR|URL|TAR='': must be a folder, a tar or a URL, such as shards")
    if spelled[0].startswith("pipe:"):
        raise DataError(f"{spelled[0]}: pipes are not run, because they run a command; name the URL that it reads")
    if len({place.partition("://")[0] if "://" in place else "" for place in spelled}) > 1:
        raise DataError(f"{', '.join(places)}: are partly local and partly remote; index each kind separately")
    base, sizes, links = _find_remote(spelled, remote) if "://" in spelled[0] else _find_local(spelled)
    if not sizes:
        rule = "name a folder that holds some" if not links else f"name a folder that one of the {links} links leads to"
        raise DataError(f"{', '.join(places)}: contains no tar (*.tar, *.tar.gz ...); {rule}")
    tars: dict[str, FoundTar] = {}
    for source, size in sizes.items():
        tar = FoundTar(source, size)
        if not is_tar_name(tar.name):
            raise DataError(f"{source}: must be the name of a tar, such as train-000.tar; rename it")
        if tar.name in tars:
            rule = "are the same tar by their names; name one of them"
            raise DataError(f"{tars[tar.name].source} and {source}: {rule}")
        tars[tar.name] = tar
    return base, [tars[name] for name in sorted(tars)], links


def _find_local(places: list[str]) -> tuple[str, dict[str, int], int]:
    roots, tars, links = [], [], 0
    for place in places:
        if os.path.isdir(place):  # noqa: PTH112 - a Path would lose the final slash that a link may need
            roots.append(os.path.abspath(place))  # noqa: PTH100
            files, linked = open_store(Path(place)).find(*_ENDINGS)
            tars += [os.path.join(roots[-1], name) for name in files]  # noqa: PTH118
            links += linked
            continue
        matches = [place] if os.path.lexists(place) else sorted(glob.glob(place, recursive=True))  # noqa: PTH207
        if not matches:
            raise DataError(f"{place}: no such file or folder; name tars, or a folder that holds some")
        tars += [os.path.abspath(file) for file in matches]  # noqa: PTH100
        roots += [os.path.dirname(file) for file in tars[-len(matches) :]]  # noqa: PTH120
    base = os.path.commonpath(roots)
    names: dict[str, str] = {}  # by real path: a file that is read twice could be in two splits
    for tar in dict.fromkeys(tars):
        name, file = os.path.relpath(tar, base), os.path.realpath(tar)
        if file in names:
            raise DataError(f"{names[file]} and {name}: are links to the same tar; name one of them, or its folder")
        names[file] = name
    with as_data_error(what=None):
        return base, {name: Path(base, name).stat().st_size for name in names.values()}, links


def _find_remote(places: list[str], remote: RemoteSettings | None) -> tuple[str, dict[str, int], int]:
    protocol = places[0].partition("://")[0]
    roots: list[str] = []
    sizes: dict[str, int] = {}
    for place in places:
        path = place.partition("://")[2]
        if "@" in path.partition("/")[0] or (protocol in ("http", "https") and "?" in path):
            raise DataError(
                f"{open_store(place).location}: has a user or a query, which would be saved in the manifest: leave "
                "them out, and give credentials in the environment (~/.netrc, AWS_PROFILE)"
            )
        is_tar, pattern = path.endswith(_ENDINGS) and "*" not in path, path if "*" in path else None
        root = posixpath.dirname(path.partition("*")[0]) if pattern or is_tar else path.rstrip("/")
        roots.append(root)
        with closing(open_store(f"{protocol}://{root}", remote)) as store:
            files = {posixpath.basename(path): None} if is_tar else store.find(*_ENDINGS)[0]
            for name, size in files.items():
                if pattern is None or fnmatchcase(f"{root}/{name}", pattern):
                    sizes[f"{root}/{name}"] = store.size(name) if size is None else size
    base = posixpath.commonpath(roots)
    return f"{protocol}://{base}", {posixpath.relpath(name, base): size for name, size in sizes.items()}, 0


def _braces(text: str) -> list[str]:
    """Expand ``{000..012}`` and ``{a,b}``, as a shell does outside of quotation marks."""
    try:
        return list(braceexpand(text, escape=False))
    except ValueError:  # braces without a pair are part of a name
        return [text]


def deal_tars(tars: list[FoundTar], splits: Sequence[str], fraction: float | None) -> dict[str, list[FoundTar]]:
    """Assign tars to splits, in order of their names; arguments are those of ``index_tars``.

    Raises DataError for a rule that fits nothing, for a tar that fits two, and for names that do not show which tars
    are held out.
    """
    if fraction is not None and not 0 <= fraction < 1:
        raise DataError(f"validation_fraction={fraction}: must be at least 0 and less than 1, such as 0.05")
    by_name = _by_rules(tars, splits) if splits else _by_words(tars)
    if fraction is None:
        fraction = 0.0 if splits else 0.05
    elif fraction and "validation" in by_name:
        rule = f"{by_name['validation'][0].source} is in that split already; leave the fraction out"
        raise DataError(f"validation_fraction={fraction}: {rule}")
    if fraction and "validation" not in by_name and "train" in by_name:
        train = by_name["train"]
        if len(train) == 1:
            rule = f"the only tar, {train[0].source}, cannot be in both splits; add tars or set it to 0"
            raise DataError(f"validation_fraction={fraction}: {rule}")
        # By its name alone, so that a tar keeps its split when others are added.
        place = {
            tar: int.from_bytes(hashlib.sha256(f"split\0{tar.name}".encode()).digest()[:8], "big") for tar in train
        }
        held_out = {tar for tar in train if place[tar] < fraction * 2**64} or {min(train, key=place.__getitem__)}
        if len(held_out) == len(train):
            held_out.discard(max(train, key=place.__getitem__))
        by_name["train"] = [tar for tar in train if tar not in held_out]
        by_name["validation"] = [tar for tar in train if tar in held_out]
    return {name: by_name[name] for name in sorted(by_name)}


def _by_rules(tars: Sequence[FoundTar], splits: Sequence[str]) -> dict[str, list[FoundTar]]:
    rules = []
    for split in splits:
        name, _, pattern = split.partition("=")
        if not pattern or not _SPLIT.fullmatch(name):
            raise DataError(f"split={split}: must be NAME=PATTERN, such as validation='val-*.tar'")
        if not any(_fits(tar, pattern) for tar in tars):
            raise DataError(f"split={split}: matches none of the {len(tars)} tars, such as {tars[0].source}")
        rules.append((name, pattern))
    by_name: dict[str, list[FoundTar]] = {}
    for tar in tars:
        fitting = sorted({name for name, pattern in rules if _fits(tar, pattern)})
        if len(fitting) > 1:
            rule = f"matches {' and '.join(fitting)}; only one pattern may match, such as {fitting[0]}='{tar.source}'"
            raise DataError(f"split: {tar.source} {rule}")
        if fitting:
            by_name.setdefault(fitting[0], []).append(tar)
    return by_name


def _by_words(tars: Sequence[FoundTar]) -> dict[str, list[FoundTar]]:
    """Assign tars by the words in their names. Tars without such a word are train, or none if others are named train.

    Raises DataError for a tar with words of two kinds, for two kinds of validation, and if all tars are held out. It
    names the options that decide.
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
        rule = f"are both named like a validation split; give {options}, or other names"
        raise DataError(f"split: {first} and {second} {rule}")
    if "train" not in by_name:
        rule = (
            f"is held out by its name, as all are; give {options}, or to train on them {_options('train', tars, tars)}"
        )
        raise DataError(f"split: {tars[0].source} {rule}")
    return by_name


def _options(name: str, members: Sequence[FoundTar], tars: Sequence[FoundTar]) -> str:
    """Return the options that assign exactly these tars to a split, by one pattern or by several."""

    def are_fitted(patterns: Iterable[str]) -> bool:
        return {tar for tar in tars if any(_fits(tar, pattern) for pattern in patterns)} == set(members)

    sources = [tar.source for tar in members]
    begin, end = (os.path.commonprefix(names) for names in (sources, [name[::-1] for name in sources]))  # noqa: RUF071
    digits = "0123456789"
    common = f"{glob.escape(begin.rstrip(digits))}*{glob.escape(end.rstrip(digits)[::-1])}"
    names = [glob.escape(source) for source in sources]
    numbered = list(dict.fromkeys(re.sub(r"\d+", "[0-9]*", name) for name in names))
    # The last names are those of tars in folders as well.
    choices = [[common], numbered, names, [name if "/" in name else f"./{name}" for name in names]]
    choices = choices[2:] if len(names) == 1 else choices
    fitting = (choice for choice in choices if len(choice) <= _SHOWN_PATTERNS and are_fitted(choice))
    patterns = next(fitting, numbered)
    shown = [f"--split {name}={shlex.quote(pattern)}" for pattern in patterns[:_SHOWN_PATTERNS]]
    return " ".join([*shown, *(["…"] if len(patterns) > len(shown) else [])])


def _fits(tar: FoundTar, pattern: str) -> bool:
    """Whether a pattern fits the path of a tar, or its path as a plain tar; without a slash, also the file's name."""
    names = {tar.source, tar.name}
    if "/" not in pattern:
        names |= {posixpath.basename(name) for name in names}
    return any(fnmatchcase(name, pattern.removeprefix("./")) for name in names)
