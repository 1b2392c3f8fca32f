"""Small files in exactly the formats of the published datasets."""

import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np

CIFAR_BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
IMAGENET_BATCHES = [*(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz"]


def pictures(count: int, edge: int, seed: int = 0) -> np.ndarray:
    """Draw pictures, (count, edge, edge, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, edge, edge, 3), dtype=np.uint8)


def in_planes(batch: np.ndarray) -> np.ndarray:
    """Convert (n, edge, edge, 3) to (n, 3 x edge x edge): all red bytes of a picture, then green and blue."""
    return np.stack([batch[:, :, :, channel] for channel in range(3)], axis=1).reshape(len(batch), -1)


def cifar_binary(batch: np.ndarray) -> bytes:
    """Make a file of the binary version: a label and the planes, picture after picture."""
    return b"".join(bytes([number % 10]) + row.tobytes() for number, row in enumerate(in_planes(batch)))


def python2_pickle(batch: np.ndarray) -> bytes:
    """Make a file of the Python version, opcode by opcode as Python 2 wrote it: protocol 2, and byte strings."""
    rows = in_planes(batch)

    def string(content: bytes) -> bytes:
        return (
            b"U" + bytes([len(content)]) + content
            if len(content) < 256
            else b"T" + struct.pack("<i", len(content)) + content
        )

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    kind = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"\x87R"
    array += b"(" + number(1) + number(len(rows)) + number(rows.shape[1]) + b"\x86" + kind + b"\x89"
    array += string(rows.tobytes()) + b"tb"
    labels = b"](" + b"".join(number(place % 10) for place in range(len(rows))) + b"e"
    items = string(b"batch_label") + string(b"training batch 1 of 5") + string(b"labels") + labels
    return b"\x80\x02}(" + items + string(b"data") + array + b"u."


def python3_pickle(batch: np.ndarray, protocol: int = 2) -> bytes:
    """Make a file of the Python version as Python 3 writes it."""
    return pickle.dumps({b"labels": [0] * len(batch), b"data": in_planes(batch)}, protocol=protocol)


def write_cifar(folder: Path, batches: dict[str, np.ndarray], version: str) -> Path:
    """Write the unpacked folder of a version: binary, python2 or python3."""
    write = {"binary": cifar_binary, "python2": python2_pickle, "python3": python3_pickle}[version]
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in batches.items():
        (folder / (name + ".bin" * (version == "binary"))).write_bytes(write(batch))
    (folder / "readme.html").write_bytes(b"<meta>")
    return folder


def tarred(path: Path, folder: Path) -> Path:
    """Write a .tar.gz of a folder, sorted by name."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path


def npz(batch: np.ndarray, deflated: bool = False) -> bytes:
    """Make a batch of the downsampled ImageNet, as numpy writes it."""
    file = io.BytesIO()
    save = np.savez_compressed if deflated else np.savez
    rows = in_planes(batch)
    save(file, data=rows, labels=np.arange(1, len(rows) + 1), mean=rows.mean(axis=0))
    return file.getvalue()


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    """Write a deflated zip archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path
