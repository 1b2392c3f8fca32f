"""A file's likelihood is the score that an evaluation gives the same batches of the same bytes, to the bit."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes
from longstride.launcher import cli
from longstride.launcher.evaluation.evaluate import evaluation_line, score
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models.exported import load_model
from longstride.launcher.ranks.processes import Ranks
from tests.harness.tiny_models import CONTEXT, PROPERTIES, content_of, tiny_export
from tests.launcher.conftest import Refusal

CPU = torch.device("cpu")


@pytest.mark.parametrize(("min_context", "batch"), [(0, 16), (40, 3)])
def test_likelihood_is_the_evaluations_number(
    exported: Path, data: Path, tmp_path: Path, min_context: int, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(exported)
    (tmp_path / "file").write_bytes(b"".join(split_bytes(data, "validation")))
    asked = {"context": model.config.context, "batch_size": batch, "min_context": min_context}
    sums = score(model, lambda: evaluation_contexts(data, **asked), batch, Ranks(), CPU)
    expected = evaluation_line(0, "validation", sums, 0.0, "byte")
    options = ["--likelihood", str(tmp_path / "file"), "--min-context", str(min_context), "--batch", str(batch)]
    assert cli.main(["sample", str(exported), *options]) == 0
    out, error = capsys.readouterr()
    line = json.loads(out)
    same = ("loss_nats", "bits_per_byte", "tokens")
    assert {name: line[name] for name in same} == {name: expected[name] for name in same}
    assert (line["file"], line["min_context"]) == (str(tmp_path / "file"), min_context)
    assert error == f"{line['bits_per_byte']:.4f} bits per byte on {tmp_path / 'file'}\n"


@pytest.mark.parametrize("modality", ["image", "audio"])
def test_decoded_files_are_scored_as_a_data_folder_of_them(
    modality: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture a context; a sound's contexts are its own, as a folder of one sound has them."""
    model, sources = tiny_export(tmp_path / "model", modality), tmp_path / "sources"
    sources.mkdir()
    for number in range(8):
        content = np.frombuffer(content_of(modality, CONTEXT * (1 if modality == "image" else 3), number), np.uint8)
        suffix = {"image": "ppm", "audio": "wav"}[modality]
        encoded = modality_named(modality).encode(content, PROPERTIES[modality])
        (sources / f"{number}.{suffix}").write_bytes(encoded)
    build([sources], tmp_path / "data", modality=modality, validation_fraction=0.5)
    network = load_model(model)
    sums = score(
        network, lambda: evaluation_contexts(tmp_path / "data", context=CONTEXT, batch_size=4), 4, Ranks(), CPU
    )
    held_out = b"".join(split_bytes(tmp_path / "data", "validation"))
    found = []
    for path in sources.iterdir():
        assert cli.main(["sample", str(model), "--likelihood", str(path), "--decoded", "--batch", "4"]) == 0
        line = json.loads(capsys.readouterr().out)
        content = path.read_bytes()[-line["tokens"] :]
        if content in held_out:
            found.append((line["loss_nats"] * line["tokens"], line["tokens"]))
    assert len(found) >= 2 and sum(tokens for _, tokens in found) == sums.count == len(held_out)
    assert sum(nats for nats, _ in found) / sums.count == pytest.approx(sums.mean(), rel=1e-7)


@pytest.mark.parametrize("size", [1, 5, CONTEXT, CONTEXT + 1])
def test_every_byte_counts_once_however_small_the_file(size: int, tmp_path: Path) -> None:
    model = load_model(tiny_export(tmp_path / "model", "image"))
    content = content_of("image", size, 0)
    nats = []
    for start in range(0, size, CONTEXT):
        piece = torch.from_numpy(np.frombuffer(content[start : start + CONTEXT], dtype=np.uint8).copy())[None]
        with torch.no_grad():
            nats += model(piece, return_nats=True)[0].tolist()
    line = likelihood(model, content)
    assert line["tokens"] == len(nats) == size
    assert line["loss_nats"] == pytest.approx(math.fsum(nats) / size, rel=1e-6)
    assert line["bits_per_byte"] == line["bits_per_dimension"] == line["loss_nats"] / math.log(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--likelihood", "{empty}"], "--likelihood={empty}: is empty: there is nothing to score"),
        (["--likelihood", "nowhere"], "--likelihood=nowhere: No such file or directory"),
        (["--likelihood", "/"], "--likelihood=/: is a folder, not a plain file"),
        (["--likelihood", "{file}", "--min-context", "64"], "--min-context=64: must be from 0 to 63"),
        (["--likelihood", "{file}", "--batch", "0"], "--batch=0: must be from 1 to 65,536 contexts; such as 4"),
        (["--batch", "3"], "--batch: only works together with --likelihood FILE; leave it out"),
        (["--likelihood", "{file}", "--prompt", "x"], "--likelihood: scores a file and does not sample; leave out --p"),
    ],
)
def test_likelihood_refuses_what_it_cannot_score(
    exported: Path, tmp_path: Path, options: list[str], message: str, refusal: Refusal
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_bytes(b"abc")
    places: Callable[[str], str] = lambda text: text.format(empty=tmp_path / "empty", file=tmp_path / "file")  # noqa: E731
    assert refusal("sample", exported, *map(places, options)).startswith(places(message))
