"""``sources.jsonl`` of a data folder: which sample is of which file of the input, a line each, in the samples' order.

    {"key": "train-00000-0000012", "source": "books/a.txt"}

The data are the same without it: the manifest does not list it, and training does not read it.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from longstride.data_pipelines.plain_files import JSONError, open_plain, parse_json
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.stores import Store

_MOST_LINE_BYTES = 2**16  # a path has 4,096 bytes, each six characters at most


def source_lines(path: Path) -> Iterator[bytes]:
    """The lines of the file, whatever it is: none is longer than a path can be."""
    with open_plain(path) as file:
        yield from iter(lambda: file.readline(_MOST_LINE_BYTES), b"")


def source_in(line: bytes, key: str) -> str | None:
    """The source in a line; None where it is no line of that sample."""
    try:
        content = parse_json(line)
    except JSONError:
        return None
    source = content.get("source") if isinstance(content, dict) and content.get("key") == key else None
    return source if isinstance(source, str) else None


def sources_of(store: Store, keys: Collection[str]) -> dict[str, str]:
    """The sources of samples by their keys, as far as the folder is on this machine and tells."""
    if DataManifest.SOURCES_NAME not in (store.sizes() or ()):
        return {}
    beginnings = {f'{{"key": "{key}"'.encode(): key for key in keys}
    found = {}
    with suppress(OSError):  # it is no part of the data
        for line in source_lines(Path(store.path_for_messages(DataManifest.SOURCES_NAME))):
            key = beginnings.get(line.partition(b",")[0])
            if key is not None and (source := source_in(line, key)) is not None:
                found[key] = source
    return found
