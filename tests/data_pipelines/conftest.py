"""A small corpus of uneven files, built once into uneven shards, and a plain reading of it to compare with."""

import random
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from longstride.data_pipelines.building import shard_writer
from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.shards.manifest import DataManifest, ShardRecord
from longstride.data_pipelines.shards.reading import SampleReader
from tests.hostile.generators.http_servers import quick_servers  # noqa: F401


@dataclass(frozen=True)
class Corpus:
    """A source folder, the data folder built from it, and the split's shards as tarfile reads them."""

    source: Path
    folder: Path
    manifest: DataManifest

    def shard_payloads(self, split: str) -> list[bytes]:
        """Read the payload bytes of each shard in canonical order, with the standard library alone."""
        return [b"".join(self.documents_of(shard)) for shard in self.manifest.splits[split].shards]

    def documents_of(self, shard: ShardRecord) -> list[bytes]:
        """List the documents of a shard, one sample each."""
        with tarfile.open(self.folder / shard.name, "r:") as archive:
            return [archive.extractfile(member).read() for member in archive]


def write_sources(folder: Path, num_files: int, seed: int = 0, highest: int = 255) -> None:
    """Write files of 1 to about 1,500 bytes in nested folders, a fifth of them tiny; bytes up to 127 are a text."""
    generator = random.Random(seed)
    for number in range(num_files):
        path = folder / f"part{number % 3}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = generator.randrange(1, 20) if number % 5 == 0 else generator.randrange(20, 1500)
        path.write_bytes(bytes(byte & highest for byte in generator.randbytes(size)))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """Build about 40 kB of training bytes in some 17 uneven shards."""
    base = tmp_path_factory.mktemp("corpus")
    write_sources(base / "source", num_files=70, highest=127)
    manifest = build([base / "source"], base / "data", validation_fraction=0.1, shard_bytes=2500)
    return Corpus(base / "source", base / "data", manifest)


@pytest.fixture(scope="session")
def built_in_pieces(tmp_path_factory) -> Corpus:
    """Build documents of many samples, some over several shards."""
    base = tmp_path_factory.mktemp("pieces")
    write_sources(base / "source", num_files=30, seed=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard_writer, "SAMPLE_BYTES", 37)
        manifest = build([base / "source"], base / "data", validation_fraction=0.2, shard_bytes=900)
    return Corpus(base / "source", base / "data", manifest)


@pytest.fixture
def pieces(built_in_pieces, monkeypatch) -> Corpus:
    """Like ``built_in_pieces``, with reads of a few samples at once."""
    monkeypatch.setattr(SampleReader, "READ_BYTES", 3000)
    return built_in_pieces
