"""A cache knows what the full context knows, in every dtype and at every length; test_parts.py has every system."""

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.mixers.cache import KeyValues
from longstride.sparse_model.session import Session, even_length
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS, small
from tests.sparse_model.test_transformer import awake

# Steps and a forward pass add up the same products in another order. Measured: 5 units in the last place of the largest
# logit in fp64 and fp32, and 0.6 in 16 bits, where most of what is rounded is rounded alike.
EXACT = 1e-13  # of the largest logit, in fp64
UNITS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}  # of torch.finfo(dtype).eps


def some_tokens(model: SparseTransformer, batch: int = 2) -> Tensor:
    return torch.randint(
        min(256, model.config.vocabulary), (batch, model.config.context), generator=torch.Generator().manual_seed(1)
    )


def caches(config: ModelConfig, batch: int, length: int) -> list[KeyValues]:
    """Empty ones of every layer."""
    return SparseTransformer(config).new_states(batch, length, torch.device("cpu"), torch.float32)


def step_by_step(session: Session, tokens: Tensor) -> Tensor:
    """The logits of every position from the session's on, (B, n, V)."""
    found = []
    for token in tokens[:, session.position :].T:
        found.append(session.logits)
        session.append(token)
    return torch.stack(found, 1)


def difference(found: Tensor, wanted: Tensor) -> float:
    """The greatest, against the largest logit."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@torch.no_grad()
def check(model: SparseTransformer, tolerance: float, prefilled: tuple[int, ...] = (0, 1, 13)) -> None:
    """Every position, from a beginning of each of these lengths, against one forward pass."""
    tokens = some_tokens(model)
    wanted = model(tokens)
    for count in prefilled:
        session = Session(model, len(tokens))
        session.prefill(tokens[:, :count])
        assert difference(step_by_step(session, tokens), wanted[:, count:]) <= tolerance, f"{count} at once"


PRECISE = {name: {"attention": ATTENTIONS[name]} for name in ("fixed merged", "strided multihead", "summary")}
PRECISE |= {
    name: changes for name, changes in SYSTEMS.items() if "synthesizer" in name or name in ("adaptive span", "entmax")
}
PRECISE |= {"later parts": LATER}


@pytest.mark.parametrize("number, name", [*enumerate(PRECISE)])
def test_steps_are_as_near_as_the_dtype_allows(number: int, name: str) -> None:
    dtype = list(UNITS)[number % 3]
    check(awake(**PRECISE[name]).to(dtype), UNITS[dtype] * torch.finfo(dtype).eps, (0, 13))


@pytest.mark.parametrize("name", ["strided merged", "fixed merged", "local"])
def test_shorter_sessions_give_the_same_rows(name: str) -> None:
    model = awake(attention=ATTENTIONS[name]).double()
    tokens = some_tokens(model)
    with torch.no_grad():
        wanted = model(tokens)
    for length in (1, 7, 8, 9, 21):
        session = Session(model, 2, length)
        assert length <= session.length <= length + 7
        assert difference(step_by_step(session, tokens[:, :length]), wanted[:, :length]) <= EXACT


def test_lengths_are_the_smallest_that_all_patterns_divide() -> None:
    cycle = [{"type": "column", "stride": 6}, {"type": "strided", "stride": 4}, {"type": "local", "window": 5}]
    config = small(context=48, attention=cycle)
    assert [even_length(config, least) for least in (0, 1, 12, 13, 37, 48)] == [12, 12, 12, 24, 48, 48]


def test_flex_is_asked_for_beginnings_alone() -> None:
    config = small(layers=1, backend="flex")
    (cache,) = caches(config, 1, 8)
    row = torch.ones(1, 4, 16)
    assert torch.equal(cache.step(row, row, 3 * row, 0), 3 * row)


def test_a_backend_that_cannot_run_is_refused_before_the_first_row() -> None:
    with pytest.raises(ConfigError, match="backend"):
        KeyValues(torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 8, 16), small().layer_patterns()[0], "flexible")


def test_heads_lie_together_but_where_long_runs_are_read() -> None:
    strided, dense = ({"type": kind} for kind in ("strided", "dense"))
    config = small(context=64, attention=[{**strided, "stride": 8}, dense], layers=2)
    sparse, whole = caches(config, 3, 64)
    assert sparse.keys.shape == whole.keys.shape == (3, 4, 64, 16)
    assert sparse.keys.permute(2, 0, 1, 3).is_contiguous() and whole.keys.is_contiguous()
