"""An index of tars that others wrote: they are read once, stay as they are, and then train in exact order like our own.

A sample is what WebDataset calls one: members of one name up to its first dot. Its content is the member with the
extension that is asked for, whatever the order of members and whatever lies between them.
"""

import glob
import hashlib
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from longstride.data_pipelines.durable import durable_file
from longstride.data_pipelines.errors import DataError, os_errors_as_data_errors
from longstride.data_pipelines.modalities import Modality, modality_named
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.manifest import DataManifest, IndexRow, ShardRecord, SplitRecord, is_tar_name
from longstride.data_pipelines.shards.tar_stream import TarStream, shown
from longstride.data_pipelines.shards.verify import Progress
from longstride.data_pipelines.stores import Store, open_store

PIECE_BYTES = 2**16  # of a long member: a row of the index each, which is checked whole and lost whole if damaged
_HEAD_BYTES = 2**16  # of a member, which tell what file it is
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")  # key and extension, as WebDataset divides a member's name
_PASSED_OVER = re.compile(r"(.*/)?\.[^/]*$|(.*/)?__[^/]*__($|/)")  # hidden files, and WebDataset's own
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SPLIT = re.compile(r"[A-Za-z0-9_-]+")


def index_tars(
    places: Sequence[str],
    output: Path,
    *,
    modality: str = "text",
    extension: str | None = None,
    splits: Sequence[str] = (),
    validation_fraction: float | None = None,
    complete: bool = False,
    remote: RemoteSettings | None = None,
    progress: Progress | None = None,
) -> DataManifest:
    """Read tars once, and write a manifest and their indexes into the folder ``output``, which may be the tars' own.

    ``places`` are folders, tars, patterns (``*``, ``{000..012}``) or URLs of them. ``extension`` names the member of a
    sample that holds its content (None: the modality's own); a sample without it is left out and counted, or refused
    where all must be ``complete``. ``splits`` are ``NAME=PATTERN``; without any, ``train*`` and ``validation*`` are
    told by their names, and where there is no validation split ``validation_fraction`` (None: 0.05) of the tars become
    one. ``progress`` is called with the bytes of tars, (done, in all). Nothing is overwritten.

    Raises DataError, naming tar and member, for what cannot be read as it lies, and for an output that is taken.
    """
    kind = modality_named(modality)
    ending = kind.extension if extension is None else extension.removeprefix(".").lower()  # as WebDataset has it
    if not ending or "/" in ending:
        raise DataError(f"extension={extension!r}: must be what follows a member's first dot, such as txt")
    base, sizes = _find(places, remote)
    dealt = _deal(sorted(sizes), splits, validation_fraction)
    _check_output(output, [name for names in dealt.values() for name in names])
    reader = _Reader(open_store(base, remote), kind, ending, complete)
    reader.left_out["tars_of_no_split"] = len(sizes) - sum(map(len, dealt.values()))
    is_new = not output.exists()
    with os_errors_as_data_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".index-", dir=output))
    try:
        records = reader.read_splits(dealt, sizes, aside, progress)
        manifest = DataManifest(
            modality=modality,
            properties=reader.properties or {},
            splits=records,
            made={"settings": {"extension": ending}, "left_out": reader.left_out},
            tars=base if "://" in base else os.path.relpath(os.path.realpath(base), os.path.realpath(output)),
        )
        with os_errors_as_data_errors(output):
            for shard in manifest.shards():
                (output / shard.index_name).parent.mkdir(parents=True, exist_ok=True)
                (aside / shard.index_name).rename(output / shard.index_name)
        with durable_file(output / DataManifest.FILE_NAME, aside) as file:  # last: it makes a data folder of all
            file.write(manifest.to_json().encode())
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        reader.store.close()
        if is_new:
            with suppress(OSError):
                output.rmdir()  # where nothing came of it
    return manifest


class _Reader:
    """Reads tars, one after the other; the first member of content settles what all have in common.

    A sample without its member is refused where all must be ``complete``.
    """

    def __init__(self, store: Store, modality: Modality, extension: str, complete: bool) -> None:
        self.store, self.modality, self.extension, self.complete = store, modality, extension, complete
        self.properties: dict[str, int] | None = None
        self.left_out = {f"samples_without_{extension}": 0, "empty_samples": 0, f"tars_without_{extension}": 0}
        self.extensions: set[str] = set()  # of other members, for messages

    def read_splits(
        self, dealt: Mapping[str, list[str]], sizes: Mapping[str, int], aside: Path, progress: Progress | None
    ) -> dict[str, SplitRecord]:
        """The record of each split, whose tars' indexes are written below ``aside``."""
        records: dict[str, list[ShardRecord]] = {split: [] for split in dealt}
        done, total = 0, sum(sizes[name] for names in dealt.values() for name in names)
        for split, names in dealt.items():
            for name in names:
                record = self.read(name, sizes[name], aside)
                if record is not None:
                    records[split].append(record)
                done += sizes[name]
                if progress is not None:
                    progress(done, total)
        for split, shards in records.items():
            if not shards:
                held = ", ".join(sorted(f".{each}" for each in self.extensions if each)) or "none with an extension"
                raise DataError(
                    f"{self.store.location}: no sample of split {split!r} ({len(dealt[split])} tars) has content in a "
                    f"member .{self.extension}; members are {held}; name the one that holds the content by --extension"
                )
        return {
            split: SplitRecord(sum(shard.documents for shard in shards), tuple(shards))
            for split, shards in records.items()
        }

    def read(self, name: str, size: int, aside: Path) -> ShardRecord | None:
        """The record of a tar, whose index is written below ``aside``; None where it holds no content."""
        tar, extension = self.store.path_for_messages(name), self.extension
        rows: list[IndexRow] = []
        keys: dict[str, bool] = {}  # of samples: whether the member is there
        stream = TarStream(tar, self.store.blocks(name, size))
        with closing(stream):
            for member in stream.members():
                matched = _NAME.fullmatch(member.name)
                key, kind = (matched[1], matched[2].lower()) if matched else (member.name, "")
                if member.isdir() or _PASSED_OVER.match(member.name):
                    continue
                if kind != extension:
                    keys.setdefault(key, False)
                    if len(self.extensions) < 20:
                        self.extensions.add(kind)
                    continue
                where = f"{tar}: member {shown(member.name)}"
                if not member.isreg():
                    rule = "is a link or no plain file, and has no bytes of its own; store the file itself"
                    raise DataError(f"{where} {rule}")
                if member.issparse():
                    raise DataError(f"{where} is sparse, and lies in pieces; write the tar without --sparse")
                if keys.get(key):
                    raise DataError(f"{where} stands twice in this tar; give every sample a name of its own")
                keys[key] = True
                rows += self._rows(where, member.offset, member.size, stream)
        lacking = [key for key, complete in keys.items() if not complete]
        if lacking and self.complete:
            raise DataError(
                f"{tar}: sample {shown(lacking[0])} has no member .{extension}; add it, or leave out --complete"
            )
        self.left_out[f"samples_without_{extension}"] += len(lacking)
        if not rows:
            self.left_out[f"tars_without_{extension}"] += 1
            return None
        record, index = ShardRecord.of(name, rows, stream.offset, stream.sha256.hexdigest())
        with os_errors_as_data_errors(aside):
            (aside / record.index_name).parent.mkdir(parents=True, exist_ok=True)
        with durable_file(aside / record.index_name, aside) as file:
            file.write(index)
        return record

    def _rows(self, where: str, begins: int, size: int, stream: TarStream) -> list[IndexRow]:
        """The rows of a member of content, whose header has just gone by: one, or one for each piece of a long one."""
        data = stream.offset
        end = data + size
        place = data + self._header_bytes(where, size, stream)
        if place == end:
            self.left_out["empty_samples"] += 1
            return []
        rows: list[IndexRow] = []
        step = PIECE_BYTES if self.modality.divisible else size
        member = begins
        while place < end:
            # Data begins at a block of the tar, and so does every piece but for the header before the first.
            stop = min(end, data + (place - data) // step * step + step)
            stream.pass_by(stop - stream.offset)
            if stop == end:
                stream.pass_by(-end % 512)
            rows.append((member, place, stop - place, stream.crc32, int(stop == end)))
            stream.crc32 = 0
            member = place = stop
        return rows

    def _header_bytes(self, where: str, size: int, stream: TarStream) -> int:
        """Bytes of the header before the content. Raises DataError for a member that is not what we read as it lies."""
        modality = self.modality
        if size == 0:
            return 0
        head = stream.peek(min(size, _HEAD_BYTES))
        if self.properties is None:
            with tempfile.TemporaryFile() as file:  # as long as the member, without its bytes
                file.write(head)
                file.truncate(size)
                file.seek(0)
                self.properties = dict(modality.settle(Path(where), file, {}))
        header = len(modality.header(0, self.properties))
        fixed = modality.document_bytes(self.properties)
        if (
            size < header
            or not head.startswith(modality.header(size - header, self.properties))
            or fixed not in (None, size - header)
        ):
            alike = ", ".join(f"{name} {value}" for name, value in self.properties.items())
            raise DataError(
                f"{where} is not a .{modality.extension} file that can be read as it lies, as `longstride data build` "
                f"writes them ({alike}); unpack the tars, and make a data folder by "
                f"`longstride data build --modality {modality.name}`"
            )
        return header


# Where the tars are.


def _find(places: Sequence[str], remote: RemoteSettings | None) -> tuple[str, dict[str, int]]:
    """The folder or URL that holds all tars, and each tar's path below it with its bytes."""
    spelled = [each.removeprefix("file://") for place in places for each in _braces(place)]
    if not all(spelled) or not spelled:
        raise DataError("DIR|URL|TAR='': must be a folder, a tar or a URL, such as shards")
    if len({place.partition("://")[0] if "://" in place else "" for place in spelled}) > 1:
        raise DataError(f"{', '.join(places)}: lie in more than one kind of place; index each kind by itself")
    found = _find_remote(spelled, remote) if "://" in spelled[0] else _find_local(spelled)
    if not found[1]:
        raise DataError(f"{', '.join(places)}: no tar there (*.tar, uncompressed); name a folder that holds some")
    for name in found[1]:
        if not is_tar_name(name):
            raise DataError(
                f"{name}: must be the name of a plain tar, such as train-000.tar; unpack what is compressed"
            )
    return found


def _find_local(places: list[str]) -> tuple[str, dict[str, int]]:
    roots, tars = [], []
    for place in places:
        if os.path.isdir(place):  # noqa: PTH112 - a Path would lose the final slash that a link may need
            roots.append(os.path.abspath(place))  # noqa: PTH100
            tars += [os.path.join(roots[-1], name) for name in open_store(Path(place)).find(".tar")]  # noqa: PTH118
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
        is_tar, pattern = rest.endswith(".tar") and "*" not in rest, rest if "*" in rest else None
        root = posixpath.dirname(rest.partition("*")[0]) if pattern or is_tar else rest.rstrip("/")
        roots.append(root)
        with closing(open_store(f"{protocol}://{root}", remote)) as store:
            found = {posixpath.basename(rest): None} if is_tar else store.find(".tar")
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
            width = len(span[1]) if span[1].startswith("0") else 0
            choices.append([f"{number:0{width}}" for number in range(int(span[1]), int(span[2]) + 1)])
        else:
            choices.append(part.split(",") if "," in part else ["{" + part + "}"])
    return ("".join(chosen) for chosen in product(*choices))


# Which split a tar belongs to.


def _deal(names: list[str], splits: Sequence[str], fraction: float | None) -> dict[str, list[str]]:
    """The tars of each split, in order of their names."""
    if fraction is not None and not 0 <= fraction < 1:
        raise DataError(f"validation_fraction={fraction}: must be at least 0 and less than 1, such as 0.05")
    rules = []
    for split in splits:
        name, _, pattern = split.partition("=")
        if not pattern or not _SPLIT.fullmatch(name):
            raise DataError(f"split={split}: must be NAME=PATTERN, such as validation='val-*.tar'")
        if not any(_fits(tar, pattern) for tar in names):
            raise DataError(f"split={split}: fits none of the {len(names)} tars, such as {names[0]}")
        rules.append((name, pattern))
    rules = rules or [(name, pattern) for name in ("train", "validation") for pattern in (f"{name}*", f"*/{name}*")]
    by_name: dict[str, list[str]] = {}
    unnamed = []
    for tar in names:
        fitting = {split: pattern for split, pattern in rules if _fits(tar, pattern)}
        if len(fitting) > 1:
            raise DataError(f"split: {tar} fits {' and '.join(fitting)}; name one by --split, such as train='{tar}'")
        if fitting:
            by_name.setdefault(next(iter(fitting)), []).append(tar)
        else:
            unnamed.append(tar)
    if not splits and "train" not in by_name and unnamed:  # names that say nothing
        by_name["train"] = unnamed
    if fraction is None:
        fraction = 0.0 if splits else 0.05
    elif fraction and "validation" in by_name:
        raise DataError(f"validation_fraction={fraction}: {by_name['validation'][0]} is of that split; leave it out")
    if fraction and "validation" not in by_name and "train" in by_name:
        by_name |= _share(by_name["train"], fraction)
    return {name: by_name[name] for name in sorted(by_name)}


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or ("/" not in pattern and fnmatchcase(posixpath.basename(name), pattern))


def _share(names: list[str], fraction: float) -> dict[str, list[str]]:
    """Train and validation: a tar stays where it is when others are added, as its name alone decides."""
    if len(names) == 1:
        rule = f"the only tar, {names[0]}, cannot be in both splits; add tars or set it to 0"
        raise DataError(f"validation_fraction={fraction}: {rule}")
    place = {name: int.from_bytes(hashlib.sha256(f"split\0{name}".encode()).digest()[:8], "big") for name in names}
    held_out = {name for name in names if place[name] < fraction * 2**64} or {min(names, key=place.__getitem__)}
    if len(held_out) == len(names):
        held_out.discard(max(names, key=place.__getitem__))
    train = [name for name in names if name not in held_out]
    return {"train": train, "validation": [name for name in names if name in held_out]}


def _check_output(output: Path, names: list[str]) -> None:
    if "://" in str(output) or not str(output):
        raise DataError(f"--output={output}: must be a folder on this machine, such as data/mine; index, then upload")
    if os.path.lexists(output) and not output.is_dir():
        raise DataError(f"{output}: there already, and no folder; name another output")
    for name in (DataManifest.FILE_NAME, *(name.removesuffix(".tar") + ".index.npy" for name in names)):
        if os.path.lexists(output / name):
            raise DataError(f"{output / name}: there already; nothing is overwritten: name another output")
