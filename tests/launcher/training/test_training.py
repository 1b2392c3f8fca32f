"""Training, resuming and exporting with two processes over gloo, for every ZeRO stage and precision."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longstride.launcher.checkpoints import open_checkpoint
from longstride.launcher.exports.export import Options, export
from longstride.launcher.models import AVERAGE
from tests.harness.runs import metrics

# Each ZeRO stage, precision and optimiser, once with loader workers. The high scale overflows at first, so that skipped
# steps are resumed as well.
HIGH_SCALE = "deepspeed.fp16.initial_scale_power=21"
LOW_SCALE = "deepspeed.fp16.initial_scale_power=10"
CSV_MONITOR = '{"enabled": true, "output_path": "{folder}", "job_name": "csv"}'
MONITORED = ("model.dropout=0", f"deepspeed.csv_monitor={CSV_MONITOR}")
MUON = 'train.optimizer={"type": "muon", "rates": {"matrices": 0.02}}'
ADAFACTOR = 'train.optimizer={"type": "adafactor"}'
TABLES = 'model.ngrams={"orders": [2, 3, 4], "rows": 997}'
EXPERTS = 'model.feed_forward=[{"type": "experts", "count": 4}, {"type": "experts", "count": 3, "top": 1}]'
SHARED = "model.attention.key_value_heads=1"
RUNS: dict[str, tuple[str, ...]] = {
    "zero0-fp16": ("deepspeed=zero0_fp16", LOW_SCALE),
    "zero0-fp32-adafactor": ("deepspeed=zero0_fp32", ADAFACTOR, EXPERTS),
    "zero1-bf16": ("deepspeed=zero1_bf16", MUON, SHARED, "data.workers=2"),
    "zero2-fp16": ("deepspeed=zero2_fp16", HIGH_SCALE, TABLES),
    "zero3-bf16": ("deepspeed=zero3_bf16", MUON, TABLES, EXPERTS, "train.activation_checkpointing=true"),
}
OTHER_RUNS = {
    f"zero{stage}-{precision}{name}": (f"deepspeed=zero{stage}_{precision}", *optimizer)
    for stage in range(4)
    for precision in ("fp32", "fp16", "bf16")
    for name, optimizer in {"-adamw": (), "-muon": (MUON,)}.items()
}
OTHER_RUNS |= {
    f"zero{stage}-{precision}-experts": (f"deepspeed=zero{stage}_{precision}", EXPERTS, MUON)
    for stage in range(4)
    for precision in ("fp32", "fp16", "bf16")
}
OTHER_RUNS["zero2-offload"] = ("deepspeed=zero2_bf16", "deepspeed.zero_optimization.offload_optimizer.device=cpu")
for stage in (2, 3):
    OTHER_RUNS[f"zero{stage}-offload-muon"] = (f"deepspeed=zero{stage}_bf16", MUON, OTHER_RUNS["zero2-offload"][-1])
# Two ranks that share each context; once with everything that a checkpoint has a file of its own for.
SHARING = "train.sequence_parallel=2"
GROUPED = {"groups-zero3-fp16": ("deepspeed=zero3_fp16", HIGH_SCALE, TABLES, SHARING)}
OTHER_RUNS |= {
    f"groups-{name}": (*overrides, SHARING) for name, overrides in OTHER_RUNS.items() if not name.endswith("-adamw")
}
EVERY_RUN = RUNS | GROUPED | OTHER_RUNS
NAMES = [*RUNS, *GROUPED, *(pytest.param(name, marks=pytest.mark.campaign) for name in OTHER_RUNS)]
Resumed = Callable[..., tuple[Path, Path]]
Trained = Callable[..., Path]


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_equals_the_uninterrupted_one(name: str, resumed: Resumed) -> None:
    whole, again = (metrics(run) for run in resumed(name, 2, *EVERY_RUN[name]))
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert again == whole  # bit for bit: losses, gradients' norms, loss scales, sample order, evaluations


@pytest.mark.parametrize("name", NAMES)
def test_exported_weights_are_the_master_weights(name: str, resumed: Resumed, tmp_path: Path) -> None:
    _, run = resumed(name, 2, *EVERY_RUN[name])
    export(run, 8, tmp_path / "export")
    exported = load_file(tmp_path / "export/model.safetensors")
    masters = torch.load(run.parent / "masters.pt", weights_only=True)[-1]
    assert exported.keys() == masters.keys()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, masters[n]) for n, tensor in exported.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_average_follows_the_master_weights_through_a_resume(name: str, resumed: Resumed, tmp_path: Path) -> None:
    """Tolerance: four steps of two roundings each, of sums of weights of equal size."""
    whole, run = resumed(name, 2, *EVERY_RUN[name])
    averages = {}
    for place, folder, step in (("before", whole, 4), ("whole", whole, 8), ("resumed", run, 8)):
        export(folder, step, tmp_path / place, Options(kind=AVERAGE))
        averages[place] = load_file(tmp_path / place / "model.safetensors")
    expected = averages["before"]
    skipped = [line["grad_norm"] is None for line in metrics(run) if line["split"] == "train" and line["step"] > 4]
    for masters, unmoved in zip(torch.load(run.parent / "masters.pt", weights_only=True), skipped, strict=True):
        if not unmoved:
            expected = {key: 0.75 * old + 0.25 * masters[key] for key, old in expected.items()}
    for key, average in averages["resumed"].items():
        assert torch.equal(average, averages["whole"][key])
        torch.testing.assert_close(average, expected[key], rtol=2**-20, atol=2**-24)


def test_replaced_lines_and_checkpoints_are_kept(resumed: Resumed) -> None:
    whole, run = resumed("zero1-bf16", 2, *RUNS["zero1-bf16"])
    assert (run / "metrics.before-resume-1.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert names == ["step-00000004", "step-00000008", "step-00000008.replaced-1"]


@pytest.mark.parametrize(("name", "world_size"), [("zero0-fp16-high", 1), ("zero2-fp16", 2)])
def test_fp16_halves_its_scale_where_gradients_overflow(name: str, world_size: int, trained: Trained) -> None:
    overrides = RUNS.get(name, ("deepspeed=zero0_fp16", HIGH_SCALE))
    lines = [line for line in metrics(trained(name, world_size, *overrides)) if line["split"] == "train"]
    assert lines[0]["loss_scale"] == 2.0**21
    skipped = lines[-1]["skipped_steps"]
    assert 0 < skipped < 8
    for before, after in pairwise(lines):
        overflowed = before["grad_norm"] is None
        assert after["loss_scale"] == before["loss_scale"] / (2 if overflowed else 1)
        assert after["skipped_steps"] - before["skipped_steps"] == (after["grad_norm"] is None)
        if overflowed:  # the schedule counts the steps that were taken
            assert after["learning_rate"] == before["learning_rate"]


def test_stages_and_precisions_agree_on_the_first_steps(trained: Trained) -> None:
    """The same batches, weights and dropout: the loss and gradient norm differ by rounding alone, scaled or not.

    Tolerance: bf16 keeps 8 bits, so that a norm of many terms is good to 2^-8 times a few.
    """
    runs = {name: metrics(trained(name, 2, *RUNS[name])) for name in RUNS}
    references = {  # by what makes another model of it
        (): metrics(trained("zero0-fp32", 2)),
        (EXPERTS,): metrics(trained("zero0-fp32-experts", 2, EXPERTS, "train.steps=3")),
        (SHARED,): metrics(trained("zero0-fp32-shared", 2, SHARED, "train.steps=3")),
    }
    for name, lines in runs.items():
        reference = references[tuple(override for override in RUNS[name] if override in (EXPERTS, SHARED))]
        assert lines[0]["loss_nats"] == pytest.approx(reference[0]["loss_nats"], rel=2**-8), name
        if name != "zero2-fp16":  # which overflows at first
            assert lines[0]["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=2**-4), name


def test_metrics_line_holds_the_contracts_fields(trained: Trained) -> None:
    run = trained("alone", 1)
    train = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert train["split"] == "train"
    assert train["bits_per_byte"] == pytest.approx(train["loss_nats"] / math.log(2))
    assert train["bits_per_byte"] == pytest.approx(8.0, abs=0.5)  # 256 equal guesses to begin with
    assert train["learning_rate"] == pytest.approx(0.0015)  # the first of two warm-up steps
    assert train["loss_scale"] == 1.0
    assert train["grad_norm"] > 0
    assert train["tokens_per_second"] == pytest.approx(8 * 64 / train["seconds"])
    assert train["sample_ids_crc32"] > 0


def test_accumulated_gradients_equal_unaccumulated_ones(trained: Trained) -> None:
    """fp32: sums in another order, 2^-23 a term, over thousands of terms and eight steps of Adam."""
    split = trained("no-dropout", 1, *MONITORED)
    whole = trained("no-dropout-whole", 1, "model.dropout=0", "train.micro_batch=8")
    for one, other in zip(metrics(split), metrics(whole), strict=True):
        assert one["loss_nats"] == pytest.approx(other["loss_nats"], rel=2**-17)
        assert one.get("grad_norm", 0) == pytest.approx(other.get("grad_norm", 0), rel=2**-13)


def test_padded_contexts_weigh_by_their_bytes_whoever_reads_them(trained: Trained) -> None:
    """Short contexts fall on other ranks and micro-batches; loss and gradient are those of all bytes together.

    Only these bytes count as seen. Tolerances as above.
    """
    padded = ("model.dropout=0", "data.packing=false", "data.hop=48")
    runs = (
        trained("padded-alone", 1, *padded, "train.micro_batch=8"),
        trained("padded-shared", 2, *padded, "train.micro_batch=1", "deepspeed=zero2_fp32"),
    )
    alone, shared = map(metrics, runs)
    assert any(line["tokens"] < 8 * 64 for line in alone)
    seen = sum(line["tokens"] for line in alone if line["split"] == "train")
    assert [open_checkpoint(run, 8).manifest.content_seen for run in runs] == [seen, seen]
    for one, same in zip(alone, shared, strict=True):
        assert one["tokens"] == same["tokens"] and one.get("sample_ids_crc32") == same.get("sample_ids_crc32")
        assert one["loss_nats"] == pytest.approx(same["loss_nats"], rel=2**-17)
        assert one.get("grad_norm", 0) == pytest.approx(same.get("grad_norm", 0), rel=2**-13)


def test_monitors_of_deepspeed_get_our_numbers(trained: Trained) -> None:
    run = trained("no-dropout", 1, *MONITORED)
    lines = (run.parent / "csv/train_bits_per_byte.csv").read_text().splitlines()
    recorded = [line["bits_per_byte"] for line in metrics(run) if line["split"] == "train"]
    assert [float(line.split(",")[1]) for line in lines[1:]] == pytest.approx(recorded)
    assert (run.parent / "csv/validation_bits_per_byte.csv").exists()
