"""Samples from an exported model, and the likelihood of any file: `longstride sample`. Needs no deepspeed.

`check_bytes` and the functions on files serve the other verbs that read an export.
"""

from longstride.launcher.generation.likelihood import check_bytes, nats_by_piece
from longstride.launcher.generation.plain_files import check_new, naming, read_file, write_new
