"""Samples from an exported model, and the likelihood of any file: `longstride sample`."""

from longstride.launcher.generation.likelihood import check_bytes
from longstride.launcher.generation.plain_files import check_new, named, read_file, write_new

__all__ = ["check_bytes", "check_new", "named", "read_file", "write_new"]
