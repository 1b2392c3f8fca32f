"""Permuted models through training in several layouts, resumes, evaluation, plans and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.config import load_config
from longstride.launcher.engine.device import run_parts
from longstride.launcher.planning import plan, rehearsal
from longstride.sparse_model import BlockContext, SparseTransformer
from longstride.sparse_model.mixers import Attention
from tests.harness.layouts import losses_of, train_through
from tests.harness.runs import metrics
from tests.launcher.training.test_objectives import assert_counted, evaluated
from tests.sparse_model.test_permuted import BIAS, DENSE, MPNET, XLNET, definition, network

MODEL = (f"model.objective={json.dumps(MPNET)}", f"model.attention={json.dumps(DENSE)}", "model.dropout=0")
BIASED = (*MODEL, f"model.relative_bias={json.dumps(BIAS['relative_bias'])}")


def test_losses_are_those_of_one_process_in_every_layout(config_file: Path, tmp_path: Path) -> None:
    legs = [
        (2, ("deepspeed=zero1_fp32", "data.workers=2", "model.backend=auto", "train.activation_checkpointing=true")),
        (2, ("deepspeed=zero3_bf16",)),
    ]
    train_through(config_file, tmp_path / "moved", BIASED, legs, 1)
    assert_counted(tmp_path / "moved", "bits_per_predicted_byte")


def test_a_resume_takes_the_steps_of_an_undisturbed_run(resumed: Callable[..., tuple[Path, Path]]) -> None:
    xlnet = (*MODEL, f"model.objective={json.dumps(XLNET)}", "model.reversible=true")
    whole, again = map(metrics, resumed("xlnet", 1, *xlnet))
    assert again == whole


def test_evaluation_is_the_definition(config_file: Path, tmp_path: Path) -> None:
    losses_of(config_file, tmp_path / "mpnet", 2, 1, *BIASED)
    line, model, data = evaluated(tmp_path / "mpnet")
    nats: list[torch.Tensor] = []
    for batch in data.evaluation():
        contexts = zip(batch.tokens, batch.inputs, batch.predicted, batch.lengths.tolist(), strict=True)
        for tokens, *drawn, length in contexts:
            if length:
                inputs, order = (x[:length] for x in drawn)
                targets = tokens[order.where(order > 0, length + 1).argsort()[: int(order.max())]].long()
                with torch.no_grad():
                    logits = definition(model, tokens[:length].long(), inputs.long(), order)
                nats.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    assert sum(map(len, nats)) == line["tokens"]
    assert line["loss_nats"] == pytest.approx(torch.cat(nats).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (('data.packing={"attend": "document"}',), "model.objective: permuted permutes whole contexts; take data.pack"),
        (("train.sequence_parallel=2",), "model.objective: permuted computes whole contexts, which processes cannot"),
        (
            ('train.context_schedule=[{"steps": 2, "context": 32}, {"context": 64}]',),
            "train.context_schedule: cuts contexts, but objective permuted permutes them; set it to null",
        ),
        (("train.samples_every=2",), "train.samples_every=2: objective permuted predicts no next token to sample"),
    ],
)
def test_what_needs_rows_in_order_is_refused(
    refused: Callable[..., list[str]], config_file: Path, overrides: tuple[str, ...], line: str
) -> None:
    (found,) = refused("--config", str(config_file), *MODEL, *overrides)
    assert found.startswith(line)


def test_a_plan_counts_both_streams(config_file: Path) -> None:
    """The rehearsed memory is that of a real pass, of N + 2b rows with an output of b."""
    config = load_config(config_file, [*BIASED, "model.backend=cpu"])
    made = plan.make_plan(config, [1], 100, "cpu")
    assert made["attention"]["pairs"] == 2 * 2 * 64 * (64 + 2 * 19)  # layers, heads
    assert made["attention"]["density"] == [(64 + 2 * 19) / 64] * 2
    model = SparseTransformer(config.model)
    counted = rehearsal.count(model, torch.zeros(2, 64, dtype=torch.uint8))
    planned = rehearsal.activations(config, False, "cpu")
    assert planned.kept == pytest.approx(counted.kept, rel=0.02)


def test_kernels_are_compiled_for_the_rows_of_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, forward = [], Attention.forward

    def record(mixer: Attention, h: torch.Tensor, context: BlockContext) -> Any:
        assert context.selection is not None
        shapes.append(tuple(h.shape))
        return forward(mixer, h, context)

    monkeypatch.setattr(Attention, "forward", record)
    run_parts(network(XLNET).config, 3, torch.float32, torch.device("cpu"), padded=True)
    assert shapes == 2 * [(3, 20 + 6, 64)]  # without and with padding
