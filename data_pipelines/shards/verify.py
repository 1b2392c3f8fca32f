"""Whether a data folder is, to the last bit, what was built."""

import hashlib
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import numpy as np

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.plain_files import open_plain
from longstride.data_pipelines.settings import REBUILD, RemoteSettings
from longstride.data_pipelines.shards.manifest import (
    BLOCK_BYTES,
    DataManifest,
    ShardRecord,
    check_places,
    load_palette,
    member_ends,
)
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader, Split
from longstride.data_pipelines.shards.sources import source_in, source_lines
from longstride.data_pipelines.stores import StoredFile, open_store

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
_CHECKED_AT_START = 1000  # shards
_READ_BYTES = 2**20


def check_split(location: str | Path | DataFolder, split: str) -> None:
    """Raises DataError unless a split's files have their sizes, and shards begin with their own first sample.

    Of the shards up to a thousand, evenly spread, are opened: enough to tell files that are no shards before a run
    begins. Remote files are not looked at: they are checked when they are fetched.
    """
    opened = DataFolder.at(location).split(split)
    if not opened.check_sizes():
        return
    count = len(opened.shards)
    checked = min(count, _CHECKED_AT_START)
    for place in range(checked):
        SampleReader(opened).fill(place * count // checked, 0, np.empty(1, dtype=np.uint8))


def verify(location: str | Path, progress: Progress | None = None) -> list[str]:
    """Read a whole data folder: one line for each damage found, none where all is as it was built.

    Sizes, SHA-256 of shards and indexes, the tar structure against the index, and the CRC-32 of each sample.
    ``progress`` is called with the bytes of shards, (done, in all), after each. Raises DataError where there is no data
    folder.
    """
    store = open_store(location)
    content = store.read(DataManifest.FILE_NAME)
    try:
        manifest = DataManifest.parse(store.path_for_messages(DataManifest.FILE_NAME), content)
    except DataError as error:
        return [str(error)]
    with tempfile.TemporaryDirectory(prefix="longstride-verify-") as cache:
        # What is remote is fetched anew, whatever the training's cache holds, and forgotten shard after shard.
        sizes = [shard.file.size + shard.index_file.size for shard in manifest.shards()]
        room = 2 * max([*sizes, 1 if manifest.pieces is None else manifest.pieces.size])
        with closing(DataFolder(location, RemoteSettings(cache=cache, cache_bytes=room), manifest)) as folder:
            return _verify_folder(folder, progress)


def _verify_folder(folder: DataFolder, progress: Progress | None) -> list[str]:
    done, total = 0, sum(shard.file_bytes for shard in folder.manifest.shards())
    findings = []
    if folder.manifest.palette is not None:
        try:
            load_palette(folder.store, folder.manifest.palette)
        except DataError as error:
            findings.append(str(error))
    if folder.manifest.pieces is not None:
        findings += _verify_pieces(folder, folder.manifest.pieces)
    if DataManifest.SOURCES_NAME in (folder.store.sizes() or ()):  # of a remote folder it is not fetched
        findings += _verify_sources(folder)
    for name in folder.manifest.splits:
        split = folder.split(name)
        for number, shard in enumerate(split.shards):
            findings += _verify_shard(folder, split, number)
            done += shard.file_bytes
            if progress is not None:
                progress(done, total)
    if folder.manifest.tars is None:  # else files beside the tars may be anybody's
        known = {file.name for shard in folder.manifest.shards() for file in (shard.file, shard.index_file)}
        for name in sorted(set(folder.store.sizes() or ()) - known):
            if name.endswith((".tar", ".npy")):
                shown = folder.store.path_for_messages(name)
                findings.append(f"{shown}: {DataManifest.FILE_NAME} does not list it; remove it")
    return findings


def _verify_pieces(folder: DataFolder, file: StoredFile) -> list[str]:
    name = folder.store.path_for_messages(file.name)
    try:
        path = folder.store.local(file)
        with as_data_error(name, mend=REBUILD):
            is_whole = _sha256_of(path) == file.sha256
    except DataError as error:
        return [str(error)]
    return [] if is_whole else [f"{name}: the list of pieces is damaged (its SHA-256 is not the manifest's); {REBUILD}"]


def _verify_sources(folder: DataFolder) -> list[str]:
    """Whether the list of sources, where there is one, has every sample in order."""
    path = folder.store.path_for_messages(DataManifest.SOURCES_NAME)
    keys = (shard.key(number) for shard in folder.manifest.shards() for number in range(shard.samples))
    try:
        with as_data_error(path, mend=REBUILD):
            for key, line in zip_longest(keys, source_lines(Path(path))):
                if key is None or line is None or source_in(line, key) is None:
                    return [f"{path}: the list of sources is damaged (at {key or 'its end'}); remove it, or rebuild"]
    except DataError as error:
        return [str(error)]
    return []


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _verify_shard(folder: DataFolder, split: Split, number: int) -> list[str]:
    shard, name = split.shards[number], split.path(number)
    findings = []
    try:
        path = folder.tars.local(shard.file)
        index = shard.load_index(folder.store)
        check_places(name, shard, index, folder.manifest)
        with as_data_error(name, mend=REBUILD):
            if _sha256_of(path) != shard.sha256:
                findings.append(f"{name}: its SHA-256 is not the manifest's; {REBUILD}")
            if folder.manifest.tars is None:
                findings += _verify_members(name, path, split, shard, index)
            else:
                findings += _verify_rows(name, path, split, number, index)
    except DataError as error:
        findings.append(str(error))
    except tarfile.TarError as error:
        findings.append(f"{name}: cannot be read as a tar file ({error}); {REBUILD}")
    return findings


def _verify_members(name: str, path: Path, split: Split, shard: ShardRecord, index: np.ndarray) -> list[str]:
    """Of a shard that we wrote: a member a sample, one behind the other, and then zeros."""
    findings = []
    width = split.manifest.stored_bytes
    with open_plain(path) as file:
        for number, (row, end) in enumerate(zip(index.tolist(), member_ends(index, width).tolist(), strict=True)):
            start, content, length, crc32, _ = row
            names = split.member_names(shard, number)
            whole = file.read(end - start)
            member = tarfile.TarInfo.frombuf(whole[:BLOCK_BYTES], "utf-8", "surrogateescape")
            key = member.name if member.name in names else names[0]
            if member.name not in names or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                findings.append(f"{name}: sample {key} is missing; {REBUILD}")
            elif start + BLOCK_BYTES + member.size != content + width * length:
                findings.append(f"{name}: sample {key} is not where the index says; {REBUILD}")
            elif zlib.crc32(whole) != crc32:
                findings.append(f"{name}: sample {key} is damaged (CRC-32); {REBUILD}")
        if any(file.read()):
            findings.append(f"{name}: goes on behind its last sample; {REBUILD}")
    return findings


def _verify_rows(name: str, path: Path, split: Split, number: int, index: np.ndarray) -> list[str]:
    """Of a tar that others wrote: what the index names. The rest is under the SHA-256 alone."""
    findings = []
    ends = member_ends(index, split.manifest.stored_bytes)
    with open_plain(path) as file:
        for sample, (start, end, crc32) in enumerate(
            zip(index["member"].tolist(), ends.tolist(), index["crc32"].tolist(), strict=True)
        ):
            file.seek(start)
            if zlib.crc32(file.read(end - start)) != crc32:
                findings.append(
                    f"{name}: member {split.sample_name(number, sample)} is damaged (CRC-32); fetch the tar again"
                )
    return list(dict.fromkeys(findings))
