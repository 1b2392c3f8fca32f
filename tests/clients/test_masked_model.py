"""An export of a masked model under transformers: logits in place, masks to fill, and steps of Trainer."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longstride.data_pipelines.modalities import MODALITIES
from longstride.kernels import ConfigError
from longstride.launcher.exports.for_hubs import model_card
from longstride.launcher.models import Exported, ModelData, load_model
from longstride.sparse_model import SparseTransformer
from tests.clients.conftest import END, PADDING, assert_rounded, run_python
from tests.harness.clients import client
from tests.harness.configs import small
from tests.harness.tiny_models import add_hub_files, random_export

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
MASK = 256  # the token in the place of the start
MASKED: dict[str, Any] = {"objective": {"type": "masked"}, "attention": {"type": "linformer", "rows": 8}}
SYSTEMS: dict[str, dict[str, Any]] = {
    "mixtures": {},
    "mixtures of each head, masks of zeros": {
        "attention": {"type": "linformer", "rows": 5, "share": "nothing", "key_value_heads": 2},
        "objective": {"type": "masked", "mask": "zero"},
    },
    "mixtures of all layers": {"attention": {"type": "linformer", "rows": 5, "share": "layers"}},
    "biases of all layers": {"attention": {"type": "dense", "causal": False}, "relative_bias": {}},
    "every pair": {"attention": {"type": "dense", "causal": False}, "rotary": {}},
    "reversible": {"reversible": True},
    "experts": {"feed_forward": {"type": "experts", "count": 3}},
}
NEIGHBOURS: dict[str, Any] = {
    "layers": 3,
    "attention": [
        {"type": "longformer", "window": 4, "globals": 2, "causal": False},
        {"type": "local", "window": 3, "causal": False},
        {"type": "block", "stride": 8, "causal": False},
    ],
}


def new_model(**changes: Any) -> Any:
    """Return a new masked model of transformers, whose logits are not small, in fp64."""
    from longstride.launcher.hub import LongstrideConfig, LongstrideForMaskedLM

    torch.manual_seed(0)
    content = small(**MASKED | changes).model_dump(mode="json")
    model = LongstrideForMaskedLM(LongstrideConfig(model=content)).double().eval()
    torch.nn.init.normal_(model.logits.weight)
    return model


def tokens(*shape: int) -> Tensor:
    """Return tokens of which some are masks."""
    return torch.randint(MASK - 7, MASK + 1, shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export = random_export(tmp_path / "model", layers=2, **MASKED)
    add_hub_files(export)
    return export


@pytest.fixture
def model(folder: Path) -> SparseTransformer:
    return load_model(folder)


def loaded(folder: Path, kind: str = "AutoModelForMaskedLM", **options: Any) -> Any:
    """Load an export by an automatic class, and check that every tensor is used."""
    import transformers

    hub, info = getattr(transformers, kind).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return hub


@client("transformers", "`AutoModelForMaskedLM`, `AutoModel`", "our logits and rows, bit for bit")
@pytest.mark.parametrize("length", [1, 40, 64])
def test_logits_are_in_place(folder: Path, model: SparseTransformer, length: int) -> None:
    hub, features, inputs = loaded(folder), loaded(folder, "AutoModel"), tokens(2, length)
    with torch.no_grad():
        expected = model(inputs)
        output = hub(inputs, output_hidden_states=True)
        assert torch.equal(output.logits, expected)
        assert torch.equal(hub(inputs, return_dict=False)[0], expected)
        assert torch.equal(hub(inputs.to(torch.int16)).logits, expected)
        states = features(inputs, output_hidden_states=True)
        assert torch.equal(model.logits(states.last_hidden_state), expected)
        assert torch.equal(features(inputs, return_dict=False)[0], states.last_hidden_state)
        for each in (output.hidden_states, states.hidden_states):
            assert len(each) == 3
            assert torch.equal(each[0], model.embedding(inputs))
            assert torch.equal(each[2], states.last_hidden_state)


@pytest.mark.parametrize("changes", SYSTEMS.values(), ids=SYSTEMS)
def test_every_row_reads_both_sides_as_the_network_does(changes: dict[str, Any]) -> None:
    hub, inputs = new_model(**changes), tokens(2, 30)
    with torch.no_grad():
        expected = hub.network(inputs)
        assert_rounded(hub(inputs).logits, expected)
        for changed in (0, 29):
            other = inputs.clone()
            other[:, changed] = 7
            assert bool((hub(other).logits != expected).any(2).all())


@pytest.mark.parametrize("changes", [*SYSTEMS.values(), NEIGHBOURS], ids=[*SYSTEMS, "neighbours"])
def test_padding_changes_no_row(changes: dict[str, Any]) -> None:
    """Hide any token behind the mask of padding, or none, since its own number suffices."""
    hub, inputs, lengths = new_model(**changes), tokens(4, 30), (30, 7, 1, 0)
    for is_left in (False, True):
        padded = torch.full((4, 30), PADDING)
        for row, text, length in zip(padded, inputs, lengths, strict=True):
            row[30 - length if is_left else 0 :][:length] = text[:length]
        real = padded != PADDING
        labels = torch.where(real, padded % 251, -100)
        with torch.no_grad():
            output = hub(padded.where(real, 7), attention_mask=real, labels=labels, output_hidden_states=True)
            assert torch.equal(hub(padded.where(real, END)).logits, output.logits)
            nats = []
            for number, length in enumerate(lengths[:3]):
                text, place = inputs[number, :length], real[number]
                alone = hub(text[None], labels=text[None] % 251, output_hidden_states=True)
                assert_rounded(output.logits[number][place], alone.logits[0])
                for state, state_alone in zip(output.hidden_states, alone.hidden_states, strict=True):
                    assert_rounded(state[number][place], state_alone[0])
                scores = alone.logits[0].log_softmax(1)
                nats += [-float(scores[place, token % 251]) for place, token in enumerate(text.tolist())]
            assert float(output.loss) == pytest.approx(sum(nats) / 38, rel=1e-12)
            torch.testing.assert_close(
                hub(padded, attention_mask=real, labels=labels, num_items_in_batch=76).loss, output.loss / 2
            )


def test_gradients_are_those_of_the_networks_nats() -> None:
    """Compare with the network's own loss of predicted tokens, activation checkpointing included."""
    hub, inputs = new_model(**SYSTEMS["experts"]), tokens(2, 30)
    targets = (inputs + 1) % 251
    predicted = inputs == MASK
    assert 0 < predicted.sum() < predicted.numel()
    network = hub.network.train()
    nats = network(targets, return_nats=True, return_extras=True, inputs=inputs, predicted=predicted)
    (nats.rows.sum() / predicted.sum() + nats.auxiliary_loss).backward()
    expected = [parameter.grad for parameter in hub.parameters()]
    hub.train()
    for _ in range(2):
        hub.zero_grad()
        hub(inputs, labels=targets.where(predicted, -100)).loss.backward()
        for parameter, gradient in zip(hub.parameters(), expected, strict=True):
            assert (parameter.grad - gradient).abs().max() <= 1e-9 * (1e-3 + gradient.abs().max())
        hub.activation_checkpointing_enable()


def test_what_it_cannot_do_is_told_in_one_line(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from longstride.launcher.hub import LongstrideConfig, LongstrideForMaskedLM

    masked = r'^model\.objective\.type="masked": predicts tokens from both sides; use AutoModelForMaskedLM$'
    with pytest.raises(ConfigError, match=masked):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    causal = r'^model\.objective\.type="autoregressive": predicts each next token; use AutoModelForCausalLM$'
    with pytest.raises(ConfigError, match=causal):
        LongstrideForMaskedLM(LongstrideConfig(model=small().model_dump(mode="json")))
    hub, inputs = loaded(folder), tokens(1, 3)
    assert not hub.can_generate() and not hasattr(hub, "generate")
    for wrong, options, rule in (
        (inputs, {"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask: padding between tokens"),
        (inputs, {"position_ids": torch.tensor([[0, 1, 0]])}, "position_ids: positions always count from 0"),
        (inputs, {"output_attentions": True}, "output_attentions: block-sparse attention has no weights"),
        (inputs, {"token_type_ids": inputs}, "token_type_ids: this model does not take this argument"),
        (inputs, {"labels": inputs[:, :2]}, r"labels: \(1, 2\), and tokens \(1, 3\): must be as many"),
        (inputs * 0 + 300, {}, r"input_ids: 300: a token is 0 to 255, or 256 \(mask\), 257 \(end\), 258 \(padding\)"),
        (torch.tensor([[1, END, 2]]), {}, "attention_mask: padding between tokens"),
        (inputs[:, :0], {}, "input_ids: no tokens; give at least one"),
        (inputs * 0 + PADDING, {}, "input_ids: no tokens; give at least one"),
        (tokens(1, 65), {}, "65 tokens: more than the model's context of 64; give 64 at most"),
        (None, {}, "input_ids: must be given"),
    ):
        with pytest.raises(ValueError, match=f"^{rule}"):
            hub(wrong, **options)


def test_tokenizer_has_the_mask_in_place_of_the_start(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    written = tokenizer.decode([MASK])
    tokenizer.save_pretrained(tmp_path / "again")
    (tmp_path / "again/config.json").write_text((folder / "config.json").read_text())
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)):
        assert (each.mask_token, each.mask_token_id, each.bos_token_id) == (written, MASK, None)
        assert (each.eos_token_id, each.pad_token_id, each.model_max_length) == (END, PADDING, 64)
        assert each(f"ä{written}b").input_ids == [*"ä".encode(), MASK, *b"b"]
        assert each(written, split_special_tokens=True).input_ids == list(written.encode())
        assert each(["ab", "c"], padding=True).input_ids == [[97, 98], [99, PADDING]]
        assert each.decode([MASK, 97, PADDING], skip_special_tokens=True) == "a"
        assert len(each) == 257  # what random tokens are drawn from
        with pytest.raises(ValueError, match=r"^add_bos_token=True: a model of masked tokens has no start"):
            each.add_bos_token = True
    stub = "modeling_longstride.py"
    assert (tmp_path / "again" / stub).read_text() == (folder / stub).read_text()


@client("transformers", '`pipeline("fill-mask")`', "the likeliest bytes of our logits")
def test_pipeline_fills_masks(folder: Path, model: SparseTransformer) -> None:
    from transformers import pipeline

    fill = pipeline("fill-mask", str(folder), trust_remote_code=True)
    mask = fill.tokenizer.mask_token
    for text in (f"a str{mask}de", f"{mask}{mask} tränen {mask}"):
        inputs = torch.tensor([fill.tokenizer(text).input_ids])
        with torch.no_grad():
            probabilities = model(inputs)[0, inputs[0] == MASK].softmax(1)
        results = fill(text, top_k=3)
        results = results if isinstance(results[0], list) else [results]
        scores, numbers = probabilities.topk(3)
        assert [[each["token"] for each in result] for result in results] == numbers.tolist()
        torch.testing.assert_close(torch.tensor([[each["score"] for each in result] for result in results]), scores)
    fill.tokenizer.errors = "surrogateescape"
    (first,) = fill(f"a str{mask}de", top_k=1)
    assert first["sequence"].encode("utf-8", "surrogateescape") == b"a str" + bytes([first["token"]]) + b"de"
    batched = fill([f"a{mask}", f"more {mask}"], batch_size=2, targets=["b", "c"])
    assert [{each["token_str"] for each in result} for result in batched] == [{"b", "c"}] * 2


@client("transformers", "Trainer, masked bytes", "the gradient of their mean")
def test_trainer_takes_a_step(folder: Path, tmp_path: Path) -> None:
    """Take a step of two accumulated batches in fp64, and compare it with the definition on the collator's batches."""
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    texts = [tokenizer("a long stride " * 4, truncation=True, max_length=20 + 5 * number) for number in range(8)]
    set_seed(0)
    mask_tokens = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
    batches: list[Any] = []
    rate, hub = 0.5, loaded(folder).double()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trained"), max_steps=1, learning_rate=rate, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        hub, arguments, train_dataset=texts, data_collator=lambda rows: batches.append(mask_tokens(rows)) or batches[-1]
    )
    trainer.train()
    assert {int(batch["input_ids"].max()) for batch in batches} <= {MASK, PADDING}
    exact = load_model(folder, dtype=torch.float64).train()
    count = sum(int((batch["labels"] != -100).sum()) for batch in batches[:2])
    for batch in batches[:2]:
        for row, labels, real in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            logits = exact(row[None, real.bool()])[0]
            places = labels[real.bool()] != -100
            log_probabilities = logits[places].log_softmax(1)
            (-log_probabilities[torch.arange(len(log_probabilities)), labels[labels != -100]].sum() / count).backward()
    for name, parameter in exact.named_parameters():
        expected = parameter - rate * parameter.grad
        assert not torch.equal(expected, parameter), name
        assert (hub.get_parameter(name) - expected).abs().max() <= 1e-12 * expected.abs().max(), name


def test_saved_model_is_an_export(folder: Path, tmp_path: Path) -> None:
    inputs, again = tokens(2, 9), tmp_path / "again"
    hub = loaded(folder)
    hub.save_pretrained(again)
    with torch.no_grad():
        expected = hub(inputs).logits
        assert torch.equal(load_model(again)(inputs), expected)
        assert torch.equal(loaded(again)(inputs).logits, expected)
    content, before = (json.loads((each / "config.json").read_text()) for each in (again, folder))
    assert content["fingerprint"] == Exported(folder).fingerprint() == Exported(again).fingerprint()
    assert content["auto_map"] == before["auto_map"] and content["architectures"] == ["LongstrideForMaskedLM"]
    assert (content["bos_token_id"], content["max_position_embeddings"]) == (None, 64)
    weights, weights_before = (load_file(each / "model.safetensors") for each in (again, folder))
    assert all(torch.equal(tensor, weights_before[name]) for name, tensor in weights.items())


def test_registered_classes_load_a_masked_export_without_its_stub(folder: Path) -> None:
    """Run in a separate process, as registration cannot be undone."""
    script = (
        "from longstride.launcher.hub import register\n"
        "import transformers\n"
        "register()\n"
        f"for kind in ('AutoModelForMaskedLM', 'AutoModel', 'AutoTokenizer'):\n"
        f"    print(type(getattr(transformers, kind).from_pretrained({str(folder)!r})).__name__)\n"
    )
    (folder / "modeling_longstride.py").unlink()
    ended = run_python("-c", script)
    names = ["LongstrideForMaskedLM", "LongstrideModel", "LongstrideTokenizer"]
    assert (ended.returncode, ended.stdout.split()) == (0, names), ended.stderr


@pytest.mark.parametrize("modality", ["text", "image"])
def test_code_of_a_card_runs(
    modality: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run what the card shows in the folder: bytes of text have a tokenizer, others none."""
    embeddings = {"text": {}, "image": {"embedding": {"type": "image", "height": 4, "width": 4, "channels": 4}}}
    config = small(context=64, **MASKED, **embeddings[modality])
    if modality != "text":
        shutil.rmtree(folder)
        random_export(folder, **config.model_dump(mode="json"))
        add_hub_files(folder)
    train = SimpleNamespace(global_batch=8)
    run = SimpleNamespace(
        model=config, notes="", train=train, data=SimpleNamespace(path="data", validation_split="v", separator=None)
    )
    manifest = SimpleNamespace(step=4, precision="fp32", zero_stage=0, world_size=1)
    checkpoint: Any = SimpleNamespace(config=run, manifest=manifest)
    properties = {"text": {}, "image": {"height": 4, "width": 4, "channels": 4, "resized": 0}}[modality]
    card = model_card(tmp_path, checkpoint, ModelData(MODALITIES[modality], properties), "trained", "fp32", "", {})
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    if modality == "text":
        assert "te is masked." in capsys.readouterr().out
    else:
        torch.testing.assert_close(names["probabilities"].sum(-1), torch.ones(1, 64))
