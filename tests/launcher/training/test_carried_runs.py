"""Models that carry state from context to context: training, resumes, guards, evaluation and samples."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.data_pipelines.order import Batch, StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.compression.coding import decode, encode, rows_for
from longstride.launcher.config import load_config
from longstride.launcher.data import TrainingData
from longstride.launcher.engine import LaneStates
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models import load_model
from longstride.launcher.planning import plan
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, Session, SparseTransformer, generate
from longstride.testing.subjects import awake
from tests.harness.layouts import losses_of, train_through
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_objectives import evaluated
from tests.launcher.training.test_training import LOW_SCALE

ATTENTION = [{"type": "recurrent", "stateful": True}, {"type": "local", "window": 9}]
MATCHES = f"model.attention={json.dumps([ATTENTION[0], {'type': 'match', 'window': 8, 'order': 2, 'matches': 4}])}"
NGRAMS = '{"orders": [2, 3], "rows": 997}'
DELTA = f"model.attention={json.dumps([{'type': 'delta', 'stateful': True}, ATTENTION[1]])}"
COMPRESSIVE = {"type": "compressive", "memory": 40, "compressed": 30, "rate": 3}
MEMORIES = f"model.attention={json.dumps([{'type': 'transformer_xl', 'memory': 80}, COMPRESSIVE])}"
IN_LANES = ("data.shuffle_bytes=0", "data.shuffle_shards=false")
MODEL = (f"model.attention={json.dumps(ATTENTION)}", "model.dropout=0", "model.backend=auto", *IN_LANES)
RECOMPUTED = "train.activation_checkpointing=true"


def test_losses_are_those_of_one_process_in_every_layout(config_file: Path, tmp_path: Path) -> None:
    legs = [
        (2, ("deepspeed=zero1_fp32", "data.workers=2")),
        (3, ("deepspeed=zero3_fp32", RECOMPUTED, "train.micro_batch=1")),
        (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
    ]
    attention = f"model.attention={json.dumps([*ATTENTION, {'type': 'delta', 'stateful': True}, COMPRESSIVE])}"
    train_through(
        config_file, tmp_path / "moved", (*MODEL, attention, "model.layers=4", "train.global_batch=12"), legs, 2
    )


def test_a_step_reads_what_the_steps_before_it_left(config_file: Path, tmp_path: Path) -> None:
    """Without learning, losses are those of one model that reads the text of each lane."""
    learned, run = tmp_path / "learned", tmp_path / "run"
    losses_of(config_file, learned, 8, 1, *MODEL, "train.learning_rate=0.03")
    frozen = ("train.learning_rate=1e-30", "train.weight_decay=0", "train.steps=6", "train.checkpoint_every=0")
    words = ["--config", str(config_file), "--from", str(learned), *MODEL, *frozen, f"train.output={run}"]
    complete([*words, "deepspeed=zero0_fp32", "train.evaluate_every=null"], 2)
    losses = [line["loss_nats"] for line in metrics(run)]
    checkpoint = open_checkpoint(learned, None)
    model = SparseTransformer(checkpoint.config.model).eval()
    model.load_state_dict(master_weights(checkpoint, "trained"))
    carried = model.new_carried(8, torch.device("cpu"), torch.float32)
    for loss, batch in zip(losses, TrainingData(checkpoint.config, Ranks()).stream(), strict=False):
        output: Any = model(batch.tokens, return_nats=True, return_extras=True, carried=carried)
        carried = output.carried
        assert loss == pytest.approx(output.rows.mean().item(), rel=1e-6)
    alone = model(batch.tokens, return_nats=True)
    assert len(losses) == 6 and abs(alone.mean().item() - losses[-1]) > 1e-4


def test_a_resume_takes_the_steps_of_an_undisturbed_run_over_the_end_of_an_epoch(
    config_file: Path, tmp_path: Path
) -> None:
    model = (*MODEL, "train.global_batch=16", "train.micro_batch=4")
    expected = losses_of(config_file, tmp_path / "whole", 17, 2, *model)
    losses_of(config_file, tmp_path / "run", 13, 2, *model)
    assert losses_of(config_file, tmp_path / "run", 17, 2, *model) == expected
    assert {line.get("epoch", 0) for line in metrics(tmp_path / "run")} == {0, 1}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("delta", ("model.reversible=true", DELTA)),
        ("memories", (RECOMPUTED, "deepspeed=zero3_bf16", MEMORIES)),
    ],
)
def test_a_resume_takes_the_steps_of_an_undisturbed_run(
    name: str, changes: tuple[str, ...], resumed: Callable[..., tuple[Path, Path]]
) -> None:
    whole, again = map(metrics, resumed(f"carried {name}", 2, *MODEL, *changes))
    assert again == whole


def test_replays_repeat_steps_before_and_behind_a_rewind(config_file: Path, tmp_path: Path) -> None:
    """Step 6 is not finite, and the run goes back to step 4."""
    words = ["--config", str(config_file), *MODEL, f"train.output={tmp_path / 'run'}", "train.guards.non_finite=rewind"]
    words += ["train.checkpoint_every=2", "train.evaluate_every=null", "train.steps=8"]
    spoil = {"SPOIL": "loss,1,6,6,1"}
    complete(words, 2, spoil)
    for step, extra in (("6", spoil), ("8", {})):
        (report, _) = complete([*words, "--replay", step], 2, extra).stdout
        assert json.loads(report.splitlines()[-1])["reproduced"], report


def batch_of(ids: list[int], goes_on: list[bool] | None = None) -> Batch:
    rows = torch.zeros(len(ids), 8, dtype=torch.uint8)
    state = StreamState("data", 0, 0, 1, len(ids))
    on = torch.ones(len(ids), dtype=torch.bool) if goes_on is None else torch.tensor(goes_on)
    return Batch(rows, torch.full((len(ids),), 8), torch.tensor(ids), state, goes_on=on)


@pytest.fixture
def lanes() -> LaneStates:
    """Three lanes that have read contexts 0, 10 and 20."""
    config = ModelConfig.model_validate(
        {"context": 8, "layers": 1, "heads": 1, "width": 4, "embedding": {"type": "learned"}, "attention": ATTENTION[0]}
    )
    lanes = LaneStates(SparseTransformer(config), 3, torch.device("cpu"))
    lanes.put([torch.ones_like(tensor) for tensor in lanes.tensors])
    lanes.advance(batch_of([0, 10, 20]))
    return lanes


def continued(lanes: LaneStates, batch: Batch) -> list[bool]:
    tensors = lanes.take(batch, slice(None))
    assert all(bool((rows == rows.flatten()[0]).all()) for tensor in tensors for rows in tensor)
    return [bool(row.any()) for row in tensors[1]]


def test_lanes_begin_anew_behind_substitutes_ends_of_texts_and_rewinds(lanes: LaneStates) -> None:
    assert continued(lanes, batch_of([1, 11, 21])) == [True, True, True]
    assert continued(lanes, batch_of([1, 37, 21], [True, True, False])) == [True, False, False]
    lanes.put(lanes.take(batch_of([1, 37, 21]), slice(0, 2)))
    lanes.put(lanes.take(batch_of([1, 37, 21]), slice(2, 3)))
    lanes.advance(batch_of([1, 37, 21]))
    assert continued(lanes, batch_of([2, 12, 22])) == [True, False, True]
    assert continued(lanes, batch_of([7, 17, 27])) == [False, False, False], "as after a rewind"


def test_lanes_that_are_not_finite_begin_anew_and_steps_that_are_not_taken_are_read_again(lanes: LaneStates) -> None:
    lanes.put([torch.full_like(tensor, 5) for tensor in lanes.tensors])
    lanes.drop()
    assert continued(lanes, batch_of([1, 11, 21])) == [True, True, True]
    lanes.put([tensor.clone() for tensor in lanes.tensors])
    lanes._next[0][1][2] = torch.nan
    lanes.advance(batch_of([1, 11, 21]))
    assert continued(lanes, batch_of([2, 12, 22])) == [True, True, False]


@pytest.fixture
def run(trained: Callable[..., Path]) -> Path:
    """A finished run in lanes, which all tests share."""
    return trained("carried", 1, *MODEL)


def test_evaluation_has_one_figure_for_any_processes_and_equals_the_definition(run: Path) -> None:
    line, model, data = evaluated(run)
    nats, carried, num_continued = [], model.new_carried(2, torch.device("cpu"), torch.float32), 0
    with torch.no_grad():
        for batch in data.evaluation():
            assert batch.goes_on is not None
            num_continued += int(batch.goes_on.sum())
            carried = tuple(tensor.where(batch.goes_on.view(-1, *(tensor.dim() - 1) * [1]), 0) for tensor in carried)
            output: Any = model(batch.tokens, return_nats=True, return_extras=True, carried=carried)
            nats.append(output.rows[batch.scored])
            carried = output.carried
    assert num_continued and sum(map(len, nats)) == line["tokens"]
    assert line["loss_nats"] == pytest.approx(torch.cat(nats).mean().item(), rel=1e-6)


@pytest.mark.parametrize("changes", [(), (DELTA,), (MEMORIES,), (MATCHES, "model.ngrams=" + NGRAMS)])
def test_a_session_reads_on_as_training_does(config_file: Path, changes: tuple[str, ...]) -> None:
    config = load_config(config_file, [*MODEL, *changes]).model
    model = awake(config)
    tokens = torch.randint(256, (2, 3 * config.context + 10))
    carried, rows = model.new_carried(2, torch.device("cpu"), torch.float64), []
    for piece in tokens.split(config.context, 1):
        output: Any = model(piece, return_extras=True, carried=carried)
        carried = output.carried
        rows.append(output.rows)
    expected = torch.cat(rows, 1)
    session = Session(model, 2)
    for number, token in enumerate(tokens.T):
        torch.testing.assert_close(session.logits, expected[:, number], rtol=0, atol=1e-12)
        session.append(token)
        if session.position == config.context:
            session.carry()
    session.reset()
    for token in tokens[:, : config.context].T:
        session.append(token)
    session.read(tokens[:, config.context : 100])  # behind a context that single steps have completed
    torch.testing.assert_close(session.logits, expected[:, 100], rtol=0, atol=1e-12)
    for cuts in ((1, 63, 64, 65), (63, 65, 192), (64, 130, 192), (1, 65, 130), (63, 130), (1, 64, 192)):
        session.reset()
        for start, stop in itertools.pairwise((0, *cuts, 201)):
            torch.testing.assert_close(session.logits, expected[:, start], rtol=0, atol=1e-12)
            session.read(tokens[:, start:stop])
        copied = session.selected(torch.tensor([1]))
        torch.testing.assert_close(copied.logits, expected[1:, 201], rtol=0, atol=1e-12)


def test_samples_go_on_behind_the_context(run: Path, tmp_path: Path, capsys: Any) -> None:
    model, text = tmp_path / "model", tmp_path / "text"
    assert main(["export", str(run), "--output", str(model)]) == 0
    sample = ["sample", str(model), "--prompt", "abc", "--bytes", "200", "--slide", "--temperature", "0"]
    assert main([*sample, "--output", str(text)]) == 0, capsys.readouterr()
    network, tokens = load_model(model), torch.tensor([list(b"abc")])
    for token in generate(network, tokens, 100, temperature=0, slide=True):
        tokens = torch.cat([tokens, token[:, None]], 1)
    carried = network.new_carried(1, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for piece in tokens.split(network.config.context, 1):
            output: Any = network(piece, return_extras=True, carried=carried)
            carried = output.carried
    assert int(output.rows[0, -1].argmax()) == int(tokens[0, -1])
    assert text.read_bytes().startswith(bytes(tokens[0].tolist()))


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_a_text_is_scored_and_coded_as_one_lane(config_file: Path, size: int) -> None:
    config = load_config(config_file, [*MODEL]).model
    model = awake(config).float()
    content = bytes(torch.randint(256, (size,)).tolist())
    carried, nats = model.new_carried(1, torch.device("cpu"), torch.float32), 0.0
    for piece in torch.tensor([list(content)]).split(config.context, 1):
        output: Any = model(piece, return_nats=True, return_extras=True, carried=carried)
        carried, nats = output.carried, nats + output.rows.sum().item()
    assert likelihood(model, content)["loss_nats"] == pytest.approx(nats / size, rel=1e-6)
    code, bits = encode(model, content, rows_for(config, size, torch.float32))
    assert bits == pytest.approx(nats / math.log(2), rel=1e-5)
    assert decode(model, code, size, 1) == content
    with pytest.raises(ConfigError, match="--min-context=8: repeats bytes"):
        likelihood(model, content, min_context=8)


def test_a_plan_counts_what_lanes_carry(config_file: Path) -> None:
    config = load_config(config_file, [*MODEL])
    described = plan.make_plan(config, [1, 2], 100, "cpu")
    width, batch = config.model.width, config.train.global_batch
    assert described["carried_bytes"] == batch * (4 + 4 * width)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("data.shuffle_bytes=1000",), "data.shuffle_bytes=1000: shuffles contexts, but model.attention carries state"),
        (("data.packing=false", "data.hop=32"), "data.hop=32: repeats bytes, but model.attention carries state"),
        (('train.context_schedule=[{"steps": 2, "context": 32}, {"context": 64}]',), "train.context_schedule"),
        (("train.sequence_parallel=2",), "train.sequence_parallel=2: divides contexts, but model.attention carries"),
    ],
)
def test_what_breaks_lanes_is_refused(
    refused: Callable[..., list[str]], config_file: Path, overrides: tuple[str, ...], line: str
) -> None:
    (found,) = refused("--config", str(config_file), *MODEL, *overrides)
    assert found.startswith(line)


def test_overlapping_windows_are_refused(run: Path, refusal: Callable[..., str]) -> None:
    line = refusal("evaluate", run, "--min-context", "8")
    assert line.startswith("--min-context=8: repeats bytes, but the model carries")
