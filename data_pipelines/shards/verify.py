"""Whether a data folder is, to the last bit, what was built."""

import hashlib
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, modality_named
from longstride.data_pipelines.settings import REBUILD, RemoteSettings
from longstride.data_pipelines.shards.index import index_file, load_index, member_ends, shard_file
from longstride.data_pipelines.shards.manifest import MANIFEST_NAME, Manifest, ShardRecord, parse_manifest
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader, open_folder
from longstride.data_pipelines.stores import Store, open_store, unreadable

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
_CHECKED_AT_START = 1000  # shards


def verify(location: str | Path, progress: Progress | None = None) -> list[str]:
    """Read a whole data folder: one line for each damage found, none where all is as it was built.

    Sizes, SHA-256 of shards and indexes, the tar structure against the index, and the CRC-32 of each sample.
    ``progress`` is told the bytes of shards, (done, in all), after each. Raises DataError where there is no data
    folder.
    """
    store = open_store(location)
    content = store.read(MANIFEST_NAME)
    try:
        manifest = parse_manifest(store.path_for_messages(MANIFEST_NAME), content)
    except DataError as error:
        return [str(error)]
    if store.sizes() is not None:
        return _verify_files(store, manifest, progress) + _strangers(store, manifest)
    with tempfile.TemporaryDirectory(prefix="longstride-verify-") as cache:
        # Fetched anew, whatever the training's cache holds, and forgotten shard after shard.
        room = 2 * max(shard_file(shard).size + index_file(shard).size for shard in manifest.shards())
        fresh = open_store(location, RemoteSettings(cache=cache, cache_bytes=room))
        try:
            return _verify_files(fresh, manifest, progress)
        finally:
            fresh.close()


def _verify_files(store: Store, manifest: Manifest, progress: Progress | None) -> list[str]:
    store.bind(manifest.fingerprint)
    modality = modality_named(manifest.modality)
    done, total = 0, sum(shard.file_bytes for shard in manifest.shards())
    findings = []
    for shard in manifest.shards():
        findings += _verify_shard(store, shard, modality)
        done += shard.file_bytes
        if progress is not None:
            progress(done, total)
    return findings


def check_split(location: str | Path | DataFolder, split: str) -> None:
    """Raises DataError unless a split's files have their sizes, and shards begin with their own first sample.

    Of the shards up to a thousand, evenly spread, are opened: enough to tell files that are no shards before a run
    begins. A remote folder is not looked at: its files are checked when they are fetched.
    """
    opened = open_folder(location).split(split)
    sizes = opened.store.sizes()
    if sizes is None:
        return
    for shard in opened.shards:
        for file in (shard_file(shard), index_file(shard)):
            if sizes.get(file.name) != file.size:
                opened.store.local(file)  # says what is wrong with it
    count = len(opened.shards)
    looked_at = min(count, _CHECKED_AT_START)
    for place in range(looked_at):
        SampleReader(opened).fill(place * count // looked_at, 0, np.empty(1, dtype=np.uint8))


def _strangers(store: Store, manifest: Manifest) -> list[str]:
    """Files that look as if they belonged to the set, and are not in its manifest."""
    known = {file.name for shard in manifest.shards() for file in (shard_file(shard), index_file(shard))}
    names = sorted(name for name in store.sizes() or () if name.endswith((".tar", ".npy")) and name not in known)
    return [f"{store.path_for_messages(name)}: {MANIFEST_NAME} does not list it; remove it" for name in names]


def _verify_shard(store: Store, shard: ShardRecord, modality: Modality) -> list[str]:
    name = store.path_for_messages(shard.name)
    try:
        path = store.local(shard_file(shard))
        index = load_index(store, shard)
    except DataError as error:
        return [str(error)]
    findings = []
    try:
        if _file_sha256(path) != shard.sha256:
            findings.append(f"{name}: its SHA-256 is not the manifest's; {REBUILD}")
        findings += _verify_samples(name, path, shard, index, modality)
    except OSError as error:
        findings.append(unreadable(name, error))
    except tarfile.TarError as error:
        findings.append(f"{name}: cannot be read as a tar file ({error}); {REBUILD}")
    return findings


def _verify_samples(name: str, path: Path, shard: ShardRecord, index: np.ndarray, modality: Modality) -> list[str]:
    findings = []
    with tarfile.open(path, "r:") as archive, path.open("rb") as file:
        found = {member.name: member for member in archive}
        for number, (row, end) in enumerate(zip(index.tolist(), member_ends(index).tolist(), strict=True)):
            start, content, length, crc32, _ = row
            key = f"{shard.key(number)}.{modality.extension}"
            member = found.pop(key, None)
            file.seek(start)
            if member is None or not member.isreg():
                findings.append(f"{name}: sample {key} is missing; {REBUILD}")
            elif (member.offset, member.offset_data + member.size) != (start, content + length):
                findings.append(f"{name}: sample {key} is not where the index says; {REBUILD}")
            elif zlib.crc32(file.read(end - start)) != crc32:
                findings.append(f"{name}: sample {key} is damaged (CRC-32); {REBUILD}")
    return findings + [f"{name}: member {stranger} is not in the index; {REBUILD}" for stranger in found]


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
