"""`--from`: first weights of an export or of another run, what fits them, and what becomes of the rest."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.data import WeightSource
from longstride.launcher.models import Exported
from longstride.launcher.training.initial import Fit, extend_table, fit
from tests.harness.runs import complete, metrics, spawn
from tests.harness.tiny_models import plain_config

Trained = Callable[..., Path]
STILL = [
    "train.steps=1",
    "train.warmup_steps=0",
    "train.learning_rate=1e-30",
    "train.ema_decay=null",
    "train.evaluate_every=1",
]
TABLES = 'model.ngrams={"orders": [2, 3], "rows": 64}'


def fitted(change: dict[str, Any], source: dict[str, Any] | None = None, **asked: Any) -> Fit:
    there, here = plain_config(**(source or {})), plain_config(**{**(source or {}), **change})
    return fit(there, here, WeightSource(Path("runs/a"), **asked), "runs/a")


def first_loss(run: Path) -> float:
    """Of the validation split after a step that moves nothing."""
    (line,) = [line for line in metrics(run) if line["split"] == "validation"]
    return float(line["loss_nats"])


def last_loss(run: Path) -> float:
    return float([line for line in metrics(run) if line["split"] == "validation"][-1]["loss_nats"])


# ---- What fits ----


def test_all_is_taken_by_a_model_whose_attention_and_dropout_alone_are_others() -> None:
    same = fitted({"attention": {"type": "strided", "stride": 8}, "dropout": 0.5, "backend": "reference"})
    assert not (same.extended or same.anew or same.unused) and "logits.weight" in same.taken
    assert same.changed == (
        "model.attention.stride was left out, is 8",
        'model.attention.type was "local", is "strided"',
        "model.attention.window was 8, is left out",
    )


def test_an_indexer_alone_begins_anew_or_is_left_unused() -> None:
    indexed = {"type": "indexed", "keys": 64, "index_heads": 2, "index_width": 8}
    sparse = fitted({"attention": indexed}, {"attention": {"type": "dense"}})
    assert sparse.anew == ("blocks.0.attention.indexer.projection.weight",) and not sparse.unused
    dense = fitted({"attention": {"type": "dense"}}, {"attention": indexed})
    assert (dense.unused, dense.anew, dense.taken) == (sparse.anew, (), sparse.taken)
    with pytest.raises(ConfigError, match="is \\[35, 32\\] in this run and \\[26, 32\\] in runs/a; take"):
        fitted({"attention": indexed | {"index_heads": 3}}, {"attention": indexed})


@pytest.mark.parametrize(
    ("change", "key", "tensors", "good"),
    [
        ({"width": 64}, "model.width=64", "embedding.start is [64] in this run and [32] in runs/a, as 18 more", "32"),
        ({"layers": 2}, "model.layers=2", "blocks.1.attention_norm.weight is [32] in this run and missing in", "1"),
        ({"ngrams": {"orders": [2], "rows": 16}}, "model.ngrams=", "embedding.ngrams.rows", "the model without it"),
        ({"vocabulary": 99}, "model.vocabulary=99", "embedding.tokens.weight is [99, 32] in this run and", "256"),
        ({"norm": "rms"}, 'model.norm="rms"', "attention_norm.bias is missing in this run", "the model without"),
        ({"norm_position": "after"}, 'model.norm_position="after"', "norm.weight is missing in", "the model without"),
        ({"output": {"tied": True}}, "model.output", "logits.weight is missing in this run and [", "the model without"),
        (
            {"embedding": {"type": "text", "row_width": 16}},
            "model.embedding=",
            "embedding.positions.0.weight is [4, 32] in this run and [8, 32]",
            '{"type": "text", "row_width": 8} as there, or --from-positions fresh',
        ),
    ],
)  # fmt: skip
def test_tensor_that_does_not_fit_is_told_with_the_key_that_causes_it(
    change: dict[str, Any], key: str, tensors: str, good: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        fitted(change)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(key) and tensors in line and f"; take {good}" in line


def test_each_key_that_causes_it_has_its_line() -> None:
    with pytest.raises(ConfigError) as refused:
        fitted({"width": 64, "layers": 2})
    assert [line.partition("=")[0] for line in str(refused.value).splitlines()] == ["model.width", "model.layers"]


def test_objectives_share_all_but_the_start_and_the_row_of_masks() -> None:
    masked = {"objective": {"type": "masked"}, "attention": {"type": "local", "window": 8, "causal": False}}
    usual = {"objective": {"type": "autoregressive"}, "attention": {"type": "local", "window": 8}}
    there, back = fitted(masked), fitted(usual, masked)
    assert there.unmasked == back.unmasked == ("embedding.tokens.weight",)
    assert (there.anew, there.unused) == ((), ("embedding.start",)) and (back.anew, back.unused) == (there.unused, ())
    with pytest.raises(
        ConfigError, match=r"^model\.vocabulary=99: embedding\.tokens\.weight is \[100, 32\] in this run"
    ):
        fitted({**masked, "vocabulary": 99})


def test_tables_of_another_hash_do_not_fit_though_their_shapes_do() -> None:
    with pytest.raises(ConfigError, match=r"^model\.ngrams=.*hashed otherwise in runs/a"):
        fitted({"ngrams": {"orders": [3], "rows": 16}}, {"ngrams": {"orders": [2], "rows": 16}})


def test_what_does_not_fit_begins_anew_where_it_may() -> None:
    partly = fitted({"layers": 2, "norm": "rms"}, partly=True)
    assert "blocks.1.attention.projection.weight" in partly.anew and "norm.bias" in partly.unused
    assert "blocks.0.attention.projection.weight" in partly.taken


def test_longer_context_asks_how_positions_are_made() -> None:
    with pytest.raises(ConfigError) as refused:
        fitted({"context": 128})
    assert str(refused.value) == (
        "--from-positions: required: embedding.positions.0.weight has 16 rows in this run (model.context=128), "
        "and in runs/a 8; take repeat, interpolate or fresh"
    )
    assert fitted({"context": 128}, positions="repeat").extended == ("embedding.positions.0.weight",)
    fresh = fitted({"context": 128}, positions="fresh")
    assert fresh.anew == ("embedding.positions.0.weight", "embedding.positions.1.weight") and not fresh.extended
    with pytest.raises(
        ConfigError, match=r"^--from-positions=repeat: no position table needs extending; leave it out$"
    ):
        fitted({}, positions="repeat")
    without: dict[str, Any] = {"embedding": {"type": "tokens"}, "rotary": {}}
    assert not (grown := fitted({"context": 128}, without)).extended and not grown.anew


def test_extended_tables_repeat_or_lie_on_straight_lines() -> None:
    table = torch.tensor([[0.0, 10.0], [2.0, 30.0], [4.0, 10.0]])
    assert torch.equal(extend_table(table, 7, "repeat"), table[[0, 1, 2, 0, 1, 2, 0]])
    longer = extend_table(table, 5, "interpolate")
    assert torch.allclose(longer, torch.tensor([[0.0, 10.0], [1.0, 20.0], [2.0, 30.0], [3.0, 20.0], [4.0, 10.0]]))
    assert torch.allclose(extend_table(longer, 3, "interpolate"), table)


# ---- What is asked ----


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--from", "{}/none"],
            "--from={}/none: no such folder; name a folder of `longstride export`, or a run folder",
        ),
        (["--from", "{}"], "--from={}: holds no model; name a folder of `longstride export`, or a run folder"),
        (["--from-partly"], "--from-partly: only applies with --from; give --from too, or leave it out"),
        (["--from-step", "4"], "--from-step=4: only applies with --from; give --from too, or leave it out"),
        (
            ["--from", "{}", "--resume", "4"],
            "--from={}: begins a run, but --resume=4 continues one; leave one of them out",
        ),
        (
            ["--from", "{}/model", "--from-weights", "ema"],
            "--from-weights=ema: only applies to runs, and {}/model is an export; leave it out",
        ),
        (
            ["--from", "{}/model", "--from-step", "4"],
            "--from-step=4: only applies to runs, and {}/model is an export; leave it out",
        ),
    ],
)  # fmt: skip
def test_wrong_option_is_one_line(
    options: list[str], line: str, exported: Path, refused: Any, config_file: Path, tmp_path: Path
) -> None:
    given = [option.format(tmp_path) for option in options]
    assert refused("--config", str(config_file), *given) == [line.format(tmp_path)]


def test_launchers_hand_on_an_absolute_path(config_file: Path, exported: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(exported.parent)
    words = ["--config", str(config_file), "--nodes", "1", "--processes-per-node", "2", "--time", "1:00:00", "--print"]
    assert cli.main(["slurm", *words, "--from", "model", "--from-positions", "repeat"]) == 0
    assert f"--from {exported} --from-weights trained --from-positions repeat" in capsys.readouterr().out


# ---- Runs ----


def test_first_loss_is_that_of_the_source_and_a_run_goes_on_from_its_own(
    trained: Trained, config_file: Path, tmp_path: Path
) -> None:
    """Under ZeRO 3 by two ranks, from a run of ZeRO 0 by one."""
    source = trained("alone", 1)
    words = ["--config", str(config_file), "--from", str(source), "--resume", "auto", "deepspeed=zero3_fp32", *STILL]
    ended = complete(words, 2)
    checkpoint = open_checkpoint(source, None)
    count = sum(tensor.numel() for tensor in master_weights(checkpoint).values())
    assert f"longstride: from step 8 of {source}: {count:,} of {count:,} parameters; the opt" in ended.stderr[0]
    assert first_loss(tmp_path / "run") == pytest.approx(last_loss(source), rel=1e-6)
    made = open_checkpoint(tmp_path / "run", None)
    assert made.manifest.step == 1 and made.manifest.origin == {
        "run": source.name, "step": 8, "weights": "trained", "manifest_sha256": checkpoint.manifest_digest(),
        "parameters_taken": count,
    }  # fmt: skip
    (start,) = map(json.loads, (tmp_path / "run/starts.jsonl").read_text().splitlines())
    assert (start["how"], start["from"]) == ("from", made.manifest.origin)
    assert cli.main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    assert Exported(tmp_path / "out").content["origin"]["from"] == made.manifest.origin
    shutil.rmtree(tmp_path / "out")
    words[3] = str(tmp_path / "gone")  # a restart needs no source any more
    ended = complete([*words, "train.steps=2"], 2)
    assert (
        f"longstride: --from={tmp_path / 'gone'}: not needed, because the run continues from its own" in ended.stderr[0]
    )
    assert open_checkpoint(tmp_path / "run", None).manifest.origin == made.manifest.origin
    last = json.loads((tmp_path / "run/starts.jsonl").read_text().splitlines()[-1])
    assert last["how"] == "resume" and "from" not in last


def test_export_in_half_precision_gives_a_longer_context_and_another_pattern(
    config_file: Path, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "model"
    assert cli.main(["export", str(trained("alone", 1)), "--dtype", "bf16", "--output", str(source)]) == 0
    words = ["--config", str(config_file), "--from", str(source), "--from-positions", "interpolate", *STILL]
    longer = ["model.context=128", 'model.attention={"type": "strided", "stride": 8}', "train.evaluate_contexts=2"]
    ended = complete([*words, *longer], 1)
    assert "extended (interpolate): embedding.positions.0.weight from 8 to 16 rows\n" in ended.stderr[0]
    assert 'model.attention.type was "fixed", is "strided"' in ended.stderr[0]
    before, after = Exported(source), master_weights(open_checkpoint(tmp_path / "run", None))
    for name, tensor in after.items():
        expected = before.tensor(name).float()
        if name == "embedding.positions.0.weight":
            expected = extend_table(expected, 16, "interpolate")
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-20)


def test_damaged_or_foreign_source_is_refused_and_leaves_nothing(
    config_file: Path, exported: Path, tmp_path: Path
) -> None:
    content = json.loads((exported / "config.json").read_text())
    changed = {"model": content["model"], "fingerprint": "0" * 64}
    (exported / "config.json").write_text(json.dumps(content | changed))
    model = [f"model.{key}={json.dumps(value)}" for key, value in content["model"].items()]
    ended = spawn(["--config", str(config_file), "--from", str(exported), *model, *STILL], 1)
    assert ended.codes == [2], ended.stderr
    assert re.search(rf"error: {exported}: its tensors do not match its fingerprint", ended.stderr[0])
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.campaign
@pytest.mark.parametrize("weights", ["trained", "ema"])
@pytest.mark.parametrize("tables", [[], [TABLES]], ids=["", "tables"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("processes", [None, 2], ids=["", "shared"])
def test_first_loss_is_that_of_the_source_in_every_layout(
    processes: int | None, stage: int, precision: str, tables: list[str], weights: str, trained: Trained,
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of a run and of its export, which give the same; the source was trained in fp32 by two ranks under ZeRO 2."""
    source = trained(f"source{'-tables' * len(tables)}", 2, "deepspeed=zero2_fp32", *tables)
    given = ["--from", str(source), "--from-weights", weights]
    capsys.readouterr()
    evaluated = ["evaluate", str(source), "--weights", weights]
    assert cli.main(evaluated) == 0
    expected = json.loads(capsys.readouterr().out)["loss_nats"]
    sharing = [] if processes is None else [f"train.sequence_parallel={processes}"]
    words = [
        "--config",
        str(config_file),
        "train.evaluate_contexts=null",
        f"deepspeed=zero{stage}_{precision}",
        *tables,
        *STILL,
        *sharing,
    ]
    complete([*words, *given], 2)
    rel = 1e-6 if precision == "fp32" else 1e-2
    assert first_loss(tmp_path / "run") == pytest.approx(expected, rel=rel)
