"""Runs whose packed documents do not see each other: training, evaluation, and a resume."""

import json
import math
import shutil
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.evaluation import evaluation_contexts
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.data import TrainingData
from longstride.launcher.output.counting import amount
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import complete, configuration, metrics, spawn

APART = 'data.packing={"attend": "document"}'


@pytest.fixture
def config_file(short_documents: Path, tmp_path: Path) -> Path:
    """The tiny run on short documents."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(configuration(short_documents, tmp_path / "run")))
    return path


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (['data.packing={"attend": "documents"}'], 'data.packing.attend="documents": must be '),
        (["data.packing=3"], "data.packing=3: must be "),
        ([APART, "data.hop=8"], "data.hop=8: packed documents are cut every 64 bytes"),
        ([APART, "model.backend=flex"], 'model.backend="flex": cannot keep documents apart; take auto'),
        (
            [APART, 'model.attention={"type": "synthesizer", "kind": "random"}'],
            "model.attention: synthesizer reads whole contexts; take patterns, or data.packing ",
        ),
    ],
)
def test_what_does_not_fit_documents_is_named(
    refused: Callable[..., list[str]], config_file: Path, overrides: list[str], line: str
) -> None:
    (found,) = refused("--config", str(config_file), *overrides)
    assert found.startswith(line)


def test_a_run_keeps_documents_apart(config_file: Path, short_documents: Path, tmp_path: Path) -> None:
    run, more = tmp_path / "run", ["data.separator=10", "train.activation_checkpointing=true", "data.workers=2", APART]
    ended = complete(["--config", str(config_file), *more], 2)
    checkpoint = open_checkpoint(run, 4)
    model = SparseTransformer(checkpoint.config.model).eval()
    model.load_state_dict(master_weights(checkpoint, "trained"))
    # The validation loss is that of each document, or its part in a context, by itself.
    nats: list[torch.Tensor] = []
    content = 0  # bytes of the documents, which hold no line ends
    options: dict[str, Any] = {"context": 64, "batch_size": 2, "limit": 6}
    cut = Cut(separator=10, apart=True)
    for batch in evaluation_contexts(short_documents, cut=cut, **options):
        assert batch.begins is not None
        for tokens, length, begins in zip(batch.tokens, batch.lengths.tolist(), batch.begins, strict=True):
            content += int((tokens[:length] != 10).sum())
            edges = sorted({0, *begins[:length].nonzero().flatten().tolist(), length})
            with torch.no_grad():
                nats += [model(tokens[None, a:b], return_nats=True).flatten() for a, b in pairwise(edges)]
    lines = metrics(run)
    found = next(line for line in lines if line["split"] == "validation" and line["step"] == 4)
    assert len(nats) > 12 and found["loss_nats"] == pytest.approx(torch.cat(nats).double().mean().item(), rel=1e-6)
    bits = torch.cat(nats).double().sum().item() / math.log(2)
    assert found["bytes"] == content and found["bits_per_byte"] == pytest.approx(bits / content, rel=1e-6)
    assert found["tokens"] == sum(map(len, nats)) > content
    # Bytes seen are the documents', in each step and in all of them.
    data = TrainingData(checkpoint.config, Ranks())
    steps = [[row[:n] for row, n in zip(each.tokens, each.lengths, strict=True)] for each in islice(data.stream(), 8)]
    seen = [sum(int((row != 10).sum()) for row in rows) for rows in steps]
    trained = [line for line in lines if line["split"] == "train"]
    assert [line["bytes"] for line in trained] == seen and all(line["tokens"] == 8 * 64 for line in trained)
    for line in trained:
        nats_in_all = line["loss_nats"] * line["tokens"]
        assert line["bits_per_byte"] == pytest.approx(nats_in_all / math.log(2) / line["bytes"], rel=1e-12)
    summed = f"done: 8 steps of 8 contexts of up to 64 bytes, {amount(sum(seen))}B, "
    assert summed in ended.stderr[0]
    # It goes on where it was, and not as another kind of run.
    shutil.copytree(run, tmp_path / "again")
    arguments = ["--config", str(config_file), "--resume", "4", f"train.output={tmp_path / 'again'}"]
    ended = complete([*arguments, *more], 2)
    assert metrics(tmp_path / "again") == lines
    assert summed in ended.stderr[0] and open_checkpoint(tmp_path / "again", 8).manifest.content_seen == sum(seen)
    ended = spawn([*arguments, *more[:2]], 1)
    assert ended.codes == [2] and "data.packing=null: the checkpoint" in ended.stderr[0], ended.stderr
