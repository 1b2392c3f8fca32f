"""Attention over sparse patterns: ``sparse_attention(q, k, v, pattern)``, and ``attend_one`` for a query at a time.

The patterns themselves are in ``longstride.kernels.patterns``. Where the data decide who reads whom, there is
``selected_attention(q, k, v, selection)``, with ``longstride.kernels.selections``, and ``attend_listed`` for a query at
a time. What is wrong in a configuration, there and in all other rooms, is a ``ConfigError``.
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
