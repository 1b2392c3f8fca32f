"""A data folder on disk: WebDataset tar shards, an index beside each, and one manifest over all.

    manifest.json           what there is, its checksums, how it was made, and the fingerprint of all that
    train-00000.tar         plain tar (ustar), one member a sample: train-00000-0000000.txt, train-00000-0000001.txt ...
    train-00000.index.npy   where each sample lies, its length and CRC-32: 25 bytes a sample
    validation-00000.tar    ...

A sample is a document of the input, or a part of a long one. Its key names split, shard and place, so that a member of
another shard is never mistaken for it. A member is a file that other programs open as it is (.txt, .ppm, .wav): its
*payload* is the *content*, the bytes of contexts, behind the header that such a file needs.
"""

import hashlib
from functools import cache
from io import BytesIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import REBUILD
from longstride.data_pipelines.shards.manifest import MANIFEST_NAME, Manifest, ShardRecord, parse_manifest
from longstride.data_pipelines.stores import Store, StoredFile, unreadable

BLOCK_BYTES = 512  # of a tar file: one header, and what payloads are padded to
INDEX_DTYPE = np.dtype(
    [
        ("member", "<u8"),  # offset of the member's header in the shard
        ("content", "<u8"),  # offset of its first content byte
        ("length", "<u4"),  # content bytes
        ("crc32", "<u4"),  # of the whole member as it lies in the shard: header, payload and padding
        ("ends", "u1"),  # 1 where a document ends with this sample, 0 where the next one goes on with it
    ]
)


def member_bytes(payload_bytes: int) -> int:
    """Bytes that a payload takes in a shard, its header and padding included."""
    return BLOCK_BYTES + -(-payload_bytes // BLOCK_BYTES) * BLOCK_BYTES


def member_ends(index: np.ndarray) -> np.ndarray:
    """(samples,) INDEX_DTYPE -> (samples,) int64: the offset behind each member's padding."""
    payload_ends = (index["content"] + index["length"]).astype(np.int64)
    return -(-payload_ends // BLOCK_BYTES) * BLOCK_BYTES


def index_to_bytes(index: np.ndarray) -> bytes:
    """(samples,) INDEX_DTYPE -> the content of an index file."""
    buffer = BytesIO()
    np.save(buffer, index.astype(INDEX_DTYPE, copy=False), allow_pickle=False)
    return buffer.getvalue()


def index_bytes(samples: int) -> int:
    """Size of the index file of so many samples."""
    return _index_header_bytes(len(str(samples))) + samples * INDEX_DTYPE.itemsize


@cache
def _index_header_bytes(digits: int) -> int:
    """Of a number of samples with so many digits."""
    header = BytesIO()
    description = np.lib.format.dtype_to_descr(INDEX_DTYPE)
    np.lib.format.write_array_header_1_0(
        header, {"descr": description, "fortran_order": False, "shape": (10 ** (digits - 1),)}
    )
    return header.tell()


def shard_file(shard: ShardRecord) -> StoredFile:
    """The shard as a store is asked for it."""
    return StoredFile(shard.name, shard.file_bytes, shard.sha256)


def index_file(shard: ShardRecord) -> StoredFile:
    """The shard's index as a store is asked for it."""
    return StoredFile(shard.index_name, index_bytes(shard.samples), shard.index_sha256)


def load_manifest(store: Store) -> Manifest:
    """The manifest of a data folder.

    Raises DataError, naming the file, for a folder that is missing or empty, and for a manifest that is damaged, of
    another version or edited.
    """
    return parse_manifest(store.path_for_messages(MANIFEST_NAME), store.read(MANIFEST_NAME))


def load_index(store: Store, shard: ShardRecord) -> np.ndarray:
    """The index of a shard: (samples,) INDEX_DTYPE. Raises DataError where it is missing or not what was built."""
    file = index_file(shard)
    content = _read(store, file)
    if _sha256(content) != file.sha256 and store.discard(file):
        content = _read(store, file)
    path = store.path_for_messages(file.name)
    if _sha256(content) != file.sha256:
        raise DataError(f"{path}: the index is damaged (its SHA-256 is not the manifest's); {REBUILD}")
    index = np.frombuffer(content, dtype=INDEX_DTYPE, offset=len(content) - shard.samples * INDEX_DTYPE.itemsize)
    totals = int(index["length"].sum(dtype=np.int64)), int(index["ends"].sum(dtype=np.int64))
    if totals != (shard.content_bytes, shard.documents):
        raise DataError(f"{path}: does not hold the {shard.samples} samples that the manifest says; {REBUILD}")
    return index


def _read(store: Store, file: StoredFile) -> bytes:
    try:
        return store.local(file).read_bytes()
    except OSError as error:
        raise DataError(unreadable(store.path_for_messages(file.name), error)) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
