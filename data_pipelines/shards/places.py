"""Find the tars of an index at the places that a person names."""

import glob
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.manifest import is_tar_name
from longstride.data_pipelines.stores import open_store

# How programs name tars, plain and compressed; what each of them holds is told by its bytes.
_PLAIN = ".tar"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.lz4")
_ENDINGS = (_PLAIN, *_COMPRESSED)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


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


def find_tars(places: Sequence[str], remote: RemoteSettings | None) -> tuple[str, list[FoundTar], int]:
    """The folder or URL that holds all tars, the tars in order of their names, and the links that are not followed.

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
    base, sizes, links = _find_remote(spelled, remote) if "://" in spelled[0] else _find_local(spelled)
    if not sizes:
        rule = "name a folder that holds some" if not links else f"name a folder that one of the {links} links leads to"
        raise DataError(f"{', '.join(places)}: no tar there (*.tar, *.tar.gz ...); {rule}")
    tars: dict[str, FoundTar] = {}
    for source, size in sizes.items():
        tar = FoundTar(source, size)
        if not is_tar_name(tar.name):
            raise DataError(f"{source}: must be the name of a tar, such as train-000.tar; rename it")
        if tar.name in tars:
            rule = "are one tar twice, as far as their names say; name one of them"
            raise DataError(f"{tars[tar.name].source} and {source}: {rule}")
        tars[tar.name] = tar
    return base, [tars[name] for name in sorted(tars)], links


def _find_local(places: list[str]) -> tuple[str, dict[str, int], int]:
    roots, tars, links = [], [], 0
    for place in places:
        if os.path.isdir(place):  # noqa: PTH112 - a Path would lose the final slash that a link may need
            roots.append(os.path.abspath(place))  # noqa: PTH100
            found, linked = open_store(Path(place)).find(*_ENDINGS)
            tars += [os.path.join(roots[-1], name) for name in found]  # noqa: PTH118
            links += linked
            continue
        files = [place] if os.path.lexists(place) else sorted(glob.glob(place, recursive=True))  # noqa: PTH207
        if not files:
            raise DataError(f"{place}: no such file or folder; name tars, or a folder that holds some")
        tars += [os.path.abspath(file) for file in files]  # noqa: PTH100
        roots += [os.path.dirname(file) for file in tars[-len(files) :]]  # noqa: PTH120
    base = os.path.commonpath(roots)
    names: dict[str, str] = {}  # of each file, links followed: read twice, it could be in two splits
    for tar in dict.fromkeys(tars):
        name, file = os.path.relpath(tar, base), os.path.realpath(tar)
        if file in names:
            raise DataError(f"{names[file]} and {name}: are one tar twice, by links; name one of them, or its folder")
        names[file] = name
    with as_data_error(what=None):
        return base, {name: Path(base, name).stat().st_size for name in names.values()}, links


def _find_remote(places: list[str], remote: RemoteSettings | None) -> tuple[str, dict[str, int], int]:
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
            found = {posixpath.basename(rest): None} if is_tar else store.find(*_ENDINGS)[0]
            for name, size in found.items():
                if pattern is None or fnmatchcase(f"{root}/{name}", pattern):
                    sizes[f"{root}/{name}"] = store.size(name) if size is None else size
    base = posixpath.commonpath(roots)
    return f"{protocol}://{base}", {posixpath.relpath(path, base): size for path, size in sizes.items()}, 0


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
