"""Use Longstride in transformers: exported models in its classes, and sparse attention in its models."""

from longstride.launcher.hub import add_indexers, load_indexers, register, register_attention, sum_indexer_losses

__all__ = ["add_indexers", "load_indexers", "register", "register_attention", "sum_indexer_losses"]
