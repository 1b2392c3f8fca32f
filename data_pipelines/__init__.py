"""Bytes to WebDataset shards to batches, in an order that is a pure function of a small state.

``build`` writes a data folder and ``verify`` checks one; ``ByteStream`` trains on it, ``evaluation_contexts`` scores a
split, ``split_bytes`` reads it plainly and ``check_split`` looks at it without reading it. What is wrong with a folder,
shard or state is a ``DataError``.
"""

from data_pipelines.build import build
from data_pipelines.errors import DataError
from data_pipelines.evaluation import EvaluationBatch, evaluation_contexts, split_bytes
from data_pipelines.lanes import Lanes, StreamState
from data_pipelines.modalities import MODALITIES, Modality, modality_named
from data_pipelines.reading import check_split
from data_pipelines.shards import Manifest, check_data_folder, load_manifest, verify
from data_pipelines.stream import SHUFFLE_BYTES, Batch, ByteStream

__all__ = [
    "MODALITIES",
    "SHUFFLE_BYTES",
    "Batch",
    "ByteStream",
    "DataError",
    "EvaluationBatch",
    "Lanes",
    "Manifest",
    "Modality",
    "StreamState",
    "build",
    "check_data_folder",
    "check_split",
    "evaluation_contexts",
    "load_manifest",
    "modality_named",
    "split_bytes",
    "verify",
]
