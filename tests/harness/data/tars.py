"""Foreign tars: by webdataset, by Python's tarfile and by GNU tar, with members besides the content."""

import io
import random
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import webdataset as wds

from longstride.data_pipelines.shards import index_tars

UNEVEN = (1, 7, 2, 12, 3)  # samples of each tar


def add(archive: tarfile.TarFile, name: str, payload: bytes, **fields: object) -> None:
    """Add one member."""
    member = tarfile.TarInfo(name)
    member.size = len(payload)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(payload) if member.isreg() else None)


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar of these members, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, payload in members:
            add(archive, name, payload)
    return path


def peak_of_indexing(tar: Path, mode: str, output: Path, **options: object) -> int:
    """Write a tar with a member of 64 MiB, index it, and return the most bytes of Python's memory."""
    with tarfile.open(tar, mode) as archive:
        add(archive, "big.txt", bytes(2**26))
    tracemalloc.start()
    index_tars([str(tar)], output, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def write_shards(folder: Path, samples=UNEVEN, prefix="train-", sizes=(1, 200), seed=0) -> list[list[bytes]]:
    """Write tars of mixed members, with tarfile and with WebDataset in turn; return the texts of each."""
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for shard, count in enumerate(samples):
        path = folder / f"{prefix}{shard:03}.tar"
        # A number heads each text, so that none occurs twice.
        texts.append(
            [b"%03d%04d" % (shard, number) + generator.randbytes(generator.randint(*sizes)) for number in range(count)]
        )
        picture = generator.randbytes(900)
        if shard % 2:
            with wds.TarWriter(str(path)) as writer:
                for number, text in enumerate(texts[-1]):
                    writer.write({"__key__": f"{shard}/{number:04}", "txt": text, "json": b"{}", "jpg": picture})
        else:
            write_tar(
                path,
                [
                    (f"./{shard}/{number:04}.{extension}", payload)
                    for number, text in enumerate(texts[-1])
                    for extension, payload in (("jpg", picture), ("json", b"{}"), ("TXT", text))
                ],
                tarfile.GNU_FORMAT,
            )
    return texts


def gnu_tar(path: Path, files: dict[str, bytes], form: str, folder: Path) -> Path:
    """Pack files with GNU tar, in one of its formats."""
    for name, payload in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(payload)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["tar", f"--format={form}", "-C", str(folder), "-cf", str(path.absolute()), *files]
    subprocess.run(command, check=True, capture_output=True)
    return path
