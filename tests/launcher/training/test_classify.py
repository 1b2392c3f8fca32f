"""Classes of documents: labels in batches, training in layouts and resumes, evaluation, and the weights to begin from.

Each document of the data holds letters of its class, after its number.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from longstride.data_pipelines.building import build
from longstride.data_pipelines.order import Cut, evaluation_contexts
from longstride.data_pipelines.palette import make_palette
from longstride.data_pipelines.shards import DataFolder
from longstride.kernels import ConfigError
from longstride.launcher.cli import main
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data import TrainingData, WeightSource
from longstride.launcher.models import load_model
from longstride.launcher.planning import plan, rehearsal
from longstride.launcher.planning.costs import work
from longstride.launcher.ranks import Ranks
from longstride.launcher.training.initial import fit
from longstride.sparse_model import SparseTransformer
from tests.harness.data.builds import picture, write_files
from tests.harness.data.streams import open_stream
from tests.harness.layouts import losses_of, train_through
from tests.harness.runs import complete, configuration, metrics
from tests.harness.tiny_models import plain_config

LETTERS = (b"abcd", b"mnop", b"wxyz")
CLASSIFY = {"type": "classify", "classes": 3}
MODEL = (
    f"model.objective={json.dumps(CLASSIFY)}", 'model.attention={"type": "local", "window": 9, "causal": false}',
    "model.dropout=0", "model.backend=auto",
)  # fmt: skip


@pytest.fixture(scope="session")
def labelled(shared: Callable[..., Path]) -> Path:
    """A data folder of 90 documents of 10 to 150 bytes in shards of 400, which divide some of them."""

    def make(folder: Path) -> None:
        draw, files = random.Random(0), {}
        for number in range(90):
            label = draw.randrange(3)
            letters = bytes(draw.choices(LETTERS[label], k=draw.randint(6, 146)))
            files |= {f"{number}.txt": b"%04d" % number + letters, f"{number}.cls": b"%d" % label}
        source = write_files(folder / "source", files)
        build([source], folder / "data", labels=True, validation_fraction=0.2, shard_bytes=400)

    return shared("labelled", make) / "data"


@pytest.fixture
def run(trained: Callable[..., Path], labelled: Path) -> Path:
    """A finished run that classifies, which all tests share."""
    return trained("classify", 1, f"data.path={labelled}", *MODEL)


@pytest.fixture
def config_file(labelled: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(configuration(labelled, tmp_path / "run")))
    return path


def classes_of(location: Path, split: str) -> dict[bytes, int]:
    """Map each document of a split to its class."""
    return {content.tobytes(): label for content, label in DataFolder(location).split(split).labelled_documents()}


@pytest.mark.parametrize(("hop", "workers"), [(None, 0), (24, 2)])
def test_each_context_has_the_class_of_its_document(
    labelled: Path, hop: int | None, workers: int, tmp_path: Path
) -> None:
    """Over epochs, contexts of long documents, documents that two shards divide, workers and replaced contexts."""
    cut = Cut(packing=False, hop=hop, labelled=True)
    documents = classes_of(labelled, "train")
    assert any(len(document) > 64 for document in documents)
    damaged, seen, replaced = Path(shutil.copytree(labelled, tmp_path / "data")), set(), 0
    shard = damaged / DataFolder(labelled).split("train").shards[1].name
    shard.write_bytes(shard.read_bytes().replace(b"a", b"b"))
    stream = open_stream(
        damaged, context=64, global_batch=6, world_size=2, rank=1, cut=cut, shuffle_bytes=256, workers=workers,
        on_damage="substitute",
    )  # fmt: skip
    for batch, _ in zip(stream, range(100), strict=False):
        replaced += len(batch.substitutions)
        assert batch.labels is not None and batch.labels.shape == (3, 1)
        for tokens, length, label in zip(batch.tokens, batch.lengths.tolist(), batch.labels, strict=True):
            text = bytes(tokens[:length].tolist())
            (expected,) = {documents[document] for document in documents if text in document}
            assert label == expected
            seen.add(text)
    assert len(seen) > len(documents) and replaced
    documents = classes_of(labelled, "validation")
    labels = {}
    for scored in evaluation_contexts(labelled, context=64, batch_size=4, cut=cut):
        assert scored.labels is not None and torch.equal(scored.scored, scored.content)
        for tokens, length, label in zip(scored.tokens, scored.lengths.tolist(), scored.labels, strict=True):
            labels[bytes(tokens[:length].tolist())] = int(label)
    assert labels.pop(b"") == -1  # of padding rows
    assert all({documents[document] for document in documents if text in document} == {labels[text]} for text in labels)


def test_contexts_of_pictures_in_colours_of_a_palette_have_their_classes(tmp_path: Path) -> None:
    draw, colours = np.random.default_rng(0), np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [255, 255, 255]], np.uint8)
    numbers = draw.integers(0, 2, (20, 8, 8)) + 2 * (np.arange(20) % 2)[:, None, None]  # class 1: colours with green
    files = {f"{n:02}.png": picture(colours[number]) for n, number in enumerate(numbers)}
    files |= {f"{n:02}.cls": b"%d" % (n % 2) for n in range(20)}
    source = write_files(tmp_path / "source", files)
    palette = make_palette(colours, 4)
    build([source], tmp_path / "data", modality="image", labels=True, palette=palette, validation_fraction=0.3)
    content = configuration(tmp_path / "data", tmp_path / "run") | {"deepspeed": {}}
    content["model"] |= {"vocabulary": 4, "objective": CLASSIFY, "embedding": {"type": "learned"}}
    content["model"]["attention"] = {"type": "dense", "causal": False}
    data = TrainingData(RunConfig.model_validate(content), Ranks())
    has_green = torch.from_numpy(palette.colours[:, 1] > 0)
    for batch in (next(data.batches(None, 0, torch.device("cpu"))).part, *data.evaluation()):
        is_real = batch.lengths > 0
        assert batch.labels is not None and is_real.any()
        assert torch.equal(has_green[batch.tokens.int()].all(1)[is_real], batch.labels[is_real, 0] == 1)
    assert data.unit == "label"


def test_losses_are_those_of_one_process_in_every_layout(config_file: Path, tmp_path: Path) -> None:
    legs = [
        (2, ("deepspeed=zero1_fp32", "data.workers=2", "train.micro_batch=1")),
        (2, ("deepspeed=zero3_fp32", "train.activation_checkpointing=true")),
        (1, ("deepspeed=zero2_bf16",)),
    ]
    train_through(config_file, tmp_path / "moved", MODEL, legs, 2)
    for line in metrics(tmp_path / "moved"):
        is_step = "grad_norm" in line
        assert line["tokens"] == (8 if is_step else 6) and not {"bits_per_byte", "bytes"} & {*line}
        assert line["bits_per_label"] == pytest.approx(line["loss_nats"] / math.log(2))
        assert ("accuracy" in line) != is_step


def test_fine_tuning_learns_the_classes_and_resumes_where_it_was(
    config_file: Path, tmp_path: Path, capsys: Any
) -> None:
    """A masked model with an output of its own gives all but this and the row of masks."""
    masked = ('model.objective={"type": "masked", "span": 4}', *MODEL[1:])
    output = 'model.output={"tied": true, "transform": true, "bias": true}'
    losses_of(config_file, tmp_path / "masked", 2, 1, *masked, output)
    assert main(["export", str(tmp_path / "masked"), "--output", str(tmp_path / "source")]) == 0
    source = ("--from", str(tmp_path / "source"), *MODEL, "model.output=null", "train.evaluate_contexts=null")
    expected = losses_of(config_file, tmp_path / "whole", 16, 1, *source)
    losses_of(config_file, tmp_path / "run", 8, 1, *source)
    assert losses_of(config_file, tmp_path / "run", 16, 1, *source) == expected
    assert expected[0] == pytest.approx(math.log(3))  # the head begins at 0
    assert metrics(tmp_path / "run")[-1]["accuracy"] > 0.9


def test_models_of_tokens_and_classes_share_all_but_start_masks_and_logits() -> None:
    both_sides = {"attention": {"type": "local", "window": 8, "causal": False}}
    masked = {"objective": {"type": "masked"}, **both_sides}
    classify = {"objective": {**CLASSIFY, "classes": 256}, **both_sides}  # as many as tokens
    head = ("logits.weight", "logits.bias", "logits.pooler.weight", "logits.pooler.bias")

    def fitted(source: dict[str, Any], model: dict[str, Any]) -> Any:
        return fit(plain_config(**source), plain_config(**model), WeightSource(Path("runs/a")), "runs/a")

    there, back = fitted(masked, classify), fitted(classify, masked)
    assert there.anew == head and there.unmasked == back.unmasked == ("embedding.tokens.weight",)
    assert back.anew == ("logits.weight",) and back.unused == head[1:]
    causal = {"objective": {**CLASSIFY, "causal": True}}
    assert fitted({}, causal).anew == head and fitted({}, causal).unused == ()
    assert fitted({}, classify).unused == ("embedding.start",)
    assert fitted(classify, classify).anew == ()
    with pytest.raises(ConfigError, match=r"^model\.objective=.*logits\.weight is \[3, 32\] in this run and \["):
        fitted(classify, {"objective": CLASSIFY, **both_sides})


def test_evaluation_has_one_figure_for_any_processes_and_equals_the_definition(
    run: Path, tmp_path: Path, labelled: Path, capsys: Any
) -> None:
    """Of the run, and of its export on named data. Each context of a longer document counts."""
    model = tmp_path / "model"
    assert main(["export", str(run), "--output", str(model)]) == 0
    capsys.readouterr()
    lines = []
    for words, processes in (([str(run)], 1), ([str(run)], 2), ([str(model), "--data", str(labelled)], 1)):
        ended = complete(["evaluate", *words, "--batch", "4"], processes, {"VERB": "1"})
        lines.append(json.loads(ended.stdout[0].splitlines()[-1]))
        assert f", accuracy {lines[-1]['accuracy']:.4f} on validation" in ended.stderr[0]
        lines[-1].pop("seconds")
    assert lines[0] == lines[1] == lines[2]
    network, nats, hits = load_model(model), [], []
    for document, label in classes_of(labelled, "validation").items():
        for first in range(0, len(document), 64):
            tokens = torch.tensor(list(document[first : first + 64]))
            with torch.no_grad():
                logits = network(tokens[None])[0, 0]
            nats.append(F.cross_entropy(logits, torch.tensor(label)))
            hits.append(int(logits.argmax()) == label)
    assert lines[0]["tokens"] == len(nats) and lines[0]["accuracy"] == sum(hits) / len(hits)
    assert lines[0]["loss_nats"] == pytest.approx(torch.stack(nats).mean().item(), rel=1e-5)


def test_verbs_that_need_tokens_say_that_there_are_classes(run: Path, tmp_path: Path, capsys: Any) -> None:
    model, text = str(tmp_path / "model"), str(tmp_path / "text")
    Path(text).write_text("some text")
    assert main(["export", str(run), "--output", model]) == 0, capsys.readouterr()
    card = (tmp_path / "model/README.md").read_text()
    assert "bits per label" in card and "fill-mask" not in card
    code = card.split("```python")[1].split("```")[0].replace('"."', repr(model))
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["probabilities"].shape == (1, 1, 3) and float(names["probabilities"].detach().sum()) == pytest.approx(
        1
    )
    for words in (
        ["sample", model, "--bytes", "5"],
        ["sample", model, "--likelihood", text],
        ["compress", text, "--model", model, "--output", f"{text}.lsz"],
        ["serve", model],
        ["export", model, "--format", "pt2", "--output", f"{model}.pt2"],
        ["evaluate", str(run), "--min-context", "8"],
        ["evaluate", str(run), "--positions", str(tmp_path / "by.png")],
    ):
        capsys.readouterr()
        assert main(words) == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert "objective" in line and "classify" in line, line


def test_a_page_compares_no_labels_with_bytes(
    run: Path, trained: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    runs = [str(trained("alone", 1)), str(run)]
    capsys.readouterr()
    assert main(["report", *runs, "--quick", "--output", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "counts bits per label, and" in line and line.endswith("; give runs of one objective")
    assert main(["report", runs[1], "--quick", "--output", str(tmp_path / "page.html")]) == 0
    assert "bits per label" in (tmp_path / "page.html").read_text()


def test_a_plan_counts_one_row_of_logits(config_file: Path) -> None:
    """The rehearsed memory is that of a real pass."""
    config = load_config(config_file, [*MODEL, "model.backend=cpu"])
    logits = plan.make_plan(config, [1], 100, "cpu")["parameters"]["output"]
    assert logits == 32 * 32 + 32 + 3 * 32 + 3
    counted = work(config.model)
    assert counted.total.forward - counted.blocks.forward == 2 * (32 * 32 + 3 * 32)
    counted = rehearsal.count(SparseTransformer(config.model), torch.zeros(2, 64, dtype=torch.uint8))
    assert rehearsal.activations(config, False, "cpu").kept == pytest.approx(counted.kept, rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("data.packing=true",), "data.packing: joins documents, but objective classify predicts the class of one"),
        (("data.separator=0",), "data.separator=0: only applies to packed documents"),
        (("train.sequence_parallel=2",), "model.objective: classify computes whole contexts, which processes cannot"),
        (
            ('train.context_schedule=[{"steps": 2, "context": 32}, {"context": 64}]',),
            "train.context_schedule: cuts contexts, but objective classify labels them; set it to null",
        ),
        (("train.samples_every=2",), "train.samples_every=2: objective classify predicts no next token to sample"),
        (("model.objective.classes=2",), "model.objective.classes=2: split 'train' of the data has class 2; at least"),
        (("data.path=UNLABELLED",), "manifest.json: has no classes of documents; make a data folder with --labels"),
    ],
)
def test_what_does_not_fit_is_refused(
    refused: Callable[..., list[str]], config_file: Path, data: Path, overrides: tuple[str, ...], line: str
) -> None:
    changes = (change.replace("UNLABELLED", str(data)) for change in overrides)
    (message,) = refused("--config", str(config_file), *MODEL, *changes)
    assert line in message
