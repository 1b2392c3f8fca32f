"""An export under transformers' Trainer: what it trains, evaluates, saves and resumes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longstride.launcher.models import Exported, load_model
from longstride.sparse_model.feed_forwards.experts import Experts
from tests.clients.conftest import PADDING, new_model
from tests.harness.clients import client
from tests.harness.configs import SYSTEMS
from tests.harness.runs import ROOT, free_port

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair

ROUNDING = 2.0**-23  # of fp32


def texts() -> list[dict[str, Tensor]]:
    """Return sixteen texts of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 60, (16,), generator=generator).tolist()
    return [{"input_ids": torch.randint(256, (length,), generator=generator)} for length in lengths]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Build a batch like transformers' collators."""
    tokens = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], True, PADDING)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PADDING).long(),
        "labels": tokens.where(tokens < 256, -100),
    }


def trainer(folder: Path, output: Path, batch: int = 4, accumulated: int = 1, **options: Any) -> Any:
    """Build a trainer of an export over ``texts``, by default with three steps of plain gradient descent."""
    from transformers import Trainer, TrainingArguments

    from longstride.launcher.hub import LongstrideForCausalLM

    settings: dict[str, Any] = {
        "max_steps": 3, "learning_rate": 0.01, "lr_scheduler_type": "constant", "optim": "sgd", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **options,
    }  # fmt: skip
    model = LongstrideForCausalLM.from_pretrained(folder)
    arguments = TrainingArguments(output_dir=str(output), **settings)
    return Trainer(model=model, args=arguments, train_dataset=texts(), eval_dataset=texts()[:4], data_collator=padded)


def losses(trained: Any) -> list[float]:
    return [line["loss"] for line in trained.state.log_history if "loss" in line]


def difference(model: Any, reference: Any) -> float:
    """Return the largest difference between parameters, relative to the largest parameter."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


@client(
    "transformers",
    "Trainer, 4 batches of 1 accumulated, texts of unequal lengths",
    "those of one batch of 4, up to rounding",
)
def test_accumulated_gradients_are_those_of_one_batch(folder: Path, tmp_path: Path) -> None:
    full, parts = trainer(folder, tmp_path, 4, 1), trainer(folder, tmp_path, 1, 4)
    for training in (full, parts):
        training.train()
    assert losses(parts) == pytest.approx(losses(full), rel=8 * ROUNDING)
    # Sums in another order, through three steps.
    assert 0 < difference(parts.model, full.model) <= 64 * ROUNDING
    assert difference(full.model, load_model(folder)) > 1e-4


@client(
    "transformers",
    "Trainer's `evaluate`",
    "the loss of `longstride evaluate` without first bytes",
)
def test_evaluation_is_ours(folder: Path, tmp_path: Path) -> None:
    output = trainer(folder, tmp_path, per_device_eval_batch_size=4).evaluate()["eval_loss"]
    model, nats = load_model(folder), []
    with torch.no_grad():
        for row in texts()[:4]:
            nats.append(model(row["input_ids"][None], return_nats=True)[0, 1:])
    assert output == pytest.approx(float(torch.cat(nats).mean()), rel=8 * ROUNDING)


@client("transformers", "Trainer, resumed from its checkpoint", "an uninterrupted run's weights, bit for bit")
def test_a_resumed_training_is_one_that_went_on(folder: Path, tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
    straight = trainer(folder, tmp_path / "run", **options)
    straight.train()
    resumed = trainer(folder, tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert difference(resumed.model, straight.model) == 0
    saved = Exported(tmp_path / "run/checkpoint-2")
    assert saved.fingerprint() == saved.content["fingerprint"]


@client(
    "transformers", "Trainer's `label_smoothing_factor`", "torch's label smoothing of our logits, full contexts too"
)
def test_smoothed_labels_stand_behind_their_logits(folder: Path, tmp_path: Path) -> None:
    rows = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    smoothed = trainer(folder, tmp_path, label_smoothing_factor=0.1)
    batch = {"input_ids": rows, "labels": rows.clone()}
    loss = smoothed.compute_loss(smoothed.model.train(), dict(batch), num_items_in_batch=torch.tensor(2 * 63))
    loss.backward()
    with torch.no_grad():
        logits = load_model(folder)(rows)[:, 1:]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), label_smoothing=0.1)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=8 * ROUNDING)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in smoothed.model.parameters())


@client("transformers", "Trainer with `bf16`", "the losses of fp32 within 1%, and weights in fp32")
def test_autocast_trains(folder: Path, tmp_path: Path) -> None:
    exact, cast = trainer(folder, tmp_path), trainer(folder, tmp_path, bf16=True)
    for training in (exact, cast):
        training.train()
    assert losses(cast) == pytest.approx(losses(exact), rel=0.01)
    assert losses(cast) != losses(exact)
    assert {parameter.dtype for parameter in cast.model.parameters()} == {torch.float32}


@client("transformers", "DataCollatorForLanguageModeling, texts of unequal lengths", "padding on the left without loss")
def test_collated_texts_train(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, add_bos_token=True)
    rows = [tokenizer(text) for text in ("a stride", "a stride of bytes", "bytes", "ä") * 4]
    trained = trainer(folder, tmp_path)
    trained.train_dataset, trained.data_collator = rows, DataCollatorForLanguageModeling(tokenizer, mlm=False)
    model, nats = load_model(folder), []
    with torch.no_grad():
        for row in rows[:4]:
            nats.append(model(torch.tensor([row["input_ids"][1:]]), return_nats=True)[0])
    output = trained.model(**trained.data_collator(rows[:4])).loss
    assert float(output.detach()) == pytest.approx(float(torch.cat(nats).mean()), rel=8 * ROUNDING)
    trained.train()
    assert all(bool(parameter.isfinite().all()) for parameter in trained.model.parameters())


def saved_bytes(model: Any, rows: Tensor) -> int:
    """Measure the bytes of activations that the forward pass of a loss saves for the backward pass."""
    weights, storages = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(rows, labels=rows).loss
    loss.backward()
    return sum(storages.values())


@client(
    "transformers",
    "`gradient_checkpointing_enable`, 8 layers",
    "equal gradients, bit for bit; under a third of the activations",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_gradients_are_equal(reentrant: bool) -> None:
    model = new_model(layers=8, dropout=0.1)
    torch.nn.init.normal_(model.logits.weight)
    rows, gradients, sizes = torch.randint(256, (2, model.config.max_position_embeddings)), [], []
    for every in (0, 1, 4):
        if every:
            model.activation_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=every)
        model.train().zero_grad()
        torch.manual_seed(1)
        sizes.append(saved_bytes(model, rows))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for recomputed in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], recomputed, strict=True))
    assert sizes[1] < sizes[0] / 3 and sizes[1] < sizes[2] < sizes[0]


def test_auxiliary_losses_count_once() -> None:
    """Check that the losses of a step's parts add up to the step's, if each part's loss is a sum over its rows."""
    changes = next(changes for changes in SYSTEMS.values() if "experts" in str(changes))
    model = new_model(**changes).train()
    row = torch.randint(256, (1, 20))
    alone = model(row, labels=row).loss
    assert alone > model.eval()(row, labels=row).loss
    model.train()
    share = model(row, labels=row, num_items_in_batch=torch.tensor(3 * 19)).loss
    torch.testing.assert_close(3 * share, alone)


@client("transformers", "rows of unequal lengths, padded on either side", "gradients and losses as with less padding")
@pytest.mark.parametrize("changes", SYSTEMS.values(), ids=SYSTEMS)
def test_padding_changes_no_gradient(changes: dict[str, Any]) -> None:
    """Check that the amount of padding does not matter either; the first batch has the least possible."""
    model = new_model(**changes | {"vocabulary": 256}).double().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for part in model.network.modules():
        if isinstance(part, Experts):  # their balance counts
            part.config = part.config.model_copy(update={"balance": 3.0})
    texts = [torch.randint(256, (length,)) for length in (30, 8, 1)]
    results = []
    for start, width, byte in ((0, 30, PADDING), (0, 39, PADDING), (9, 39, PADDING), (4, 40, 7), (0, 40, 250)):
        tokens, mask = torch.full((3, width), byte), torch.zeros(3, width, dtype=torch.long)
        for row, shown, text in zip(tokens, mask, texts, strict=True):
            row[start : start + len(text)], shown[start : start + len(text)] = text, 1
        labels = tokens.where(mask.bool(), -100)
        labels[:, start] = -100  # which a row with padding before it would count
        model.zero_grad()
        output = model(tokens, attention_mask=mask, labels=labels)
        output.loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append({"loss": output.loss.detach(), **gradients})
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        for name, gradient in result.items():
            expected = results[0][name]
            assert (gradient - expected).abs().max() <= 2.0**-40 * expected.abs().max(), name


def test_labels_of_tokens_that_no_model_predicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longstride.launcher.hub import LongstrideForCausalLM

    model = LongstrideForCausalLM.from_pretrained(folder)
    rows = padded(texts()[:3])
    expected = model(**rows).loss
    specials = rows | {"labels": rows["input_ids"]}
    torch.testing.assert_close(model(**specials).loss, expected)
    warned: list[str] = []
    monkeypatch.setattr("longstride.launcher.hub.model._logger.warning_once", warned.append)
    counted = int((rows["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(model(**rows, num_items_in_batch=counted).loss, expected)
    assert not warned
    torch.testing.assert_close(model(**specials, num_items_in_batch=2 * counted).loss, expected / 2)
    assert warned[0].startswith("labels: 258: num_items_in_batch counts it, and no model predicts it")
    shifted = torch.nn.functional.pad(rows["labels"], (0, 1), value=-100)[:, 1:]
    output = model(rows["input_ids"], shift_labels=shifted).loss
    torch.testing.assert_close(output, expected)


@client(
    "transformers",
    "Trainer under DeepSpeed's ZeRO 3, loaded and new weights, 1 and 2 processes",
    "the weights of ZeRO 0, to rounding",
)
@pytest.mark.parametrize("processes", [1, 2])
def test_zero_three_trains_as_zero_zero(folder: Path, tmp_path: Path, processes: int) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(processes), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    script = [sys.executable, str(ROOT / "tests/harness/processes/hub_training.py"), str(folder), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            script,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), outputs[-1][-3000:]
    before = load_file(folder / "model.safetensors")
    for weights in ("loaded", "new"):
        expected, weights_3 = (load_file(tmp_path / f"{weights}-{stage}/model.safetensors") for stage in "03")
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights_3.items())
        for name, tensor in expected.items():
            assert (weights_3[name] - tensor).abs().max() <= 64 * ROUNDING * max(float(tensor.abs().max()), 1.0), name
