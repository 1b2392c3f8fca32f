"""An export under transformers: loaded by its own classes, with the project's logits and samples."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longstride.launcher.exports.for_hubs import refresh_stub
from longstride.launcher.models.exported import load_model
from longstride.sparse_model import SparseTransformer, generate
from tests.clients.conftest import PADDING, START, assert_rounded, new_model, run_python, tokens
from tests.harness.clients import client
from tests.harness.configs import SYSTEMS, small
from tests.harness.runs import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair


@pytest.fixture
def model(folder: Path) -> SparseTransformer:
    return load_model(folder)


@pytest.fixture
def hub(folder: Path) -> Any:
    """Load the same model in transformers, and check that every tensor is used."""
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), info
    return loaded


def rows(model: SparseTransformer, inputs: Tensor) -> Tensor:
    """Return the network's rows 1 to n; row i predicts token i."""
    with torch.no_grad():
        return model(torch.cat([inputs, inputs.new_zeros(len(inputs), 1)], 1))[:, 1:]


def test_logits_are_shifted_by_one(hub: Any, model: SparseTransformer) -> None:
    inputs = tokens(2, 40)
    with torch.no_grad():
        assert torch.equal(hub(inputs).logits, rows(model, inputs))
        torch.testing.assert_close(hub(inputs, logits_to_keep=3).logits, rows(model, inputs)[:, -3:])
        full = hub(tokens(2, 64)).logits
        assert torch.equal(full[:, :-1], model(tokens(2, 64))[:, 1:])
        assert full[:, -1].isnan().all()
        assert_rounded(hub.double()(inputs[:, :0]).logits, model.double()(inputs)[:, :1])


@pytest.mark.parametrize("length", [0, 1, 20, 63])
def test_greedy_sample_is_ours(hub: Any, model: SparseTransformer, length: int) -> None:
    """Compare in fp64, where another order of sums changes no choice."""
    inputs = tokens(2, length)
    output = hub.double().generate(inputs, max_new_tokens=64 - length, do_sample=False)
    ours = torch.stack(list(generate(model.double(), inputs, 64 - length, temperature=0)), 1)
    start = inputs if length else torch.full((2, 1), 256)  # which a prompt of no tokens begins with
    assert torch.equal(output, torch.cat([start, ours], 1))


def test_gradients_reach_every_weight(hub: Any) -> None:
    inputs = tokens(2, 64)
    hub.train()
    hub(inputs, labels=inputs).loss.backward()
    assert all(weight.grad is not None for weight in hub.parameters())


@client("transformers", "padding on either side, and a start, in one batch", "each row's logits and loss as alone")
def test_rows_in_a_batch_are_those_alone(hub: Any) -> None:
    inputs, hub = tokens(4, 30), hub.double()
    rows_of = [inputs[0], inputs[1, :7], torch.cat([torch.tensor([START]), inputs[2, :20]]), inputs[3, :0]]
    for is_left in (False, True):
        padded = torch.full((4, 30), PADDING)
        for row, alone in zip(padded, rows_of, strict=True):
            row[30 - len(alone) if is_left else 0 :][: len(alone)] = alone
        labels = torch.where(padded < START, padded, -100)
        with torch.no_grad():
            masked = torch.where(padded == PADDING, 7, padded)
            output = hub(masked, attention_mask=padded != PADDING, position_ids=None).logits
            assert torch.equal(output, hub(padded).logits)
            for row, logits, alone in zip(padded, output, rows_of, strict=True):
                if len(alone):
                    assert_rounded(logits[row != PADDING], hub(alone[None]).logits[0])
                else:
                    assert_rounded(logits[-1:], hub(alone[None]).logits[0])
            if not is_left:
                nats = [hub(alone[None], labels=labels[i : i + 1, : len(alone)]) for i, alone in enumerate(rows_of[:3])]
                counts = torch.tensor([29, 6, 20])
                mean = (torch.stack([output.loss for output in nats]) * counts).sum() / counts.sum()
                torch.testing.assert_close(hub(padded, labels=labels).loss, mean)


@client("transformers", "a loss behind the start token", "that of `longstride evaluate`")
def test_loss_behind_a_start_counts_the_first_token(hub: Any, model: SparseTransformer) -> None:
    inputs = tokens(2, 64)
    texts = torch.cat([torch.full((2, 1), START), inputs], 1)
    with torch.no_grad():
        output = hub(texts, labels=texts)
        torch.testing.assert_close(output.loss, model(inputs, return_nats=True).mean())
        assert torch.equal(output.logits[:, :-1], model(inputs))
        assert output.logits[:, -1].isnan().all()


def test_bytes_are_tokens_and_labels(hub: Any) -> None:
    inputs = tokens(2, 30)
    narrow, options = inputs.to(torch.uint8), {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(hub(narrow, labels=narrow).loss, hub(inputs, labels=inputs).loss)
    assert torch.equal(hub.generate(narrow, **options), hub.generate(inputs, **options))


def test_what_it_cannot_do_is_told(hub: Any, past: str) -> None:
    inputs = tokens(1, 3)
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="65 tokens: more than the model's context of 64; give 64 at most"):
        hub(tokens(1, 65))
    with pytest.raises(ValueError, match="input_ids, inputs_embeds: one of them must be given"):
        hub()
    for wrong, rule in {
        "attention_mask": (torch.tensor([[1, 0, 1]]), "padding between tokens"),
        "position_ids": (torch.tensor([[0, 1, 0]]), "positions always count from 0 in each row; leave them out"),
        past: (DynamicCache(), "a DynamicCache: this model keeps its own session; leave it out"),
        "output_attentions": (True, "block-sparse attention has no weights to return; leave it out"),
        "cu_seq_lens_q": (inputs, "this model does not take this argument; leave it out"),
    }.items():
        with pytest.raises(ValueError, match=f"^{wrong}: {rule[1]}"):
            hub(inputs, **{wrong: rule[0]})
    with pytest.raises(ValueError, match=r"^input_ids: 300: a token is 0 to 255, or 256 \(start\)"):
        hub(inputs * 0 + 300)
    for number in (-1, -100):  # which collators mean for labels alone
        for use_cache in (False, True):
            with pytest.raises(ValueError, match=rf"^input_ids: {number}: a token is 0 to 255"):
                hub(inputs * 0 + number, use_cache=use_cache)
    cache = hub(inputs, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"^cache, past_key_values: two names of one argument; give only {past}"):
        hub(inputs, cache=cache, past_key_values=cache)
    for wrong in (inputs[0], inputs.float()):
        with pytest.raises(ValueError, match=r"^input_ids: torch.*: must be integers \(B, n\)"):
            hub(wrong)
    for options in ({"labels": inputs[:, :2]}, {"labels": inputs, "logits_to_keep": 1}):
        with pytest.raises(ValueError, match=r"^labels: .*must be as many; give one for each token"):
            hub(inputs, **options)
    with pytest.raises(ValueError, match=r"^use_cache=True: a step with a cache takes input_ids"):
        hub(inputs, use_cache=True, output_hidden_states=True)


@client(
    "transformers",
    "`output_hidden_states`, `inputs_embeds`, `logits_to_keep`, default `position_ids`",
    "as in transformers",
)
def test_states_and_embeddings_are_those_of_the_network(hub: Any, model: SparseTransformer) -> None:
    inputs, entered = tokens(2, 30), []
    for part in (*model.blocks, model.norm):
        part.register_forward_hook(lambda part, arguments, rows: entered.append((arguments[0], rows)))
    expected = rows(model, inputs)
    padded = torch.cat([torch.full((2, 5), PADDING), inputs], 1)
    mask = padded != PADDING
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    every = [*(arguments for arguments, _ in entered[:-1]), entered[-1][1]]
    hub.eval()
    with torch.no_grad():
        for each in (hub(inputs, output_hidden_states=True), hub(padded, mask, positions, output_hidden_states=True)):
            assert torch.equal(each.logits[:, -30:], expected)
            assert len(each.hidden_states) == hub.config.num_hidden_layers + 1
            for output, state in zip(each.hidden_states, every, strict=True):
                assert torch.equal(output[:, -30:], state[:, 1:])
        embedded = hub.get_input_embeddings()(padded.clamp(max=255))
        assert torch.equal(hub(inputs_embeds=embedded, attention_mask=mask).logits[:, -30:], expected)
        assert torch.equal(hub(inputs_embeds=embedded[:, 5:]).logits, expected)
        # Of fewer rows, products round otherwise.
        places, shown = torch.tensor([3, 20]), torch.zeros(2, 30, dtype=torch.bool)
        shown[0, 3] = shown[1, 20] = True
        for keep, expected_logits in (
            (2, expected[:, -2:]), (places, expected[:, places]), (places[None].expand(2, 2), expected[:, places]),
            (shown, expected[shown]),
        ):  # fmt: skip
            torch.testing.assert_close(hub(inputs, logits_to_keep=keep).logits, expected_logits)
        loss, logits = hub(inputs, labels=inputs, return_dict=False)
        assert torch.equal(logits, expected) and loss.dim() == 0
    gradient = hub(inputs, output_hidden_states=True)
    gradient.hidden_states[0].retain_grad()
    gradient.logits.sum().backward()
    assert gradient.hidden_states[0].grad.abs().max() > 0


@pytest.mark.parametrize("changes", SYSTEMS.values(), ids=SYSTEMS)
def test_every_system_is_computed_as_by_itself(changes: dict[str, Any]) -> None:
    """Compare logits, states of all blocks, and recomputed gradients of a batch padded on either side."""
    config, hub = small(**changes), new_model(**changes).double().eval()
    torch.nn.init.normal_(hub.logits.table)
    end = config.vocabulary + 2
    inputs = torch.randint(config.vocabulary, (3, config.context - 1))
    padded = [inputs, torch.cat([inputs[:, :9], torch.full((3, 4), end)], 1)]
    padded += [padded[1].roll(4, 1)]
    for batch in padded:
        tokens_of = [row[row < config.vocabulary][None] for row in batch]
        with torch.no_grad():
            output = hub(batch, output_hidden_states=True)
            states = [hub(row, output_hidden_states=True).hidden_states for row in tokens_of]
            for number, row in enumerate(tokens_of):
                shown = output.logits[number][batch[number] < config.vocabulary]
                assert_rounded(shown, rows(hub.network, row)[0])
                for state, alone in zip(output.hidden_states, states[number], strict=True):
                    assert_rounded(state[number][batch[number] < config.vocabulary], alone[0])
    hub.train()
    for parameter in hub.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hub(inputs, labels=inputs).loss.backward()
    expected = [parameter.grad.clone() for parameter in hub.parameters()]
    hub.zero_grad()
    hub.activation_checkpointing_enable()
    for parameter in hub.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hub(inputs, labels=inputs, output_hidden_states=True).loss.backward()
    for parameter, gradient in zip(hub.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).abs().max() <= 1e-9 * (1 + gradient.abs().max())


@pytest.mark.parametrize("how", ["autocast", "half", "bfloat16"])
def test_sixteen_bits_are_near(hub: Any, model: SparseTransformer, how: str) -> None:
    inputs = tokens(2, 40)
    expected = rows(model, inputs)
    with torch.no_grad():
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                output = hub(inputs).logits
        else:
            output = getattr(hub, how)()(inputs).logits
    assert output.dtype == torch.float32
    assert (output - expected).square().mean() ** 0.5 <= 0.02 * expected.square().mean() ** 0.5


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Provide an export from before the packages moved, whose stub imports modules that no longer exist."""
    return Path(shutil.copytree(ROOT / "tests/made_before/model", tmp_path / "old"))


@pytest.mark.parametrize("name", ["folder", "old"])
def test_registered_classes_load_an_export_without_its_stub(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    """Run in a separate process, as registration cannot be undone."""
    export = request.getfixturevalue(name)
    script = (
        "import torch\n"
        "from longstride.launcher.hub import register\n"
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
        "register()\nregister()\n"
        f"folder = {str(export)!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "for each in (model, tokenizer, AutoConfig.from_pretrained(folder)):\n"
        "    assert type(each).__module__.startswith('longstride.launcher.hub.'), type(each)\n"
        "with torch.no_grad():\n"
        f"    torch.save(model(**tokenizer('a stride', return_tensors='pt')).logits, {str(tmp_path / 'logits.pt')!r})\n"
    )
    ended = run_python("-c", script)
    assert ended.returncode == 0, ended.stderr
    expected = rows(load_model(export), torch.tensor([list(b"a stride")]))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)  # of another number of threads


def test_old_stub_is_refreshed(old: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(ImportError, match="this model needs Longstride"):
        AutoModelForCausalLM.from_pretrained(old, trust_remote_code=True)
    refresh_stub(old)
    model = AutoModelForCausalLM.from_pretrained(old, trust_remote_code=True)
    folder_before = ROOT / "tests/made_before"
    with torch.no_grad():
        logits = model(torch.tensor([json.loads((folder_before / "expected.json").read_text())["tokens"]])).logits
    # Row i of the network stands at place i - 1 here.
    torch.testing.assert_close(logits[0, 6::8], torch.from_numpy(np.load(folder_before / "logits.npy")))


def test_neither_deepspeed_nor_triton_is_needed(folder: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('deepspeed', 'triton', 'mpi4py', 'webdataset', 'aiohttp'): sys.modules[name] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "print(model.generate(max_new_tokens=3, inputs=__import__('torch').zeros(1, 2, dtype=int)).shape)\n"
    )
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stdout) == (0, "torch.Size([1, 5])\n"), ended.stderr
