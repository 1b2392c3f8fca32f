"""Compression: the same bytes again, at the size that the likelihood says, and nothing for what does not fit."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstride.launcher import cli
from longstride.launcher.compression.coding import MOST_ROWS, decode, encode, rows_for
from longstride.launcher.compression.compress import Compressed, machine_name
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models.exported import load_model
from longstride.sparse_model import SparseTransformer, generate
from tests.harness.tiny_models import content_of, tiny_export
from tests.launcher.conftest import Refusal

CONTEXT = 64  # of the exported model


def compress(model: Path, file: Path, output: Path) -> bytes:
    assert cli.main(["compress", str(file), "--model", str(model), "--output", str(output)]) == 0
    return output.read_bytes()


def decompress(model: Path, file: Path, output: Path, *options: str) -> bytes:
    assert cli.main(["decompress", str(file), "--model", str(model), "--output", str(output), *options]) == 0
    return output.read_bytes()


def check_size(packed: bytes, expected: float) -> None:
    """Whether the code has the bytes that the likelihood asks for, and a check of two in every 4,096 symbols."""
    file = Compressed.from_bytes(packed)
    assert abs(len(file.code) - expected) <= 0.005 * expected + 16
    assert len(packed) - len(file.code) <= 38 + len(machine_name(torch.device("cpu")))


def likely_bytes(network: SparseTransformer, size: int) -> bytes:
    """As the model would write them: those of a random network cost much less than any others."""
    rows = -(-size // CONTEXT)
    torch.manual_seed(0)
    columns = list(generate(network, torch.empty(rows, 0, dtype=torch.int64), CONTEXT))
    return torch.stack(columns, 1).to(torch.uint8).numpy().tobytes()[:size]


@pytest.mark.parametrize("size", [0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, CONTEXT * MOST_ROWS + 40])
def test_a_file_comes_back_from_the_size_of_its_likelihood(exported: Path, tmp_path: Path, size: int) -> None:
    content = likely_bytes(load_model(exported), size)
    (tmp_path / "file").write_bytes(content)
    packed = compress(exported, tmp_path / "file", tmp_path / "file.lsz")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # decides nothing
    try:
        assert decompress(exported, tmp_path / "file.lsz", tmp_path / "again") == content
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    expected = size * likelihood(load_model(exported), content)["bits_per_byte"] / 8 if size else 0
    check_size(packed, expected)
    names = {"file", "file.lsz", "again", "model"}
    assert {path.name for path in tmp_path.iterdir()} == names


def check_round_trip(model: Path, folder: Path) -> float:
    """Compress and decompress 500 bytes; return the bytes that their likelihood asks for."""
    content = content_of("text", 500, 0)
    (folder / "file").write_bytes(content)
    packed = compress(model, folder / "file", folder / "file.lsz")
    assert decompress(model, folder / "file.lsz", folder / "again") == content
    expected = 500 * likelihood(load_model(model), content)["bits_per_byte"] / 8
    check_size(packed, expected)
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_compress_too(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_export(tmp_path / "model", "text", steps=3, model={"ngrams": {"orders": [2, 4], "rows": 997}})
    weights = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors")
    check_round_trip(model, tmp_path)


BY_CONTENT: tuple[dict[str, Any], ...] = (
    {"type": "routing", "clusters": 4, "window": 9, "local": {"heads": 1, "window": 8}},
    {"type": "lsh", "buckets": 4, "rounds": 2, "chunk": 5},
    {"type": "match", "window": 8, "order": 2, "matches": 4},
    {"type": "moba", "block": 8, "top": 3},
    {"type": "indexed", "keys": 12, "window": 3, "local": {"heads": 1, "window": 8}},
    {"type": "recurrent", "width": 24},
    {"type": "compressed", "block": 4, "distance": 2},
    {"type": "nsa", "block": 4, "distance": 2, "selected_block": 8, "selected": 4, "window": 8},
    {"type": "adaptive_span", "ramp": 4, "penalty": 0.001, "initial": 5.5},
    {"type": "entmax", "pattern": {"type": "local", "window": 9}},
    {"type": "transformer_xl", "memory": 0, "window": 9},
    {"type": "delta"},
)


@pytest.mark.parametrize("attention", BY_CONTENT, ids=lambda attention: attention["type"])
def test_models_whose_content_chooses_keys_compress_too(attention: dict[str, Any], tmp_path: Path) -> None:
    """At the size that the forward pass says: so that likelihood had seen nothing of the future."""
    changes = {"attention": attention, "layers": 2, "backend": "auto", "context": 40}
    model = tiny_export(tmp_path / "model", "text", steps=20, model=changes)
    assert check_round_trip(model, tmp_path) < 450


@pytest.mark.campaign
@pytest.mark.parametrize("modality", ["text", "image", "audio"])
def test_twenty_files_of_a_trained_model_come_back(modality: str, tmp_path: Path) -> None:
    model = tiny_export(tmp_path / "model", modality, steps=150)
    network, shares = load_model(model), []
    for number in range(20):
        content = content_of(modality, random.Random(number).randrange(1, 12_000), number)
        file, packed, again = (tmp_path / f"{number}{suffix}" for suffix in ("", ".lsz", ".again"))
        file.write_bytes(content)
        whole = compress(model, file, packed)
        assert decompress(model, packed, again) == content
        expected = len(content) * likelihood(network, content)["bits_per_byte"] / 8
        check_size(whole, expected)
        shares.append(len(whole) / len(content))
    assert sorted(shares)[10] < 0.95  # it has learned something, so that the sizes are not those of the bytes


def test_a_model_that_never_errs_costs_next_to_nothing(exported: Path, tmp_path: Path) -> None:
    """Bytes as the model would choose them, so that rounding probabilities down is all there is to be lost."""
    network = load_model(exported)
    with torch.no_grad():
        network.logits.weight.mul_(100)
    content = likely_bytes(network, 4 * CONTEXT)
    code, bits = encode(network, content, 4)
    assert len(code) <= 2 and bits < 0.1
    assert decode(network, code, 4 * CONTEXT, 4) == content


def test_header_names_model_and_torch(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc" * 100)
    packed = compress(exported, tmp_path / "file", tmp_path / "file.lsz")
    read = Compressed.from_bytes(packed)
    assert read.to_bytes() == packed
    made_by = machine_name(torch.device("cpu"))
    assert made_by.startswith(f"torch {torch.__version__} on ")
    assert (read.format, read.size, read.rows, read.made_by) == (2, 300, 5, made_by)
    assert len(packed) - len(read.code) == 36 + len(made_by)


def test_another_model_is_refused_by_its_fingerprint(exported: Path, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    compress(exported, tmp_path / "file", tmp_path / "file.lsz")
    other = tiny_export(tmp_path / "other", "text")
    line = refusal("decompress", tmp_path / "file.lsz", "--model", other, "--output", tmp_path / "again")
    assert line.startswith(f"FILE={tmp_path / 'file.lsz'}: is another model's file: its fingerprint begins with ")


def test_damage_anywhere_is_refused(exported: Path, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_bytes(b"some text")
    whole = compress(exported, tmp_path / "file", tmp_path / "file.lsz")
    bad = tmp_path / "bad.lsz"
    command = ("decompress", bad, "--model", exported, "--output", tmp_path / "again")
    damaged = [whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :] for place in range(len(whole))]
    for number, content in enumerate([*damaged, *(whole[:size] for size in range(len(whole))), whole + b"\0"]):
        bad.write_bytes(content)
        line = refusal(*command)
        if number not in (0, 1, 2, 3):  # of the magic and the format
            assert line.endswith(("is damaged or cut short; fetch it again", "`longstride compress` wrote")), line


def test_files_of_format_1_are_tried_on_any_machine(exported: Path, tmp_path: Path, refusal: Refusal) -> None:
    """They only have the content's checksum; so short a code is the same in both formats."""
    (tmp_path / "file").write_bytes(b"some text")
    packed = Compressed.from_bytes(compress(exported, tmp_path / "file", tmp_path / "file.lsz"))
    older = dataclasses.replace(packed, made_by="1.0", bits_crc32=0, format=1)
    (tmp_path / "older.lsz").write_bytes(older.to_bytes())
    assert decompress(exported, tmp_path / "older.lsz", tmp_path / "again") == b"some text"
    (tmp_path / "wrong.lsz").write_bytes(dataclasses.replace(older, crc32=1).to_bytes())
    line = refusal("decompress", tmp_path / "wrong.lsz", "--model", exported, "--output", tmp_path / "new")
    assert "the model computes different bits" in line


def test_a_header_that_lies_is_refused(exported: Path, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_bytes(b"some text")
    packed = Compressed.from_bytes(compress(exported, tmp_path / "file", tmp_path / "file.lsz"))
    for name, value in (("crc32", 1), ("size", 10), ("size", 2**50), ("rows", 2), ("rows", 2**40)):
        (tmp_path / "wrong.lsz").write_bytes(dataclasses.replace(packed, **{name: value}).to_bytes())
        words = ("decompress", tmp_path / "wrong.lsz", "--model", exported, "--output", tmp_path / "again")
        for options in ((), ("--elsewhere",)):
            assert "the model computes different bits" in refusal(*words, *options), (name, value)


@pytest.mark.parametrize("verb", ["compress", "decompress"])
def test_files_that_cannot_be_are_refused(verb: str, exported: Path, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    there, model = tmp_path / "file", ("--model", exported)
    new = ("--output", tmp_path / "new")
    assert refusal(verb, there, *model, "--output", there).endswith("already exists and is not overwritten")
    assert refusal(verb, there, *model, "--output", tmp_path / "no/new").endswith("must lie in a folder that exists")
    assert "is a folder, not a plain file" in refusal(verb, tmp_path, *model, *new)
    assert "is a device, not a plain file" in refusal(verb, "/dev/zero", *model, *new)
    assert refusal(verb, tmp_path / "none", *model, *new) == f"FILE={tmp_path / 'none'}: No such file or directory"
    if verb == "compress":
        assert "has no config.json" in refusal(verb, there, "--model", tmp_path, *new)
    else:
        assert refusal(verb, there, *model, *new).endswith("is not a file that `longstride compress` wrote")


def test_bytes_beyond_the_vocabulary_are_refused(exported: Path, tmp_path: Path, refusal: Refusal) -> None:
    weights = load_file(exported / "model.safetensors")
    for name in ("embedding.tokens.weight", "logits.weight"):
        weights[name] = weights[name][:128].contiguous()
    save_file(weights, exported / "model.safetensors")
    config = json.loads((exported / "config.json").read_text())
    config["model"]["vocabulary"] = 128
    (exported / "config.json").write_text(json.dumps(config))
    (tmp_path / "file").write_bytes(b"abc\x80")
    line = refusal("compress", tmp_path / "file", "--model", exported, "--output", tmp_path / "new")
    assert line == f"FILE={tmp_path / 'file'}: contains byte 128, but the model knows 0 to 127"
    (tmp_path / "file").write_bytes(b"abc")
    compress(exported, tmp_path / "file", tmp_path / "file.lsz")
    assert decompress(exported, tmp_path / "file.lsz", tmp_path / "again") == b"abc"


def test_large_caches_stand_in_fewer_rows(exported: Path) -> None:
    config = load_model(exported).config
    assert rows_for(config, 0, torch.float32) == rows_for(config, 64, torch.float32) == 1
    assert rows_for(config, 10**6, torch.float32) == MOST_ROWS
    large = config.model_copy(update={"context": 2**16, "layers": 48, "width": 512, "heads": 8})
    assert rows_for(large, 10**9, torch.float32) == 1
    assert rows_for(large, 3000, torch.float32) == 1
    assert rows_for(large.model_copy(update={"context": 1024}), 10**6, torch.float32) == 5
    without_keys = {"context": 1024, "attention": {"type": "synthesizer", "kind": "random"}}
    assert rows_for(large.model_copy(update=without_keys), 10**6, torch.float32) == 10
    shared = {"context": 1024, "attention": {"type": "dense", "key_value_heads": 2}}
    assert rows_for(large.model_copy(update=shared), 10**6, torch.float32) == 21
    for attention, rows in (  # keys and values of 1,024 channels, and those of indexes, or of branches and summaries
        ({"type": "indexed", "keys": 16, "index_width": 512}, 3),
        ({"type": "nsa"}, 2),
    ):
        more = large.model_copy(update={"context": 1024, "attention": attention})
        assert rows_for(more, 10**6, torch.float32) == rows
