"""Lossless compression by a model's probabilities: `longstride compress` and `decompress`."""
