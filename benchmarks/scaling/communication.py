"""Comparison of predicted bytes of a step with those that torch counts.

Tiny runs of every ZeRO stage and precision, with one and two micro-batches, and with sequence parallelism.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import run_ranks
from benchmarks.scaling.collectives import DEEPSPEED, OURS, Collective, message_bytes, num_calls
from benchmarks.scaling.divided import exchanges
from benchmarks.scaling.zero_communication import Run
from longstride.launcher.config import RunConfig, load_config

WORKER = "benchmarks.scaling.communication_worker"
PRECISIONS, STAGES, MICRO_BATCHES = ("fp16", "bf16", "fp32"), (0, 1, 2, 3), (1, 2)
# Settings of stage 3 under which a tiny network shows what large ones do: weights that are not kept, are released
# between the passes, and are fetched ahead or not.
STAGE_3: dict[str, dict[str, int]] = {
    "defaults": {},
    "nothing persistent": {"stage3_param_persistence_threshold": 0},
    "small ones persistent": {"stage3_param_persistence_threshold": 1500},
    "released": {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0},
    "released, none ahead": {
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    },
    "few ahead": {
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 4_000,
        "stage3_prefetch_bucket_size": 3_000,
    },
}
FIXED = {"type": "fixed", "stride": 6, "summary": 2, "combine": "merged"}
STRIDED = {"type": "strided", "stride": 8, "combine": "interleaved"}
SHARED_BY = (2, 3, 4)
# Attention of runs whose contexts are shared; 12 heads, so that 2, 3 and 4 processes divide them.
DIVIDED: dict[str, dict[str, Any]] = {
    "fixed": FIXED,
    "strided": STRIDED,  # whose last layer, the third, is local
    "columns": {"type": "column", "stride": 8},
    "strided, merged": {**STRIDED, "combine": "merged"},
    "a pattern a head": {**STRIDED, "combine": "multihead"},
    "fixed, 2 key heads": {**FIXED, "key_value_heads": 2},
}


def configuration(stage: int, kind: str, micro_batches: int, ranks: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Make a run of three small layers with odd sizes; ``changes`` are of zero_optimization."""
    overrides = [
        "model.context=60",
        "model.layers=3",
        "model.width=36",
        "model.heads=2",
        f"model.attention={json.dumps(FIXED)}",
        "model.embedding.row_width=6",
        "model.backend=reference",
        f"train.global_batch={2 * micro_batches * ranks}",
        "train.micro_batch=2",
        f"deepspeed=zero{stage}_{kind}",
        *(f"deepspeed.zero_optimization.{name}={json.dumps(value)}" for name, value in changes.items()),
    ]
    config = load_config("paper_small", overrides).to_json()
    return {**config, "notes": ""}


def shared(title: str, ranks: int, size: int, exchange: str, stage: int = 0, **train: Any) -> dict[str, Any]:
    """Make a run in which ``size`` processes share each context, with one of the attentions of ``DIVIDED``."""
    config = configuration(stage, "bf16", 2, ranks // size, {})
    config["model"] |= {"context": 96, "heads": 12, "query_key_ratio": 2.0, "attention": DIVIDED[title]}
    if "key heads" in title:
        config["model"] |= {"convolution": 3, "rotary": {"base": 1000}}
    config["train"] |= {"sequence_parallel": size, "sequence_exchange": exchange, **train}
    return {"title": f"ZeRO {stage}, {title}, a context over {size}, by {exchange}", "config": config}


def cases(ranks: int) -> list[dict[str, Any]]:
    """Return the grid for a number of ranks."""
    grid = []

    def add(title: str, stage: int, kind: str, micro_batches: int, changes: dict[str, Any], **train: Any) -> None:
        config = configuration(stage, kind, micro_batches, ranks, changes)
        config["train"] |= train
        grid.append({"title": f"ZeRO {stage}, {kind}, {micro_batches} micro-batches, {title}", "config": config})

    for kind in PRECISIONS:
        for micro_batches in MICRO_BATCHES:
            for stage in STAGES:
                add("defaults", stage, kind, micro_batches, {})
            add("released, none ahead", 3, kind, micro_batches, STAGE_3["released, none ahead"])
    for title, changes in STAGE_3.items():
        add(title, 3, "bf16", 2, changes, activation_checkpointing=True)
    for title in ("nothing persistent", "small ones persistent", "released", "few ahead"):
        add(title, 3, "fp16", 2, STAGE_3[title])
    add("reduced to owners", 2, "fp16", 2, {"use_multi_rank_bucket_allreduce": False})
    sizes = [size for size in SHARED_BY if ranks % size == 0 and ranks <= max(SHARED_BY)]
    for size, exchange in itertools.product(sizes, ("heads", "keys", "auto")):
        grid += [shared(title, ranks, size, exchange) for title in DIVIDED]
        grid += [shared("strided", ranks, size, exchange, stage, activation_checkpointing=True) for stage in (1, 2, 3)]
    return grid


def predicted(case: dict[str, Any], ranks: int, rank: int = 0) -> list[Collective]:
    """Compute a case's collectives by the formulas, for one of its processes."""
    config = RunConfig.model_validate(case["config"])
    train = config.train
    size = train.sequence_parallel or 1
    micro_batches = train.global_batch * size // (train.micro_batch * ranks)
    return Run(config).step(ranks, micro_batches) + exchanges(config, rank % size, micro_batches)


def measured(grid: list[dict[str, Any]], ranks: int, folder: Path, fake: bool = False) -> list[list[dict[str, Any]]]:
    """Count the collectives of every case on every rank: real processes, or one that simulates the first of W."""
    plan = folder / "cases.json"
    plan.write_text(json.dumps(grid))
    fakes = {"FAKE_RANKS": str(ranks)} if fake else {}
    outputs = run_ranks(WORKER, [plan], 1 if fake else ranks, **fakes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def differences(case: dict[str, Any], ranks: int, counted: dict[str, Any], rank: int = 0) -> list[str]:
    """List where a rank's counts differ from the predicted ones: bytes and calls by owner."""
    expected = predicted(case, ranks, rank)
    expected_counts = {
        "bytes": {owner: message_bytes(expected, owner) for owner in (DEEPSPEED, OURS)},
        "calls": {owner: num_calls(expected, owner) for owner in (DEEPSPEED, OURS)},
    }
    return [
        f"{case['title']}, {rank} of {ranks} ranks, {kind}: predicted {expected_counts[kind]}, counted {counted[kind]}"
        for kind in expected_counts
        if expected_counts[kind] != counted[kind]
    ]
