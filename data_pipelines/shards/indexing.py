"""Index foreign tars: they are read once, stay unchanged, and can then be read in exact order like own shards.

A sample is a sample of WebDataset: the members with the same name up to the first dot. Its content is the member with
the requested extension, in any order and with any members in between. A compressed tar cannot be read from the middle,
so it is copied once without compression.
"""

import os
import posixpath
import re
import tarfile
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from filecmp import cmp
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.durable import complete_folder, durable_file, flush_folder, make_folders, working_folder
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.formats import HEAD_BYTES, decompress, file_format
from longstride.data_pipelines.labels import LABEL_EXTENSION, LABELS_NAME, MOST_TEXT_BYTES, labels_to_bytes, parse_label
from longstride.data_pipelines.modalities import Modality, Properties, modality_named
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.manifest import MOST_SAMPLES, DataManifest, IndexRow, ShardRecord, SplitRecord
from longstride.data_pipelines.shards.tar_stream import TarStream, shown
from longstride.data_pipelines.shards.tars import FoundTar, deal_tars, find_tars
from longstride.data_pipelines.shards.verify import Progress
from longstride.data_pipelines.stores import Store, StoredFile, open_store

PIECE_BYTES = 2**16  # a long member has a row per piece, which is verified, and lost, as a unit
_HEAD_BYTES = 2**16  # of a member, to identify its format
# Key and extension, as WebDataset divides a member's name; it skips folders with both a line end and a dot.
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)")
_META = re.compile(r"__[^/]*__(\n?\Z|/)")  # names that WebDataset reserves
_OTHER_MEMBERS = "members_of_other_extensions"
_ASIDE = ".index.partial"  # files that are being written for an existing folder
_UNPACK = "use --unpack to write uncompressed copies of the tars into another folder"


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
    labels: bool = False,
    properties: Properties | None = None,
    remote: RemoteSettings | None = None,
    progress: Progress | None = None,
    dealt: Callable[[Mapping[str, Sequence[str]]], None] | None = None,
) -> DataManifest:
    """Read tars once, and write a manifest and their indexes into the folder ``output``. Nothing is overwritten.

    Args:
        places: folders, tars, patterns (``*``, ``{000..012}``) or URLs of these.
        output: a folder, which may be that of the tars.
        extension: of the member of a sample that is its content; None: the modality's own.
        splits: rules ``NAME=PATTERN``; without any, words in the tars' names decide (``train``, ``val``, ``test`` …).
        validation_fraction: share of the tars that become the validation split if there is none; None: 0.05.
        complete: whether to reject samples without the member, which are otherwise left out and counted.
        unpack: whether to copy the tars into ``output`` without compression, except for plain ones that are there.
        labels: whether to keep the classes in members ``.cls``, which every sample must then have.
        properties: of all members, as far as these do not state them.
        progress: called with the bytes of tars, (done, in all).
        dealt: called once with the names of each split's tars, before any is read.

    Raises:
        DataError: a tar or a member cannot be read in place, names do not show which tars are held out, or the output
            is taken. The message names tar and member.
    """
    kind = modality_named(modality)
    ending = kind.extension if extension is None else extension.removeprefix(".").lower()  # like WebDataset
    if not ending or "/" in ending:
        raise DataError(f"extension={extension!r}: must be what follows a member's first dot, such as txt")
    base, tars, links = find_tars(places, remote)
    by_split = deal_tars(tars, splits, validation_fraction)
    is_in_place = "://" not in base and os.path.realpath(base) == os.path.realpath(output)
    indexed = [tar for split in by_split.values() for tar in split]
    if not unpack and (packed := [tar for tar in indexed if tar.source != tar.name]):
        raise DataError(f"{packed[0].source}: a compressed tar cannot be read from the middle; {_UNPACK}")
    copied = {tar.name for tar in indexed if unpack and not (is_in_place and tar.source == tar.name)}
    if os.path.lexists(output) and not output.is_dir():
        raise DataError(f"{output}: already exists and is not a folder; name another output")
    if os.path.lexists(output / DataManifest.FILE_NAME):
        raise _taken_error(output / DataManifest.FILE_NAME)
    reader = _Reader(open_store(base, remote), kind, ending, complete, copied, labels, properties or {})
    reader.left_out["tars_of_no_split"] = len(tars) - len(indexed)
    if links:
        reader.left_out["links_to_folders"] = links
    if dealt is not None:
        dealt({name: [tar.source for tar in members] for name, members in by_split.items()})
    is_new = not output.exists()
    target = complete_folder(output) if is_new else working_folder(output / _ASIDE)
    with closing(reader.store), as_data_error(output, None), target as folder:
        records = reader.read_splits(by_split, folder, progress)
        made = {"settings": {"extension": ending}, "left_out": dict(reader.left_out)}
        if labels:
            content = labels_to_bytes({split: np.array(classes) for split, classes in reader.labels.items()})
            made["labels"] = asdict(StoredFile.of(LABELS_NAME, content))
            with durable_file(folder / LABELS_NAME, folder) as file:
                file.write(content)
        place = base if "://" in base else os.path.relpath(os.path.realpath(base), os.path.realpath(output))
        manifest = DataManifest(
            modality=modality,
            properties=reader.properties or {},
            splits=records,
            made=made,
            tars="." if unpack else place,
        )
        with durable_file(folder / DataManifest.FILE_NAME, folder) as file:
            file.write(manifest.to_json().encode())
        if not is_new:
            _move_into_place(folder, output)
    return manifest


def _move_into_place(aside: Path, output: Path) -> None:
    """Move all files to the output, the manifest last, as it makes the folder a data folder.

    Identical files may be there already, from a run that was killed. If a file cannot be moved, all moves are undone.
    Raises DataError for another file that is there, and OSError.
    """
    names = [path.relative_to(aside) for path in sorted(aside.rglob("*")) if path.is_file()]
    names.sort(key=lambda name: name == Path(DataManifest.FILE_NAME))
    moved: list[Path] = []
    try:
        for name in names:
            target = output / name
            if os.path.lexists(target):
                if not (target.is_file() and cmp(aside / name, target, shallow=False)):
                    raise _taken_error(target)
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


@dataclass
class _Reader:
    """Reads tars one after the other. The first content member decides the properties of all.

    ``complete`` rejects samples without their member. Tars whose names are in ``copied`` may be compressed, and are
    copied next to their indexes. With ``has_labels`` samples have a class, which ``labels`` collects by split.
    """

    store: Store
    modality: Modality
    extension: str
    complete: bool
    copied: Collection[str]
    has_labels: bool
    requested: Properties
    properties: dict[str, int] | None = None
    extensions: set[str] = field(default_factory=set)  # of other members, for messages
    labels: dict[str, "array[int]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (f"samples_without_{self.extension}", "empty_samples", f"tars_without_{self.extension}")
        self.left_out = Counter(dict.fromkeys(names, 0))

    def read_splits(
        self, dealt: Mapping[str, list[FoundTar]], aside: Path, progress: Progress | None
    ) -> dict[str, SplitRecord]:
        """Read all tars, and write their indexes below ``aside``. Return the record of each split."""
        records: dict[str, list[ShardRecord]] = {split: [] for split in dealt}
        done, total = 0, sum(tar.size for tars in dealt.values() for tar in tars)
        for split, tars in dealt.items():
            self.labels[split] = array("i")
            for tar in tars:
                record = self.read(tar, aside, self.labels[split])
                if record is not None:
                    records[split].append(record)
                done += tar.size
                if progress is not None:
                    progress(done, total)
        for split, shards in records.items():
            if not shards:
                members = ", ".join(sorted(f".{ending}" for ending in self.extensions if ending))
                members = members or "none with an extension"
                rule = "name the one that holds the content by --extension"
                if self.left_out["meta_members"] and not self.extensions:
                    members, rule = "named __…__/", "rename them, as WebDataset skips such names"
                raise DataError(
                    f"{self.store.location}: no sample of split {split!r} ({len(dealt[split])} tars) has a "
                    f"member .{self.extension} with content; members are {members}; {rule}"
                )
        return {
            split: SplitRecord(sum(shard.documents for shard in shards), tuple(shards))
            for split, shards in records.items()
        }

    def read(self, source: FoundTar, aside: Path, labels: "array[int]") -> ShardRecord | None:
        """Read a tar, write its index below ``aside``, and add its classes. Return its record; None without content."""
        tar, extension = self.store.path_for_messages(source.source), self.extension
        rows: list[IndexRow] = []
        keys: dict[str, bool] = {}  # whether each sample has its member
        documents: list[str] = []  # keys of samples with content
        classes: dict[str, int] = {}
        with as_data_error(aside, None):
            (aside / source.name).parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            copy = stack.enter_context(durable_file(aside / source.name, aside)) if source.name in self.copied else None
            stream = stack.enter_context(closing(TarStream(tar, self._blocks(tar, source, copy))))
            for member in stream.members():
                match = _NAME.fullmatch(member.name)
                key, kind = (match[1], match[2].lower()) if match else ("", None)
                reason, where = _why_left_out(member, kind, extension), f"{tar}: member {shown(member.name)}"
                if reason == _OTHER_MEMBERS and self.has_labels and kind == LABEL_EXTENSION:
                    if key in classes:
                        raise DataError(f"{where} occurs twice in this tar; give every sample a unique name")
                    classes[key] = parse_label(where, stream.peek(min(member.size, MOST_TEXT_BYTES + 1)))
                    keys.setdefault(key, False)
                    continue
                if reason is not None:
                    self.left_out[reason] += 1
                    if reason == _OTHER_MEMBERS:
                        keys.setdefault(key, False)
                        if len(self.extensions) < 20:
                            self.extensions.add(kind or "")
                    continue
                if not member.isreg():
                    rule = "is a link or a special file, and has no content; store the file itself"
                    raise DataError(f"{where} {rule}")
                if member.issparse():
                    raise DataError(f"{where} is a sparse file, stored in pieces; write the tar without --sparse")
                if keys.get(key):
                    raise DataError(f"{where} occurs twice in this tar; give every sample a unique name")
                keys[key] = True
                pieces = -(-member.size // PIECE_BYTES) if self.modality.divisible else 1
                if len(rows) + pieces > MOST_SAMPLES:  # checked before it is read
                    raise DataError(f"{where}: a tar has more than {MOST_SAMPLES:,} samples or pieces; split the tar")
                content_rows = self._rows(where, member.offset, member.size, stream)
                documents += [key] if content_rows else []
                rows += content_rows
        lacking = [key for key, complete in keys.items() if not complete]
        if lacking and self.complete:
            rule = f"sample {shown(lacking[0])} has no member .{extension}; add it, or leave out --complete"
            raise DataError(f"{tar}: {rule}")
        if self.has_labels:
            missing = next((key for key in documents if key not in classes), None)
            if missing is not None:
                rule = f"has no member .{LABEL_EXTENSION} with its class; add it, or leave out --labels"
                raise DataError(f"{tar}: sample {shown(missing)} {rule}")
            labels.extend(classes[key] for key in documents)
        self.left_out[f"samples_without_{extension}"] += len(lacking)
        if not rows:
            self.left_out[f"tars_without_{extension}"] += 1
            return None
        record, index = ShardRecord.of(source.name, rows, stream.offset, stream.sha256.hexdigest())
        with durable_file(aside / record.index_name, aside) as file:
            file.write(index)
        return record

    def _blocks(self, tar: str, location: FoundTar, copy: BinaryIO | None) -> Generator[bytes, None, None]:
        """Yield the decompressed tar, and write it to ``copy``, if any. Raises DataError if it cannot be read."""
        with closing(self.store.blocks(location.source, location.size)) as blocks:
            head = b""
            while len(head) < HEAD_BYTES and (block := next(blocks, b"")):
                head += block
            plain: Iterator[bytes] = chain((head,), blocks)
            kind = file_format(head)
            if kind is not None and kind.begin is not None:
                if copy is None:
                    raise DataError(f"{tar}: is {kind.name}, and cannot be read from the middle; {_UNPACK}")
                plain = decompress(tar, plain, kind)
            for block in plain:
                if copy is not None:
                    copy.write(block)
                yield block

    def _rows(self, where: str, begins: int, size: int, stream: TarStream) -> list[IndexRow]:
        """Read a content member after its header, and return its rows: one, or one per piece of a long member."""
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
            # Data, and every piece after the first, begins at a block of the tar.
            stop = min(end, data + (place - data) // step * step + step)
            stream.pass_by(stop - stream.offset)
            if stop == end:
                stream.pass_by(-end % 512)
            rows.append((member, place, (stop - place) // width, stream.crc32, int(stop == end)))
            stream.crc32 = 0
            member = place = stop
        return rows

    def _header_bytes(self, where: str, size: int, stream: TarStream) -> int:
        """Return the size of the header before the content. Raises DataError for a member in another format."""
        modality = self.modality
        if size == 0:
            return 0
        head = stream.peek(min(size, _HEAD_BYTES))
        if self.properties is None:
            with tempfile.TemporaryFile() as file:  # a sparse file of the member's size
                file.write(head)
                file.truncate(size)
                file.seek(0)
                self.properties = dict(modality.settle_member(Path(where), file, self.requested))
        modality.check_head(where, head, self.properties)
        header = len(modality.header(0, self.properties))
        content, remainder = divmod(max(0, size - header), modality.stored_bytes(self.properties))
        fixed = modality.document_bytes(self.properties)
        if (
            size < header
            or remainder
            or not head.startswith(modality.header(content, self.properties))
            or fixed not in (None, content)
        ):
            alike = ", ".join(f"{name} {value}" for name, value in self.properties.items())
            raise DataError(
                f"{where} is not a .{modality.extension} file in the form that `longstride data build` "
                f"writes ({alike}); unpack the tars, and make a data folder with "
                f"`longstride data build --modality {modality.name}`"
            )
        return header


def _why_left_out(member: tarfile.TarInfo, kind: str | None, extension: str) -> str | None:
    """Return why a member with extension ``kind`` is not content, for the manifest's counts; None if it is.

    WebDataset only reads plain files. It ignores reserved names and those without an extension (``kind`` None).
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


def _taken_error(path: Path) -> DataError:
    return DataError(f"{path}: already exists and is not overwritten; name another output")
