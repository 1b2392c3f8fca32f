"""From files to shards: documents, where they are found, how they are dealt to shards, and how one is written."""

from longstride.data_pipelines.documents.documents import (
    Document,
    FileDocument,
    Openings,
    changed,
    check_unchanged,
    reading,
)
from longstride.data_pipelines.documents.planning import FileSettings, Plan, Settings, check_shard_bytes, make_plan, mix
from longstride.data_pipelines.documents.shard_writer import SAMPLE_BYTES, Piece, write_shard
from longstride.data_pipelines.documents.walk import WalkCounts, find_documents

__all__ = [
    "SAMPLE_BYTES",
    "Document",
    "FileDocument",
    "FileSettings",
    "Openings",
    "Piece",
    "Plan",
    "Settings",
    "WalkCounts",
    "changed",
    "check_shard_bytes",
    "check_unchanged",
    "find_documents",
    "make_plan",
    "mix",
    "reading",
    "write_shard",
]
