"""N-gram tables in training, against the same rule with dense gradients; and their way to other ranks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.launcher.config import TrainConfig
from longstride.launcher.engine import states
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.engine.tables import Bags, HeldTable
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer, Table
from tests.harness.configs import small
from tests.harness.stochastic import SAFETY, Roundings

TABLES = {"orders": [2, 4], "rows": 97}  # few: rows are shared within a batch, and some are not touched by it
STEPS = 5
CLIPPED = [1.0, 0.3, 0.9, 1.0, 0.01]  # factors of the steps' gradients


def train_config(**changes: Any) -> TrainConfig:
    settings = {"output": "run", "steps": STEPS, "global_batch": 4, "micro_batch": 2, "learning_rate": 0.01}
    return TrainConfig.model_validate(settings | {"warmup_steps": 2, "ema_decay": 0.75} | changes)


def with_tables(train: TrainConfig) -> tuple[SparseTransformer, HeldTable]:
    """A model of one process whose tables have been taken out."""
    torch.manual_seed(0)
    model = SparseTransformer(small(ngrams=TABLES, dropout=0.0))
    torch.nn.init.normal_(model.logits.weight)
    assert model.embedding.ngrams is not None
    torch.nn.init.normal_(model.embedding.ngrams.rows, std=0.1)
    return model, HeldTable(states.TABLES, model.embedding.ngrams, train, Ranks(), sharded=False)


class DenseTables:
    """The rule on a whole parameter and its dense gradient: what every row's moments and average go through."""

    def __init__(self, rows: torch.nn.Parameter, train: TrainConfig) -> None:
        self.rows, self.train = rows, train
        self.second, self.touches = torch.zeros(2, len(rows), dtype=rows.dtype)
        self.average = rows.detach().clone()
        self.squares: list[float] = []

    @torch.no_grad()
    def step(self, number: int, scale: float) -> None:
        assert self.rows.grad is not None and self.train.ema_decay is not None
        gradient = self.rows.grad / scale * CLIPPED[number]
        square = gradient.square().mean(1)
        moved = square > 0
        self.touches += moved
        self.second = torch.where(moved, 0.95 * self.second + 0.05 * square, self.second)
        size = (self.second / (1 - 0.95 ** self.touches.clamp(min=1))).sqrt()
        rate = self.train.rate_of("tables") * rate_factor(self.train, number)
        self.rows -= rate * torch.where(moved[:, None], gradient / size[:, None], 0.0)
        self.average += (1 - self.train.ema_decay) * (self.rows - self.average)
        self.rows.grad = None


def batches(scale: float) -> list[list[tuple[Tensor, float]]]:
    """Micro-batches of few letters, as tokens and what their loss is multiplied by, for each step."""
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randint(97, 105, (2, 40), generator=generator), scale / 160) for _ in range(2)] for _ in range(STEPS)
    ]


def loss(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """The sum of nats without those of the last positions, as of contexts that are padded."""
    return model(tokens, return_nats=True)[:, :30].sum()


def dense_steps(model: SparseTransformer, rows: Tensor, train: TrainConfig) -> DenseTables:
    """The steps of a run in fp64, of which the last but one is not taken, by dense gradients."""
    plain = SparseTransformer(model.config).double()
    plain.load_state_dict(model.state_dict() | {states.TABLES: rows})
    assert plain.embedding.ngrams is not None
    dense = DenseTables(plain.embedding.ngrams.rows, train)
    for number, parts in enumerate(batches(scale=64.0)):
        for tokens, factor in parts:
            (loss(plain, tokens) * factor).backward()
        assert dense.rows.grad is not None
        dense.squares.append(float((dense.rows.grad / 64.0).square().sum()))
        if number == STEPS - 2:
            dense.rows.grad = None
        else:
            dense.step(number, 64.0)
    return dense


def test_steps_are_those_of_dense_gradients() -> None:
    train = train_config(optimizer={"type": "adamw", "rates": {"tables": 0.05}})
    model, tables = with_tables(train)
    before = tables.rows.clone()
    exact = dense_steps(model, before, train)
    with Roundings(torch.float32):
        rounded = dense_steps(model, before, train)
    for number, parts in enumerate(batches(scale=64.0)):
        for tokens, factor in parts:
            (loss(model, tokens) * factor).backward()
        squares = tables.reduce(64.0)
        assert float(squares) == pytest.approx(exact.squares[number], rel=1e-4)
        tables.forget() if number == STEPS - 2 else tables.step(number, CLIPPED[number])
    touched = exact.touches > 0
    assert 0 < int(touched.sum()) < len(touched) and int(exact.touches.max()) == STEPS - 1
    assert torch.equal(tables.rows[~touched], before[~touched])
    saved = tables.share()
    assert torch.equal(saved["touches"].double(), exact.touches) and float(saved["steps"]) == STEPS - 1
    assert bool((saved["ema_step"] < STEPS - 1).any())  # some stood still, and their average is behind
    average = states.advance_average(saved["ema"], saved["fp32"], 0.75, saved["steps"] - saved["ema_step"])
    for found, name in ((tables.rows, "rows"), (average, "average")):
        error, explained = (x.detach() - getattr(exact, name).detach() for x in (found, getattr(rounded, name)))
        assert error.square().mean() <= (SAFETY * explained).square().mean()


def test_padding_touches_no_row() -> None:
    """Nor the average, the moment or the count of a row: to the bit, whatever stands in the padding."""
    real = torch.arange(40) < torch.tensor([40, 9])[:, None]
    results = []
    for padding in (97, 98):
        model, tables = with_tables(train_config())
        for number, parts in enumerate(batches(1.0)[:3]):
            tokens = parts[0][0].where(real, padding)
            model(tokens, return_nats=True, real=real).sum().backward()
            tables.reduce(1.0)
            tables.step(number, 1.0)
        results.append(tables.share())
    assert all(torch.equal(one, results[1][name]) for name, one in results[0].items())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_sums_what_is_real_of_its_rows(ranks: int) -> None:
    ids, gradients = torch.tensor([[0, 97], [5, 99], [5, 97]]), torch.randn(3, 64)
    every, real = {}, torch.tensor([True, False, True])[:, None]
    for rank in range(ranks):
        model = SparseTransformer(small(ngrams=TABLES))
        assert model.embedding.ngrams is not None
        tables = HeldTable(
            states.TABLES, model.embedding.ngrams, train_config(), Ranks(rank, rank, ranks), sharded=True
        )
        touched, sums = tables._sum_by_row(Bags(gradients, ids.where(real, -1)))
        every |= {int(row) * ranks + rank: total for row, total in zip(touched, sums, strict=True)}
    assert sorted(every) == [0, 5, 97]
    for row, wanted in ((0, gradients[0]), (5, gradients[2]), (97, gradients[0] + gradients[2])):
        assert torch.equal(every[row], wanted)


def test_evaluation_keeps_no_gradients() -> None:
    model, tables = with_tables(train_config())
    tokens = batches(1.0)[0][0][0]
    with torch.no_grad():
        model(tokens)
    assert not tables._pending
    loss(model, tokens).backward()
    assert len(tables._pending) == 1


MEMORY = [{"type": "dense"}, {"type": "product_keys", "keys": 9, "top": 5, "heads": 3, "query_width": 8}]


@pytest.mark.parametrize("form", ["plain", "recomputed", "reversible"])
def test_weighted_rows_have_the_gradients_of_a_parameter(form: str) -> None:
    """In several layers, beside n-grams, with padding; each once, however often a block is computed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"ngrams": TABLES, "dropout": 0.0, "feed_forward": MEMORY, "layers": 4}
    model = SparseTransformer(small(**sizes, reversible=form == "reversible")).double()
    torch.nn.init.normal_(model.logits.weight)
    plain = copy.deepcopy(model)
    if form == "recomputed":
        model.activation_checkpoint = partial(checkpoint, use_reentrant=True)
    named = [(f"{path}.rows", module) for path, module in model.named_modules() if isinstance(module, Table)]
    held = {name: HeldTable(name, table, train_config(), Ranks(), sharded=False) for name, table in named}
    assert list(held) == [states.TABLES, *(f"blocks.{number}.feed_forward.values.rows" for number in (1, 3))]
    for table in held.values():
        table.rows = table.rows.double()
    real = torch.arange(40) < torch.tensor([40, 9])[:, None]
    for tokens, _ in batches(1.0)[0]:
        for network in (model, plain):
            network(tokens, return_nats=True, real=real).sum().backward()
    others = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        if name not in held:  # queries and sub-keys learn by the weights
            torch.testing.assert_close(others[name], parameter.grad, rtol=1e-10, atol=1e-12)
            continue
        square = held[name].reduce(1.0)
        reduced = held[name]._reduced
        assert reduced is not None and not held[name]._pending
        gradient = torch.zeros_like(parameter).index_copy_(0, reduced[0], reduced[1].double())
        rounding = 2.0**-24 * 160 * 3 * float(parameter.grad.abs().max())  # fp32 sums over positions and heads
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=rounding)
        assert float(square) == pytest.approx(float(parameter.grad.square().sum()), rel=1e-5)
        assert held[name].share().keys() >= {f"{states.table_prefix(name)}{kind}" for kind in ("fp32", "steps")}


@pytest.mark.parametrize("saved_by", [(1, False), (2, True), (3, False)], ids=str)
@pytest.mark.parametrize("read_by", [(1, True), (3, True), (2, False)], ids=str)
def test_rows_come_through_any_number_of_ranks(saved_by: tuple[int, bool], read_by: tuple[int, bool]) -> None:
    def tables_of(ranks: int, sharded: bool, **changes: Any) -> list[HeldTable]:
        found = []
        for rank in range(ranks):
            model = SparseTransformer(small(ngrams=TABLES))
            assert model.embedding.ngrams is not None
            settings, place = train_config(**changes), Ranks(rank, rank, ranks)
            found.append(HeldTable(states.TABLES, model.embedding.ngrams, settings, place, sharded=sharded))
        return found

    def fill(tables: HeldTable, files: list[dict[str, Tensor]], decay: float | None = 0.75) -> None:
        for first, content in enumerate(files):
            tables.fill(first, len(files), content, decay)

    model, tables = with_tables(train_config())
    for number, parts in enumerate(batches(1.0)[:3]):
        loss(model, parts[0][0]).backward()
        tables.reduce(1.0)
        tables.step(number, 1.0)
    whole = tables.share()
    writers, readers = tables_of(*saved_by), tables_of(*read_by)
    for each in writers:
        fill(each, [whole])
    files = [each.share() for each in writers]
    for each in readers:
        fill(each, files)
    again = tables_of(1, False)[0]
    fill(again, [each.share() for each in readers])
    assert again.share().keys() == whole.keys()
    assert all(torch.equal(again.share()[name], each) for name, each in whole.items())
    without, anew, other = (tables_of(1, False, ema_decay=decay)[0] for decay in (None, 0.5, 0.5))
    fill(without, files)
    assert without.share().keys() == {"fp32", "exp_avg_sq", "touches", "steps"}
    fill(anew, [without.share()], None)
    assert torch.equal(anew.share()["ema"], whole["fp32"])  # begins at the weights
    fill(other, files)
    caught_up = states.advance_average(whole["ema"], whole["fp32"], 0.75, 3 - whole["ema_step"])
    assert torch.equal(other.share()["ema"], caught_up) and bool((other.share()["ema_step"] == 3).all())
