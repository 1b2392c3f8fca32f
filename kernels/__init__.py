"""Attention over sparse patterns: ``sparse_attention(q, k, v, pattern)``, and ``attend_one`` for a query at a time."""

from kernels.attention import check_backend, sparse_attention
from kernels.decoding import allowed_keys, attend_one, num_keys_read
from kernels.errors import ConfigError

__all__ = ["ConfigError", "allowed_keys", "attend_one", "check_backend", "num_keys_read", "sparse_attention"]
