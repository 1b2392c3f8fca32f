"""Sampling: reproducible, within the context, and from the distribution that the logits say."""

import pytest
import torch

from sparse_model.generation import choose, generate
from tests.sparse_model.test_transformer import awake


def sample(**settings) -> torch.Tensor:
    model = awake(context=128)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return torch.stack(list(generate(model, prompt, 80, **settings)), dim=1)


def test_greedy_tokens_are_the_most_likely_ones_of_a_full_forward() -> None:
    model = awake(context=128)
    prompt = torch.tensor([[1, 2, 3]])
    found = torch.stack(list(generate(model, prompt, 80, temperature=0)), dim=1)
    tokens = torch.cat([prompt, found], dim=1)
    assert found.shape == (1, 80)
    assert torch.equal(model(tokens)[:, 3:].argmax(-1), found)


def test_an_empty_prompt_starts_from_the_start_vector() -> None:
    model = awake()
    (first,) = generate(model, torch.zeros(2, 0, dtype=torch.int64), 1, temperature=0)
    assert torch.equal(first, model(torch.zeros(2, 1, dtype=torch.int64))[:, 0].argmax(-1))


def test_equal_seeds_give_equal_samples() -> None:
    first, again, other = (sample(generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        (39, {"num_tokens": 2}, "prompt and sample are 41 tokens: they must fit in the model's context of 40"),
        (1, {"num_tokens": 1, "temperature": -1.0}, "temperature=-1.0: must be 0 or more, and finite"),
        (1, {"num_tokens": 1, "temperature": float("nan")}, "temperature=nan: must be 0 or more, and finite"),
        (1, {"num_tokens": 1, "temperature": float("inf")}, "temperature=inf: must be 0 or more, and finite"),
        (1, {"num_tokens": -1}, "num_tokens=-1: must be 0 or more"),
        (1, {"num_tokens": 1, "top_p": float("nan")}, "top_p=nan: must be above 0 and at most 1"),
        (1, {"num_tokens": 1, "top_k": 0}, "top_k=0: must be at least 1"),
        (1, {"num_tokens": 1, "top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompt: int, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(awake(), torch.zeros(1, prompt, dtype=torch.int64), **settings)
