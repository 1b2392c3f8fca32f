"""The moving average of the weights beside the optimiser's moments."""

from types import SimpleNamespace
from typing import Any

import torch

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine.optimizer import Settings, keep_average, make_schedule
from longstride.launcher.models import AVERAGE


def test_average_begins_at_the_first_weights_and_follows_each_step() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    keep_average(optimizer, 0.9)
    expected = [weight.detach().clone() for weight in weights]
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        expected = [0.9 * old + 0.1 * weight.detach() for old, weight in zip(expected, weights, strict=True)]
    for weight, average in zip(weights, expected, strict=True):
        torch.testing.assert_close(optimizer.state[weight][AVERAGE], average)
        assert not torch.equal(weight, average)


def test_adam_is_left_as_it_is_and_its_state_comes_back() -> None:
    results = []
    for decay in (None, 0.9):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        if decay:
            keep_average(optimizer, decay)
        for _ in range(3):
            weight.grad = torch.randn(4)
            optimizer.step()
            again = torch.optim.AdamW([weight], lr=0.1)
            again.load_state_dict(optimizer.state_dict())
            if decay:
                keep_average(again, decay)
                assert torch.equal(again.state[weight][AVERAGE], optimizer.state[weight][AVERAGE])
            optimizer = again
        results.append(weight.detach())
        train = TrainConfig(output="run", steps=3, global_batch=1, micro_batch=1, learning_rate=0.1)
        schedule = make_schedule(optimizer, train)
        engine: Any = SimpleNamespace(lr_scheduler=schedule, optimizer=optimizer, basic_optimizer=optimizer)
        Settings(engine, train).apply(engine, None)
        assert AVERAGE not in optimizer.state[weight]  # it would be saved as if it were kept
    assert torch.equal(*results)
