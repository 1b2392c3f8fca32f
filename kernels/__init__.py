"""Attention over sparse patterns: ``sparse_attention(q, k, v, pattern)``, and ``attend_one`` for one query at a time.

Patterns are in ``longstride.kernels.patterns``. If the data decide what a query reads, use
``selected_attention(q, k, v, selection)`` with ``longstride.kernels.selections``, and ``attend_listed`` for one query
at a time. Attention by an indexer is in ``longstride.kernels.indexed``, recurrences in
``longstride.kernels.recurrences``. All packages raise ``ConfigError`` for mistakes in a configuration.
"""

import longstride

if __name__ == "kernels":
    longstride.stand_aside(__name__)
else:
    from longstride.kernels.attention import check_backend, num_pairs, sparse_attention
    from longstride.kernels.backends import has_bf16_products
    from longstride.kernels.decoding import CachedAttention, allowed_keys, attend_one, empty_cache, num_keys_read
    from longstride.kernels.errors import ConfigError, Problem, join_paths, nearest
    from longstride.kernels.selected import attend_listed, selected_attention
