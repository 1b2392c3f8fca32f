"""Where the files of a data folder come from: this machine, or anything that fsspec reads, through a cache."""

from longstride.data_pipelines.stores.cache import lock_file, unlock_file
from longstride.data_pipelines.stores.download import Download
from longstride.data_pipelines.stores.stores import Store, StoredFile, open_store, unreadable
from longstride.data_pipelines.stores.transport import Address, Transport, check_protocol

__all__ = [
    "Address",
    "Download",
    "Store",
    "StoredFile",
    "Transport",
    "check_protocol",
    "lock_file",
    "open_store",
    "unlock_file",
    "unreadable",
]
