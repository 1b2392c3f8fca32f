"""Learned indexers in models of transformers, with tiny random weights, against sdpa under their mask."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.kernels.indexed import choose_keys
from longstride.kernels.selections import listed_positions
from tests.clients.test_attention_in_transformers import assert_rounded, build, refused, tokens
from tests.harness.clients import client
from tests.harness.runs import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

attention = client(
    "transformers",
    "`add_indexers` in Llama and Qwen3, all keys or few",
    "sdpa's logits and gradients under the chosen keys' mask, within 1e-12 in fp64",
)
stages = client(
    "transformers",
    "`add_indexers`: training in two stages, caches, `load_indexers`",
    "first no other weight changes; tokens without a cache; equal bits",
)
NAMES = ["LlamaConfig", "Qwen3Config"]
LENGTH = 50
FEW = [{"keys": 7}, {"keys": 12, "block": 4, "window": 6, "index_heads": 3, "index_width": 64}]


def with_indexers(name: str, keys: int = 7, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return the model of ``build`` in training mode, with indexers whose weights let their choice matter."""
    from longstride.hub import add_indexers

    model = build(name, "sdpa", dtype=dtype)
    add_indexers(model, keys, **options)
    for parameter in indexer_parameters(model):
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.shape[0]))
    return model.train()


def indexer_parameters(model: Any) -> list[Any]:
    return [parameter for name, parameter in model.named_parameters() if ".indexer." in name]


def other_parameters(model: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if ".indexer." not in name}


def run_and_record(model: Any, inputs: Tensor) -> tuple[Tensor, list[Any]]:
    """Return the logits, and the index of each layer."""
    record: list[Any] = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda *call: record.append(call[2])) for layer in layers(model)
    ]
    logits = model(inputs, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, record


def layers(model: Any) -> Any:
    return model.model.layers


def scores_of(index: Any) -> Tensor:
    q, k, weights = index
    return torch.einsum("bnj,bnjm->bnm", weights, torch.einsum("bnji,bmi->bnjm", q, k).relu())


# Attention


@attention
@pytest.mark.parametrize("name", [*NAMES, "GPTNeoXConfig", "GPT2Config", "MistralConfig"])
def test_all_keys_are_dense_attention(name: str) -> None:
    inputs = tokens(2, LENGTH)
    assert_rounded(with_indexers(name, LENGTH)(inputs).logits, build(name, "sdpa")(inputs).logits)


@attention
@pytest.mark.parametrize("options", FEW, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_few_keys_are_sdpa_under_their_mask(name: str, options: dict[str, int]) -> None:
    inputs, ours, theirs = tokens(2, LENGTH), with_indexers(name, **options), build(name, "sdpa").train()
    logits, record = run_and_record(ours, inputs)
    keys, block, window = options["keys"], options.get("block", 1), options.get("window", 1)
    assert len(record) == 2
    for layer, index in zip(layers(theirs), record, strict=True):
        numbers = choose_keys(*index, count=keys // block, block=block, window=window)
        places = listed_positions(numbers, block, torch.arange(LENGTH))
        mask = torch.zeros(2, LENGTH, LENGTH + 1, dtype=torch.bool)
        mask.scatter_(2, places.where(places >= 0, LENGTH).long(), True)
        assert int(mask[..., :-1].sum(-1).max()) <= keys and bool(mask[:, -1, LENGTH - window : -1].all())
        change = {"attention_mask": mask[:, None, :, :-1]}
        layer.self_attn.register_forward_pre_hook(
            lambda _, inputs, options, change=change: (inputs, {**options, **change}), with_kwargs=True
        )
    expected = theirs(inputs, use_cache=False).logits
    assert_rounded(logits, expected)
    ours_by_name, theirs_by_name = other_parameters(ours), dict(theirs.named_parameters())
    grads = torch.autograd.grad(logits.square().sum(), list(ours_by_name.values()))
    expected_grads = torch.autograd.grad(expected.square().sum(), [theirs_by_name[name] for name in ours_by_name])
    assert_rounded(*(torch.cat([grad.flatten() for grad in some]) for some in (grads, expected_grads)))


@pytest.mark.parametrize("width", [8, 24, 40])
def test_scores_depend_on_distances(width: int) -> None:
    """Repeat a token: a score then follows from the distance alone, and differs between distances."""
    model = with_indexers("Qwen3Config", index_width=width)
    slowing = model.model.rotary_emb.inv_freq.double()

    def exact_angles(*_: Any) -> tuple[Tensor, Tensor]:  # transformers rounds them to fp32
        angles = (torch.arange(20)[:, None] * slowing).repeat(1, 2)[None]
        return angles.cos(), angles.sin()

    model.model.rotary_emb.register_forward_hook(exact_angles)
    _, record = run_and_record(model, torch.full((1, 20), 5))
    scores = scores_of(record[0])[0].detach()
    for distance in range(20):
        diagonal = scores.diagonal(-distance)
        assert_rounded(diagonal, diagonal[:1].expand_as(diagonal))
    assert float(scores[-1].std()) > 1e-3


def test_queries_are_rotated_as_the_models_are() -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    model, inputs, rows = with_indexers("Qwen3Config", index_width=24), tokens(2, LENGTH), []
    indexer = layers(model)[0].self_attn.indexer
    indexer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs))
    _, record = run_and_record(model, inputs)
    q, k, _ = indexer.projection(rows[0][0]).split(indexer.widths, -1)
    q, k = apply_rotary_pos_emb(q.unflatten(-1, (4, 24)).transpose(1, 2), k[:, None], *rows[0][1])
    assert_rounded(record[0][0], q.transpose(1, 2))
    assert_rounded(record[0][1], k[:, 0])


# The loss


@stages
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_divergence_from_the_attention(name: str) -> None:
    from transformers import AttentionInterface

    from longstride.hub import sum_indexer_losses

    inputs, model = tokens(2, LENGTH), with_indexers(name, LENGTH)
    _, record = run_and_record(model, inputs)
    attentions = []

    def exact(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, scaling: float, **___: Any) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        weights = (q @ k.mT * scaling).masked_fill(later, -torch.inf).softmax(-1)
        attentions.append(weights)
        return (weights @ v).transpose(1, 2), None

    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    AttentionInterface.register("exact", exact)
    build(name, "exact")(inputs)
    expected = torch.zeros((), dtype=torch.float64)
    for index, weights in zip(record, attentions, strict=True):
        p = weights.mean(1).detach()
        log_index = scores_of(index).masked_fill(later, -torch.inf).log_softmax(-1).masked_fill(later, 0.0)
        expected = expected + (torch.xlogy(p, p) - p * log_index).sum(-1).mean()
    loss = sum_indexer_losses(model)
    assert_rounded(loss, expected)
    grads = (torch.autograd.grad(x, indexer_parameters(model), retain_graph=True) for x in (loss, expected))
    assert_rounded(*(torch.cat([grad.flatten() for grad in some]) for some in grads))


@pytest.mark.parametrize("keys", [7, LENGTH])
@pytest.mark.parametrize("name", NAMES)
def test_each_loss_reaches_its_own_parameters(name: str, keys: int) -> None:
    from longstride.hub import sum_indexer_losses

    model, inputs = with_indexers(name, keys), tokens(2, LENGTH)
    model(inputs, labels=inputs).loss.backward()
    assert all(parameter.grad is None for parameter in indexer_parameters(model))
    assert all(bool(parameter.grad.any()) for parameter in other_parameters(model).values())
    model.zero_grad()
    sum_indexer_losses(model).backward()
    assert all(bool(parameter.grad.any()) for parameter in indexer_parameters(model))
    assert all(parameter.grad is None for parameter in other_parameters(model).values())


def test_checkpointed_layers_have_the_same_gradients() -> None:
    from longstride.hub import sum_indexer_losses

    inputs, grads = tokens(2, LENGTH), []
    for is_checkpointed in (False, True):
        model = with_indexers("LlamaConfig")
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(inputs, labels=inputs, use_cache=False).loss + sum_indexer_losses(model)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@stages
@pytest.mark.parametrize("name", NAMES)
def test_two_stages_train(name: str) -> None:
    from longstride.hub import sum_indexer_losses

    model, inputs = with_indexers(name, LENGTH, torch.float32), tokens(2, LENGTH)
    before = {key: parameter.detach().clone() for key, parameter in other_parameters(model).items()}
    model.requires_grad_(False)
    for parameter in indexer_parameters(model):
        parameter.requires_grad_(True)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(8):
        model(inputs)
        losses.append(step(optimizer, sum_indexer_losses(model)))
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(parameter, before[key]) for key, parameter in other_parameters(model).items())
    model.requires_grad_(True)
    model.config.longstride_indexer["keys"] = 7
    losses = []
    for _ in range(8):
        loss = model(inputs, labels=inputs).loss
        step(optimizer, loss + sum_indexer_losses(model))
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert not any(torch.equal(parameter, before[key]) for key, parameter in other_parameters(model).items())


def step(optimizer: Any, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# Caches and files


@stages
@pytest.mark.parametrize("options", FEW, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_changes_nothing(name: str, options: dict[str, int], past: str) -> None:
    from transformers import DynamicCache

    model, inputs = with_indexers(name, **options).eval(), tokens(2, 13)
    steps = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(inputs, use_cache=False, **steps)
    assert torch.equal(model.generate(inputs, **steps), expected)
    beams = {**steps, "num_beams": 3}
    assert torch.equal(model.generate(inputs, **beams), model.generate(inputs, use_cache=False, **beams))
    assert torch.equal(model.generate(inputs[:1], prompt_lookup_num_tokens=4, **steps), expected[:1])
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with torch.no_grad():
            parts = [model(part, **{past: cache}).logits for part in expected.split([17, 1, 25], 1)]
            assert_rounded(torch.cat(parts, 1), model(expected).logits)


@stages
def test_indexers_are_saved_with_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from longstride.hub import load_indexers

    model, inputs = with_indexers("Qwen3Config", **FEW[1]).eval(), tokens(2, LENGTH)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    load_indexers(again, tmp_path)
    other = with_indexers("Qwen3Config", **FEW[1]).eval()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model(inputs).logits
        assert torch.equal(again(inputs).logits, expected) and torch.equal(other(inputs).logits, expected)
    (tmp_path / "empty").mkdir()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    name = "model.layers.0.self_attn.indexer.projection.weight"
    with pytest.raises(ConfigError, match=f"^{tmp_path}/empty: has no {name}; give a folder .*$"):
        load_indexers(plain, tmp_path / "empty")


# What is refused


def test_what_indexers_cannot_do_is_refused(past: str) -> None:
    from transformers import StaticCache

    from longstride.hub import add_indexers, sum_indexer_losses

    model, inputs = with_indexers("LlamaConfig").eval(), tokens(2, 20)
    for padding in (0, -1):
        shown = torch.ones_like(inputs)
        shown[1, padding] = 0
        message = "attention_mask: indexers read no padding; give texts of equal length, or one at a time"
        refused(message, model, inputs, attention_mask=shown)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    refused(
        "position_ids: indexers read one text a context; .*", model, inputs[:1], position_ids=positions, use_cache=False
    )
    cache = StaticCache(config=model.config, max_cache_len=32)
    refused(
        f"{past}: StaticLayer has no place for keys of indexers; give a new DynamicCache",
        model,
        inputs,
        **{past: cache},
    )
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    refused("attention_mask: a mask of all pairs; .*", model, inputs, attention_mask=mask)
    refused("output_attentions=true: .*", model, inputs, output_attentions=True)
    with pytest.raises(ConfigError, match=r'^model="LlamaForCausalLM": has no losses of indexers; call model.train.*'):
        sum_indexer_losses(model)
    refused('model="LlamaForCausalLM": has indexers; change config.longstride_indexer', lambda: add_indexers(model, 7))
    model.config.longstride_indexer["keys"] = 0
    refused("config.longstride_indexer.keys=0: must be a positive integer", model, inputs)
    sliding = build("MistralConfig", "sdpa", sliding_window=7)
    add_indexers(sliding, 7)
    message = "sliding_window=7: must be None, as indexers choose among all keys"
    refused(message, sliding, inputs, use_cache=False)
    refused(f"{past}: DynamicSlidingWindowLayer has no place for keys of indexers; .*", sliding, inputs)
    plain = build("LlamaConfig", "longstride_indexed")
    refused('attn_implementation="longstride_indexed": this model has no indexers; call add_indexers', plain, inputs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"keys": 10, "block": 4}, "keys=10: must be a multiple of block=4; nearest 8"),
        ({"keys": 8, "block": 4, "window": 6}, "window=6: may lie in blocks of 12 positions; take keys of at least .*"),
        ({"keys": 8, "index_heads": 1.5}, "index_heads=1.5: must be a positive integer"),
        ({"keys": 8, "index_width": 7}, "index_width=7: must be even; nearest 8"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    refused(message, lambda: with_indexers("LlamaConfig", **options))


def test_the_example_turns_a_dense_model_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "docs" / "examples" / "dense_to_indexed.py"))
    dense, chosen_at_random, chosen, recovered = (
        float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()
    )
    assert dense < chosen < chosen_at_random - 0.3 and chosen < dense + 0.15 and recovered < chosen
