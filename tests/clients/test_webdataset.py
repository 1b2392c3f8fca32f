"""webdataset, wids and torchdata on data folders, and data folders of what webdataset writes."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

from longstride.data_pipelines.building import build
from longstride.data_pipelines.order import ByteStream, StreamSettings
from longstride.data_pipelines.order.evaluation import split_bytes
from longstride.data_pipelines.shards import DataManifest, index_tars
from longstride.data_pipelines.stores import open_store
from tests.harness.clients import client
from tests.harness.data.builds import write_files

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a data folder of twenty texts in several shards."""
    texts = {f"{n:02}.txt": f"text {n}, für alle: {'€' * 10 * n}".encode() for n in range(20)}
    build([write_files(tmp_path / "source", texts)], tmp_path / "data", validation_fraction=0, shard_bytes=1500)
    return tmp_path / "data"


def urls(folder: Path) -> list[str]:
    return [str(folder / shard.name) for shard in DataManifest.load(open_store(folder)).shards()]


def samples(folder: Path, *decoders: Any) -> list[dict[str, Any]]:
    return list(wds.WebDataset(urls(folder), shardshuffle=False).decode(*decoders))


@client("webdataset", "`WebDataset(…)` in a `DataLoader` of two workers", "each sample once")
def test_texts(folder: Path) -> None:
    loaded = samples(folder)
    assert "".join(sample["txt"] for sample in loaded).encode() == b"".join(split_bytes(folder, "train"))
    loader = torch.utils.data.DataLoader(
        wds.WebDataset(urls(folder), shardshuffle=False).decode(), batch_size=None, num_workers=2
    )
    assert sorted(sample["__key__"] for sample in loader) == sorted(sample["__key__"] for sample in loaded)


@client("webdataset", '`.decode("pil")`, `.decode("rgb8")` of pictures', "the bytes of each pixel")
def test_pictures(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    (tmp_path / "source").mkdir()
    for number in range(6):
        pixels = generator.integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "source" / f"{number}.png")
    build([tmp_path / "source"], tmp_path / "data", modality="image", validation_fraction=0)
    for decoder in ("pil", "rgb8"):
        loaded = samples(tmp_path / "data", decoder)
        assert b"".join(np.asarray(sample["ppm"]).tobytes() for sample in loaded) == b"".join(
            split_bytes(tmp_path / "data", "train")
        )


@client("webdataset", "`data index --unpack` of `ShardWriter(…, compress=True)`", "the texts in their order")
def test_compressed_shards_of_its_writer(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    texts = [b"text %d" % number for number in range(10)]
    with wds.ShardWriter(str(tmp_path / "tars" / "set-%04d.tar"), maxcount=4, compress=True, verbose=0) as writer:
        for number, text in enumerate(texts):
            writer.write({"__key__": f"a/{number:04}", "txt": text, "seg.png": b"", "json": {"number": number}})
    index_tars([str(tmp_path / "tars")], tmp_path / "data", unpack=True, validation_fraction=0)
    assert b"".join(split_bytes(tmp_path / "data", "train")) == b"".join(texts)


@client(
    "wids", "`ShardListDataset` by an index that `widsindex` made in the folder", "each sample, in any order, is ours"
)
def test_samples_at_random(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wids
    from wids import wids_index

    monkeypatch.chdir(folder)
    shards = map(str, sorted(Path().glob("*.tar")))
    with monkeypatch.context() as patched:
        patched.setattr("sys.argv", ["widsindex", "create", "--output", "wids.json", *shards])
        patched.setattr(wids_index.wids_dl, "download_file", lambda url, _: url)  # it copies each to /tmp/shard.tar
        wids_index.main()
    loaded = wids.ShardListDataset(str(folder / "wids.json"), cache_dir=str(tmp_path / "cache"), keep=True)
    expected = list(split_bytes(folder, "train"))
    texts = [sample["txt"] for sample in samples(folder)]
    assert len(loaded) == len(texts) and json.loads((folder / "wids.json").read_text())["wids_version"] == 1
    for number in (7, 0, len(texts) - 1, 3):
        assert loaded[number][".txt"] == texts[number]
    assert "".join(loaded[number][".txt"] for number in range(len(loaded))).encode() == b"".join(expected)


@client("torchdata", "`StatefulDataLoader` of a `ByteStream`, stopped and begun anew", "the same next batch")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_at_the_very_batch(folder: Path, num_workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        stream = ByteStream(folder, StreamSettings(context=64, global_batch=4, seed=3, shuffle_bytes=500))
        return StatefulDataLoader(stream, batch_size=None, num_workers=num_workers)

    stopped, again = loader(), loader()
    batches = list(itertools.islice(iter(loader()), 20))
    running = iter(stopped)
    assert len(list(itertools.islice(running, 7))) == 7
    again.load_state_dict(stopped.state_dict())
    for expected, loaded in zip(batches[7:], itertools.islice(iter(again), 13), strict=True):
        assert torch.equal(expected.tokens, loaded.tokens) and expected.state == loaded.state
