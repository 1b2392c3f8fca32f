"""Masked models through training, resumes in other layouts, evaluation and every verb that needs a next token."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.data import TrainingData
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import MASKED
from tests.harness.layouts import losses_of, train_through
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_training import LOW_SCALE
from tests.sparse_model.test_permuted import DENSE, MPNET

ATTENTION = [{"type": "linformer", "rows": 8}, {"type": "local", "window": 9, "causal": False}]
MODEL = (
    f"model.objective={json.dumps(MASKED)}", f"model.attention={json.dumps(ATTENTION)}",
    "model.dropout=0", "model.backend=auto",
)  # fmt: skip


def assert_counted(run: Path, name: str) -> None:
    """Assert that each line has its loss under this name alone, over 0.3 of each context of 64 bytes."""
    for line in metrics(run):
        is_step = "grad_norm" in line
        assert line["tokens"] == (8 if is_step else 6) * 19
        assert line["bytes"] == (8 * 64 if is_step else 6 * 19) and "bits_per_byte" not in line
        assert line[name] == pytest.approx(line["loss_nats"] / math.log(2))


def evaluated(run: Path, *options: str) -> tuple[dict[str, Any], SparseTransformer, TrainingData]:
    """Return a run's line, which one process and two print alike, its last model and its data."""
    lines = []
    for processes in (1, 2):
        named = [option.format(processes) for option in options]
        ended = complete(["evaluate", str(run), *named], processes, {"VERB": "1"})
        lines.append(json.loads(ended.stdout[0].splitlines()[-1]))
        lines[-1].pop("seconds")
    assert lines[0] == lines[1]
    checkpoint = open_checkpoint(run, None)
    model = SparseTransformer(checkpoint.config.model).eval()
    model.load_state_dict(master_weights(checkpoint, "trained"))
    return lines[0], model, TrainingData(checkpoint.config, Ranks())


def test_losses_are_those_of_one_process_in_every_layout(config_file: Path, tmp_path: Path) -> None:
    legs = [
        (2, ("deepspeed=zero1_fp32", "data.workers=2")),
        (4, ("deepspeed=zero3_fp32", "train.sequence_parallel=2", "train.activation_checkpointing=true")),
        (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
    ]
    train_through(config_file, tmp_path / "moved", MODEL, legs, 2)
    assert_counted(tmp_path / "moved", "bits_per_masked_byte")


def test_a_resume_takes_the_steps_of_an_undisturbed_run(resumed: Callable[..., tuple[Path, Path]]) -> None:
    whole, again = map(metrics, resumed("masked", 2, *MODEL))
    assert again == whole


def test_a_schedule_of_contexts_masks_the_tokens_of_one_without(config_file: Path, tmp_path: Path) -> None:
    """Masks belong to a context of the data, which a stage cuts."""
    schedule = 'train.context_schedule=[{"steps": 2, "context": 32}, {"context": 64}]'
    losses_of(config_file, tmp_path / "run", 4, 1, *MODEL, schedule)
    assert [line["tokens"] for line in metrics(tmp_path / "run") if "grad_norm" in line] == 4 * [8 * 19]


def test_evaluation_has_one_figure_for_any_processes_and_equals_the_definition(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    line, model, data = evaluated(trained("masked", 2, *MODEL), "--positions", str(tmp_path / "{}.png"))
    nats, count = 0.0, 0
    for batch in data.evaluation():
        for tokens, inputs, predicted, length in zip(
            batch.tokens, batch.inputs, batch.predicted, batch.lengths.tolist(), strict=True
        ):
            if length:
                with torch.no_grad():
                    logits = model(inputs[None, :length])[0]
                rows = predicted[:length]
                each = torch.nn.functional.cross_entropy(logits[rows], tokens[:length][rows].long(), reduction="sum")
                nats, count = nats + float(each), count + int(rows.sum())
    assert count == line["tokens"] and line["loss_nats"] == pytest.approx(nats / count, rel=1e-6)
    bins = json.loads((tmp_path / "1.json").read_text())["positions"]
    assert sum(bins["tokens"]) == count and "bits_per_masked_byte" in bins


@pytest.mark.parametrize("objective", [MASKED, MPNET], ids=lambda objective: objective["type"])
def test_verbs_that_need_a_next_token_say_that_there_is_none(
    config_file: Path, tmp_path: Path, capsys: Any, objective: dict[str, Any]
) -> None:
    chosen = (*MODEL, f"model.objective={json.dumps(objective)}", f"model.attention={json.dumps(DENSE)}")
    run, model, text = tmp_path / "run", str(tmp_path / "model"), str(tmp_path / "text")
    losses_of(config_file, run, 2, 1, *chosen)
    Path(text).write_text("some text")
    assert main(["export", str(run), "--output", model]) == 0, capsys.readouterr()
    for words in (
        ["sample", model, "--bytes", "5"],
        ["sample", model, "--likelihood", text],
        ["compress", text, "--model", model, "--output", f"{text}.lsz"],
        ["serve", model],
        ["evaluate", str(run), "--min-context", "8"],
        ["train", "--config", str(config_file), *chosen, "train.samples_every=2"],
    ):
        capsys.readouterr()
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "objective" in line and objective["type"] in line, line


def test_a_page_compares_no_masked_with_other_losses(trained: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    runs = [str(trained("alone", 1)), str(trained("masked", 2, *MODEL))]
    capsys.readouterr()
    assert main(["report", *runs, "--quick", "--output", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "counts bits per masked byte, and" in line and line.endswith("; give runs of one objective")
    assert main(["report", runs[1], "--quick", "--output", str(tmp_path / "page.html")]) == 0
    assert "bits per masked byte" in (tmp_path / "page.html").read_text()
