"""Bytes to WebDataset shards to batches, in an order that is a pure function of a small state.

``build`` writes a data folder, ``build_dataset`` that of a published dataset, and ``verify`` checks one; ``ByteStream``
trains on it, ``evaluation_contexts`` scores a split, ``split_bytes`` reads it plainly, and ``sample_documents`` takes a
few of its samples. ``PlainStream`` and ``plain_contexts`` train and score on plain WebDataset shards, without the
promise. What is wrong with a folder, shard or state is a ``DataError``.
"""

from data_pipelines.build import build, build_dataset
from data_pipelines.contexts import Cut
from data_pipelines.damage import ON_DAMAGE, Substitution
from data_pipelines.datasets import DATASETS
from data_pipelines.errors import DataError
from data_pipelines.evaluation import EvaluationBatch, evaluation_contexts, read_context, split_bytes
from data_pipelines.lanes import Lanes, StreamState
from data_pipelines.manifest import Manifest
from data_pipelines.modalities import MODALITIES, Modality, modality_named
from data_pipelines.plain_evaluation import plain_context, plain_contexts
from data_pipelines.reading import DataFolder
from data_pipelines.samples import Sample, sample_documents
from data_pipelines.shards import load_manifest
from data_pipelines.stores import RemoteSettings, open_store
from data_pipelines.stream import SHUFFLE_BYTES, Batch, ByteStream
from data_pipelines.streaming import PlainStream
from data_pipelines.verify import check_split, verify

__all__ = [
    "DATASETS",
    "MODALITIES",
    "ON_DAMAGE",
    "SHUFFLE_BYTES",
    "Batch",
    "ByteStream",
    "Cut",
    "DataError",
    "DataFolder",
    "EvaluationBatch",
    "Lanes",
    "Manifest",
    "Modality",
    "PlainStream",
    "RemoteSettings",
    "Sample",
    "StreamState",
    "Substitution",
    "build",
    "build_dataset",
    "check_split",
    "evaluation_contexts",
    "load_manifest",
    "modality_named",
    "open_store",
    "plain_context",
    "plain_contexts",
    "read_context",
    "sample_documents",
    "split_bytes",
    "verify",
]
