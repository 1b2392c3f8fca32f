"""Which bytes come next: batches in an order that is a pure function of a small state."""

from longstride.data_pipelines.order.contexts import Cut, contexts_in, settle_cut
from longstride.data_pipelines.order.damage import Substitution
from longstride.data_pipelines.order.evaluation import (
    PADDING_ID,
    EvaluationBatch,
    evaluation_contexts,
    no_such_context,
    read_context,
    split_bytes,
)
from longstride.data_pipelines.order.lanes import Lanes, StreamState, shard_order
from longstride.data_pipelines.order.loading import Rows, load_rows, shared_out
from longstride.data_pipelines.order.stream import Batch, ByteStream, as_batch
from longstride.data_pipelines.order.windows import settle_windows

__all__ = [
    "PADDING_ID",
    "Batch",
    "ByteStream",
    "Cut",
    "EvaluationBatch",
    "Lanes",
    "Rows",
    "StreamState",
    "Substitution",
    "as_batch",
    "contexts_in",
    "evaluation_contexts",
    "load_rows",
    "no_such_context",
    "read_context",
    "settle_cut",
    "settle_windows",
    "shard_order",
    "shared_out",
    "split_bytes",
]
