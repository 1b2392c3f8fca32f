"""Bytes to WebDataset shards to batches, in an order that is a pure function of a small state.

``build`` writes a data folder, ``build_dataset`` that of a published dataset, and ``verify`` checks one; ``ByteStream``
trains on it, ``evaluation_contexts`` scores a split, ``split_bytes`` reads it plainly, and ``sample_documents`` takes a
few of its samples. ``PlainStream`` and ``plain_contexts`` train and score on plain WebDataset shards, without the
promise. What is wrong with a folder, shard or state is a ``DataError``.
"""

from longstride.data_pipelines.building.build import build, build_dataset
from longstride.data_pipelines.datasets import DATASETS
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, Modality, modality_named
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.damage import ON_DAMAGE, Substitution
from longstride.data_pipelines.order.evaluation import EvaluationBatch, evaluation_contexts, read_context, split_bytes
from longstride.data_pipelines.order.lanes import Lanes, StreamState
from longstride.data_pipelines.order.stream import SHUFFLE_BYTES, Batch, ByteStream
from longstride.data_pipelines.plain.plain_evaluation import plain_context, plain_contexts
from longstride.data_pipelines.plain.streaming import PlainStream
from longstride.data_pipelines.shards.index import load_manifest
from longstride.data_pipelines.shards.manifest import Manifest
from longstride.data_pipelines.shards.reading import DataFolder
from longstride.data_pipelines.shards.samples import Sample, sample_documents
from longstride.data_pipelines.shards.verify import check_split, verify
from longstride.data_pipelines.stores.stores import RemoteSettings, open_store

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
