"""Attention to where the last tokens came before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels.selections import selection_mask
from longstride.sparse_model import Session, SparseTransformer
from tests.harness.configs import small


def model_of(window: int, order: int, matches: int, **changes: Any) -> SparseTransformer:
    attention = {"type": "match", "window": window, "order": order, "matches": matches}
    torch.manual_seed(0)
    return SparseTransformer(small(**{"layers": 1, "attention": attention, **changes})).double().eval()


def reads_of(tokens: list[int], begins: list[int], window: int, order: int, matches: int) -> list[list[int]]:
    """Return the rows that each row reads, from the definition: row j holds token j - 1."""
    rows = []
    for i in range(len(tokens)):
        start = max(begin for begin in begins if begin <= i)
        near = list(range(max(start, i - window + 1), i + 1))

        def last(row: int, start: int = start) -> list[int | None]:
            return [tokens[t] if t >= start else None for t in range(row - order, row)]

        far = [j for j in range(start + 1, i - window + 1) if last(j - 1) == last(i)]
        rows.append(far[-matches:] + near)
    return rows


@pytest.mark.parametrize("begins", [[0], [0, 1, 17, 30]])
@pytest.mark.parametrize(("window", "order", "matches"), [(1, 2, 100), (3, 2, 2), (4, 3, 5), (40, 2, 3), (39, 2, 3)])
def test_rows_read_their_window_and_what_followed_their_last_tokens(
    window: int, order: int, matches: int, begins: list[int]
) -> None:
    tokens = torch.randint(3, (2, 40), generator=torch.Generator().manual_seed(order))
    places = torch.arange(40) - torch.tensor([max(b for b in begins if b <= i) for i in range(40)])
    model = model_of(window, order, matches)
    (context,) = model.block_contexts(tokens, None if len(begins) == 1 else places.expand(2, -1))
    assert context.selection is not None
    context.selection.check(40)
    found = selection_mask(context.selection, 40)
    for b in range(2):
        wanted = reads_of(tokens[b].tolist(), begins, window, order, matches)
        for head in range(4):
            assert [row.nonzero().flatten().tolist() for row in found[b, head]] == wanted
    bound = model.mixers[0].work(40, 1).pairs
    assert found[0].sum() <= bound <= 4 * sum(min(i + 1, window) + min(matches, max(0, i - window)) for i in range(40))


def test_a_string_of_any_length_is_found_at_any_distance() -> None:
    """All rows of a repetition, after the first tokens of it, read the row that holds the right token, and few else."""
    tokens = torch.randint(256, (1, 500), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    model = model_of(2, 4, 3, context=1_000)
    (context,) = model.block_contexts(tokens)
    assert context.selection is not None
    found = selection_mask(context.selection, 1_000)[0, 0]
    rows = torch.arange(504, 1_000)
    assert found[rows, rows - 499].all()
    assert found[rows].sum() == 3 * len(rows)


@pytest.mark.parametrize("ngrams", [None, {"orders": [3, 6], "rows": 97}])
@pytest.mark.parametrize("orders", [[2], [5, 2]])
def test_steps_and_passes_give_the_logits_of_a_whole_context(orders: list[int], ngrams: Any) -> None:
    """With tables that look further back than the matches, and less far."""
    attention = [{"type": "match", "window": 2, "order": order, "matches": 4} for order in orders]
    model = model_of(1, 2, 1, attention=attention, layers=2, vocabulary=3, ngrams=ngrams)
    tokens = torch.randint(3, (2, 40), generator=torch.Generator().manual_seed(3))
    whole: Any = model(tokens)
    for cut in (0, 1, 7, 30):
        session = Session(model, 2, back=None)
        session.prefill(tokens[:, :cut])
        rows: list[Tensor] = [session.logits]
        for place in range(cut, 39):
            session.append(tokens[:, place])
            rows.append(session.logits)
        torch.testing.assert_close(torch.stack(rows, 1), whole[:, cut:])
        session.truncate(5)
        torch.testing.assert_close(session.extend(tokens[:, 5:33]), whole[:, 6:34])


def test_a_call_without_tokens_is_refused() -> None:
    mixer = model_of(4, 2, 3).mixers[0]
    with pytest.raises(ValueError, match=r"^matches follow from tokens: call with a context of"):
        mixer(torch.zeros(1, 40, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^matches follow from tokens"):
        mixer.weights(torch.zeros(1, 40, 64, dtype=torch.float64))(torch.arange(3), 0)
