"""The plan of experts that processes divide: its traffic against real exchanges, and its memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.launcher.config import RunConfig
from longstride.launcher.planning import costs
from longstride.launcher.planning.plan import describe, make_plan
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.feed_forwards.experts import Choice, Experts
from longstride.testing.threads import ThreadDivision, in_sections
from tests.harness.configs import model_json, small
from tests.harness.divided import hold_experts

ROUTED = [{"type": "experts", "count": 8}, {"type": "experts", "count": 16, "top": 1, "capacity": 1.5}]


def run_config(size: int, precision: str = "fp32", model: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    model = {"feed_forward": ROUTED, "layers": 3, "dropout": 0.0} if model is None else model
    train = {"output": "run", "steps": 2, "global_batch": 64, "micro_batch": 2, "learning_rate": 0.001} | changes
    content = {
        "model": model_json(**model),
        "data": {"path": "absent"},
        "train": train | {"expert_parallel": size},
        "deepspeed": f"zero1_{precision}",
    }
    return RunConfig.model_validate(
        content | {"deepspeed": json.loads(Path(f"ds_configs/zero1_{precision}.json").read_text())}
    )


@pytest.mark.parametrize("size", [2, 4])
def test_planned_traffic_is_that_of_real_exchanges_in_even_use(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(size)
    route: Callable[..., Choice] = Experts.route

    def evenly(self: Experts, h: Tensor, real: Tensor | None = None) -> Choice:
        choice = route(self, h, real)
        places = torch.arange(choice.chosen.numel()).view(choice.chosen.shape)
        return choice._replace(chosen=places % self.count, gates=torch.full_like(choice.gates, 0.5))

    monkeypatch.setattr(Experts, "route", evenly)

    def work(division: ThreadDivision) -> tuple[int, int, int, int]:
        model = SparseTransformer(config.model)
        hold_experts(model, division)
        tokens = torch.zeros(config.train.micro_batch, config.model.context, dtype=torch.uint8)
        nats = model(tokens, return_nats=True)
        forward = division.calls, division.sent_bytes
        nats.sum().backward()
        return *forward, division.calls - forward[0], division.sent_bytes - forward[1]

    planned = costs.expert_step(config)
    expected = (planned.forward_calls, planned.forward_bytes, planned.backward_calls, planned.backward_bytes)
    assert in_sections(size, work) == size * [expected]


def test_a_process_holds_as_much_of_more_experts_on_as_many_more_processes() -> None:
    held = []
    for count, size in ((8, 1), (16, 2), (64, 8)):
        model = {"layers": 2, "feed_forward": {"type": "experts", "count": count}}
        config = run_config(size, "bf16", model, ema_decay=0.9)
        numel = SparseTransformer.num_parameters(config.model)
        states = costs.states(numel, config, 8, 1)
        experts = sum(
            x.numel()
            for name, x in SparseTransformer(config.model).named_parameters()
            if name.rpartition(".")[2] in Experts.by_expert
        )
        assert states.experts == (2 + 4 + 4 + 8 + 4) * experts // size  # weights, gradients, masters, moments, average
        assert costs.states(numel, config, 8, 0).weights == 2 * (numel - experts) + 4 * costs.buffer_numbers(
            config.model
        )
        held.append(states.experts)
    assert held == 3 * held[:1]


def test_rows_of_a_process_are_bounded_by_capacity_alone() -> None:
    model = {"layers": 1, "feed_forward": {"type": "experts", "count": 8, "top": 1}}
    rows = 2 * small().context
    step = costs.expert_step(run_config(4, model=model))
    assert (step.rows, step.most_rows) == (rows, 4 * rows)
    model["feed_forward"] |= {"capacity": 1.0}  # type: ignore[operator]
    step = costs.expert_step(run_config(4, model=model))
    assert (step.rows, step.most_rows) == (rows, rows)
    plan = make_plan(run_config(4, model=model), [8])
    assert f"{rows} rows in a layer and micro-batch in even use, as planned above; at most {rows}, " in describe(plan)


def test_gshards_largest_model_is_planned() -> None:
    """36 layers, 2,048 experts in every other one, over 2,048 processes: 600 billion weights (Lepikhin et al. 2020)."""
    model = {
        "context": 1024, "layers": 36, "heads": 16, "width": 1024, "feed_forward_ratio": 8,
        "attention": {"type": "dense"},
        "feed_forward": [{"type": "dense"}, {"type": "experts", "count": 2048, "capacity": 2.0}],
    }  # fmt: skip
    config = run_config(2048, "bf16", model, global_batch=4096)
    step, parts = costs.expert_step(config), costs.parameter_parts(config.model)
    assert round(sum(parts.values()) / 1e9) == 619
    assert (step.layers, step.rows, step.most_rows) == (18, 4096, 8192)
    assert costs.states(sum(parts.values()), config, 2048, 1).experts == 18 * step.numel // 2048
