"""The Sparse Transformer and its configuration."""
