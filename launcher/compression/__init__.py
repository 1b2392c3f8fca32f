"""Lossless compression by an exported model's probabilities: `longstride compress` and `decompress`.

Needs no deepspeed.
"""

from longstride.launcher.compression.compress import (
    add_compress_arguments,
    add_decompress_arguments,
    run_compress,
    run_decompress,
)
