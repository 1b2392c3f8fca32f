"""Attention over sparse patterns: ``sparse_attention(q, k, v, pattern)``."""

from kernels.attention import check_backend, sparse_attention
from kernels.errors import ConfigError

__all__ = ["ConfigError", "check_backend", "sparse_attention"]
