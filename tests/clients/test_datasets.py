"""`datasets` on data folders: what it finds, as what, and that its bytes are those that a model is trained on."""

import io
import random
import tarfile
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from longstride.data_pipelines.building import build
from longstride.data_pipelines.modalities.wav import mulaw_encode
from longstride.data_pipelines.order.evaluation import split_bytes
from tests.harness.clients import client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair
ARRAYS = {"wav": "binary", "__key__": "string", "__url__": "string"}  # features that need no decoder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., Path]:
    """Makes a data folder of a few small documents and several shards."""

    def make(kind: str, **options: Any) -> Path:
        source, generator = tmp_path / "source" / kind, random.Random(0)
        source.mkdir(parents=True, exist_ok=True)
        for number in range(12):
            name = source / f"{number:02}"
            if kind == "text":
                name.with_suffix(".txt").write_text(
                    "".join(generator.choices("abc äö€\r\n", k=200 + number)), newline=""
                )
            elif kind == "image":
                Image.frombytes("RGB", (6, 4), generator.randbytes(72)).save(name.with_suffix(".png"))
            else:
                with wave.open(str(name.with_suffix(".wav")), "wb") as file:
                    file.setparams((1, 2, 8000, 0, "NONE", ""))
                    file.writeframes(generator.randbytes(800))
        folder = tmp_path / f"data-{kind}-{len(options.get('properties', ()))}"
        sizes = {"text": 900, "image": 300, "audio": 1500}
        build([source], folder, modality=kind, validation_fraction=0.2, shard_bytes=sizes[kind], **options)
        return folder

    return make


def load(folder: Path, split: str, streaming: bool, **options: Any) -> Any:
    from datasets import load_dataset

    files = {name: str(folder / f"{name}-*.tar") for name in ("train", "validation")}
    return load_dataset("webdataset", data_files=files, split=split, streaming=streaming, **options)


def trained_on(folder: Path, split: str) -> bytes:
    return b"".join(split_bytes(folder, split))


@pytest.mark.parametrize("streaming", [False, True])
def test_texts(make_data: Callable[..., Path], streaming: bool) -> None:
    folder = make_data("text")
    for split in ("train", "validation"):
        loaded = load(folder, split, streaming)
        assert "".join(row["txt"] for row in loaded).encode() == trained_on(folder, split)


@client("datasets", "`load_dataset(FOLDER)` of texts, of pictures", "both splits, as `string` and `Image`")
def test_a_folder_is_found_by_its_name(make_data: Callable[..., Path]) -> None:
    from datasets import load_dataset

    contents = {"text": ("txt", str.encode), "image": ("ppm", lambda picture: np.asarray(picture).tobytes())}
    for kind, (name, content) in contents.items():
        folder = make_data(kind)
        splits = load_dataset(str(folder))
        assert {split: b"".join(map(content, rows[name])) for split, rows in splits.items()} == {
            split: trained_on(folder, split) for split in ("train", "validation")
        }


@client("datasets", '`load_dataset("webdataset", data_files=…)` of pictures', "`Image`, equal pixels")
@pytest.mark.parametrize("streaming", [False, True])
def test_pictures(make_data: Callable[..., Path], streaming: bool) -> None:
    folder = make_data("image")
    loaded = load(folder, "train", streaming)
    assert type(loaded.features["ppm"]).__name__ == "Image"
    assert b"".join(np.asarray(row["ppm"]).tobytes() for row in loaded) == trained_on(folder, "train")


@client(
    "datasets",
    '`load_dataset("webdataset", data_files=…)` of sounds, PCM or mu-law, `features=` with `Value("binary")`',
    "WAV files with the same bytes",
)
@pytest.mark.parametrize("properties", [{}, {"pcm_bits": 16}], ids=["mulaw", "pcm"])
def test_sounds(make_data: Callable[..., Path], properties: dict[str, int]) -> None:
    from datasets import Features, Value

    folder = make_data("audio", properties=properties)
    features = Features({name: Value(kind) for name, kind in ARRAYS.items()})
    loaded = load(folder, "train", True, features=features)
    sounds = [soundfile.read(io.BytesIO(row["wav"]), dtype="int16")[0] for row in loaded]
    if properties:
        assert mulaw_encode(np.concatenate(sounds)).tobytes() == trained_on(folder, "train")
    else:  # soundfile makes one of mu-law's two zeros
        content = np.frombuffer(trained_on(folder, "train"), dtype=np.uint8)
        assert mulaw_encode(np.concatenate(sounds)).tobytes() == np.where(content == 0x7F, 0xFF, content).tobytes()


@client(
    "datasets",
    '`load_dataset("webdataset", data_files=…)` of sounds as `Audio`, without torchcodec',
    "its own ImportError",
)
def test_sounds_as_audio_ask_for_torchcodec(make_data: Callable[..., Path]) -> None:
    loaded = load(make_data("audio", properties={"pcm_bits": 16}), "train", True)
    assert type(loaded.features["wav"]).__name__ == "Audio"
    with pytest.raises(ImportError, match="please install 'torchcodec'"):
        next(iter(loaded))


@client("datasets", "`split_dataset_by_node`, two nodes", "each shard on one node")
def test_nodes_share_shards(make_data: Callable[..., Path]) -> None:
    from datasets.distributed import split_dataset_by_node

    folder = make_data("text")
    loaded = load(folder, "train", True)
    keys = [[row["__key__"] for row in split_dataset_by_node(loaded, rank, 2)] for rank in range(2)]
    assert keys[0] and keys[1] and sorted(keys[0] + keys[1]) == [row["__key__"] for row in loaded]
    assert not {key[:11] for key in keys[0]} & {key[:11] for key in keys[1]}


@client(
    "datasets",
    '`load_dataset("webdataset", data_dir=…)`',
    "ReadError, as it reads the indexes as tars: name `data_files`",
)
def test_a_whole_folder_takes_indexes_for_tars(make_data: Callable[..., Path]) -> None:
    from datasets import load_dataset

    with pytest.raises(Exception, match="truncated header"):
        load_dataset("webdataset", data_dir=str(make_data("text")))


def test_readers_of_wav_files(make_data: Callable[..., Path]) -> None:
    """Test what docs/data/audio.md says of readers."""
    from scipy.io import wavfile

    for properties in ({}, {"pcm_bits": 16}):
        folder = make_data("audio", properties=properties)
        with tarfile.open(folder / "train-00000.tar") as archive:
            sound = archive.extractfile(archive.next()).read()  # type: ignore[union-attr,arg-type]
        numbers, rate = soundfile.read(io.BytesIO(sound), dtype="int16")
        assert rate == 8000
        if properties:
            assert np.array_equal(wavfile.read(io.BytesIO(sound))[1], numbers)
            with wave.open(io.BytesIO(sound)) as file:
                assert file.readframes(400) == numbers.astype("<i2").tobytes()
        else:
            with pytest.raises(ValueError, match="MULAW"):
                wavfile.read(io.BytesIO(sound))
            with pytest.raises(wave.Error, match="unknown format: 7"), wave.open(io.BytesIO(sound)):
                pass
