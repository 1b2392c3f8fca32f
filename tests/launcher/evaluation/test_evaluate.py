"""A score is exact, whatever computes it; by position and with a minimum of context it is that of every byte alone."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.durable import write_new
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts, split_bytes
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints.checkpoint import open_checkpoint
from longstride.launcher.checkpoints.manifest import read_checkpoint_config
from longstride.launcher.checkpoints.saved_state import master_weights
from longstride.launcher.evaluation.evaluate import check_sharing, evaluation_line, score
from longstride.launcher.evaluation.exact_sums import ExactSums
from longstride.launcher.evaluation.positions import (
    bin_numbers,
    draw_positions,
    join_bins,
    position_edges,
    write_positions,
)
from longstride.launcher.exports.export import export
from longstride.launcher.ranks.processes import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.harness.configs import small
from tests.harness.runs import complete
from tests.launcher.conftest import Refusal

Trained = Callable[..., Path]
CPU = torch.device("cpu")


def random_model(**changes: Any) -> SparseTransformer:
    torch.manual_seed(0)
    model = SparseTransformer(small(backend="reference", layers=2, heads=2, width=32, **changes))
    torch.nn.init.normal_(model.logits.weight, std=0.2)
    return model.eval()


def scored(model: SparseTransformer, data: Path, **options: Any) -> ExactSums:
    """The validation split's score by a model, in batches of 16."""
    edges = options.pop("edges", None)
    threads = options.pop("threads", 0)
    asked = {"context": model.config.context, "batch_size": 16, **options}
    return score(model, lambda: evaluation_contexts(data, **asked), 16, Ranks(), CPU, edges=edges, threads=threads)


def evaluate_processes(run: Path, world_size: int, *options: str) -> dict[str, Any]:
    """The line that so many processes print."""
    ended = complete(["evaluate", str(run), *options], world_size, {"VERB": "1"})
    assert not any(ended.stdout[1:])
    return json.loads(ended.stdout[0].splitlines()[-1])


def brute_force(run: Path, data: Path, folder: Path) -> tuple[float, int]:
    """(nats a byte, bytes) of a run's exported weights over its validation split, batch after batch."""
    export(run, None, folder / "export")
    model = SparseTransformer(ModelConfig.model_validate(json.loads((run / "config.json").read_text())["model"])).eval()
    model.load_state_dict(load_file(folder / "export/model.safetensors"))
    content = np.frombuffer(b"".join(split_bytes(data, "validation")), dtype=np.uint8)
    padded = torch.from_numpy(
        np.resize(np.append(content, np.zeros(-len(content) % 128)), (-(-len(content) // 64), 64))
    )
    padded = torch.cat([padded, torch.zeros(len(padded) % 2, 64)]).long()
    padded.view(-1)[len(content) :] = 0
    with torch.no_grad():
        nats = torch.cat([model(rows, return_nats=True) for rows in padded.split(2)])
    return math.fsum(nats.flatten()[: len(content)].tolist()) / len(content), len(content)


def test_two_processes_print_what_brute_force_finds_to_the_last_bit(
    trained: Trained, data: Path, tmp_path: Path
) -> None:
    run = trained("alone", 1)
    line = evaluate_processes(run, 2)
    nats, tokens = brute_force(run, data, tmp_path)
    assert (line["step"], line["split"], line["min_context"], line["weights"]) == (8, "validation", 0, "trained")
    assert (line["loss_nats"], line["tokens"]) == (nats, tokens)
    assert line["bits_per_byte"] == nats / math.log(2)
    assert "bits_per_dimension" not in line


def test_processes_that_share_contexts_print_the_same_but_for_rounding(
    trained: Trained, data: Path, tmp_path: Path
) -> None:
    """By position too: each position is one process's. Tolerance: fp32 products of other shapes."""
    run = trained("alone", 1)
    line = evaluate_processes(run, 2, "--sequence-parallel", "2", "--positions", str(tmp_path / "by.png"))
    model = SparseTransformer(read_checkpoint_config(run).model).eval()
    model.load_state_dict(master_weights(open_checkpoint(run, None)))
    whole = scored(model, data, batch_size=2, edges=position_edges(64))
    assert line["tokens"] == whole.count and line["loss_nats"] == pytest.approx(whole.mean(), rel=2**-22)
    bins = json.loads((tmp_path / "by.json").read_text())["positions"]
    assert bins["bytes"] == whole.counts()
    bits = [mean / math.log(2) for mean in whole.means()]
    assert bins["bits_per_byte"] == pytest.approx(bits, rel=2**-20)


def test_model_that_processes_cannot_share_is_refused(trained: Trained) -> None:
    config = read_checkpoint_config(trained("alone", 1))
    check_sharing(config, Ranks(world_size=4, sequence_parallel=4))  # keys are exchanged where two heads are too few
    with pytest.raises(
        ConfigError, match=r"^--sequence-parallel=3: model\.context=64: must be a multiple of the 3 processes "
    ):
        check_sharing(config, Ranks(world_size=3, sequence_parallel=3))


@pytest.mark.campaign
def test_score_of_groups_is_the_same_whatever_the_number_of_groups(trained: Trained) -> None:
    run = trained("four-heads", 1, "model.heads=4")
    lines = {
        (processes, shared): evaluate_processes(run, processes, "--sequence-parallel", str(shared), *options)
        for processes, shared in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
        for options in [("--min-context", "40", "--batch", "3")]
    }
    assert lines[2, 1]["loss_nats"] == lines[1, 1]["loss_nats"] and lines[4, 2]["loss_nats"] == lines[2, 2]["loss_nats"]
    for line in lines.values():
        assert line["tokens"] == lines[1, 1]["tokens"]
        assert line["loss_nats"] == pytest.approx(lines[1, 1]["loss_nats"], rel=2**-22)


@pytest.mark.campaign
@pytest.mark.parametrize("options", [(), ("--min-context", "40", "--batch", "3"), ("--precision", "bf16")], ids=str)
def test_any_number_of_processes_prints_the_same_bits(trained: Trained, options: tuple) -> None:
    lines = [evaluate_processes(trained("alone", 1), world_size, *options) for world_size in (1, 2, 3, 4)]
    assert len({line["loss_nats"] for line in lines}) == len({line["tokens"] for line in lines}) == 1


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of documents of 1 to 90 bytes, most of which end within a context of 40."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "source").mkdir()
    for number in range(60):
        (folder / f"source/{number}.txt").write_text("abs"[number % 3] * (1 + 7 * number % 90))
    build([folder / "source"], folder / "data", validation_fraction=0.3)
    return folder / "data"


CUTS = {
    "packed": Cut(),
    "separated": Cut(separator=10),
    "separated by a byte that documents hold": Cut(separator=ord("s")),
    "contexts of their own": Cut(packing=False),
}


@pytest.mark.parametrize("options", [{}, {"min_context": 29}, {"limit": 5}], ids=str)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_bits_per_byte_are_all_bits_over_the_bytes_of_documents(
    records: Path, tmp_path: Path, cut: Cut, options: dict[str, int]
) -> None:
    """By hand, window after window; for one rank and several, over all and by position.

    Tolerance: fp32 in batches of other sizes.
    """
    model, shared = random_model(), options.get("min_context", 0)
    behind = b"" if cut.separator is None else bytes([cut.separator])
    texts = [row.tobytes() + behind for row in documents(records)]
    # Each stream, and which of its bytes are a document's.
    streams = [(text, [True] * (len(text) - len(behind)) + [False] * len(behind)) for text in texts]
    if cut.packing is None:
        streams = [(b"".join(texts), [each for _, marks in streams for each in marks])]
    windows = [
        (text[start : start + 40], marks[start : start + 40], shared if start else 0)
        for text, marks in streams
        for start in range(0, max(1, len(text) - shared), 40 - shared)
    ]
    if limit := options.get("limit"):
        windows = [windows[place * len(windows) // limit] for place in range(limit)]
    bits, content = np.zeros(40), np.zeros(40, dtype=int)  # by position
    tokens = 0
    for text, marks, first in windows:
        with torch.no_grad():
            nats = model(torch.tensor(list(text))[None], return_nats=True)[0].double().numpy()
        bits[first : len(text)] += nats[first:] / math.log(2)
        content[first : len(text)] += marks[first:]
        tokens += len(text) - first
    assert (tokens > content.sum()) == (cut.separator is not None)
    for world_size in (1, 2, 3):
        edges = position_edges(40)
        sums = ExactSums(40, squares=True)
        for rank in range(world_size):
            share = scored(model, records, cut=cut, edges=edges, rank=rank, world_size=world_size, **options)
            sums._table += share._table
            sums._squares._table += share._squares._table
        line = evaluation_line(0, "validation", sums, 0.0, "byte") | {"min_context": shared}
        assert (line["tokens"], line["bytes"]) == (tokens, content.sum())
        assert line["bits_per_byte"] == pytest.approx(bits.sum() / content.sum(), rel=2**-17)
        assert line["loss_nats"] == pytest.approx(bits.sum() * math.log(2) / tokens, rel=2**-17)
    write_positions(tmp_path / "by.png", sums, edges, line, tmp_path)
    bins = json.loads((tmp_path / "by.json").read_text())["positions"]
    assert bins["bytes"] == content.tolist()
    for place in range(40):
        wanted = bits[place] / content[place] if content[place] else None
        assert bins["bits_per_byte"][place] == (wanted and pytest.approx(wanted, rel=2**-16))


def test_ranks_and_threads_do_not_change_a_bit(data: Path) -> None:
    model, before = random_model(), torch.get_num_threads()
    whole = scored(model, data, threads=1)
    assert scored(model, data, threads=3).mean() == whole.mean()
    assert torch.get_num_threads() == before
    for world_size in (2, 3, 4):
        shares = [scored(model, data, rank=rank, world_size=world_size, threads=1) for rank in range(world_size)]
        everyone = ExactSums()
        everyone._table = sum(share._table for share in shares)
        assert (everyone.mean(), everyone.count) == (whole.mean(), whole.count)


def documents(data: Path) -> list[np.ndarray]:
    """The validation documents, whole."""
    batches = evaluation_contexts(data, context=5000, batch_size=1, cut=Cut(packing=False))
    return [batch.tokens[0, : int(batch.lengths[0])].numpy() for batch in batches]


@pytest.mark.parametrize("context", [1, 2, 1023, 1024, 1025, 12288, 2**20])
def test_bins_of_positions_cover_every_one_once(context: int) -> None:
    edges = position_edges(context)
    assert edges[0] == 0 and edges[-1] == context and (np.diff(edges) > 0).all() and len(edges) <= 1025
    assert (np.diff(edges) == 1).all() or context > 1024
    numbers = bin_numbers(edges)
    assert len(numbers) == context and numbers[-1] == len(edges) - 2
    assert (edges[numbers] <= np.arange(context)).all() and (np.arange(context) < edges[numbers + 1]).all()


def test_picture_by_position_shows_the_means_of_its_bins() -> None:
    edges = position_edges(200)
    sums, positions = ExactSums(200, squares=True), np.arange(200).repeat(100)
    noise = np.random.default_rng(0).normal(size=20_000) / 5
    nats = (np.linspace(5, 1, 200).repeat(100) + noise).astype(np.float32)
    sums.add(nats, positions)
    line = evaluation_line(7, "test", sums, 0.0, "byte") | {"min_context": 0}
    (axis,) = draw_positions(sums, edges, line, Path("runs/mine")).axes
    curve, band = axis.patches
    values, bounds, _ = curve.get_data()
    assert bounds[0] == 1 and bounds[-1] == 201 and (np.diff(values) < 0).all() and len(values) <= 48
    first = nats[positions < bounds[1] - 1]
    assert len(first) >= 1000  # no bin of a few bytes, which would be noise
    assert values[0] == pytest.approx(first.mean() / math.log(2), rel=1e-6)
    above, _, below = band.get_data()
    error = first.std(ddof=1) / math.sqrt(len(first)) / math.log(2)
    assert above[0] - values[0] == pytest.approx(2 * error, rel=1e-4) == values[0] - below[0]
    assert all(word in axis.get_title() for word in ("mine", "step 7", "test", "20,000 bytes", " a bin"))


def test_drawn_bins_have_enough_bytes_and_leave_none_out() -> None:
    edges = position_edges(12288)
    counts = np.diff(edges) * 7
    found = join_bins(counts, edges, 0, 1000)
    assert found[0] == 0 and found[-1] == len(counts) and (np.diff(found) > 0).all()
    assert (np.add.reduceat(counts, found[:-1]) >= 1000).all() and 16 < len(found) <= 48
    assert join_bins(np.array([3, 3]), np.arange(3), 0, 1000).tolist() == [0, 2]
    # With a minimum of context the positions before it occur once a stream: they are no tenth of the picture.
    sums = ExactSums(200, squares=True)
    sums.add(np.full(128, 9, dtype=np.float32), np.arange(128))
    sums.add(np.ones(7200, dtype=np.float32), np.arange(128, 200).repeat(100))
    line = evaluation_line(7, "test", sums, 0.0, "byte") | {"min_context": 128}
    (axis,) = draw_positions(sums, position_edges(200), line, Path("runs/mine")).axes
    assert axis.get_xlim() == (129, 201) and max(axis.patches[0].get_data()[0]) == pytest.approx(1 / math.log(2))


def test_numbers_go_when_the_picture_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next try is not refused."""
    sums = ExactSums(8, squares=True)
    sums.add(np.ones(80, dtype=np.float32), np.arange(8).repeat(10))
    line = evaluation_line(7, "test", sums, 0.0, "byte") | {"min_context": 0}
    arguments = (tmp_path / "by.png", sums, position_edges(8), line, Path("runs/mine"))

    def full(path: Path, content: bytes) -> None:
        if path.suffix == ".png":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_new(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("longstride.data_pipelines.durable.write_new", full)
        with pytest.raises(ConfigError, match=r"by\.png: cannot be written: No space left on device; name a file"):
            write_positions(*arguments)
    assert not list(tmp_path.iterdir())
    write_positions(*arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"by.png", "by.json"}


def test_images_are_told_by_the_dimension() -> None:
    sums = ExactSums()
    sums.add(np.full(4, math.log(2), dtype=np.float32))
    line = evaluation_line(1, "validation", sums, 0.0, "dimension")
    assert line["bits_per_dimension"] == line["bits_per_byte"] == pytest.approx(1, rel=2**-22)
    assert "bits_per_dimension" not in evaluation_line(1, "validation", sums, 0.0, "byte")


def test_positions_are_written_beside_each_other(
    trained: Trained, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # which the process group leaves behind, and is to be undone
    monkeypatch.delenv("LOCAL_RANK")
    run, output = trained("alone", 1), tmp_path / "by.png"
    options = ["--positions", str(output), "--split", "train", "--batch", "16", "--weights", "ema"]
    assert cli.main(["evaluate", str(run), *options]) == 0
    line = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "by.json").read_text())
    assert {key: written[key] for key in line} == line and line["split"] == "train"
    bins = written["positions"]
    assert (bins["first"], bins["end"]) == (list(range(64)), list(range(1, 65)))
    assert sum(bins["bytes"]) == line["tokens"]
    mean = sum(b * n for b, n in zip(bins["bits_per_byte"], bins["bytes"], strict=True)) / line["tokens"]
    assert mean == pytest.approx(line["bits_per_byte"])
    assert len(bins["standard_error"]) == 64 and all(0 < each < 2 for each in bins["standard_error"])
    assert output.read_bytes().startswith(b"\x89PNG")
    found = {}
    for kind in ("ema", "trained"):
        model = SparseTransformer(read_checkpoint_config(run).model).eval()
        model.load_state_dict(master_weights(open_checkpoint(run, None), kind))
        found[kind] = scored(model, data, split="train").mean()
    assert line["loss_nats"] == found["ema"] != found["trained"] and line["weights"] == "ema"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-context", "64"], "--min-context=64: must be from 0 to 63, less than the model's context; nearest 63"),
        (["--min-context", "-1"], "--min-context=-1: must be from 0 to 63, less than the model's context; nearest 0"),
        (["--positions", "{}/a.pdf"], "--positions={}/a.pdf: must be a .png in a folder that exists; such as new.png"),
        (["--positions", "{}/there.png"], "--positions={}/there.png: already exists and is not overwritten"),
        (["--positions", "{}/b.png"], "--positions={}/b.png: {}/b.json already exists and is not overwritten"),
        (
            ["--sequence-parallel", "2"],
            "--sequence-parallel=2: must divide the 1 process that a launcher started; nearest 1",
        ),
        (["--split", "test"], "manifest.json: has no split 'test'; it has train, validation"),
    ],
)
def test_evaluate_refuses_in_one_line(
    trained: Trained, tmp_path: Path, options: list[str], message: str, refusal: Refusal
) -> None:
    (tmp_path / "there.png").touch()
    (tmp_path / "b.json").touch()
    placed = [option.format(tmp_path) for option in options]
    assert refusal("evaluate", trained("alone", 1), *placed).endswith(message.format(tmp_path, tmp_path))


def test_data_that_is_not_found_is_asked_for_in_one_line(
    trained: Trained, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained("alone", 1)
    monkeypatch.setattr("longstride.launcher.config.run_config.resolve_saved_path", lambda *_: "gone")
    assert refusal("evaluate", run) == f'data.path="gone": of the run {run} cannot be found; give --data FOLDER'


def test_export_scores_as_its_checkpoint_does(
    trained: Trained, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same batches in the same precision: every bit but the seconds."""
    run, model = trained("alone", 1), tmp_path / "model"
    export(run, None, model)
    capsys.readouterr()
    lines = []
    for words in ([str(run)], [str(model), "--data", str(data)]):
        assert cli.main(["evaluate", *words, "--batch", "2"]) == 0
        lines.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert lines[0].pop("seconds") and lines[1].pop("seconds")
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            [],
            "{0}: is an exported model, which does not include data; give --data DIR, or score a file with `longstride",
        ),
        (["--step", "4"], "--step=4: {0} is an export, which has its own weights; leave it out"),
        (["--weights", "ema"], "--weights=ema: {0} is an export, which has its own weights; leave it out"),
    ],
)
def test_export_refuses_what_is_of_runs(options: list[str], message: str, exported: Path, refusal: Refusal) -> None:
    assert refusal("evaluate", exported, *options).startswith(message.format(exported))
