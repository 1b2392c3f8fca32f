"""Adapters of PEFT on an export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model.feed_forwards import dense
from tests.clients.conftest import tokens
from tests.harness.clients import client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair

TOKENS = tokens(2, 40)
LINEAR = ["query_key_value", "projection", "expand", "contract"]  # of each block


def loaded(folder: Path) -> Any:
    from longstride.launcher.hub import LongstrideForCausalLM

    return LongstrideForCausalLM.from_pretrained(folder).double()


def adapted(folder: Path, targets: Any = "all-linear", **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False, **options}
    return get_peft_model(loaded(folder), LoraConfig(target_modules=targets, **options))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_all_linear_layers_are_those_of_the_blocks(folder: Path) -> None:
    for targets in ("all-linear", LINEAR):
        names = {
            name.split(".")[-3]
            for name, _ in adapted(folder, targets).named_modules()
            if name.endswith("lora_A.default")
        }
        assert names == set(LINEAR)


@client(
    "peft",
    "LoRA on `all-linear`, on `logits`, on `tokens`, or with `modules_to_save`: trained, saved, loaded, merged",
    "equal logits up to rounding; a merged model is saved as an export",
)
@pytest.mark.parametrize(
    ("targets", "saved"), [("all-linear", None), (["logits", "tokens"], None), (["expand"], ["logits", "embedding"])]
)
def test_adapters_are_trained_saved_and_merged(folder: Path, tmp_path: Path, targets: Any, saved: Any) -> None:
    from peft import PeftModel

    from longstride.launcher.models import load_model

    model, before = adapted(folder, targets, modules_to_save=saved).train(), logits_of(loaded(folder))
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None for parameter in trained)
    torch.optim.SGD(trained, 0.1).step()
    after = logits_of(model.eval())
    assert (after - before).abs().max() > 0.1
    greedy = {"max_new_tokens": 10, "do_sample": False}
    prompt = TOKENS[:, :20]
    sampled = model.generate(input_ids=prompt, **greedy)
    assert torch.equal(sampled, model.generate(input_ids=prompt, use_cache=False, **greedy))
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")), after)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), after)
    merged.float().save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        exported = load_model(tmp_path / "merged")(torch.nn.functional.pad(TOKENS, (0, 1)))[:, 1:]
    torch.testing.assert_close(exported, after.float(), atol=1e-4, rtol=1e-4)


def test_an_adapter_reaches_what_is_computed_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(folder, ["expand", "contract"])
    expected = logits_of(model)
    monkeypatch.setattr(dense, "LONG_ROWS", 8)
    torch.testing.assert_close(logits_of(model), expected)


@client("peft", "LoRA with gradient checkpointing, both kinds", "the gradients without it")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_gradients_reach_adapters(folder: Path, reentrant: bool) -> None:
    model, gradients = adapted(folder).train(), []
    for recomputed in (False, True):
        if recomputed:
            model.base_model.model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad])
    assert all(torch.equal(stored, recomputed) for stored, recomputed in zip(*gradients, strict=True))


@client(
    "peft",
    "prompt tuning; prefix tuning",
    "trains; refused",
)
def test_prompts_are_tuned(folder: Path, past: str) -> None:
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    sizes = {"num_virtual_tokens": 4, "token_dim": 32, "num_layers": 1, "num_attention_heads": 2}
    model = get_peft_model(loaded(folder).float(), PromptTuningConfig(task_type="CAUSAL_LM", **sizes))
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters() if parameter.requires_grad)
    prompt = TOKENS[:, :20]
    for use_cache in (True, False):
        output = model.eval().generate(
            input_ids=prompt,
            max_new_tokens=6,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.no_grad():
            expected = model(input_ids=output.sequences[:, :-1]).logits[:, -6:]
        torch.testing.assert_close(torch.stack(output.logits, 1), expected)  # behind what was tuned
    model = get_peft_model(loaded(folder).float(), PrefixTuningConfig(task_type="CAUSAL_LM", **sizes))
    with pytest.raises(ValueError, match=f"^{past}: a DynamicCache: this model keeps its own session; leave it out"):
        model(input_ids=TOKENS, labels=TOKENS)
