"""Batches, in an order that is a pure function of a small state.

``ByteStream`` yields the batches of training, ``evaluation_contexts`` each byte of a split exactly once.
"""

from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import EvaluationBatch, evaluation_contexts, read_context, split_bytes
from longstride.data_pipelines.order.lanes import StreamState
from longstride.data_pipelines.order.stream import (
    Batch,
    ByteStream,
    StreamSettings,
    Substitution,
    join_batches,
    stream_fingerprint,
)
from longstride.data_pipelines.order.workers import LostWorkerError
