"""Mixers with states or choices of their own, through training in every layout, checkpoints, export and sampling."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher.cli import main
from longstride.launcher.config import load_config
from longstride.launcher.planning.plan import make_plan
from longstride.sparse_model import SparseTransformer
from tests.harness.layouts import Leg, losses_of, train_through
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_tied_output import GATHERED
from tests.launcher.training.test_training import LOW_SCALE, MUON

STRIDED = {"type": "strided", "stride": 8}
REFORMER = [
    {"type": "lsh", "buckets": 4, "rounds": 2, "chunk": 8},
    {"type": "match", "window": 8, "order": 2, "matches": 4},
    {"type": "fixed", "stride": 8, "summary": 2},
]
SYNTHESIZER = [
    {"type": "synthesizer", "kind": ["random", "dense", "attention"], "fixed": True},
    {
        "type": "synthesizer", "kind": ["factorized_random", "factorized_dense"], "rank": 4,
        "pattern": {"type": "fixed", "stride": 8, "summary": 2},
    },
    {"type": "synthesizer", "kind": "factorized_random", "pattern": STRIDED},
    {"type": "adaptive_span", "ramp": 4, "penalty": 0.001, "initial": 5.5},
    {"type": "entmax", "pattern": STRIDED},
]  # fmt: skip
INDEXED = [
    {"type": "indexed", "keys": 12, "window": 3, "index_heads": 2, "index_width": 8},
    STRIDED,
    {"type": "indexed", "keys": 16, "block": 4, "index_width": 8, "local": {"heads": 1, "window": 6}},
]
EXPERTS = 'model.feed_forward=[{"type": "dense"}, {"type": "experts", "count": 3}]'
COMMON = ("model.dropout=0", "model.backend=auto")


class Case(NamedTuple):
    """A model, the layouts that a run of it goes through, two steps in each, and what becomes of its tensors."""

    model: tuple[str, ...]
    legs: list[Leg]
    exact: int  # the number of legs in fp32, which come first
    fixed: str  # of the first block: is as it was drawn, to the bit
    learned: tuple[str, ...] = ()


CASES = {
    "reformer": Case(
        (*COMMON, f"model.attention={json.dumps(REFORMER)}", EXPERTS, "model.layers=3", "model.reversible=true"),
        [
            (2, ("deepspeed=zero1_fp32",)),
            (2, ("deepspeed=zero3_fp32",)),
            (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
            (2, ("deepspeed=zero3_bf16",)),
        ],
        2,
        "rotations",
    ),
    "synthesizer": Case(
        (*COMMON, f"model.attention={json.dumps(SYNTHESIZER)}", "model.layers=5", MUON),
        [
            (2, ("deepspeed=zero1_fp32",)),
            (4, ("deepspeed=zero3_fp32", "train.activation_checkpointing=true")),
            (1, ("deepspeed=zero2_fp32",)),
            (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
            (2, ("deepspeed=zero3_bf16",)),
        ],
        3,
        "random",
        ("0.dense_keys", "1.mixing", "2.random_keys", "3.spans", "4.excess_logits"),
    ),
    "indexer": Case(
        (*COMMON, f"model.attention={json.dumps(INDEXED)}", "model.layers=3", "model.rotary.base=1000"),
        [
            (2, ("deepspeed=zero1_fp32",)),
            (4, ("deepspeed=zero3_fp32", GATHERED, "train.activation_checkpointing=true")),
            (1, ("deepspeed=zero2_fp32",)),
            (2, ("deepspeed=zero2_fp16", LOW_SCALE)),
            (2, ("deepspeed=zero3_bf16",)),
        ],
        3,
        "",
        ("0.indexer.projection.weight", "2.indexer.projection.weight"),
    ),
}


@pytest.mark.campaign  # test_buffers.py has the way for every run of the tests
@pytest.mark.parametrize("name", CASES)
def test_one_run_goes_through_every_layout(name: str, config_file: Path, tmp_path: Path, capsys: Any) -> None:
    case, moved, model = CASES[name], tmp_path / "moved", str(tmp_path / "model")
    trained, drawn = train_through(config_file, moved, case.model, case.legs, case.exact)
    if case.fixed:
        fixed = f"blocks.0.attention.{case.fixed}"
        assert torch.equal(trained[fixed], drawn[fixed])
    for block, name in (learned.split(".", 1) for learned in case.learned):
        learned = f"blocks.{block}.attention.{name}"
        assert not torch.equal(trained[learned], drawn[learned]), learned
    config = load_config(moved / "config.json", [])
    planned = make_plan(config, [2], contexts=100)["parameters"]["total"]
    assert planned == sum(each.numel() for each in SparseTransformer(config.model).parameters())
    # A likelihood without a leak is a code length: the decoder, which knows no future, finds the same bytes.
    file, packed, again = (tmp_path / place for place in ("file", "file.lsz", "again"))
    file.write_bytes(bytes(range(97)))
    for words in (
        ["export", str(moved), "--output", model, "--dtype", "bf16"],
        ["sample", model, "--bytes", "20", "--output", str(tmp_path / "sample.txt")],
        ["compress", str(file), "--model", model, "--output", str(packed)],
        ["decompress", str(packed), "--model", model, "--output", str(again)],
        ["show", "attention", str(moved), "--output", str(tmp_path / "attention.png")],
        ["show", "pattern", str(moved / "config.json"), "--output", str(tmp_path / "pattern.png")],
    ):
        assert main(words) == 0, capsys.readouterr()
    assert (tmp_path / "sample.txt").stat().st_size == 20 and again.read_bytes() == file.read_bytes()


def test_evaluations_measure_what_an_indexer_chooses(config_file: Path, tmp_path: Path) -> None:
    """Of any number of ranks, also where ZeRO 3 gathers weights; nothing of other mixers, or if all keys are read."""
    lines = []
    for processes, layout in ((1, "zero0_fp32"), (2, "zero3_fp32")):
        options = (f"train.output={tmp_path / layout}", f"deepspeed={layout}", GATHERED, "train.steps=2")
        run = ["--config", str(config_file), *CASES["indexer"].model, *options, "train.evaluate_every=1"]
        complete(run, processes)
        lines.append([line for line in metrics(tmp_path / layout) if line["split"] == "validation"])
    for first, second in zip(*lines, strict=True):
        for name in ("indexer_kl", "indexer_mass"):
            assert first[name][1] is None is second[name][1]
            assert second[name][::2] == pytest.approx(first[name][::2], rel=1e-4)
            assert all(0 < each < 1 for each in first[name][::2])
    dense = 'model.attention={"type": "indexed", "keys": 64, "index_width": 8}'
    complete(["--config", str(config_file), dense, f"train.output={tmp_path / 'dense'}", "train.steps=1"], 1)
    assert not any("indexer_kl" in line for line in metrics(tmp_path / "dense"))


@pytest.mark.campaign
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", CASES)
def test_it_trains_in_every_stage_and_precision(
    name: str, stage: int, precision: str, config_file: Path, tmp_path: Path
) -> None:
    scale = (LOW_SCALE,) if precision == "fp16" else ()
    dropout = ("model.dropout=0.1",) if name == "reformer" else ()
    changes = (*CASES[name].model, f"deepspeed=zero{stage}_{precision}", *dropout, *scale)
    found = losses_of(config_file, tmp_path / "run", 8, 2, *changes)
    assert len(found) == 8 and found[-1] < found[0]


@pytest.mark.parametrize("name", ["activation_checkpointing", "compile"])
def test_what_recomputes_otherwise_is_refused(name: str, config_file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.{name}=true: .*model\.reversible.*; give false$"):
        load_config(config_file, ["model.reversible=true", f"train.{name}=true"])


@pytest.mark.campaign
@pytest.mark.parametrize("changes", [(), ("train.activation_checkpointing=true",), ("model.reversible=true",)])
def test_a_recurrence_learns_alike_in_every_stage(changes: tuple[str, ...], config_file: Path, tmp_path: Path) -> None:
    attention = [{"type": "recurrent", "width": 24}, {"type": "recurrent", "cell": "brc"}]
    model = (*COMMON, f"model.attention={json.dumps(attention)}", MUON, *changes)
    losses = [
        losses_of(config_file, tmp_path / f"{stage}", 6, processes, *model, f"deepspeed=zero{stage}_fp32")
        for stage, processes in ((0, 1), (1, 2), (3, 2))
    ]
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
