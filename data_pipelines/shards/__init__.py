"""A data folder, read: its manifest, its shards by their indexes, and whether they are as they were built."""

from longstride.data_pipelines.shards.index import (
    BLOCK_BYTES,
    INDEX_DTYPE,
    index_bytes,
    index_file,
    index_to_bytes,
    load_index,
    load_manifest,
    member_bytes,
)
from longstride.data_pipelines.shards.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    ShardRecord,
    SplitRecord,
    index_name,
    sample_key,
)
from longstride.data_pipelines.shards.reading import (
    READ_BYTES,
    REPAIR,
    DataFolder,
    OpenShard,
    SampleReader,
    Split,
    document_edges,
    open_folder,
)
from longstride.data_pipelines.shards.samples import Sample, sample_documents
from longstride.data_pipelines.shards.verify import Progress, check_split, verify

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "INDEX_DTYPE",
    "MANIFEST_NAME",
    "READ_BYTES",
    "REPAIR",
    "DataFolder",
    "Manifest",
    "OpenShard",
    "Progress",
    "Sample",
    "SampleReader",
    "ShardRecord",
    "Split",
    "SplitRecord",
    "check_split",
    "document_edges",
    "index_bytes",
    "index_file",
    "index_name",
    "index_to_bytes",
    "load_index",
    "load_manifest",
    "member_bytes",
    "open_folder",
    "sample_documents",
    "sample_key",
    "verify",
]
