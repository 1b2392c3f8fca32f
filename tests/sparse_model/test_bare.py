"""What is called bare computes what the module computes, unless someone has put something around it."""

import pytest
import torch
from torch import Tensor, nn

from longstride.sparse_model.session import bare
from tests.sparse_model.test_transformer import awake

TOKENS = torch.arange(40).view(1, 40)


@torch.no_grad()
def test_it_is_the_same_code_over_the_same_tensors() -> None:
    model = awake()
    twin = bare(model)
    assert type(twin) is not type(model) and isinstance(twin, type(model))
    assert torch.equal(twin(TOKENS), model(TOKENS))
    model.blocks[0].feed_forward.expand.weight.mul_(2)
    assert torch.equal(twin(TOKENS), model(TOKENS))
    assert [p is q for p, q in zip(twin.parameters(), model.parameters(), strict=True)]
    assert type(model).__call__ is nn.Module.__call__


@torch.no_grad()
def test_parts_with_something_around_them_are_called_as_ever() -> None:
    model = awake()
    seen: list[str] = []
    model.blocks[0].attention.projection.register_forward_hook(lambda *_: seen.append("hook"))
    model.blocks[1].feed_forward.expand.register_forward_pre_hook(lambda *_: seen.append("before"))
    forward = model.blocks[2].attention_norm.forward

    def replaced(h: Tensor) -> Tensor:
        seen.append("forward")
        return forward(h)

    model.blocks[2].attention_norm.forward = replaced
    bare(model)(TOKENS)
    assert seen == ["hook", "before", "forward"]


@torch.no_grad()
def test_a_part_in_several_places_is_one_part_and_none_is_none() -> None:
    linear = nn.Linear(4, 4)
    twice = nn.ModuleList([linear, linear])
    twice.register_module("nothing", None)
    twin = bare(twice)
    assert len(twin) == len(twice) and twin[0] is twin[1] and twin.nothing is None
    x = torch.randn(2, 4)
    assert torch.equal(bare(nn.Sequential(linear, nn.ReLU(), linear))(x), linear(linear(x).relu()))


@torch.no_grad()
def test_what_is_put_around_all_modules_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = awake()
    seen: list[str] = []
    with nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(type(module).__name__)):
        bare(model)(TOKENS)
    assert seen.count("Linear") == 4 * model.config.layers
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    doubled = bare(model)(TOKENS)
    assert torch.equal(doubled, model(TOKENS))
    monkeypatch.undo()
    found = bare(model)(TOKENS)
    assert torch.equal(found, model(TOKENS)) and not torch.equal(found, doubled)
