"""Samples from an exported model, and the likelihood of any file: `longstride sample`. Needs no deepspeed.

Other verbs that read an export use `check_bytes`.
"""

from longstride.launcher.generation.likelihood import check_bytes, nats_by_piece
