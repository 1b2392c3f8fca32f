"""Native sparse attention. Letters: B batch, H heads, K heads of keys, N positions, D head width."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstride.kernels.selections import chosen_blocks, selection_mask
from longstride.sparse_model.mixers.memories import nsa
from longstride.sparse_model.part import BlockContext, places_of
from longstride.testing import check
from tests.harness.configs import small
from tests.sparse_model.test_compressed import LENGTHS, OPTIONS, Summaries, assert_equals_loops, random_mixer, turned

# Positions of a summary and between them, of a chosen block, blocks that are chosen, the window.
SIZES = [(4, 2, 4, 4, 3), (2, 2, 6, 5, 7), (6, 2, 8, 3, 2), (3, 1, 3, 6, 1)]


def mixer_of(block: int, distance: int, selected_block: int, selected: int, window: int, **changes: Any) -> Any:
    attention = {
        "type": "nsa", "block": block, "distance": distance, "selected_block": selected_block, "selected": selected,
        "window": window, "key_value_heads": 2,
    }  # fmt: skip
    return random_mixer(attention, **changes)


def attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return softmax attention of one query (D,); 0 without keys."""
    if not keys:
        return torch.zeros_like(query[:1]).expand(16)
    return torch.softmax(torch.stack(keys) @ query / len(query) ** 0.5, 0) @ torch.stack(values)


def chosen_by(config: Any, weights: list[Tensor], place: int) -> set[int]:
    """Return the blocks of a document that the query at a place reads, from its group's weights of the summaries."""
    own, scores = place // config.selected_block, {}
    for block in range(1, own - 1):
        score = 0.0
        for unit in range(block * config.selected_block, (block + 1) * config.selected_block, config.distance):
            for number, weight in enumerate(sum(weights).tolist() if weights[0].numel() else []):
                if number * config.distance <= unit < number * config.distance + config.block:
                    score += weight
        scores[block] = score
    best = sorted(scores, key=lambda block: (-scores[block], block))[: config.selected - 3]
    return {block for block in (own, own - 1, 0, *best) if block >= 0}


def by_loops(mixer: Any, h: Tensor, begins: list[int]) -> tuple[Tensor, list[list[set[int]]]]:
    """Return rows (N, C) of one context (N, C), and the positions of chosen blocks by query and head of keys."""
    config, rows, reads = mixer.config, [], []
    q, *branches = mixer.query_key_value(h).split(mixer.widths, -1)
    q = q.unflatten(1, (4, -1))
    k_near, v_near, k_chosen, v_chosen, k_all, v_all = (branches[i].unflatten(1, (2, -1)) for i in (1, 4, 0, 3, 2, 5))
    begin_of = [max(start for start in begins if start <= i) for i in range(len(h))]

    def turned_rows(k: Tensor) -> list[Tensor]:
        return [torch.stack([turned(mixer, key, i - begin_of[i]) for key in row]) for i, row in enumerate(k)]

    near_keys, chosen_keys, summaries = turned_rows(k_near), turned_rows(k_chosen), Summaries(mixer, k_all, v_all)
    gates = mixer.gates(h).sigmoid().unflatten(1, (3, 4))
    for i in range(len(h)):
        begin = begin_of[i]
        queries = [turned(mixer, query, i - begin) for query in q[i]]
        pairs, heads = summaries.before(i, begin), []
        reads.append([])
        for shared in range(2):
            group = queries[2 * shared : 2 * shared + 2]
            keys, values = ([pair[side][shared] for pair in pairs] for side in (0, 1))
            scores = [torch.stack([key @ query for key in keys]) if keys else query[:0] for query in group]
            weights = [torch.softmax(score.detach() / q.shape[2] ** 0.5, 0) for score in scores]
            blocks = chosen_by(config, weights, i - begin)
            places = [j for j in range(begin, i + 1) if (j - begin) // config.selected_block in blocks]
            window = range(max(begin, i - config.window + 1), i + 1)
            reads[-1].append(set(places))
            for head, query in enumerate(group, 2 * shared):
                rows_of_branches = (
                    attended(query, [chosen_keys[j][shared] for j in places], [v_chosen[j, shared] for j in places]),
                    attended(query, [near_keys[j][shared] for j in window], [v_near[j, shared] for j in window]),
                    attended(query, keys, values),
                )
                heads.append(sum(gates[i, branch, head] * row for branch, row in enumerate(rows_of_branches)))
        rows.append(mixer.projection(torch.cat(heads)))
    return torch.stack(rows), reads


def assert_equals(mixer: Any, length: int, begins: list[int], context: BlockContext) -> None:
    assert_equals_loops(mixer, length, begins, context, lambda *inputs: by_loops(*inputs)[0], 1e-11)


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        (SIZES[0], [*range(1, 22), 33]),  # every remainder of up to five blocks
        *((sizes, [1, 2, 7, 23, 33]) for sizes in SIZES[1:]),
        pytest.param(SIZES[0], LENGTHS, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_attention_equals_its_definition(sizes: tuple[int, ...], lengths: list[int]) -> None:
    mixer = mixer_of(*sizes)
    for length in lengths:
        assert_equals(mixer, length, [0], BlockContext())


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        pytest.param(sizes, changes, marks=[pytest.mark.campaign] if (i + j) % 3 else [])
        for i, sizes in enumerate(SIZES)
        for j, changes in enumerate(({}, OPTIONS, {"bias": False, "rotary": {}}))
    ],
    ids=str,
)
def test_documents_are_contexts_of_their_own(sizes: tuple[int, ...], changes: dict[str, Any]) -> None:
    begins = [0, 1, 3, 10, 14, 47]
    is_begin = torch.zeros(1, 53, dtype=torch.bool)
    is_begin[:, begins] = True
    mixer = mixer_of(*sizes, **changes)
    assert_equals(mixer, 53, begins, BlockContext(places=places_of(is_begin)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chosen_blocks_are_those_of_the_definition(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with few scores at once, and pairs are counted as they are."""
    mixer, length = mixer_of(*sizes), 59
    h = torch.randn(1, length, 64, dtype=torch.float64)
    q, keys, values = mixer.branch_heads(h, slice(length))
    grid = mixer.compression.grid(length, None, h.device)
    summaries, _ = mixer.compression(keys[2], values[2], grid)
    last = (length - 1) // mixer.config.selected_block
    numbers = mixer.choices(q, summaries, grid, last)
    selection = chosen_blocks(numbers, mixer.config.selected_block)
    selection.check(length)
    mask = selection_mask(selection, length)[0]
    _, reads = by_loops(mixer, h[0], [0])
    for i in range(length):
        assert [set(row.nonzero().flatten().tolist()) for row in mask[:, i]] == reads[i]
    window = sum(min(i + 1, mixer.config.window) for i in range(length))
    blocks = int(grid.high.sum())
    assert mixer.num_pairs(length) == 2 * int(mask.sum()) + 4 * (window + blocks)
    monkeypatch.setattr(nsa, "SCORES", 7 * 4 * summaries.shape[2])
    assert torch.equal(mixer.choices(q, summaries, grid, last), numbers)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_row_depends_on_a_later_position(sizes: tuple[int, ...]) -> None:
    """Exactly, at every remainder; and pictures show what a head reads."""
    mixer, length = mixer_of(*sizes), 26
    h = torch.randn(1, length, 64, dtype=torch.float64)
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: mixer(x).rows.sum((0, 2)), h)
    depends = jacobian[:, 0].any(-1)  # (N, N)
    assert not depends.triu(1).any()
    reads = torch.stack([mixer.reads(h, head)(torch.arange(length)) for head in range(4)]).any(0)
    assert torch.equal(depends, reads)


def test_equal_scores_choose_the_earlier_block() -> None:
    mixer = mixer_of(2, 2, 2, 5, 1)
    for parameter in mixer.compression.parameters():
        nn.init.zeros_(parameter)
    h = torch.randn(1, 20, 64, dtype=torch.float64)
    q, keys, values = mixer.branch_heads(h, slice(20))
    grid = mixer.compression.grid(20, None, h.device)
    summaries, _ = mixer.compression(keys[2], values[2], grid)
    numbers = mixer.choices(q, summaries, grid, 9)[0, 0]
    assert numbers[::2].tolist() == [
        [-1, -1, -1, -1], [0, -1, -1, -1], [1, 0, -1, -1], [2, 0, 1, -1], *([i, 0, 1, 2] for i in range(3, 9)),
    ]  # fmt: skip


def test_the_conformance_suite_holds_for_one_head_of_keys() -> None:
    """Of several heads, and with all options: a system of tests/harness/configs.py."""
    names = ("block", "distance", "selected_block", "selected", "window")
    attention = {"type": "nsa", **dict(zip(names, SIZES[2], strict=True)), "key_value_heads": 1}
    results = check(small(layers=1, context=33, rotary={}, attention=attention))
    assert [title for title, result in results.items() if result != "holds"] == ["sections", "keys", "weights"]
