"""Reading data: ``python -m benchmarks.training.data``.

Throughput, one process, warm cache: for sets of short documents, of pictures and of long documents, all readers take
turns over the whole set in every repeat. The ratio to WebDataset's sequential reading is the median over repeats.
WebDataset iterates over plain samples, without checks or cutting. Longstride checks every sample, cuts contexts and
yields them in its shuffled order.

Start: a set of many shards (100,000 by default) is opened in a separate process, checked as a run checks it (the sizes
of all files, the beginnings of a thousand shards) and read to the first batch. Its memory is the process's peak minus
what it held after its imports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds

from benchmarks.machine import about, resident_bytes
from benchmarks.report import ROOT, check_output, new_parser, write_result
from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.order import ByteStream, StreamSettings
from longstride.data_pipelines.shards.manifest import DataManifest, SplitRecord
from longstride.data_pipelines.shards.reading import DataFolder
from longstride.data_pipelines.shards.verify import check_split

ASCII = bytes(byte & 127 for byte in range(256))  # WebDataset finds texts under "txt", and other bytes under "bin"
CONTEXT = 12_288
BATCH = 8
# Document bytes by name of a set; a set is cut off at the size that is asked for.
SETS: dict[str, Callable[[random.Random], int]] = {
    "documents of about 10 kB": lambda generator: int(generator.lognormvariate(8.6, 1.1)) + 1,
    "pictures of 64 x 64": lambda generator: 64 * 64 * 3,
    "documents of 16 MiB": lambda generator: 2**24,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = read_options(arguments)
    if options.open_folder:
        print(json.dumps(open_once(options.open_folder)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rows = [row for kind in SETS for row in throughput(kind, folder, options)]
        start = measure_start(folder, options.shards)
    print_tables(rows, start)
    result = {**about(torch.device("cpu")), "context": CONTEXT, "batch": BATCH, "repeats": options.repeats}
    write_result(options, {**result, "set_bytes": options.set_bytes, "throughput": rows, "start": start})
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--set-bytes", type=int, default=2**27, help="of each set")
    parser.add_argument("--shards", type=int, default=100_000, help="of the set whose start is measured")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="for the sets (default: the system's temporary one)")
    parser.add_argument("--open-folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.open_folder is None:
        check_output(parser, options, "data")
    return options


def throughput(kind: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the readers over one set: bytes a second, and the ratio to WebDataset's own reading."""
    data = make_set(kind, folder, options.set_bytes)
    readers: dict[str, Callable[[Path], int]] = {
        "WebDataset, samples alone": read_samples,
        "WebDataset, cut into contexts": read_cut_samples,
        "Longstride": read_stream,
        "Longstride, in sequence": read_in_sequence,
    }
    sizes = {name: read(data) for name, read in readers.items()}  # which warms the cache
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(options.repeats):  # in turns, so that other work on the machine disturbs all alike
        for name, read in readers.items():
            start = time.perf_counter()
            read(data)
            rates[name].append(sizes[name] / (time.perf_counter() - start))
    shutil.rmtree(data)
    reference = rates["WebDataset, samples alone"]
    return [
        {
            "set": kind,
            "reader": name,
            "bytes_per_second": statistics.median(rate),
            "ratio": statistics.median(ours / theirs for ours, theirs in zip(rate, reference, strict=True)),
        }
        for name, rate in rates.items()
    ]


def make_set(kind: str, folder: Path, size: int) -> Path:
    """Build a data folder of documents of random bytes."""
    generator = random.Random(0)
    source = folder / "source"
    source.mkdir()
    for number in itertools.count():
        length = SETS[kind](generator)
        (source / f"{number}.txt").write_bytes(generator.randbytes(length).translate(ASCII))
        size -= length
        if size <= 0:
            break
    build([source], folder / "data", validation_fraction=0)
    shutil.rmtree(source)
    return folder / "data"


def samples_of(data: Path) -> Iterator[bytes]:
    """Iterate over samples as WebDataset reads them sequentially."""
    urls = sorted(str(path) for path in data.glob("train-*.tar"))
    return (sample["txt"] for sample in wds.WebDataset(urls, shardshuffle=False))


def read_samples(data: Path) -> int:
    """Count the bytes of all samples without using them."""
    return sum(map(len, samples_of(data)))


def read_cut_samples(data: Path) -> int:
    """Count the bytes of all batches of contexts, cut from the samples in order."""
    row, filled, total = np.empty((BATCH, CONTEXT), dtype=np.uint8).reshape(-1), 0, 0
    for sample in samples_of(data):
        content = np.frombuffer(sample, dtype=np.uint8)
        while len(content):
            part = content[: len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            content = content[len(part) :]
            if filled == len(row):
                total += torch.from_numpy(row.copy()).numel()
                filled = 0
    return total


def read_stream(data: Path, **changes: Any) -> int:
    """Count the bytes of all batches of an epoch."""
    stream = ByteStream(data, StreamSettings(context=CONTEXT, global_batch=BATCH, **changes))
    return sum(batch.tokens.numel() for batch in itertools.islice(stream, stream.lanes.steps_in(0)))


def read_in_sequence(data: Path) -> int:
    """Count the bytes of all batches of an epoch without the shuffle."""
    return read_stream(data, shuffle_bytes=0)


def measure_start(folder: Path, num_shards: int) -> dict[str, Any]:
    """Measure the opening of a set of many shards, in a separate process."""
    data = make_many_shards(folder, num_shards)
    command = [sys.executable, "-m", "benchmarks.training.data", "--open-folder", str(data.resolve())]
    result = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    return {"shards": num_shards, "manifest_bytes": (data / DataManifest.FILE_NAME).stat().st_size, **result}


def make_many_shards(folder: Path, num_shards: int) -> Path:
    """Build a data folder whose shards are links to one file."""
    source, data = folder / "source", folder / "many"
    source.mkdir()
    (source / "document.txt").write_bytes(random.Random(0).randbytes(3 * CONTEXT))
    manifest = build([source], data, validation_fraction=0)
    (shard,) = manifest.splits["train"].shards
    shards = [replace(shard, name=f"train-{number:05d}.tar") for number in range(num_shards)]
    for copy in shards[1:]:
        (data / copy.name).symlink_to(shard.name)
        (data / copy.index_name).symlink_to(shard.index_name)
    complete = DataManifest("text", {}, {"train": SplitRecord(num_shards, tuple(shards))}, manifest.made)
    (data / DataManifest.FILE_NAME).write_text(complete.to_json(), encoding="utf-8")
    return data


def open_once(data: Path) -> dict[str, Any]:
    """Measure the seconds to the first batch, and its memory."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the imports is none of the set's
    start = time.perf_counter()
    folder = DataFolder(data)
    stream = ByteStream(folder, StreamSettings(context=CONTEXT, global_batch=BATCH))
    opened = time.perf_counter() - start
    check_split(folder, "train")
    next(iter(stream))
    first = time.perf_counter() - start
    peak = resident_bytes("VmHWM") - before
    return {"opened_seconds": opened, "first_batch_seconds": first, "memory_bytes": peak}


def print_tables(rows: list[dict[str, Any]], start: dict[str, Any]) -> None:
    """Print both tables."""
    print(f"{'set':<28}{'reader':<34}{'MB/s':>8}{'ratio':>8}")
    for row in rows:
        rate = row["bytes_per_second"] / 1e6
        print(f"{row['set']:<28}{row['reader']:<34}{rate:>8.0f}{row['ratio']:>8.2f}")
    print(
        f"\n{start['shards']:,} shards: opened in {start['opened_seconds']:.2f} s, checked and first batch after "
        f"{start['first_batch_seconds']:.2f} s, {start['memory_bytes'] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
