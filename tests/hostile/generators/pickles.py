"""Hostile pickles: what may lie in the place of one of a checkpoint's, and a manifest that agrees with it."""

import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from longstride.launcher.checkpoints.manifest import find_foreign, read_manifest, record_files, write_manifest
from tests.hostile.generators.models import Damage


class Runs:
    """A pickle that would make a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _tar(path: Path) -> None:
    """Write a file in the format of torch before version 0.1.10."""
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps({"protocol_version": 1000, "little_endian": True})
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, BytesIO(content))


def _script(path: Path) -> None:
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is no more advised
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def _packed(path: Path) -> None:
    """Compress the pickle of the archive, with a gigabyte of zeros in it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(content)
                if name.endswith("data.pkl"):
                    for _ in range(2048):
                        member.write(bytes(2**20))


def _saved(make: Callable[[Path], object], **options: Any) -> Damage:
    return lambda path: torch.save(make(path), path, **options)


# In the place of a pickle of a checkpoint. What would run makes the file `ran` beside it.
PICKLES: dict[str, Damage] = {
    "a plain pickle": lambda path: path.write_bytes(pickle.dumps({"module": {}})),
    "a plain pickle that runs": lambda path: path.write_bytes(pickle.dumps(Runs(path.with_name("ran")))),
    "an archive that runs": _saved(lambda path: {"module": Runs(path.with_name("ran"))}),
    "torch's format before archives": _saved(
        lambda _: {"module": torch.zeros(2)}, _use_new_zipfile_serialization=False
    ),
    "that format, which runs": _saved(lambda path: Runs(path.with_name("ran")), _use_new_zipfile_serialization=False),
    "TorchScript": _script,
    "torch's first tar": _tar,
    "a whole module": _saved(lambda _: torch.nn.Linear(2, 2)),
    "a tensor": _saved(lambda _: torch.zeros(3)),
    "a number": _saved(lambda _: 7),
    "an empty object": _saved(lambda _: {}),
    "objects of other things": _saved(
        lambda _: {"module": [], "optimizer": 7, "buffer_names": "ab", "param_shapes": None, "lr_scheduler": {}}
    ),
    "a tensor of one number, as large as a disk": _saved(
        lambda _: {"module": {"embedding.start": torch.zeros(1).expand(2**40)}, "optimizer": {"state": {}}}
    ),
    "a text": lambda path: path.write_text("not a pickle"),
    "nothing": lambda path: path.write_bytes(b""),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "a packed archive": _packed,
    "another archive": lambda path: _zip(path, {"a": b"b"}),
    "an archive of a pickle that stops": lambda path: _zip(path, {"archive/data.pkl": b".", "archive/version": b"3\n"}),
    "an archive of a pickle that takes 4 GiB": lambda path: _zip(
        path,
        {
            "archive/data.pkl": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x01\x00\x85R.",
            "archive/version": b"3\n",
        },
    ),
}


def _zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def seal(folder: Path) -> None:
    """Makes the manifest of a checkpoint tell of what lies there: as whoever means harm does."""
    manifest = read_manifest(folder)
    files = record_files(folder, ("manifest.json",))
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    assert not find_foreign(folder, read_manifest(folder))
