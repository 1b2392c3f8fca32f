"""Sampling: reproducible, within the context, and from the distribution that the logits say."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import Session, SparseTransformer
from longstride.sparse_model.generation import choose, generate, window_start
from tests.harness.configs import ATTENTIONS, small
from tests.sparse_model.test_transformer import awake


@torch.no_grad()
def recomputed(
    model: SparseTransformer, prompt: Tensor, num_tokens: int, generator: torch.Generator | None = None, **settings: Any
) -> Tensor:
    """The specification: the whole context anew for every token."""
    tokens = prompt
    settings = {"temperature": 1.0, "top_k": None, "top_p": None} | settings
    for _ in range(num_tokens):
        window = tokens[:, window_start(model.config, tokens.shape[1]) :]
        logits = model(torch.cat([window, window.new_zeros(len(window), 1)], 1))[:, -1]
        tokens = torch.cat([tokens, choose(logits, generator=generator, **settings)[:, None]], 1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize(
    "name, count, settings",
    [
        ("strided interleaved", 0, {"temperature": 0}),
        ("fixed merged", 1, {"top_k": 20}),
        ("strided multihead", 5, {"temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_samples_are_those_of_recomputing_everything(name: str, count: int, settings: dict[str, Any]) -> None:
    model = awake(attention=ATTENTIONS[name], layers=2).double()
    prompt = torch.randint(256, (2, count), generator=torch.Generator().manual_seed(3))
    found = generate(model, prompt, 40 - count, generator=torch.Generator().manual_seed(4), **settings)
    wanted = recomputed(model, prompt, 40 - count, torch.Generator().manual_seed(4), **settings)
    assert torch.equal(torch.stack(list(found), 1), wanted)


@pytest.mark.parametrize("count", [0, 5, 50])
def test_contexts_with_generators_of_their_own_have_the_samples_that_each_has_alone(count: int) -> None:
    model = awake(layers=2).double()
    prompt = torch.randint(256, (3, count), generator=torch.Generator().manual_seed(3))

    def sampled(rows: slice) -> Tensor:
        generators = [torch.Generator().manual_seed(number) for number in range(3)[rows]]
        # 30 tokens behind 50 slide.
        return torch.stack(list(generate(model, prompt[rows], 30, generator=generators, slide=True)), 1)

    whole = sampled(slice(None))
    for number in range(3):
        one = generate(
            model, prompt[number : number + 1], 30, generator=torch.Generator().manual_seed(number), slide=True
        )
        assert torch.equal(whole[number : number + 1], torch.stack(list(one), 1))


@pytest.mark.parametrize("slide", [False, True])
def test_a_session_that_holds_the_prompt_goes_on_as_one_that_computes_it(slide: bool) -> None:
    model = awake(layers=2)
    prompt, count = torch.tensor([[5, 6, 7]]), 80 if slide else 30

    def session() -> Session:
        begun = Session(model, 1, model.config.context if slide else 33, back=0)
        begun.prefill(prompt)
        return begun

    def sampled(session: Session | None) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.stack(list(generate(model, prompt, count, generator=generator, session=session, slide=slide)), 1)

    assert torch.equal(sampled(session()), sampled(None))
    for wrong in (torch.tensor([[5, 6]]), prompt.repeat(2, 1)):
        with pytest.raises(ValueError, match=r"session of 3 tokens: must hold the prompt \("):
            generate(model, wrong, count, session=session(), slide=slide)


def test_contexts_that_leave_change_nothing_for_the_others() -> None:
    model = awake(layers=2).double()
    prompt = torch.arange(12).view(4, 3)

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(number) for number in range(4)]

    whole = torch.stack(list(generate(model, prompt, 90, generator=generators(), slide=True)), 1)
    sampled = generate(model, prompt, 90, generator=generators(), slide=True)
    found: list[list[int]] = [[], [], [], []]
    left, rows = [0, 1, 2, 3], None
    for number in range(90):  # in contexts of 64
        for row, token in zip(left, sampled.send(rows).tolist(), strict=True):
            found[row].append(token)
        rows = {20: [3, 1, 0], 50: [0, 2], 70: [1]}.get(number)
        left = left if rows is None else [left[row] for row in rows]
    assert left == [0]
    for row, tokens in enumerate(found):
        assert tokens == whole[row, : len(tokens)].tolist()
    assert sorted(map(len, found)) == [21, 51, 71, 90]


@pytest.mark.parametrize("count", [0, 40, 63])
def test_a_context_that_slides_is_that_of_recomputing(count: int) -> None:
    model = awake(layers=2).double()
    prompt = torch.randint(256, (2, count), generator=torch.Generator().manual_seed(3))
    found = generate(model, prompt, 50, temperature=0, slide=True)
    assert torch.equal(torch.stack(list(found), 1), recomputed(model, prompt, 50, temperature=0))


@pytest.mark.parametrize(
    "context, embedding, unit",
    [
        (40, {"type": "text", "row_width": 8}, 8),
        (40, {"type": "audio", "row_width": 12}, 12),
        (40, {"type": "text", "row_width": 40}, 1),
        (48, {"type": "image", "height": 4, "width": 4}, 12),
        (96, {"type": "image", "height": 1, "width": 32}, 1),
        (40, {"type": "learned"}, 1),
        (1, {"type": "text", "row_width": 1}, 1),
    ],
    ids=str,
)
def test_windows_drop_whole_rows_about_half_at_a_time(context: int, embedding: dict[str, Any], unit: int) -> None:
    config = small(context=context, embedding=embedding, attention={"type": "dense"})
    starts = [window_start(config, known) for known in range(5 * context)]
    assert starts[:context] == [0] * context
    for known, (start, later) in enumerate(itertools.pairwise(starts)):
        assert 0 <= known - start < context
        assert start % unit == 0
        if later != start:  # only a full context is cut, and then to a third of it at least, where it has two rows
            assert known + 1 - start == context
            assert later - start <= max(2 * context / 3, (context + 1) / 2)


@pytest.mark.parametrize(
    "settings, kept",
    [({}, 4), ({"top_k": 2}, 2), ({"top_p": 0.5}, 1), ({"top_p": 0.51}, 2), ({"top_k": 3, "top_p": 1.0}, 3)],
)
def test_choices_follow_the_truncated_distribution(settings: dict, kept: int) -> None:
    probability = torch.tensor([0.3, 0.1, 0.5, 0.1]) if kept != 3 else torch.tensor([0.3, 0.05, 0.5, 0.15])
    settings = {"temperature": 1.0, "top_k": None, "top_p": None} | settings
    generator = torch.Generator().manual_seed(0)
    chosen = choose(probability.log().expand(20000, -1), generator=generator, **settings)
    frequency = torch.bincount(chosen, minlength=4) / 20000
    wanted = torch.where(probability >= probability.sort(descending=True).values[kept - 1], probability, 0)
    assert torch.allclose(frequency, wanted / wanted.sum(), atol=4 * 0.5 / 20000**0.5)


def chosen_from(probability: list[float], **settings: Any) -> set[int]:
    """All tokens that come up in many choices."""
    settings = {"temperature": 1.0, "top_k": None, "top_p": None} | settings
    logits = torch.tensor(probability).log().expand(4000, -1)
    return set(choose(logits, generator=torch.Generator().manual_seed(0), **settings).tolist())


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),  # 3 and 4 are equally likely: the lower one stays
        ({"top_k": 4}, {0, 1, 3, 4}),
        ({"top_k": 1000}, {0, 1, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 3, 4}),
        ({"top_p": 1e-300}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"temperature": 1e-310}, {1}),
        ({"temperature": 5e-324, "top_p": 1.0}, {1}),
        ({"temperature": 0, "top_k": 4, "top_p": 0.9}, {1}),
    ],
    ids=str,
)
def test_settings_at_their_ends(settings: dict[str, Any], kept: set[int]) -> None:
    assert chosen_from([0.1, 0.4, 0.0, 0.25, 0.25], **settings) == kept


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(wrong: float, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = wrong
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        choose(logits, temperature, None, None, None)


def test_tokens_without_a_share_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the least uniform number, nor by the greatest below 1."""
    share = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.1, 0.2, 0.0, 0.0, 0.0]])
    for uniform, wanted in ((0.0, [2, 1]), (1 - 2**-53, [4, 2])):
        monkeypatch.setattr(torch, "rand", lambda count, u=uniform, **_: torch.full((count,), u, dtype=torch.float64))
        assert choose(share.log(), 1.0, None, None, None).tolist() == wanted


def test_tokens_come_as_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a token is computed after the token before it was handed out."""
    model = awake()
    rows: list[int] = []
    forward = model.forward_cached
    monkeypatch.setattr(
        model,
        "forward_cached",
        lambda h, caches, first, before: rows.append(first) or forward(h, caches, first, before),
    )
    sampled = generate(model, torch.tensor([[1, 2, 3]]), 4)
    for number in range(4):
        assert len(rows) == (0 if number == 0 else 1 + number)
        next(sampled)
    assert rows == [0, 3, 4, 5, 6] and not list(sampled) and len(rows) == 5


LONG, SHORT = torch.zeros(1, 39).long(), torch.zeros(1, 1).long()


@pytest.mark.parametrize(
    "prompt, settings, messages",
    [
        (LONG, {"num_tokens": 2}, ["prompt and sample are 41 tokens: they must fit in the model's context of 40"]),
        (SHORT, {"temperature": -1.0}, ["temperature=-1.0: must be a number from 0"]),
        (SHORT, {"temperature": float("nan")}, ["temperature=nan: must be a number from 0"]),
        (SHORT, {"temperature": float("inf")}, ["temperature=inf: must be a number from 0"]),
        (SHORT, {"num_tokens": -1}, ["num_tokens=-1: must be an integer of at least 0"]),
        (SHORT, {"num_tokens": 1.0}, ["num_tokens=1.0: must be an integer of at least 0"]),
        (SHORT, {"top_p": float("nan")}, ["top_p=nan: must be above 0 and at most 1"]),
        (SHORT, {"top_p": 0.0}, ["top_p=0.0: must be above 0 and at most 1"]),
        (SHORT, {"top_p": "0.5"}, ["top_p=0.5: must be above 0 and at most 1"]),
        (SHORT, {"top_k": 0}, ["top_k=0: must be an integer of at least 1"]),
        (SHORT, {"top_k": 2.5}, ["top_k=2.5: must be an integer"]),
        (torch.tensor([1, 2]), {}, ["must be (B, N)"]),
        (torch.tensor([[256]]), {}, ["must be 0 to 255"]),
        (torch.tensor([[-1]]), {}, ["must be 0 to 255"]),
        (SHORT.float(), {"num_tokens": 50, "temperature": -1, "top_k": 0, "top_p": 2},
         ["prompt is torch.float32", "51 tokens", "temperature=-1", "top_k=0", "top_p=2"]),
    ],
)  # fmt: skip
def test_all_that_cannot_be_sampled_is_told_in_one_line(
    prompt: Tensor, settings: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        generate(awake(), prompt, **{"num_tokens": 1, **settings})
    assert all(message in str(error.value) for message in messages) and "\n" not in str(error.value), str(error.value)
