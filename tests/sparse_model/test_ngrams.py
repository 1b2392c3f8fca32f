"""Hash n-gram embeddings: the hash, what a row depends on, and the rows of generation."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.ngrams import Ngrams
from tests.harness.configs import small

TABLES = {"orders": [2, 3, 5], "rows": 70_000}  # the pairs of bytes have rows of their own, longer n-grams share some


def drawn(**changes: Any) -> SparseTransformer:
    """A small model whose tables and logits are random too."""
    torch.manual_seed(0)
    model = SparseTransformer(small(ngrams=TABLES, **changes)).eval()
    assert model.embedding.ngrams is not None
    for weight in (model.embedding.ngrams.rows, model.logits.weight):
        torch.nn.init.normal_(weight, std=0.3)
    return model


def row_by_integers(before: list[int], order: int, number: int, tables: Ngrams, vocabulary: int) -> int:
    """The row of the tokens before a position, as the docstring of ``Ngrams`` has it, in Python's integers."""
    base = next(base for base in range(vocabulary + 1, vocabulary + 3) if base % 2)
    newest_first = [0 if token < 0 else token + 1 for token in reversed(before)][:order]
    key = sum(token * base**place for place, token in enumerate(newest_first)) % 2**64
    if base**order > tables.num_rows:
        x = key * (2 * order + 1) * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 % 2**64
        key = (x >> 33) * tables.num_rows >> 31
    return number * tables.num_rows + key


@pytest.mark.parametrize("vocabulary", [2, 255, 256, 70_000])
def test_rows_are_those_of_the_written_hash(vocabulary: int) -> None:
    torch.manual_seed(0)
    tables = Ngrams((2, 3, 12), 4096, vocabulary, 1)
    before = torch.cat([torch.full((2, 12), -1), torch.randint(vocabulary, (2, 19))], 1)
    ids = tables.ids(before)
    assert ids.shape == (2, 20, 3)
    for context, rows in zip(before.tolist(), ids.tolist(), strict=True):
        for position, found in enumerate(rows):
            window = context[position : position + 12]
            pairs = enumerate(tables.orders)
            assert found == [row_by_integers(window, order, n, tables, vocabulary) for n, order in pairs]


def test_hash_is_what_it_was() -> None:
    """A saved model's rows lie where this hash finds them: another one would be another format."""
    tables = Ngrams((2, 3, 6), 70_000, 256, 1)
    before = torch.tensor([[-1] * 6 + list(b"sparse")])
    assert tables.ids(before)[0].tolist() == [
        [0, 70000, 140000],
        [116, 104788, 207400],
        [29925, 105519, 195539],
        [29139, 110944, 172546],
        [25301, 123641, 153262],
        [29671, 106011, 191799],
        [29914, 110862, 200913],
    ]


def test_rows_are_shared_no_more_than_by_chance() -> None:
    tables = Ngrams((2, 4), 65_536, 256, 1)
    grams = torch.cartesian_prod(torch.arange(97, 123), torch.arange(97, 123), *[torch.arange(97, 105)] * 2)
    found = tables.ids(grams)[:, 0, 1].unique().numel()
    chance = 65_536 * (1 - (1 - 1 / 65_536) ** len(grams))
    assert found == pytest.approx(chance, rel=0.01)


def test_no_row_depends_on_its_own_token_or_a_later_one() -> None:
    model = drawn()
    tokens = torch.randint(256, (2, 40))
    rows = model.embedding(tokens)
    for position in (0, 1, 4, 39):
        changed = tokens.clone()
        changed[:, position:] = (changed[:, position:] + 1) % 256
        assert torch.equal(model.embedding(changed)[:, : position + 1], rows[:, : position + 1])
        if position < 35:
            later = (model.embedding(changed)[:, position + 1 :] != rows[:, position + 1 :]).any(2)
            assert bool(later.all())


def test_tables_begin_at_zero_and_change_no_other_value() -> None:
    torch.manual_seed(0)
    plain = SparseTransformer(small())
    torch.manual_seed(0)
    model = SparseTransformer(config := small(ngrams=TABLES))
    tables = model.embedding.ngrams
    assert tables is not None and not bool(tables.rows.any()) and tables.rows.shape == (3 * 70_000, config.width)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in plain.state_dict().items())
    extra = SparseTransformer.num_parameters(config) - SparseTransformer.num_parameters(small())
    assert extra == tables.rows.numel()
    tokens = torch.randint(256, (1, 40))
    assert torch.equal(model.embedding(tokens), plain.embedding(tokens))


def test_gradients_are_those_of_sums_of_rows() -> None:
    model = drawn()
    tables = model.embedding.ngrams
    assert tables is not None
    tokens = torch.randint(256, (2, 40))
    model.embedding(tokens).square().sum().backward()
    ids = tables.ids(F.pad(tokens[:, :-1], (5, 0), value=-1))
    again = drawn().embedding
    assert again.ngrams is not None
    again.ngrams.reader = lambda *_: again.ngrams.rows[ids].sum(2)  # type: ignore[union-attr]
    again(tokens).square().sum().backward()
    assert tables.rows.grad is not None and again.ngrams.rows.grad is not None
    torch.testing.assert_close(tables.rows.grad, again.ngrams.rows.grad)


def test_configuration_is_written_only_where_it_is_asked_for() -> None:
    assert "ngrams" not in small().model_dump(mode="json")
    config = small(ngrams=TABLES)
    assert config.model_dump(mode="json")["ngrams"] == TABLES
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
