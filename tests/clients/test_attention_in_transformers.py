"""Our attention inside models of transformers, with tiny random weights, against sdpa under the pattern's mask."""

import copy
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern, pattern_from_json, pattern_to_json
from tests.harness.clients import PAGE, client
from tests.harness.oracles import example_patterns, mask_of

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
# Configurations of transformers by name, each with its own options.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "GPTNeoXConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 24},
    "MistralConfig": {"sliding_window": None, "head_dim": 16},
    "GPT2Config": {"n_inner": 96, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
DENSE, FIXED = {"type": "dense"}, {"type": "fixed", "stride": 8, "summary": 2}
IN_TURN = [{"type": "local", "window": 8}, {"type": "column", "stride": 8}]
LENGTH = 50


@pytest.fixture(autouse=True)
def registered() -> None:
    from longstride.hub import register_attention

    register_attention()


def build(name: str, attention: str, pattern: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a tiny model in evaluation mode; the same name and options give the same weights."""
    import transformers

    config = getattr(transformers, name)(**{**SIZES, **MODELS.get(name, {}), **options})
    if pattern is not None:
        config.longstride_pattern = pattern
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # first values are so small that attention would hardly matter
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.5)
    return model.to(dtype).eval()


def both(name: str, *values: Any, **options: Any) -> tuple[Any, Any]:
    """Return the same model with our attention and with sdpa."""
    return build(name, "longstride", *values, **options), build(name, "sdpa", *values, **options)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(0))


def mask(pattern: Pattern, heads: int = 4, length: int = LENGTH) -> Tensor:
    """Return the mask of every head, (1, H, N, N)."""
    return torch.stack([mask_of(pattern.for_head(head), length) for head in range(heads)])[None]


def assert_rounded(result: Tensor, expected: Tensor) -> None:
    """Assert that tensors are equal within rounding: 1e-12 of the largest number in fp64, 1e-6 in fp32."""
    assert result.shape == expected.shape and result.dtype == expected.dtype
    error = float((result - expected).detach().abs().max())
    assert error <= (1e-12 * float(expected.detach().abs().max()) if result.dtype == torch.float64 else 1e-6), error


# Equal to sdpa


@client(
    "transformers",
    '`attn_implementation="longstride"` in six kinds of decoders, `{"type": "dense"}`',
    "sdpa's logits within 1e-6 in fp32, 1e-12 of the largest in fp64",
)
@pytest.mark.parametrize("pattern", [DENSE, FIXED], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_sdpa_under_a_mask(name: str, pattern: Any) -> None:
    check_under_mask(name, pattern, pattern_from_json(pattern))


@client(
    "transformers",
    '`attn_implementation="longstride"`, every pattern, grouped heads, lists of patterns',
    "sdpa's logits and gradients under the pattern's mask, within 1e-6 in fp32, 1e-12 of the largest in fp64",
)
@pytest.mark.parametrize("pattern", example_patterns(), ids=str)
def test_every_pattern_is_sdpa_under_its_mask(pattern: Pattern) -> None:
    check_under_mask("LlamaConfig", pattern_to_json(pattern), pattern)


def check_under_mask(name: str, value: Any, pattern: Pattern) -> None:
    """Compare logits and gradients in fp64 with large weights, and logits in fp32 with transformers' initial ones."""
    ours, theirs = both(name, value)
    inputs = tokens(2, LENGTH)
    losses = []
    for model, of_pairs in ((ours, None), (theirs, mask(pattern).expand(2, -1, -1, -1))):
        output = model(inputs, attention_mask=of_pairs, labels=inputs)
        output.loss.backward()
        losses.append(output)
    assert_rounded(losses[0].logits, losses[1].logits)
    models = (ours, theirs)
    gradients = [torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) for model in models]
    assert_rounded(*gradients)
    single, reference = ours.float(), theirs.float()
    with torch.no_grad():
        torch.manual_seed(0)
        reference.init_weights()
        single.load_state_dict(reference.state_dict())
        result = single(inputs).logits
        assert_rounded(result, reference(inputs, attention_mask=mask(pattern).expand(2, -1, -1, -1)).logits)


def test_layers_take_patterns_in_turn() -> None:
    """Compare models of one layer with each pattern to one of both: the first layer's rows go into the second."""
    ours, theirs = both("LlamaConfig", IN_TURN)
    masks = [mask(pattern_from_json(pattern)).expand(2, -1, -1, -1) for pattern in IN_TURN]
    for layer, of_layer in zip(theirs.model.layers, masks, strict=True):
        layer.register_forward_pre_hook(
            lambda module, arguments, options, of_layer=of_layer: (arguments, {**options, "attention_mask": of_layer}),
            with_kwargs=True,
        )
    with torch.no_grad():
        assert_rounded(ours(tokens(2, LENGTH)).logits, theirs(tokens(2, LENGTH)).logits)


def test_recomputed_layers_have_equal_gradients() -> None:
    model, inputs = build("LlamaConfig", "longstride", FIXED).train(), tokens(2, LENGTH)
    padded = (torch.arange(LENGTH) >= torch.tensor([[0], [7]])).long()
    grads = []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(inputs, attention_mask=padded, labels=inputs, use_cache=False).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# Padding and packing


@client(
    "transformers",
    '`attn_implementation="longstride"` with left or right padding, or packed by `position_ids`',
    "each text as alone, within 1e-12 in fp64; sdpa's if the pattern is dense",
)
@pytest.mark.parametrize("pattern", [DENSE, FIXED, {"type": "strided", "stride": 8}, IN_TURN], ids=str)
@pytest.mark.parametrize("is_left", [True, False])
def test_padded_texts_are_those_alone(pattern: Any, is_left: bool) -> None:
    ours, theirs = both("LlamaConfig", pattern)
    inputs, lengths = tokens(3, LENGTH), (LENGTH, 31, 1)
    shown = torch.zeros(3, LENGTH, dtype=torch.int64)
    for row, length in zip(shown, lengths, strict=True):
        row[LENGTH - length if is_left else 0 :][:length] = 1
    positions = (shown.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = ours(inputs, attention_mask=shown, position_ids=positions).logits
        for number in range(3):
            alone = ours(inputs[number, shown[number].bool()][None]).logits[0]
            assert_rounded(logits[number, shown[number].bool()], alone)
        if pattern == DENSE:
            expected = theirs(inputs, attention_mask=shown, position_ids=positions).logits
            assert_rounded(logits[shown.bool()], expected[shown.bool()])


@pytest.mark.parametrize("pattern", [DENSE, FIXED, IN_TURN], ids=str)
def test_packed_texts_are_those_alone(pattern: Any) -> None:
    ours, theirs = both("LlamaConfig", pattern)
    inputs, lengths = tokens(1, LENGTH), (13, 1, 36)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    options = {"position_ids": positions, "use_cache": False}
    packed = ours(inputs, **options).logits
    alone = torch.cat([ours(text).logits for text in inputs.split(lengths, 1)], 1)
    assert_rounded(packed, alone)
    grads = (torch.autograd.grad(logits.square().sum(), list(ours.parameters())) for logits in (packed, alone))
    assert_rounded(*(torch.cat([gradient.flatten() for gradient in of_logits]) for of_logits in grads))
    if pattern == DENSE:
        assert_rounded(packed, theirs(inputs, **options).logits)


# Caches


@client(
    "transformers",
    '`attn_implementation="longstride"`: `generate` with DynamicCache or StaticCache, beams, prompt lookup, padding',
    "the tokens without a cache; each prompt's as alone",
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pattern", [DENSE, FIXED, IN_TURN], ids=str)
def test_generated_tokens_are_those_without_a_cache(name: str, pattern: Any) -> None:
    model, inputs = build(name, "longstride", pattern), tokens(2, 13)
    options = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(inputs, use_cache=False, **options)
    assert torch.equal(model.generate(inputs, **options), expected)
    assert torch.equal(model.generate(inputs, cache_implementation="static", **options), expected)
    beams = {**options, "num_beams": 3}
    assert torch.equal(model.generate(inputs, **beams), model.generate(inputs, use_cache=False, **beams))
    looked_up = model.generate(inputs[:1], prompt_lookup_num_tokens=4, **options)
    assert torch.equal(looked_up, expected[:1])
    if pattern == DENSE:
        assert torch.equal(build(name, "sdpa").generate(inputs, **options), expected)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("pattern", [DENSE, FIXED, IN_TURN], ids=str)
def test_padded_prompts_generate_what_they_do_alone(pattern: Any, cache: str | None) -> None:
    model, inputs, lengths = build("LlamaConfig", "longstride", pattern), tokens(3, 20), (20, 9, 1)
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache}
    shown = (torch.arange(20) >= 20 - torch.tensor(lengths)[:, None]).long()
    result = model.generate(inputs, attention_mask=shown, **options)
    for row, length in zip(result, lengths, strict=True):
        alone = row[20 - length : 20][None]
        assert torch.equal(model.generate(alone, **options)[0], row[20 - length :])


@client(
    "transformers",
    '`attn_implementation="longstride"`: a prompt in chunks through DynamicCache or StaticCache',
    "the logits of the prompt at once, within 1e-12 of the largest in fp64",
)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("pattern", [DENSE, FIXED, IN_TURN], ids=str)
def test_a_prompt_in_chunks_is_the_prompt_at_once(pattern: Any, is_static: bool, is_padded: bool, past: str) -> None:
    from transformers import DynamicCache, StaticCache

    model, inputs = build("LlamaConfig", "longstride", pattern), tokens(2, LENGTH)
    shown = torch.ones_like(inputs)
    if is_padded:
        shown[1, :23] = 0  # beyond the first chunk
    positions = (shown.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(config=model.config, max_cache_len=64) if is_static else DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(inputs, attention_mask=shown, position_ids=positions).logits
        result = [
            model(
                inputs[:, first:end],
                attention_mask=shown[:, :end] if is_padded else None,
                position_ids=positions[:, first:end],
                **{past: cache},
            ).logits
            for first, end in itertools.pairwise([0, 17, 18, 40, LENGTH])
        ]
    assert_rounded(torch.cat(result, 1)[shown.bool()], expected[shown.bool()])


# Windows


@client(
    "transformers",
    '`attn_implementation="longstride"` with `sliding_window`, where the pattern is dense or local',
    "sdpa's logits and tokens; other patterns are refused",
)
@pytest.mark.parametrize("window", [2, 7, 64])
def test_a_sliding_window_cuts_a_dense_pattern(window: int) -> None:
    ours, theirs = both("MistralConfig", DENSE, sliding_window=window)
    inputs, options = tokens(2, LENGTH), {"max_new_tokens": 20, "do_sample": False}
    with torch.no_grad():
        assert_rounded(ours(inputs).logits, theirs(inputs).logits)
    assert torch.equal(ours.generate(inputs[:, :5], **options), theirs.generate(inputs[:, :5], **options))


def test_windows_and_patterns_by_layer() -> None:
    """Check that a model's sliding layers are local and the others sparse, and that a wider local pattern is cut."""
    options = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 6}
    model = build("Qwen2Config", "longstride", [FIXED, {"type": "local", "window": 8}], **options)
    same = build("Qwen2Config", "longstride", [FIXED, {"type": "local", "window": 6}], **options)
    inputs, steps = tokens(2, LENGTH), {"max_new_tokens": 20, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, same(inputs).logits)
    assert torch.equal(model.generate(inputs, **steps), model.generate(inputs, use_cache=False, **steps))


# What is refused


def refused(message: str, model: Any, *inputs: Any, **options: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$") as caught:
        model(*inputs, **options)
    assert "\n" not in str(caught.value)


@client(
    "transformers",
    '`attn_implementation="longstride"` with attention dropout, softcap, sinks, masks of all pairs, without causality',
    "refused by name in one line",
)
def test_what_patterns_cannot_do_is_refused() -> None:
    inputs, model = tokens(2, 20), build("LlamaConfig", "longstride", FIXED)
    remedy = "give another attn_implementation"
    refused(
        "attention dropout=0.1: weights are not dropped; set the model's attention dropout to 0",
        build("LlamaConfig", "longstride", FIXED, attention_dropout=0.1).train(),
        inputs,
    )
    refused(
        f"softcap=50.0: scores are not capped; {remedy}",
        build("Gemma2Config", "longstride", FIXED, head_dim=16),
        inputs,
    )
    sinks = build("GptOssConfig", "longstride", FIXED, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    refused(f"s_aux: there are no attention sinks; {remedy}", sinks, inputs)
    refused(
        r"attention_mask: a mask of all pairs; give \(batch, positions\) with zeros at padding",
        model,
        inputs,
        attention_mask=torch.ones(2, 1, 20, 20, dtype=torch.bool),
    )
    hole = torch.ones_like(inputs)
    hole[1, 5] = 0
    refused("attention_mask: padding between tokens; pad prompts on the left", model, inputs, attention_mask=hole)
    refused(
        f"is_causal=false: queries attend to later keys; {remedy}",
        build("LlamaConfig", "longstride", FIXED, is_causal=False),
        inputs,
    )
    refused(
        r"sliding_window=7: cannot be combined with Fixed\(.*\); give these layers a dense or local pattern, or .*",
        build("MistralConfig", "longstride", FIXED, sliding_window=7),
        inputs,
    )
    refused(
        f"output_attentions=true: block-sparse attention has no weights to return; {remedy}",
        model,
        inputs,
        output_attentions=True,
    )


def test_later_steps_of_a_window_that_drops_keys_are_refused(past: str) -> None:
    """Refuse a pattern that counts blocks from the first position, as a cache that drops keys shifts it."""
    from transformers import DynamicCache

    model = build("MistralConfig", "longstride", FIXED, sliding_window=7)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), **{past: cache})
        refused(
            r"sliding_window: its cache drops keys, from which Fixed\(.*\) counts; .*",
            model,
            tokens(1, 1),
            **{past: cache},
        )


@pytest.mark.parametrize(
    "pattern, message",
    [
        (None, 'config.longstride_pattern: missing; give a pattern, such as {"type": "fixed", .*}'),
        ([], r"config.longstride_pattern=\[\]: must have at least one pattern, such as .*"),
        ("fixed", "config.longstride_pattern.type: a pattern is an object with a type: .*"),
        ({"type": "fixd"}, 'config.longstride_pattern.type="fixd": must be a pattern\'s name; nearest fixed'),
        ([DENSE, {"type": "local"}], r"config.longstride_pattern\[1\].window: missing; local needs it"),
    ],
)
def test_a_wrong_pattern_is_named(pattern: Any, message: str) -> None:
    refused(message, build("LlamaConfig", "longstride", pattern), tokens(1, 9))


def test_a_pattern_of_another_package_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longstride.hub import register_attention

    (tmp_path / "foreign_pattern.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path))
    value, inputs = {"type": "foreign_pattern:Halved", "window": 12}, tokens(2, LENGTH)
    model = build("LlamaConfig", "longstride", value)
    rule = r"is from another package; call register_attention\(trust_code=True\) to run its code"
    refused(f'config.longstride_pattern.type="foreign_pattern:Halved": {rule}', model, inputs)
    assert "foreign_pattern" not in sys.modules
    register_attention(trust_code=True)
    same = build("LlamaConfig", "longstride", {"type": "local", "window": 6})
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, same(inputs).logits)


FOREIGN = """
from dataclasses import dataclass
from longstride.kernels.patterns import Local


@dataclass(frozen=True, repr=False)
class Halved(Local):
    def parts(self):
        return Local(self.window // 2).parts()
"""


# Around it


@client(
    "transformers",
    '`attn_implementation="longstride"`: the example of docs/clients.md',
    "trains and generates, as it is shown",
)
def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(import torch\nfrom longstride.hub.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "torch.Size([1, 120])\n"


def test_the_pattern_is_saved_with_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, inputs = build("LlamaConfig", "longstride", FIXED), tokens(2, LENGTH)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="longstride", dtype=torch.float64)
    assert again.config.longstride_pattern == FIXED
    with torch.no_grad():
        assert torch.equal(again(inputs).logits, model(inputs).logits)


def test_a_model_changes_its_attention_at_any_time() -> None:
    model, inputs = build("LlamaConfig", "sdpa"), tokens(2, LENGTH)
    dense = copy.deepcopy(model)
    model.config.longstride_pattern = FIXED
    model.set_attn_implementation("longstride")
    with torch.no_grad():
        result = model(inputs).logits
        expected = dense(inputs, attention_mask=mask(pattern_from_json(FIXED)).expand(2, -1, -1, -1)).logits
        assert_rounded(result, expected)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(inputs).logits, dense(inputs).logits)
