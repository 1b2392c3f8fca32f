"""Where the tars of an index are, by what a person names; and which split each of them belongs to."""

import glob
import hashlib
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from longstride.data_pipelines.errors import DataError, os_errors_as_data_errors
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.manifest import is_tar_name
from longstride.data_pipelines.stores import open_store

# How programs name tars, plain and compressed; what each of them holds is told by its bytes.
_PLAIN = ".tar"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.lz4")
_ENDINGS = (_PLAIN, *_COMPRESSED)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SPLIT = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class FoundTar:
    """A tar as it lies at its place."""

    source: str  # its path below the place of all
    size: int  # bytes

    @property
    def name(self) -> str:
        """What it is called as a plain tar."""
        ending = next((ending for ending in _COMPRESSED if self.source.endswith(ending)), None)
        return self.source if ending is None else self.source.removesuffix(ending) + _PLAIN


# Where the tars are.


def find_tars(places: Sequence[str], remote: RemoteSettings | None) -> tuple[str, list[FoundTar]]:
    """The folder or URL that holds all tars, and the tars in order of their names.

    ``places`` are folders, tars, patterns or URLs of them. Raises DataError for a place that holds none, or whose name
    would tell a secret, and for tars that cannot be told apart.
    """
    spelled = [each.removeprefix("file://") for place in places for each in _braces(place)]
    if not all(spelled) or not spelled:
        raise DataError("DIR|URL|TAR='': must be a folder, a tar or a URL, such as shards")
    if spelled[0].startswith("pipe:"):
        raise DataError(f"{spelled[0]}: a pipe runs a command, and is not run here; name the URL that it reads")
    if len({place.partition("://")[0] if "://" in place else "" for place in spelled}) > 1:
        raise DataError(f"{', '.join(places)}: lie in more than one kind of place; index each kind by itself")
    base, sizes = _find_remote(spelled, remote) if "://" in spelled[0] else _find_local(spelled)
    if not sizes:
        raise DataError(f"{', '.join(places)}: no tar there (*.tar, *.tar.gz ...); name a folder that holds some")
    tars: dict[str, FoundTar] = {}
    for source, size in sizes.items():
        tar = FoundTar(source, size)
        if not is_tar_name(tar.name):
            raise DataError(f"{source}: must be the name of a tar, such as train-000.tar; rename it")
        if tar.name in tars:
            rule = "are one tar twice, as far as their names say; name one of them"
            raise DataError(f"{tars[tar.name].source} and {source}: {rule}")
        tars[tar.name] = tar
    return base, [tars[name] for name in sorted(tars)]


def _find_local(places: list[str]) -> tuple[str, dict[str, int]]:
    roots, tars = [], []
    for place in places:
        if os.path.isdir(place):  # noqa: PTH112 - a Path would lose the final slash that a link may need
            roots.append(os.path.abspath(place))  # noqa: PTH100
            tars += [os.path.join(roots[-1], name) for name in open_store(Path(place)).find(*_ENDINGS)]  # noqa: PTH118
            continue
        files = [place] if os.path.lexists(place) else sorted(glob.glob(place, recursive=True))  # noqa: PTH207
        if not files:
            raise DataError(f"{place}: no such file or folder; name tars, or a folder that holds some")
        tars += [os.path.abspath(file) for file in files]  # noqa: PTH100
        roots += [os.path.dirname(file) for file in tars[-len(files) :]]  # noqa: PTH120
    base = os.path.commonpath(roots)
    with os_errors_as_data_errors():
        return base, {os.path.relpath(tar, base): Path(tar).stat().st_size for tar in tars}


def _find_remote(places: list[str], remote: RemoteSettings | None) -> tuple[str, dict[str, int]]:
    protocol = places[0].partition("://")[0]
    roots: list[str] = []
    sizes: dict[str, int] = {}
    for place in places:
        rest = place.partition("://")[2]
        if "@" in rest.partition("/")[0] or (protocol in ("http", "https") and "?" in rest):
            raise DataError(
                f"{open_store(place).location}: has a user or a query, which would be saved in the manifest: leave "
                "them out, and give credentials by the environment (~/.netrc, AWS_PROFILE)"
            )
        is_tar, pattern = rest.endswith(_ENDINGS) and "*" not in rest, rest if "*" in rest else None
        root = posixpath.dirname(rest.partition("*")[0]) if pattern or is_tar else rest.rstrip("/")
        roots.append(root)
        with closing(open_store(f"{protocol}://{root}", remote)) as store:
            found = {posixpath.basename(rest): None} if is_tar else store.find(*_ENDINGS)
            for name, size in found.items():
                if pattern is None or fnmatchcase(f"{root}/{name}", pattern):
                    sizes[f"{root}/{name}"] = store.size(name) if size is None else size
    base = posixpath.commonpath(roots)
    return f"{protocol}://{base}", {posixpath.relpath(path, base): size for path, size in sizes.items()}


def _braces(text: str) -> Iterator[str]:
    """What a shell would make of ``{000..012}`` and ``{a,b}``, which it leaves alone between quotation marks."""
    parts = _BRACES.split(text)
    choices = []
    for place, part in enumerate(parts):
        span = _RANGE.fullmatch(part)
        if place % 2 == 0:
            choices.append([part])
        elif span:
            first, last = int(span[1]), int(span[2])
            is_padded = any(len(each) > 1 and each.startswith("0") for each in span.groups())
            width = max(map(len, span.groups())) if is_padded else 0
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            choices.append([f"{number:0{width}}" for number in numbers])
        else:
            choices.append(part.split(",") if "," in part else ["{" + part + "}"])
    return ("".join(chosen) for chosen in product(*choices))


# Which split a tar belongs to.


def deal_tars(tars: list[FoundTar], splits: Sequence[str], fraction: float | None) -> dict[str, list[FoundTar]]:
    """The tars of each split, in order of their names; arguments as ``index_tars`` has them.

    Raises DataError for a rule that fits nothing, and for a tar that fits two.
    """
    if fraction is not None and not 0 <= fraction < 1:
        raise DataError(f"validation_fraction={fraction}: must be at least 0 and less than 1, such as 0.05")
    rules = []
    for split in splits:
        name, _, pattern = split.partition("=")
        if not pattern or not _SPLIT.fullmatch(name):
            raise DataError(f"split={split}: must be NAME=PATTERN, such as validation='val-*.tar'")
        if not any(_fits(tar, pattern) for tar in tars):
            raise DataError(f"split={split}: fits none of the {len(tars)} tars, such as {tars[0].source}")
        rules.append((name, pattern))
    rules = rules or [(name, pattern) for name in ("train", "validation") for pattern in (f"{name}*", f"*/{name}*")]
    by_name: dict[str, list[FoundTar]] = {}
    unnamed = []
    for tar in tars:
        fitting = {split: pattern for split, pattern in rules if _fits(tar, pattern)}
        if len(fitting) > 1:
            rule = f"fits {' and '.join(fitting)}; name one by --split, such as train='{tar.source}'"
            raise DataError(f"split: {tar.source} {rule}")
        if fitting:
            by_name.setdefault(next(iter(fitting)), []).append(tar)
        else:
            unnamed.append(tar)
    if not splits and "train" not in by_name and unnamed:  # names that say nothing
        by_name["train"] = unnamed
    if fraction is None:
        fraction = 0.0 if splits else 0.05
    elif fraction and "validation" in by_name:
        raise DataError(
            f"validation_fraction={fraction}: {by_name['validation'][0].source} is of that split; leave it out"
        )
    if fraction and "validation" not in by_name and "train" in by_name:
        by_name |= _share(by_name["train"], fraction)
    return {name: by_name[name] for name in sorted(by_name)}


def _fits(tar: FoundTar, pattern: str) -> bool:
    """By the name that it has, or would have as a plain tar."""
    names = {tar.source, tar.name}
    if "/" not in pattern:
        names |= {posixpath.basename(name) for name in names}
    return any(fnmatchcase(name, pattern) for name in names)


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
