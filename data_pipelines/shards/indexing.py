"""An index of tars that others wrote: they are read once, stay as they are, and then train in exact order like our own.

A sample is what WebDataset calls one: members of one name up to its first dot. Its content is the member with the
extension that is asked for, whatever the order of members and whatever lies between them. A compressed tar has no place
that could be read without all before it: such tars are copied once, uncompressed.
"""

import io
import os
import posixpath
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from filecmp import cmp
from pathlib import Path
from typing import Any, BinaryIO, cast

from longstride.data_pipelines.durable import durable_file, flush_folder, make_folders, whole_folder, working_folder
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.formats import HEAD_BYTES, file_format, unpacked
from longstride.data_pipelines.modalities import Modality, Properties, modality_named
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.manifest import MOST_SAMPLES, DataManifest, IndexRow, ShardRecord, SplitRecord
from longstride.data_pipelines.shards.places import FoundTar, find_tars
from longstride.data_pipelines.shards.splits import deal_tars
from longstride.data_pipelines.shards.tar_stream import TarStream, shown
from longstride.data_pipelines.shards.verify import Progress
from longstride.data_pipelines.stores import Store, open_store

PIECE_BYTES = 2**16  # of a long member: a row of the index each, which is checked whole and lost whole if damaged
_HEAD_BYTES = 2**16  # of a member, which tell what file it is
# Key and extension, as WebDataset divides a member's name: of a folder with both a line end and a dot it takes nothing.
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)")
_META = re.compile(r"__[^/]*__(\n?\Z|/)")  # what WebDataset keeps for itself, at the beginning of a name
_OTHER_MEMBERS = "members_of_other_extensions"
_ASIDE = ".index.partial"  # in a folder that is there: what is written for it
_SOURCE_BYTES = 2**20  # of a tar, read at once
_UNPACK = "copy the set with its tars uncompressed by --unpack into another folder, with room for them"


def index_tars(
    places: Sequence[str],
    output: Path,
    *,
    modality: str = "text",
    extension: str | None = None,
    splits: Sequence[str] = (),
    validation_fraction: float | None = None,
    complete: bool = False,
    unpack: bool = False,
    properties: Properties | None = None,
    remote: RemoteSettings | None = None,
    progress: Progress | None = None,
    dealt: Callable[[Mapping[str, Sequence[str]]], None] | None = None,
) -> DataManifest:
    """Read tars once, and write a manifest and their indexes into the folder ``output``, which may be the tars' own.

    ``places`` are folders, tars, patterns (``*``, ``{000..012}``) or URLs of them. ``unpack``: the tars may be
    compressed, and are copied into ``output`` as plain ones, but for plain ones that lie there. ``extension`` names the
    member of a sample that holds its content (None: the modality's own); a sample without it is left out and counted,
    or refused where all must be ``complete``. ``splits`` are ``NAME=PATTERN``; without any, words in the tars' names
    decide (``train``, ``val``, ``test`` …), and where there is no validation split ``validation_fraction`` (None: 0.05)
    of the tars become one. ``properties`` are asked of all members, where these do not tell of themselves. ``progress``
    is called with the bytes of tars, (done, in all), and ``dealt`` once, with the names of each split's tars, before
    any is read. Nothing is overwritten.

    Raises DataError, naming tar and member, for what cannot be read as it lies, for names that leave open which tars
    are held out, and for an output that is taken.
    """
    kind = modality_named(modality)
    ending = kind.extension if extension is None else extension.removeprefix(".").lower()  # as WebDataset has it
    if not ending or "/" in ending:
        raise DataError(f"extension={extension!r}: must be what follows a member's first dot, such as txt")
    base, tars, links = find_tars(places, remote)
    by_split = deal_tars(tars, splits, validation_fraction)
    is_beside = "://" not in base and os.path.realpath(base) == os.path.realpath(output)
    taken = [tar for split in by_split.values() for tar in split]
    if not unpack and (packed := [tar for tar in taken if tar.source != tar.name]):
        raise DataError(f"{packed[0].source}: a compressed tar cannot be read from the middle; {_UNPACK}")
    copied = {tar.name for tar in taken if unpack and not (is_beside and tar.source == tar.name)}
    aside = output / _ASIDE
    was_killed = aside.is_dir()
    _check_output(output, [tar.name for tar in taken], copied, was_killed)
    reader = _Reader(open_store(base, remote), kind, ending, complete, copied, properties or {})
    reader.left_out["tars_of_no_split"] = len(tars) - len(taken)
    if links:
        reader.left_out["links_to_folders"] = links
    if dealt is not None:
        dealt({name: [tar.source for tar in members] for name, members in by_split.items()})
    is_new = not output.exists()
    filled = whole_folder(output) if is_new else working_folder(aside)
    marked = _stays_marked(aside) if was_killed else nullcontext()
    with closing(reader.store), as_data_error(output, None), marked, filled as folder:
        records = reader.read_splits(by_split, folder, progress)
        place = base if "://" in base else os.path.relpath(os.path.realpath(base), os.path.realpath(output))
        manifest = DataManifest(
            modality=modality,
            properties=reader.properties or {},
            splits=records,
            made={"settings": {"extension": ending}, "left_out": dict(reader.left_out)},
            tars="." if unpack else place,
        )
        with durable_file(folder / DataManifest.FILE_NAME, folder) as file:
            file.write(manifest.to_json().encode())
        if not is_new:
            _lay_down(folder, output, was_killed)
    return manifest


@contextmanager
def _stays_marked(aside: Path) -> Iterator[None]:
    """Leaves the folder of a killed index where this one fails too: the next knows by it whose files lie there."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            aside.mkdir()
        raise


def _lay_down(aside: Path, output: Path, was_killed: bool) -> None:
    """Moves all files to where they belong, the manifest last: it makes a data folder of all.

    A file that an index that ``was_killed`` has laid there already is as it should be. Where one cannot be moved, none
    of them stays. Raises DataError for one that is there otherwise, and OSError.
    """
    names = [path.relative_to(aside) for path in sorted(aside.rglob("*")) if path.is_file()]
    names.sort(key=lambda name: name == Path(DataManifest.FILE_NAME))
    moved: list[Path] = []
    try:
        for name in names:
            target = output / name
            if os.path.lexists(target):
                if not (was_killed and target.is_file() and cmp(aside / name, target, shallow=False)):
                    raise _taken(target)
                continue
            make_folders(target.parent)
            if name == names[-1]:
                for folder in {target.parent for target in moved}:
                    flush_folder(folder)
            (aside / name).rename(target)
            moved.append(target)
        flush_folder(output)
    except BaseException:
        for target in reversed(moved):
            with suppress(OSError):
                target.unlink()
        raise


class _Reader:
    """Reads tars, one after the other; the first member of content settles what all have in common.

    A sample without its member is refused where all must be ``complete``. Tars whose names are in ``copied`` may be
    compressed, and are written anew beside their indexes.
    """

    def __init__(
        self,
        store: Store,
        modality: Modality,
        extension: str,
        complete: bool,
        copied: Collection[str],
        asked: Properties,
    ) -> None:
        self.store, self.modality, self.extension, self.complete = store, modality, extension, complete
        self.copied, self.asked = copied, asked
        self.properties: dict[str, int] | None = None
        self.left_out = Counter({f"samples_without_{extension}": 0, "empty_samples": 0, f"tars_without_{extension}": 0})
        self.extensions: set[str] = set()  # of other members, for messages

    def read_splits(
        self, dealt: Mapping[str, list[FoundTar]], aside: Path, progress: Progress | None
    ) -> dict[str, SplitRecord]:
        """The record of each split, whose tars' indexes are written below ``aside``."""
        records: dict[str, list[ShardRecord]] = {split: [] for split in dealt}
        done, total = 0, sum(tar.size for tars in dealt.values() for tar in tars)
        for split, tars in dealt.items():
            for tar in tars:
                record = self.read(tar, aside)
                if record is not None:
                    records[split].append(record)
                done += tar.size
                if progress is not None:
                    progress(done, total)
        for split, shards in records.items():
            if not shards:
                held = ", ".join(sorted(f".{each}" for each in self.extensions if each)) or "none with an extension"
                rule = "name the one that holds the content by --extension"
                if self.left_out["meta_members"] and not self.extensions:
                    held, rule = "named __…__/", "rename them, as WebDataset passes over what begins so"
                raise DataError(
                    f"{self.store.location}: no sample of split {split!r} ({len(dealt[split])} tars) has content in a "
                    f"member .{self.extension}; members are {held}; {rule}"
                )
        return {
            split: SplitRecord(sum(shard.documents for shard in shards), tuple(shards))
            for split, shards in records.items()
        }

    def read(self, found: FoundTar, aside: Path) -> ShardRecord | None:
        """The record of a tar, whose index is written below ``aside``; None where it holds no content."""
        tar, extension = self.store.path_for_messages(found.source), self.extension
        rows: list[IndexRow] = []
        keys: dict[str, bool] = {}  # of samples: whether the member is there
        with as_data_error(aside, None):
            (aside / found.name).parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            copy = stack.enter_context(durable_file(aside / found.name, aside)) if found.name in self.copied else None
            stream = stack.enter_context(closing(TarStream(tar, self._blocks(tar, found, copy))))
            for member in stream.members():
                divided = _NAME.fullmatch(member.name)
                key, kind = (divided[1], divided[2].lower()) if divided else ("", None)
                reason = _why_left_out(member, kind, extension)
                if reason is not None:
                    self.left_out[reason] += 1
                    if reason == _OTHER_MEMBERS:
                        keys.setdefault(key, False)
                        if len(self.extensions) < 20:
                            self.extensions.add(kind or "")
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
                pieces = -(-member.size // PIECE_BYTES) if self.modality.divisible else 1
                if len(rows) + pieces > MOST_SAMPLES:  # told before it is read: no index may be longer
                    raise DataError(f"{where}: a tar has more than {MOST_SAMPLES:,} samples or pieces; split the tar")
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
        record, index = ShardRecord.of(found.name, rows, stream.offset, stream.sha256.hexdigest())
        with durable_file(aside / record.index_name, aside) as file:
            file.write(index)
        return record

    def _blocks(self, tar: str, found: FoundTar, copy: BinaryIO | None) -> Generator[bytes, None, None]:
        """The plain tar, all of which is written to ``copy`` as well. Raises DataError where it cannot be had."""
        with closing(self.store.blocks(found.source, found.size)) as blocks:
            source = io.BufferedReader(_BlocksFile(blocks), _SOURCE_BYTES)
            kind = file_format(source.peek(HEAD_BYTES))
            if kind is not None and kind.unpack is not None:
                if copy is None:
                    raise DataError(f"{tar}: is {kind.name}, and cannot be read from the middle; {_UNPACK}")
                plain: Iterator[bytes] = unpacked(tar, cast("BinaryIO", source), kind)
            else:
                plain = iter(lambda: source.read(_SOURCE_BYTES), b"")
            for block in plain:
                if copy is not None:
                    copy.write(block)
                yield block

    def _rows(self, where: str, begins: int, size: int, stream: TarStream) -> list[IndexRow]:
        """The rows of a member of content, whose header has just gone by: one, or one for each piece of a long one."""
        data = stream.offset
        end = data + size
        place = data + self._header_bytes(where, size, stream)
        width = self.modality.stored_bytes(self.properties or {})
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
            rows.append((member, place, (stop - place) // width, stream.crc32, int(stop == end)))
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
                self.properties = dict(modality.settle_member(Path(where), file, self.asked))
        modality.check_head(where, head, self.properties)
        header = len(modality.header(0, self.properties))
        content, rest = divmod(max(0, size - header), modality.stored_bytes(self.properties))
        fixed = modality.document_bytes(self.properties)
        if (
            size < header
            or rest
            or not head.startswith(modality.header(content, self.properties))
            or fixed not in (None, content)
        ):
            alike = ", ".join(f"{name} {value}" for name, value in self.properties.items())
            raise DataError(
                f"{where} is not a .{modality.extension} file that can be read as it lies, as `longstride data build` "
                f"writes them ({alike}); unpack the tars, and make a data folder by "
                f"`longstride data build --modality {modality.name}`"
            )
        return header


def _why_left_out(member: tarfile.TarInfo, kind: str | None, extension: str) -> str | None:
    """Why a member of extension ``kind`` is no content, as the manifest counts it; None where it should be.

    WebDataset takes plain files alone, and ignores its own names and those that it cannot divide (``kind`` None).
    """
    if member.isdir():
        return "folder_members"
    if _META.match(member.name):
        return "meta_members"
    if posixpath.basename(member.name).startswith("."):
        return "hidden_members"
    if kind == extension:
        return None
    if not member.isreg():
        return "link_members" if member.issym() or member.islnk() else "special_members"
    return "members_without_extension" if kind is None else _OTHER_MEMBERS


class _BlocksFile(io.RawIOBase):
    """Blocks as a file that can be read, and not sought in."""

    def __init__(self, blocks: Generator[bytes, None, None]) -> None:
        self._blocks, self._held = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        """As many bytes as there is room for, fewer at the end."""
        filled = 0
        while filled < len(target):
            if not self._held:
                self._held = memoryview(next(self._blocks, b""))
                if not self._held:
                    break
            part = self._held[: len(target) - filled]
            target[filled : filled + len(part)] = part
            self._held = self._held[len(part) :]
            filled += len(part)
        return filled


def _check_output(output: Path, names: Sequence[str], copied: Collection[str], was_killed: bool) -> None:
    """Whether manifest, indexes of the tars of these names, and copies of some have place.

    What an index that ``was_killed`` may have laid there is compared when it is made again.
    """
    if "://" in str(output) or not str(output):
        raise DataError(f"--output={output}: must be a folder on this machine, such as data/mine; index, then upload")
    if os.path.lexists(output) and not output.is_dir():
        raise DataError(f"{output}: there already, and no folder; name another output")
    indexes = (name.removesuffix(".tar") + ".index.npy" for name in names)
    for name in (DataManifest.FILE_NAME, *(() if was_killed else (*indexes, *sorted(copied)))):
        if os.path.lexists(output / name):
            raise _taken(output / name)


def _taken(path: Path) -> DataError:
    return DataError(f"{path}: there already; nothing is overwritten: name another output")
