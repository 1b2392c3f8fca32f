"""Compressed files where other bits are computed: refused at the start, and where nothing differs read as ever."""

import contextlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longstride.launcher import cli
from longstride.launcher.compression import coding, compress
from longstride.launcher.models.exported import load_model
from longstride.sparse_model import SparseTransformer
from tests.harness.tiny_models import plain_config, random_export
from tests.launcher.compression.test_compress import BY_CONTENT
from tests.launcher.conftest import Refusal

ROOT = Path(__file__).parents[3]
CONTENT = bytes(range(32, 127)) * 3
ROWS = coding.rows_for(plain_config(), len(CONTENT), torch.float32)
# Each changes the bits of some processors: the first three on one with AVX2 or AVX512, threads on none.
SETTINGS = {
    "MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default": (),
    "MKL_CBWR=COMPATIBLE": pytest.mark.campaign,
    "ATEN_CPU_CAPABILITY=default": pytest.mark.campaign,
    "OMP_NUM_THREADS=3 MKL_NUM_THREADS=2": (),
    "MKL_CBWR=AVX2,STRICT": pytest.mark.campaign,
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2": pytest.mark.campaign,
}


def edges_crc32(model: SparseTransformer) -> int:
    """Of all edges by which the content is coded, so of every bit that coding depends on."""
    crc32 = 0

    def next_byte(place: int, edges: np.ndarray) -> int:
        nonlocal crc32
        crc32 = zlib.crc32(edges.tobytes(), crc32)
        return CONTENT[place]

    coding._step(model, len(CONTENT), ROWS, next_byte, lambda _: None)
    return crc32


def decompress_and_report(folder: Path, output: Path) -> None:
    """What a process under another setting does; it prints its exit code, whether it decoded, and its own bits."""
    begun = []

    def decode(*arguments: Any, **options: Any) -> bytes:
        begun.append(True)
        return coding.decode(*arguments, **options)

    compress.decode = decode
    words = ["decompress", str(folder / "lsz"), "--model", str(folder / "model"), "--output", str(output)]
    code = cli.main(words)
    bits = edges_crc32(load_model(folder / "model"))
    print(json.dumps({"code": code, "begun": bool(begun), "bits": bits}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, which weighs its bytes unevenly, and what it has compressed."""
    folder = tmp_path_factory.mktemp("compressed")
    random_export(folder / "model")
    (folder / "file").write_bytes(CONTENT)
    words = ["compress", str(folder / "file"), "--model", str(folder / "model"), "--output", str(folder / "lsz")]
    assert cli.main(words) == 0
    return folder


@pytest.mark.parametrize("setting", [pytest.param(name, marks=marks) for name, marks in SETTINGS.items()])
def test_another_arithmetic_gives_the_file_or_refuses_before_it_decodes(
    place: Path, tmp_path: Path, setting: str
) -> None:
    output = tmp_path / "again"
    script = "from tests.launcher.compression import test_other_bits as t; "
    script += f"t.decompress_and_report(t.Path({str(place)!r}), t.Path({str(output)!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(each.split("=") for each in setting.split())
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    if report["bits"] == edges_crc32(load_model(place / "model")):
        assert (report["code"], report["begun"]) == (0, True), ended.stderr
        assert output.read_bytes() == CONTENT
    else:
        assert "OMP_NUM_THREADS" not in setting
        assert (report["code"], report["begun"]) == (2, False), ended.stderr
        assert "a setting such as MKL_CBWR differs; decompress it there, or try it" in ended.stderr
        assert not output.exists()


def test_the_last_bit_of_any_weight_is_refused_before_anything_is_decoded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """Another machine's rounding, simulated: whichever product has other bits."""
    name = ""

    def other_model(folder: Path, device: str, **options: bool) -> SparseTransformer:
        model = load_model(folder, device, **options)
        weight = model.state_dict()[name]
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
        return model

    monkeypatch.setattr(compress, "load_model", other_model)
    monkeypatch.setattr(compress, "decode", lambda *_, **__: pytest.fail("decoded"))
    monkeypatch.setattr(compress, "machine_name", lambda device: "torch 9.9 on a Z80")
    for name in SparseTransformer(plain_config()).state_dict():
        line = refusal("decompress", place / "lsz", "--model", place / "model", "--output", tmp_path / "again")
        assert f"was compressed by torch {torch.__version__} on " in line, name
        assert ", and the model computes different bits here, by torch 9.9 on a Z80; decompress it there" in line


@pytest.mark.parametrize(
    ("context", "size", "expected"),
    [(64, 1, 1), (64, 63, 63), (64, 640, 64), (4096, 3000, 93), (4096, 2048, 64), (4096, 10_000, 128)],
)
def test_a_fingerprint_covers_all_rows_at_a_bounded_number_of_positions(
    monkeypatch: pytest.MonkeyPatch, context: int, size: int, expected: int
) -> None:
    model = SparseTransformer(plain_config(context=context)).eval()
    rows = coding.rows_for(model.config, size, torch.float32)
    shapes, intervals, sessions = [], coding.intervals, []
    monkeypatch.setattr(coding, "intervals", lambda logits: shapes.append(logits.shape) or intervals(logits))
    session = coding.Session
    monkeypatch.setattr(coding, "Session", lambda *words, **more: sessions.append(words[1:]) or session(*words, **more))
    coding.computed_crc32(model, size, rows)
    assert shapes == [(rows, 256)] * expected
    coding.encode(model, bytes(min(size, 64)), rows)
    coding.computed_crc32(model, min(size, 64), rows)
    assert sessions[0] == (rows, min(size, context)) and sessions[1] == sessions[2]


@contextlib.contextmanager
def setting(*names: str) -> Iterator[None]:
    """What a process may have done before it compresses."""
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if "autocast" in names:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        if "inference" in names:
            stack.enter_context(torch.inference_mode())
        if "double" in names:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        if "deterministic" in names:  # fills what is not written with NaN
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        if "flushed" in names:
            stack.callback(torch.set_flush_denormal, False)
            torch.set_flush_denormal(True)
        if "threads" in names:
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(threads + 2)
        yield


ATTENTION: tuple[dict[str, Any], ...] = (
    {"type": "strided", "stride": 8},
    {"type": "dense"},
    *BY_CONTENT,
    {"type": "synthesizer", "kind": "dense"},
)
SAMPLED = ("strided", "dense", "routing", "nsa", "recurrent", "delta", "entmax", "synthesizer")


def subnormal_model(tmp_path: Path, attention: dict[str, Any]) -> SparseTransformer:
    """A model of random weights, some of which stand for nothing where subnormal numbers are flushed to zero."""
    model = load_model(random_export(tmp_path / "model", attention=attention))
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.mul_(1e-39)
        model.logits.weight.mul_(1e37)
    return model


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(each, marks=() if each["type"] in SAMPLED else pytest.mark.campaign, id=each["type"])
        for each in ATTENTION
    ],
)
def test_nothing_that_a_process_has_done_changes_the_bits(tmp_path: Path, attention: dict[str, Any]) -> None:
    """Each setting alone with the first attention; three at once with each."""
    model = subnormal_model(tmp_path, attention)
    expected = edges_crc32(model), coding.computed_crc32(model, len(CONTENT), ROWS)
    names = ("inference", "double", "deterministic", "threads", "autocast", "flushed")
    alone = [(name,) for name in names] if attention == ATTENTION[0] else []
    for done in (*alone, names[:3], names[3:], ()):
        with setting(*done):
            threads, autocast = torch.get_num_threads(), torch.is_autocast_enabled("cpu")
            assert (edges_crc32(model), coding.computed_crc32(model, len(CONTENT), ROWS)) == expected, done
            assert (torch.get_num_threads(), torch.is_autocast_enabled("cpu")) == (threads, autocast)
            assert bool(torch.tensor(1e-40).mul(1)) == ("flushed" not in done)


def test_bits_that_differ_later_are_found_at_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel may take over where a context grows beyond what a fingerprint has covered."""
    torch.manual_seed(0)
    model = SparseTransformer(plain_config()).eval()
    with torch.no_grad():
        model.logits.weight.normal_()
    content = np.random.default_rng(0).integers(0, 256, 15_000, dtype=np.uint8).tobytes()
    rows = coding.rows_for(model.config, len(content), torch.float32)
    code, bits = coding.encode(model, content, rows)
    assert coding.decode(model, code, len(content), rows) == content
    assert len(code) <= bits / 8 + 2 * (len(content) // 4096) + 2 + 2.2e-5 / 8 * len(content)
    done, after, intervals = 0, 0, coding.intervals

    def count(symbols: int) -> None:
        nonlocal done
        done = symbols

    def differing(logits: np.ndarray) -> np.ndarray:
        edges: np.ndarray = intervals(logits)
        edges[:, 1:-1] += done >= after  # by 2**-40
        return edges

    monkeypatch.setattr(coding, "intervals", differing)
    for after in (0, 4095, 4096, 9000):
        done = 0
        with pytest.raises(coding.DamagedError):
            coding.decode(model, code, len(content), rows, count)
        assert after - rows <= done <= after + 4096 + 2 * rows
