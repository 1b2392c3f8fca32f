"""Samples from an exported model, and the likelihood of any file: `longstride sample`. Needs no deepspeed.

`check_bytes` serves the other verbs that read an export.
"""

from longstride.launcher.generation.likelihood import check_bytes, nats_by_piece
