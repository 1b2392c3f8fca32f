"""``generate`` of transformers: by sessions it gives what it gives without them, in every mode and any batch."""

import copy
import pickle
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.clients.conftest import END, PADDING, START, assert_rounded, tokens
from tests.harness.clients import client
from tests.harness.tiny_models import add_hub_files, tiny_export

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair


@pytest.fixture
def hub(folder: Path) -> Any:
    """Load the model in fp64, where another order of sums changes no choice."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).double()


PROMPTS = [tokens(length, seed=length) for length in (12, 1, 7)] + [torch.tensor([START]), tokens(7, seed=9)]


def padded(side: str = "left") -> dict[str, Tensor]:
    """Build a batch of all prompts, with 5 to 11 positions of padding on one side or both."""
    batch = torch.full((len(PROMPTS), 12), PADDING)
    for row, prompt in zip(batch, PROMPTS, strict=True):
        first = {"left": 12 - len(prompt), "right": 0, "both": (12 - len(prompt)) // 2}[side]
        row[first : first + len(prompt)] = prompt
    return {"input_ids": batch, "attention_mask": (batch != PADDING).long()}


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "no repetition": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "eos_token_id": 65},
    "guided": {"guidance_scale": 1.5, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2},
    "in chunks": {"prefill_chunk_size": 5},
    "stopped": {"eos_token_id": list(range(40)), "stop_strings": ["A", "b"]},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_that_without_a_cache(hub: Any, folder: Path, mode: str) -> None:
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": PADDING, **MODES[mode]}
    if "stop_strings" in options:
        from transformers import AutoTokenizer

        options["tokenizer"] = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    sequences = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        sequences.append(hub.generate(**padded(), **options, use_cache=use_cache))
        options.pop("prefill_chunk_size", None)  # which asks for a cache
    assert torch.equal(*sequences)
    if mode == "stopped":  # some rows earlier than others
        assert len({int((row[12:] < START).sum()) for row in sequences[0]}) > 2


@client("transformers", "`generate` for prompts of 0 to 12 bytes, padded on either side", "each prompt's tokens alone")
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_padded_prompts_go_on_as_alone(hub: Any, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    alone = [hub.generate(prompt[None], **options)[0, len(prompt) :] for prompt in PROMPTS]
    for side in ("left", "right", "both"):
        assert torch.equal(hub.generate(**padded(side), **options)[:, 12:], torch.stack(alone))


def test_a_model_in_training_generates_without_a_cache(hub: Any) -> None:
    hub.train()
    output = hub.generate(tokens(2, 5), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert output.past_key_values is None and output.sequences.shape == (2, 10)


def test_no_prompt_is_an_empty_one(hub: Any) -> None:
    options = {"max_new_tokens": 64, "do_sample": False}
    sequence = hub.generate(**options)
    assert sequence[0, 0] == START and bool((sequence[0, 1:] < START).all())
    with torch.no_grad():
        assert torch.equal(hub(sequence).logits[0, :64].argmax(-1), sequence[0, 1:])
    assert torch.equal(hub.generate(tokens(2, 0), attention_mask=torch.ones(2, 0), **options), sequence.repeat(2, 1))


@client(
    "transformers",
    "`generate` with `prompt_lookup_num_tokens`, or another export as `assistant_model`",
    "greedy's tokens",
)
@pytest.mark.parametrize("kind", ["lookup", "assistant", "sampling assistant"])
def test_speculation_changes_no_token(hub: Any, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    prompt = tokens(1, 6).repeat(1, 3)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    expected = hub.generate(prompt, **options)
    taken = counted_steps(hub)
    if kind == "lookup":
        # What greedy repeats is looked up, so that some is taken and some is taken back.
        prompt = torch.cat([prompt[:, :0], expected.sequences[:, 18:30], prompt], 1)
        options["max_new_tokens"], options["output_logits"] = 30, True
        expected = hub.generate(prompt, **options)
        taken.clear()
        options["prompt_lookup_num_tokens"] = 3
    elif kind == "assistant":
        assistant = tiny_export(tmp_path / "other", "text", steps=2)
        add_hub_files(assistant)
        options["assistant_model"] = AutoModelForCausalLM.from_pretrained(assistant, trust_remote_code=True)
    else:  # its own twin, whose every token is taken
        options["assistant_model"] = copy.deepcopy(hub)
        options["assistant_model"].generation_config.assistant_confidence_threshold = 0.0
        options |= {"do_sample": True, "temperature": 1e-4}
    output = hub.generate(prompt, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert any(count > 1 for count in taken[1:])
    if "output_logits" in options:
        assert_rounded(torch.stack(output.logits), torch.stack(expected.logits), torch.float32)
    # What it leaves is what plain steps leave.
    follows = [hub(output.sequences[:, -1:], cache=result.past_key_values).logits for result in (output, expected)]
    assert_rounded(*follows)


def counted_steps(hub: Any) -> list[int]:
    """Return a list that collects the number of tokens of each call."""
    counts: list[int] = []

    def count(_: Any, positional: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        counts.append((positional[0] if positional else named["input_ids"]).shape[1])

    hub.register_forward_pre_hook(count, with_kwargs=True)
    return counts


@client("transformers", "`generate` from the cache that it returned, or from a deep copy", "the same as at once")
def test_a_returned_cache_goes_on(hub: Any, past: str) -> None:
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    for prompt in (tokens(1, 9), tokens(3, 9)):
        at_once = hub.generate(prompt, max_new_tokens=30, **options).sequences
        first = hub.generate(prompt, max_new_tokens=10, **options)
        returned = first[past]
        for cache in (copy.deepcopy(returned), pickle.loads(pickle.dumps(returned)), returned):
            assert cache.get_seq_length() == 18
            second = hub.generate(first.sequences, **{past: cache}, max_new_tokens=20, **options)
            assert torch.equal(second.sequences, at_once)
        # Several new tokens, as of a next turn; by themselves, as the mask says.
        longer = torch.cat([at_once, tokens(len(prompt), 4, seed=1)], 1)
        expected = hub.generate(longer, max_new_tokens=10, use_cache=False, **options).sequences
        for inputs in (longer, longer[:, second[past].get_seq_length() :]):
            cache = copy.deepcopy(second[past])
            mask = torch.ones_like(longer)
            output = hub.generate(inputs, attention_mask=mask, past_key_values=cache, max_new_tokens=10, **options)
            assert torch.equal(output.sequences[:, -14:], expected[:, -14:])


def test_one_prompt_serves_several_endings(hub: Any) -> None:
    """Follow transformers' recipe for a shared prompt."""
    with torch.no_grad():
        shared = hub(tokens(1, 20), use_cache=True).past_key_values
    cache = copy.deepcopy(shared)
    cache.batch_repeat_interleave(3)
    endings = torch.cat([tokens(1, 20).repeat(3, 1), tokens(3, 5, seed=2)], 1)
    output = hub.generate(endings, past_key_values=cache, max_new_tokens=15, do_sample=False)
    assert torch.equal(output, hub.generate(endings, max_new_tokens=15, do_sample=False))
    cache = copy.deepcopy(shared)
    cache.crop(-8)
    cut = torch.cat([tokens(1, 20)[:, :12], tokens(1, 5, seed=3)], 1)
    output = hub.generate(cut, past_key_values=cache, max_new_tokens=15, do_sample=False)
    assert torch.equal(output, hub.generate(cut, max_new_tokens=15, do_sample=False))


@torch.no_grad()
def test_contexts_of_several_lengths_are_cropped_and_selected(hub: Any) -> None:
    batch, appended = padded(), tokens(len(PROMPTS), 6, seed=4)
    appended[2, 4:] = PADDING  # done before the others
    texts = torch.cat([batch["input_ids"], appended], 1)
    mask = (texts != PADDING).long()
    cache = hub(**batch, use_cache=True).past_key_values
    for place in range(12, 18):
        logits = hub(texts[:, place : place + 1], attention_mask=mask[:, : place + 1], cache=cache).logits
        expected = hub(texts[:, : place + 1], attention_mask=mask[:, : place + 1], logits_to_keep=1).logits
        assert_rounded(logits, expected)
    order = torch.tensor([2, 0, 0, 4, 1, 2])
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(order)
    for removed in (0, 3, 4, 9):
        cropped = copy.deepcopy(chosen)
        cropped.crop(-removed)
        size = cropped.get_seq_length()
        assert size == 18 - removed
        next_tokens, masks = tokens(6, 2, seed=5), torch.cat([mask[order, :size], torch.ones(6, 2).long()], 1)
        for row, (number, length) in enumerate(zip(order.tolist(), masks.sum(1).tolist(), strict=True)):
            del length
            prompt = texts[number, :size][mask[number, :size].bool()]
            prompt = torch.cat([prompt[prompt < START], next_tokens[row]])[None]
            if row == 0:
                output = hub(next_tokens, attention_mask=masks, cache=cropped).logits
            assert_rounded(output[row], hub(prompt, logits_to_keep=2).logits[0])


@torch.no_grad()
@pytest.mark.parametrize("keep", [0, 1, 5])
def test_many_tokens_behind_others_are_taken_at_once(hub: Any, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    from longstride.sparse_model import Session

    prompt, mask = tokens(2, 40), torch.ones(2, 40)
    mask[0, :4] = 0  # two lengths
    cache = hub(prompt[:, :10], attention_mask=mask[:, :10], use_cache=True).past_key_values
    monkeypatch.setattr(Session, "append", None)
    options = {"attention_mask": mask, "logits_to_keep": keep}
    assert_rounded(hub(prompt[:, 10:], cache=cache, **options).logits, hub(prompt, **options).logits[:, -keep or 10 :])
    monkeypatch.undo()
    longer = torch.cat([prompt, tokens(2, 1, seed=1)], 1)
    masks = torch.cat([mask, torch.ones(2, 1)], 1)
    output = hub(longer[:, 40:], attention_mask=masks, cache=cache).logits
    assert_rounded(output, hub(longer, attention_mask=masks, logits_to_keep=1).logits)


def test_streams_are_the_tokens(hub: Any, folder: Path) -> None:
    from transformers import AutoTokenizer, TextIteratorStreamer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {"inputs": tokens(1, 5) % 26 + 97, "max_new_tokens": 20, "do_sample": False}
    worker = Thread(target=hub.generate, kwargs={**options, "streamer": streamer})
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert text == tokenizer.decode(hub.generate(**options)[0, 5:])


def test_processors_choose_among_the_bytes(hub: Any) -> None:
    """Scores are those of V tokens, and a grammar's choice is kept to."""
    digits = list(range(48, 58))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "return_dict_in_generate": True}
    output = hub.generate(**padded(), prefix_allowed_tokens_fn=lambda *_: digits, output_scores=True, **options)
    assert output.scores[0].shape == (len(PROMPTS), 256)
    assert bool(torch.isin(output.sequences[:, 12:], torch.tensor(digits)).all())


@pytest.mark.parametrize("beams", [1, 3])
def test_scores_of_what_was_generated_are_those_of_the_logits(hub: Any, beams: int) -> None:
    """Include rows that end early; their padding has no score."""
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "num_beams": beams,
        "eos_token_id": [*range(40)],
    }
    output = hub.generate(tokens(3, 9), **options, output_scores=True, return_dict_in_generate=True)
    scores = hub.compute_transition_scores(
        output.sequences, output.scores, getattr(output, "beam_indices", None), normalize_logits=beams == 1
    )
    with torch.no_grad():
        nats = hub(output.sequences).logits[:, 8:-1].log_softmax(-1)
    chosen = output.sequences[:, 9:]
    assert bool((chosen == PADDING).any())
    expected = nats.gather(2, chosen.clamp(max=255)[..., None])[..., 0].masked_fill(chosen == PADDING, 0)
    if beams > 1:  # of a beam, what its tokens have together
        scores, expected = scores.sum(1), expected.sum(1)
    torch.testing.assert_close(scores, expected.float())  # transformers keeps scores in fp32


@client(
    "transformers", "`generate` beyond the context", "refused before the first step, with the largest `max_new_tokens`"
)
def test_what_does_not_fit_is_refused_before_the_first_step(hub: Any) -> None:
    taken = counted_steps(hub)
    rule = "60 tokens and 5 new ones exceed the model's context of 64; give max_new_tokens=4 at most"
    for options, line in (
        ({"max_new_tokens": 5}, f"^max_new_tokens=5: {rule}$"),
        ({"max_length": 65}, f"^max_length=65: {rule}$"),
    ):
        with pytest.raises(ValueError, match=line):
            hub.generate(tokens(1, 60), **options)
    with pytest.raises(
        ValueError, match=r"^max_new_tokens=1: 64 tokens and 1 new ones exceed .*; give a shorter prompt$"
    ):
        hub.generate(tokens(2, 64), max_new_tokens=1)
    assert not taken
    # By default 20, or as many as fit: padding and a start take no room.
    for inputs, length in (
        (tokens(1, 10), 30),
        (tokens(1, 60), 64),
        (torch.cat([torch.tensor([[START]]), tokens(1, 60)], 1), 65),
    ):
        assert hub.generate(inputs, do_sample=False).shape == (1, length)
    short = torch.cat([torch.full((1, 30), PADDING), tokens(1, 40)], 1)
    assert hub.generate(short, attention_mask=(short != PADDING).long(), max_new_tokens=24).shape == (1, 94)
    # What is held counts too.
    first = hub.generate(tokens(1, 50), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"55 tokens and 10 new ones .* give max_new_tokens=9 at most"):
        hub.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=10)
    with pytest.raises(ValueError, match=r"55 tokens and 10 new ones .* give max_new_tokens=9 at most"):
        mask = torch.ones_like(first.sequences)
        hub.generate(
            first.sequences[:, -1:], attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=10
        )


def test_what_generate_cannot_do_is_told(hub: Any, past: str) -> None:
    from transformers import DynamicCache

    for options, line in (
        ({"cache_implementation": "static"}, "^cache_implementation='static': this model keeps its own session"),
        ({"cache_implementation": "quantized"}, "^cache_implementation='quantized': this model keeps its own session"),
        ({"cache_implementation": "paged"}, "^continuous batching: this model keeps sessions, not pages"),
        ({"assistant_early_exit": 1}, "^assistant_early_exit=1: this model has no exit before its last layer"),
        ({past: DynamicCache()}, f"^{past}: a DynamicCache: this model keeps its own session"),
        ({"forced_eos_token_id": END}, "^forced_eos_token_id: the end is token 257: the model never predicts it"),
        ({"exponential_decay_length_penalty": (2, 1.5)}, "^exponential_decay_length_penalty: the end is token 257"),
    ):
        with pytest.raises(ValueError, match=line):
            hub.generate(tokens(1, 5), max_new_tokens=5, **options)
    cache = hub.generate(tokens(2, 5), max_new_tokens=5, return_dict_in_generate=True).past_key_values
    cases: list[tuple[Any, str]] = [
        (
            lambda: hub.generate(tokens(2, 3), past_key_values=cache),
            f"^input_ids: 3 places, and {past} holds 9",
        ),
        (lambda: hub(tokens(3, 1), cache=cache), f"^input_ids: 3 contexts: {past} holds 2"),
        (lambda: cache.crop(3), "^crop: tokens_to_remove=3: must be 0 or less: -3 removes 3 places"),
        (lambda: hub(tokens(2, 56), cache=cache), "^65 tokens: more than the model's context of 64"),
        (lambda: hub(torch.full((2, 1), START), past_key_values=cache), "^input_ids: the start, 256, after tokens"),
        (
            lambda: hub(tokens(2, 1), attention_mask=torch.ones(2, 3), cache=cache),
            f"^attention_mask: 3 places: must be 10, for all that {past} holds and the new ones",
        ),
        (
            lambda: hub(tokens(2, 1), attention_mask=torch.arange(10).expand(2, 10), cache=cache),
            f"^attention_mask: padding where {past} holds a token; use crop to remove tokens",
        ),
    ]
    other = copy.deepcopy(hub)  # whose weights are the same until they are trained
    assert torch.isfinite(other(tokens(2, 1), cache=copy.deepcopy(cache)).logits).all()
    other.logits.weight.data.mul_(2)
    for stored in (cache, pickle.loads(pickle.dumps(cache))):
        cases.append((lambda stored=stored: other(tokens(2, 1), cache=stored), f"^{past}: belongs to another model"))
    for call, line in cases:
        with pytest.raises(ValueError, match=line):
            call()
    assert cache.get_seq_length() == 9


@client("transformers", "`generate` under `torch.autocast`, and in bfloat16", "logits as near as bfloat16 is")
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_generation_in_16_bits(hub: Any, kind: str) -> None:
    hub.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        output = hub.generate(tokens(2, 20), max_new_tokens=30, **options)
        expected = hub(output.sequences[:, :-1]).logits[:, 19:]
    logits = torch.stack(output.logits, 1)
    # As tests/sparse_model/test_cache.py has it of steps in 16 bits.
    assert (logits - expected).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
