"""ImageNet in 64 x 64 pixels: the npz batches of "A downsampled variant of ImageNet", or a folder of pictures.

Train and validation are the published splits, and there is no other. Batches are read in their order, in which classes
are mixed already; a folder of pictures is mixed by a hash of the paths.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longstride.data_pipelines.datasets.dataset import Archives, Found, files_in
from longstride.data_pipelines.datasets.members import Member, whole_file
from longstride.data_pipelines.datasets.parts import Parts, Run
from longstride.data_pipelines.datasets.planes import PlaneRows, picture_properties
from longstride.data_pipelines.datasets.published import WAY_OUT, Known
from longstride.data_pipelines.documents import FileDocument, Openings, WalkCounts, find_documents, mix
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named

_EDGE = 64
_PICTURE_BYTES = 3 * _EDGE**2
_TRAIN, _VALIDATION = tuple(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz"
_NAMES = {*_TRAIN, _VALIDATION}
_FOLDERS = {
    "train": ("train", "train_64x64"),
    "validation": ("validation", "valid", "val", "valid_64x64", "val_64x64"),
}
_PICKLED = re.compile(r"train_data_batch_\d+|val_data")
_HEADER_BYTES = 2**12  # far more than numpy writes before such an array

# As TensorFlow Datasets has them. Of the npz files in them no checksum is published; their counts are.
_ARCHIVES = {
    "Imagenet64_train_part1_npz.zip": Known(
        6_783_426_789, "sha256", "9422dc1dc5d092e9814a70a1cb7fc74880d2db5d88a0cb8a34ee363b12bde3f1"
    ),
    "Imagenet64_train_part2_npz.zip": Known(
        6_780_506_068, "sha256", "9fafc115afb7e6c301e66dc16b2d737152b427bd5dab26e1293487a6819c7f30"
    ),
    "Imagenet64_val_npz.zip": Known(
        529_522_927, "sha256", "e1e75133158a1924135a9c6f97a80d2d237b158945e0b34074e58e6c8430eeb8"
    ),
}


@dataclass(frozen=True, slots=True)
class ImageNet64:
    """The dataset: see ``Dataset``."""

    archives: Mapping[str, Known] = field(default_factory=lambda: _ARCHIVES)
    # (train, validation) pictures: of the npz batches; and of the older folders of PNG files, which lack a few.
    counts: tuple[tuple[int, int], ...] = ((1_281_167, 50_000), (1_281_149, 49_999))
    name: str = "imagenet64"
    modality: str = "image"
    archive: None = None  # only for people who are logged in

    @property
    def file_names(self) -> set[str]:
        """Of the batches and their archives."""
        return {*_NAMES, *self.archives}

    @property
    def where(self) -> str:
        """Where it is to be had."""
        return (
            "log in at https://image-net.org/download-images, fetch "
            f"{', '.join(self.archives)} into a folder, and name that"
        )

    def find(self, given: Path, unpublished: bool) -> Found:
        """The splits of batches, archives or folders of pictures: see ``Dataset``."""
        batches = self._batches_in(given)
        if batches:
            found = self._of_batches(given, batches, unpublished)
        else:
            found = self._of_pictures(given)
        counts = tuple(len(found.splits.get(split, ())) for split in ("train", "validation"))
        if not unpublished and counts not in self.counts:
            published = " or ".join(f"{train:,} and {validation:,}" for train, validation in self.counts)
            raise DataError(
                f"{given}: {counts[0]:,} pictures to train on and {counts[1]:,} to validate with, and published are "
                f"{published}; {WAY_OUT}"
            )
        return found

    def _of_batches(self, given: Path, batches: Mapping[str, Member], unpublished: bool) -> Found:
        missing = [name for name in (*_TRAIN, _VALIDATION) if name not in batches]
        if missing and not unpublished:
            raise DataError(f"{given}: lacks {', '.join(missing)}; {WAY_OUT}")
        openings = Openings()
        try:
            if not unpublished:
                self._check_archives(batches, openings)
            runs = {name: _run_of(member, openings) for name, member in batches.items()}
        finally:
            openings.close()
        splits = {
            "train": Parts([runs[name] for name in _TRAIN if name in runs]),
            "validation": Parts([runs[_VALIDATION]] if _VALIDATION in runs else []),
        }
        return _found(given, splits, WalkCounts())

    def _check_archives(self, batches: Mapping[str, Member], openings: Openings) -> None:
        for path in sorted({Path(member.path) for member in batches.values() if member.layers}):
            archive = whole_file(path)
            known = {one.size: one for one in self.archives.values()}.get(archive.size)
            if known is None:
                sizes = ", ".join(f"{one.size:,}" for one in self.archives.values())
                raise DataError(f"{path}: {archive.size:,} bytes, and the published archives have {sizes}; {WAY_OUT}")
            known.check(archive, openings)

    def _of_pictures(self, given: Path) -> Found:
        """Of folders of pictures, one for each split."""
        folders = {
            split: next((given / name for name in names if (given / name).is_dir()), None)
            for split, names in _FOLDERS.items()
        }
        counts = WalkCounts()
        splits: dict[str, list[FileDocument]] = {}
        for split, folder in folders.items():
            if folder is None:
                wanted = " or ".join(_FOLDERS[split])
                raise DataError(
                    f"{given}: holds neither npz batches ({_TRAIN[0]} …, {_VALIDATION}) nor a folder of pictures "
                    f"named {wanted}; {self.where}"
                )
            image = modality_named(self.modality)
            documents, properties, left_out = find_documents([folder], image.suffixes, (), image, {})
            if dict(properties) != picture_properties(_EDGE):
                raise DataError(
                    f"{folder}: its pictures are {properties['height']}x{properties['width']} pixels, and those of "
                    f"{self.name} {_EDGE}x{_EDGE}; resize them by a build without --dataset and with --image-size"
                )
            mix(documents, 0)
            splits[split] = documents
            counts.empty += left_out.empty
            counts.symlinks += left_out.symlinks
        return _found(given, splits, counts)

    def _batches_in(self, given: Path) -> dict[str, Member]:
        """The batches of a file, or of a folder and the folders in it: of two the nearer one, unpacked before zipped.

        The three archives may thus lie, and be unpacked, in folders of their own.
        """
        found: dict[str, Member] = {}
        pickled = None
        archives = Archives(tuple(self.archives), given)
        here, *below = files_in(given)
        for files in (here, [path for folder in below for path in folder]):
            for path in files:
                if path.name in _NAMES:
                    found.setdefault(path.name, whole_file(path))
            for path in archives.in_order(path for path in files if path.suffix == ".zip"):
                if len(found) == len(_NAMES):  # no other archive need be opened
                    return found
                members = archives.members(path)
                for one in members:
                    if one.base_name in _NAMES:
                        found.setdefault(one.base_name, one)
                pickled = next((path for one in members if _PICKLED.fullmatch(one.base_name)), pickled)
        if not found:
            archives.check_nothing_passed_over()
            if pickled is not None:
                raise DataError(
                    f"{pickled}: holds pickled batches, which are not read; fetch the archives of npz files"
                )
        return found


def _found(given: Path, splits: Mapping[str, "Parts | list[FileDocument]"], counts: WalkCounts) -> Found:
    """Without empty splits. Raises DataError where there is nothing to train on."""
    kept: dict[str, Parts | list[FileDocument]] = {name: members for name, members in splits.items() if members}
    if "train" not in kept:
        raise DataError(f"{given}: holds no picture to train on; {WAY_OUT}")
    return Found(kept, picture_properties(_EDGE), counts)


def _run_of(member: Member, openings: Openings) -> Run:
    """The pictures of a batch. Raises DataError where it is none."""
    data = member.inside("data.npy")
    head = data.read(openings, 0, min(_HEADER_BYTES, data.size))
    shape, offset = _array_in(data, head)
    if len(shape) != 2 or shape[1] != _PICTURE_BYTES or offset + shape[0] * _PICTURE_BYTES != data.size:
        words = "x".join(map(str, shape))
        raise DataError(
            f"{data.shown}: an array of {words} bytes; must be pictures x {_PICTURE_BYTES:,}; fetch it again"
        )
    return Run(PlaneRows(data, offset, _EDGE), 0, shape[0], _PICTURE_BYTES)


def _array_in(member: Member, head: bytes) -> tuple[tuple[int, ...], int]:
    """Shape of an array of bytes in a .npy file, and where its first one lies, by the beginning of the file."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, columns_first, kind = read(file)
    except Exception as error:  # numpy parses the header as Python's literals, which raise what they like
        words = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{member.shown}: cannot be read as an array ({words}); fetch it again") from error
    if columns_first or kind != np.uint8:
        order = "column" if columns_first else "row"
        raise DataError(
            f"{member.shown}: an array of {kind} {order} by {order}; must be bytes row by row; fetch it again"
        )
    return shape, file.tell()


IMAGENET64 = ImageNet64()
