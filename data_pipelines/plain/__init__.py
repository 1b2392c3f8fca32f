"""Plain WebDataset shards without an index."""

from longstride.data_pipelines.plain.plain_evaluation import plain_context, plain_contexts
from longstride.data_pipelines.plain.streaming import PlainStream

__all__ = ["PlainStream", "plain_context", "plain_contexts"]
