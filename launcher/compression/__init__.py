"""Lossless compression by an exported model's probabilities: `longstride compress` and `decompress`.

Needs no deepspeed.
"""
