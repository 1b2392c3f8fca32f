"""What a step communicates: predicted bytes are those that torch counts over real steps."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.collectives import Collective, message_bytes, num_calls, sent_bytes, total_sent
from benchmarks.scaling.communication import STAGE_3, cases, configuration, differences, measured, shared
from benchmarks.scaling.divided import exchanges, rows_by_masks
from benchmarks.scaling.zero_communication import Run
from longstride.kernels import ConfigError
from longstride.kernels.patterns import Column, Local
from longstride.kernels.selections import rows_sent
from longstride.launcher.config import RunConfig, load_config


def held(found: list[dict[str, Any]], ranks: int, folder: Path, fake: bool = False) -> None:
    """Asserts that every rank counts what is predicted of every case."""
    for rank, counted in enumerate(measured(found, ranks, folder, fake)):
        for case, own in zip(found, counted, strict=True):
            assert not differences(case, ranks, own, rank)
            assert ranks == 1 or sum(own["bytes"]["deepspeed"].values()) > 0


def test_two_processes_send_what_is_predicted(tmp_path: Path) -> None:
    small = [
        {"title": "ZeRO 1", "config": configuration(1, "bf16", 1, 2, {})},
        {"title": "ZeRO 2", "config": configuration(2, "fp16", 2, 2, {})},
        {"title": "ZeRO 3", "config": configuration(3, "fp32", 2, 2, STAGE_3["released, none ahead"])},
        shared("fixed, 2 key heads", 2, 2, "heads"),
        shared("fixed", 2, 2, "keys"),
        shared("strided", 2, 2, "auto", 2, activation_checkpointing=True),
    ]
    held(small, 2, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_and_precision_sends_what_is_predicted(ranks: int, tmp_path: Path) -> None:
    held(cases(ranks), ranks, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [8, 64])
def test_deepspeed_asks_the_first_of_many_ranks_for_what_is_predicted(ranks: int, tmp_path: Path) -> None:
    held(cases(ranks), ranks, tmp_path, fake=True)


def test_a_context_that_nobody_shares_is_not_exchanged() -> None:
    assert exchanges(load_config("paper_small", ["train.sequence_parallel=1"]), 0, 1) == []


def test_masks_tell_the_rows_that_lists_send() -> None:
    patterns = (Local(7), Column(8), Column(8), Local(7))
    for sections in (2, 3, 4):
        assert rows_by_masks(patterns, 2, 48, sections) == rows_sent(patterns, 2, 48, sections).tolist()


def test_what_is_not_counted_is_refused() -> None:
    config = load_config("enwik8_routing", ["model.layers=2", "train.sequence_parallel=2"])
    with pytest.raises(ConfigError, match="not counted"):
        exchanges(config, 0, 1)


def test_rings_send_each_share_as_often_as_it_goes_round() -> None:
    assert sent_bytes("all_reduce", 1000, 4) == 1500
    assert sent_bytes("all_gather", 1000, 4) == sent_bytes("reduce_scatter", 1000, 4) == 750
    assert all(sent_bytes(each, 1000, 1) == 0 for each in ("all_reduce", "all_gather", "all_to_all", "broadcast"))


def test_collectives_add_up_by_operation_and_owner() -> None:
    found = [
        Collective("all_reduce", 8, 3),
        Collective("all_reduce", 2, calls=5),
        Collective("all_gather", 6, owner="longstride"),
    ]
    assert message_bytes(found) == {"all_reduce": 26, "all_gather": 6}
    assert message_bytes(found, "deepspeed") == {"all_reduce": 26}
    assert num_calls(found) == {"all_reduce": 8, "all_gather": 1}
    assert total_sent(found, 2) == {"all_reduce": 26.0, "all_gather": 3.0}


def test_stages_send_what_their_definition_says_where_padding_is_nothing() -> None:
    # With P parameters of 2 bytes and many ranks: 2 P for plain data parallelism; the updated weights are 1 P more.
    run = Run(load_config("enwik8_fixed", ["model.layers=3"]))
    unit, ranks = 2 * run.parameters.total, 64
    whole = [sum(total_sent(run.step(ranks, m, stage), ranks).values()) / unit for stage in range(4) for m in (1, 3)]
    share = (ranks - 1) / ranks
    # Stage 3 gathers every weight once in a micro-batch, the reuse distance being longer than the network.
    expected = [2, 2, 3, 3, 3, 7, 2, 6]
    assert whole == pytest.approx([each * share for each in expected], rel=0.02)


def test_weights_that_are_released_are_gathered_again_for_every_pass() -> None:
    changes = [f"deepspeed.zero_optimization.{name}={value}" for name, value in STAGE_3["released, none ahead"].items()]
    passes = {}
    for recomputed in (False, True):
        checkpointing = f"train.activation_checkpointing={str(recomputed).lower()}"
        run = Run(load_config("enwik8_fixed", ["model.layers=3", "deepspeed=zero3_fp16", checkpointing, *changes]))
        gathered = sum(each.num_bytes for each in run.step(8, 1) if each.what == "weights")
        passes[recomputed] = gathered / (2 * run.parameters.total)
        blocks = sum(count for name, count in run.parameters.numel.items() if name.startswith("blocks."))
    assert passes[False] == pytest.approx(2, rel=0.01)  # forward and backward
    assert passes[True] == pytest.approx(2 + blocks / run.parameters.total, rel=0.01)  # what is recomputed


def test_settings_that_are_not_modelled_are_refused() -> None:
    config = configuration(3, "bf16", 1, 2, {"zero_quantized_weights": True})
    with pytest.raises(ConfigError, match=r"zero_quantized_weights=.*not modelled"):
        Run(RunConfig.model_validate(config))
