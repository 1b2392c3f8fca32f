"""ImageNet in 64 x 64 pixels: the npz batches of "A downsampled variant of ImageNet", or a folder of pictures.

The splits are the published ones, train and validation. Batches are read in their order, which already mixes the
classes. A folder of pictures is shuffled by a hash of the paths.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longstride.data_pipelines.datasets.dataset import (
    WAY_OUT,
    Dataset,
    DatasetContent,
    Excerpt,
    PlaneRows,
    PublishedFile,
    excerpts,
    find_members,
    picture_properties,
)
from longstride.data_pipelines.datasets.members import Member, whole_file
from longstride.data_pipelines.documents import Document, LeftOut, OpenInput, find_documents, mix
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.modalities import modality_named

_EDGE = 64
_PICTURE_BYTES = 3 * _EDGE**2
_TRAIN, _VALIDATION = tuple(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz"
_NAMES = {*_TRAIN, _VALIDATION}
_FOLDERS = {
    "train": ("train", "train_64x64"),
    "validation": ("validation", "valid", "val", "valid_64x64", "val_64x64"),
}
_PICKLED = {name.removesuffix(".npz") for name in _NAMES}
_HEADER_BYTES = 2**12  # numpy's header is far shorter

# Checksums from TensorFlow Datasets. For the npz files inside, only the counts are published.
_ARCHIVES = {
    "Imagenet64_train_part1_npz.zip": PublishedFile(
        6_783_426_789, "sha256", "9422dc1dc5d092e9814a70a1cb7fc74880d2db5d88a0cb8a34ee363b12bde3f1"
    ),
    "Imagenet64_train_part2_npz.zip": PublishedFile(
        6_780_506_068, "sha256", "9fafc115afb7e6c301e66dc16b2d737152b427bd5dab26e1293487a6819c7f30"
    ),
    "Imagenet64_val_npz.zip": PublishedFile(
        529_522_927, "sha256", "e1e75133158a1924135a9c6f97a80d2d237b158945e0b34074e58e6c8430eeb8"
    ),
}


@dataclass(frozen=True, kw_only=True)
class ImageNet64(Dataset):
    """The dataset, as batches or as pictures."""

    archives: Mapping[str, PublishedFile] = field(default_factory=lambda: _ARCHIVES)
    # (train, validation) pictures of the npz batches, and of the older folders of PNG files, which lack a few.
    counts: tuple[tuple[int, int], ...] = ((1_281_167, 50_000), (1_281_149, 49_999))
    name: str = "imagenet64"
    modality: str = "image"
    archive: None = None  # only for users who are logged in

    @property
    def file_names(self) -> set[str]:
        return {*_NAMES, *self.archives}

    @property
    def where(self) -> str:
        return (
            "log in at https://image-net.org/download-images, fetch "
            f"{', '.join(self.archives)} into a folder, and name that"
        )

    def find(self, path: Path, unpublished: bool) -> DatasetContent:
        members = find_members(
            path, _NAMES | _PICKLED, self.archives, lambda members: members.keys() >= _NAMES, suffixes=(".zip",)
        )
        batches = {name: member for name, member in members.items() if name in _NAMES}
        if members and not batches:
            pickled = next(iter(members.values()))
            raise DataError(f"{pickled.path}: holds pickled batches, which are not supported; fetch the npz archives")
        left_out = LeftOut()
        splits = self._of_batches(path, batches, unpublished) if batches else self._of_pictures(path, left_out)
        if not splits["train"]:
            raise DataError(f"{path}: holds no picture to train on; {WAY_OUT}")
        counts = tuple(map(len, splits.values()))
        if not unpublished and counts not in self.counts:
            published = " or ".join(f"{train:,} and {validation:,}" for train, validation in self.counts)
            pictures = f"{counts[0]:,} pictures to train on and {counts[1]:,} to validate with"
            raise DataError(f"{path}: {pictures}, but the published set has {published}; {WAY_OUT}")
        splits = {name: documents for name, documents in splits.items() if documents}
        return DatasetContent(splits, picture_properties(_EDGE), left_out)

    def _of_batches(
        self, path: Path, batches: Mapping[str, Member], unpublished: bool
    ) -> dict[str, Sequence[Document]]:
        missing = [name for name in (*_TRAIN, _VALIDATION) if name not in batches]
        if missing and not unpublished:
            raise DataError(f"{path}: lacks {', '.join(missing)}; {WAY_OUT}")
        with OpenInput() as open_input:
            archives = {Path(member.path) for member in batches.values() if member.layers and not unpublished}
            for archive in map(whole_file, sorted(archives)):
                published = {file.size: file for file in self.archives.values()}
                if archive.size not in published:
                    sizes = ", ".join(f"{size:,}" for size in published)
                    rule = f"{archive.size:,} bytes, but the published archives have {sizes}"
                    raise DataError(f"{archive.path}: {rule}; {WAY_OUT}")
                published[archive.size].check(archive, open_input)
            contents = {name: _pictures_of(member, open_input) for name, member in batches.items()}
        return {
            "train": [picture for name in _TRAIN for picture in contents.get(name, ())],
            "validation": contents.get(_VALIDATION, []),
        }

    def _of_pictures(self, path: Path, left_out: LeftOut) -> dict[str, Sequence[Document]]:
        """Find the pictures in folders, one for each split."""
        folders = {
            split: next((path / name for name in names if (path / name).is_dir()), None)
            for split, names in _FOLDERS.items()
        }
        splits: dict[str, Sequence[Document]] = {}
        for split, folder in folders.items():
            if folder is None:
                expected = " or ".join(_FOLDERS[split])
                rule = f"holds neither npz batches ({_TRAIN[0]} …, {_VALIDATION}) nor a folder of pictures"
                raise DataError(f"{path}: {rule} named {expected}; {self.where}")
            image = modality_named(self.modality)
            documents, properties, left_out_here = find_documents([folder], image.suffixes, (), image, {})
            if dict(properties) != picture_properties(_EDGE):
                size = f"{properties['height']}x{properties['width']} pixels, but {self.name} has {_EDGE}x{_EDGE}"
                mend = "build without --dataset and with --image-size to resize them"
                raise DataError(f"{folder}: its pictures are {size}; {mend}")
            mix(documents, 0)
            splits[split] = documents
            left_out.empty += left_out_here.empty
            left_out.links += left_out_here.links
        return splits


def _pictures_of(member: Member, open_input: OpenInput) -> list[Excerpt]:
    """Return the pictures of a batch. Raises DataError for a file that is not a batch."""
    data = member.inside("data.npy")
    head = data.read(open_input, 0, min(_HEADER_BYTES, data.size))
    file = io.BytesIO(head)
    # NumPy parses the header as a Python literal, which may raise anything.
    with as_data_error(data.shown, damage=(Exception,), damaged="cannot be read as an array"):
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, columns_first, kind = read(file)
    if columns_first or kind != np.uint8:
        order = "column" if columns_first else "row"
        raise DataError(f"{data.shown}: an array of {kind} {order} by {order}; must be bytes by rows; fetch it again")
    offset = file.tell()
    if len(shape) != 2 or shape[1] != _PICTURE_BYTES or offset + shape[0] * _PICTURE_BYTES != data.size:
        words = "x".join(map(str, shape))
        raise DataError(f"{data.shown}: an array of {words}; must be pictures x {_PICTURE_BYTES:,}; fetch it again")
    return excerpts(PlaneRows(data, _EDGE, offset), shape[0], _PICTURE_BYTES)


IMAGENET64 = ImageNet64()
