"""Exporting: the trainer's logits to the bit, files of any size and type, and nothing left of one that fails."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longstride.data_pipelines import durable
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints import saved_state
from longstride.launcher.checkpoints.checkpoint import Checkpoint, open_checkpoint
from longstride.launcher.checkpoints.manifest import read_checkpoint_config, read_manifest, write_manifest
from longstride.launcher.checkpoints.saved_state import SavedState
from longstride.launcher.engine.states import TABLES as TABLES_NAME
from longstride.launcher.exports import export as export_module
from longstride.launcher.exports.export import Options, export, parse_size
from longstride.launcher.models import AVERAGE
from longstride.launcher.models import exported as exported_module
from longstride.launcher.models.exported import Exported, load_model, stream_model
from longstride.launcher.models.tensors import DTYPES
from tests.harness.runs import ROOT, configuration, metrics, spawn
from tests.launcher.conftest import Refusal
from tests.launcher.training.test_training import RUNS, TABLES

Trained = Callable[..., Path]
EVERY_LAYOUT = [(stage, ranks) for stage in range(4) for ranks in (1, 2)]
LAYOUTS = [(3, 2)]  # the others are as long again
NAME = "zero2-fp16"


@pytest.fixture
def run(trained: Trained) -> Path:
    """A run of two processes under ZeRO 2 in fp16; its checkpoints are of steps 4 and 8."""
    return trained(NAME, 2, *RUNS[NAME])


@pytest.fixture
def run_copy(run: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        pytest.param(*each, marks=() if each in LAYOUTS else pytest.mark.campaign, id=f"zero{each[0]}-{each[1]}")
        for each in EVERY_LAYOUT
    ],
)
def test_exported_logits_are_the_trainers_to_the_bit(
    stage: int, ranks: int, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(configuration(data, tmp_path / "run")))
    changes = [
        f"deepspeed=zero{stage}_fp32",
        TABLES,
        "train.steps=2",
        "train.warmup_steps=0",
        "train.learning_rate=0.05",
    ]
    logits = tmp_path / "logits.pt"
    ended = spawn(["--config", str(tmp_path / "run.json"), *changes], ranks, {"DUMP_LOGITS": str(logits)})
    assert ended.codes == [0] * ranks, ended.stderr
    assert cli.main(["export", str(tmp_path / "run"), "--shard-size", "20KB", "--output", str(tmp_path / "out")]) == 0
    seen = capsys.readouterr().err.splitlines()[0]
    said, numbers = seen.split(": ")
    assert said == "probe (a check on random bytes, not the model's score)"
    first, second = numbers.split(" nats, the trainer's ")
    assert first == second  # and nothing about a difference behind it
    trainers = torch.load(logits, weights_only=True)
    with torch.no_grad():
        found = load_model(tmp_path / "out")(trainers["tokens"])
    assert trainers["logits"].abs().max() > 0.1
    assert torch.equal(found, trainers["logits"])


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_holds_the_masters_rounded_once(name: str, dtype: str, trained: Trained, tmp_path: Path) -> None:
    run = trained(name, 2, *RUNS[name])
    checkpoint, seen = export(run, 8, tmp_path / "out", Options(dtype=dtype))
    state, weights = SavedState(checkpoint), load_file(tmp_path / "out/model.safetensors")
    assert weights.keys() == state.model_shapes.keys()
    for key, tensor in weights.items():
        assert tensor.dtype == DTYPES[dtype]
        assert torch.equal(tensor, state.tensor(key).to(DTYPES[dtype]))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert config["fingerprint"] == Exported(tmp_path / "out").fingerprint()
    assert config["data"] == {"modality": "text", "properties": {}}
    trainers = checkpoint.manifest.probe
    assert trainers is not None
    same = dtype == "fp32" or dtype in name  # else the model is another one by its rounding
    own, before = float(seen.partition(": ")[2].split()[0]), trainers.loss_nats
    assert f"the trainer's {before:.6f}" in seen
    assert own == pytest.approx(before, rel=1e-3 if same else 1e-2)


def test_shards_hold_what_one_file_holds(run: Path, tmp_path: Path) -> None:
    export(run, None, tmp_path / "one")
    export(run, None, tmp_path / "many", Options(shard_bytes=40_000))
    whole = load_file(tmp_path / "one/model.safetensors")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert [file.name for file in files] == names and 3 < len(files) < len(whole)
    held: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 40_000 or tensors.keys() == {TABLES_NAME}
        assert all(index["weight_map"][name] == file.name for name in tensors)
        held |= tensors
    assert index["weight_map"].keys() == held.keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in whole)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in whole.values())}
    assert Exported(tmp_path / "one").fingerprint() == Exported(tmp_path / "many").fingerprint()
    modes = {path.stat().st_mode for path in (tmp_path / "many").iterdir()}
    assert len(modes) == 1


def test_a_tensor_larger_than_a_file_may_be_has_its_own(run: Path, tmp_path: Path) -> None:
    checkpoint, _ = export(run, None, tmp_path / "out", Options(shard_bytes=1))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(SavedState(checkpoint).model_shapes)


def test_average_is_exported_once_the_trained_weights_are_checked(run: Path, tmp_path: Path) -> None:
    checkpoint, seen = export(run, None, tmp_path / "out", Options(kind=AVERAGE))
    state, weights = SavedState(checkpoint), load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(tensor, state.tensor(name, AVERAGE)) for name, tensor in weights.items())
    own, trained = (float(part.split()[-1]) for part in (seen.partition(" nats")[0], seen.partition(", the")[0]))
    assert own != trained
    assert checkpoint.manifest.probe is not None
    assert trained == pytest.approx(checkpoint.manifest.probe.loss_nats, rel=1e-3)


def test_card_has_the_runs_figures(run: Path, tmp_path: Path) -> None:
    export(run, None, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert front.splitlines()[:3] == ["library_name: longstride", "pipeline_tag: text-generation", "tags:"]
    count = sum(tensor.numel() for tensor in load_model(tmp_path / "out").parameters())
    lines = {line["split"]: line["bits_per_byte"] for line in metrics(run) if line["step"] == 8}
    (scored,) = (line["bytes"] for line in metrics(run) if line["step"] == 8 and line["split"] == "validation")
    for cell in (
        f"| parameters | {count:,} |",
        "| context | 64 bytes |",
        '| attention | `{"type": "fixed", "stride": 8, "summary": 2}` |',
        "| data | data: text, byte by byte |",
        "| steps | 8, each of 8 contexts |",
        "| trained in | fp16, ZeRO 2, 2 processes |",
        "| weights | fp32, as they were trained |",
        f"| training bits per byte | {lines['train']:.4f} on the step's batch |",
        f"| validation bits per byte | {lines['validation']:.4f} on {scored:,} bytes of validation |",
        f"| fingerprint | `{Exported(tmp_path / 'out').fingerprint()}` |",
        "longstride sample .",
    ):
        assert cell in text
    assert str(run.parent) not in card  # a card is for others


def test_nothing_of_an_export_names_the_machine(run: Path, tmp_path: Path) -> None:
    export(run, None, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["origin"]["run"] == run.name
    for path in (tmp_path / "out").iterdir():
        content = path.read_bytes()
        for name in (run.parent, tmp_path, ROOT):
            assert str(name).encode() not in content, f"{path.name} has {name}"


@pytest.mark.parametrize(
    ("words", "fields"),
    [("apache-2.0", ["license: apache-2.0"]), ("other:My own: 1.0", ["license: other", 'license_name: "My own: 1.0"'])],
)
def test_card_has_the_license_that_was_asked_for(words: str, fields: list[str], run: Path, tmp_path: Path) -> None:
    options = ["--license", words, "--no-check", "--output", str(tmp_path / "out")]
    assert cli.main(["export", str(run), *options]) == 0
    front = (tmp_path / "out/README.md").read_text().split("---\n", 2)[1].splitlines()
    assert front[: len(fields) + 2] == ["library_name: longstride", *fields, "pipeline_tag: text-generation"]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("Apache 2.0", "apache-2.0"),
        ("CC-BY-4", "cc-by-4.0"),
        ("other:", "other:NAME"),
        ("other", "other:NAME"),
        ("ours", "other:ours"),
    ],
)
def test_license_that_the_hub_does_not_know_is_told(
    words: str, nearest: str, run: Path, tmp_path: Path, refusal: Refusal
) -> None:
    line = refusal("export", run, "--output", tmp_path / "deep/out", "--license", words)
    rule = f"must be an identifier of Hugging Face's hub, or other:NAME; nearest {nearest}"
    assert line == f"--license={words}: {rule}"


def changed(run: Path, **changes: Any) -> Checkpoint:
    """A run's newest checkpoint, whose manifest says something else."""
    checkpoint = open_checkpoint(run, None)
    write_manifest(checkpoint.folder, read_manifest(checkpoint.folder).model_copy(update=changes))
    return checkpoint


def test_model_that_computes_otherwise_is_refused(
    run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    probe = open_checkpoint(run_copy, None).manifest.probe
    assert probe is not None
    changed(run_copy, probe=probe.model_copy(update={"loss_nats": 1.01 * probe.loss_nats}))
    for words in ([], ["--weights", "ema"]):
        line = refusal("export", run_copy, "--output", tmp_path / "deep/out", *words)
        assert "and rounding explains 1e-03; nothing is exported; --no-check skips this" in line
        assert (" trained weights' loss" if words else " exported model's loss") in line
    assert cli.main(["export", str(run_copy), "--output", str(tmp_path / "out"), "--no-check"]) == 0
    assert "probe: not checked, as --no-check asks" in capsys.readouterr().err


def test_checkpoint_without_a_probe_says_that_it_cannot_be_checked(run_copy: Path, tmp_path: Path) -> None:
    changed(run_copy, probe=None)
    _, seen = export(run_copy, None, tmp_path / "out")
    assert seen == "probe: not checked, as the checkpoint has none"


def test_value_beyond_the_type_is_refused_by_its_tensor(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = SavedState.tensor

    def with_a_large_value(self: SavedState, name: str, kind: str = "fp32") -> torch.Tensor:
        found = tensor(self, name, kind)
        if name == "blocks.1.attention.projection.weight":
            found[3, 2] = -70_000.0
        return found

    monkeypatch.setattr(SavedState, "tensor", with_a_large_value)
    rule = (
        r"blocks\.1\.attention\.projection\.weight=-70000: is beyond float16, whose maximum is 65504; use --dtype fp32"
    )
    with pytest.raises(ConfigError, match=f"^{rule}$"):
        export(run, None, tmp_path / "out", Options(dtype="fp16", check=False))
    assert not list(tmp_path.iterdir())
    export(run, None, tmp_path / "out", Options(dtype="bf16", check=False))


def test_weights_of_another_model_are_refused(run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wider(checkpoint: Checkpoint) -> Any:
        config = read_checkpoint_config(checkpoint.folder)
        return config.model_copy(update={"model": config.model.model_copy(update={"width": 64})})

    monkeypatch.setattr(Checkpoint, "config", property(wider))
    with pytest.raises(
        ConfigError, match=r"its weights are not those of the model in its config\.json: it has blocks\.0\."
    ):
        export(run_copy, None, run_copy.parent / "out")
    assert not (run_copy.parent / "out").exists()


@pytest.mark.parametrize("where", ["write_json", "check_losses", "flush_folder"])
def test_export_that_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> None:
        assert list((tmp_path / ".out.partial").iterdir())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")

    monkeypatch.setattr(durable if where == "flush_folder" else export_module, where, fail)
    with pytest.raises(OSError, match="No space"):
        export(run, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_files_that_read_otherwise_than_written_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = export_module.model_card

    def spoil(*arguments: Any) -> str:
        path = tmp_path / ".out.partial/model.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        return card(*arguments)

    monkeypatch.setattr(export_module, "model_card", spoil)
    with pytest.raises(ConfigError, match="differs from what was written"):
        export(run, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_full_disk_is_told_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"out: the weights take 0\.0 GB, and 0\.0 GB are free; free some space"):
        export(run, None, tmp_path / "deep/out")
    assert not list(tmp_path.iterdir())


def test_half_of_a_killed_export_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model.safetensors").write_bytes(b"half")
    export(run, None, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "modeling_longstride.py", "tokenizer_config.json"]


def test_check_holds_no_more_than_a_block(run: Path, tmp_path: Path) -> None:
    """Weights are fetched as they are used, and let go."""
    checkpoint, _ = export(run, None, tmp_path / "out")
    state, config = SavedState(checkpoint), load_model(tmp_path / "out").config
    model = stream_model(config, state.tensor, torch.float32, torch.device("cpu"))
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens), load_model(tmp_path / "out")(tokens))
    assert all(parameter.is_meta for parameter in model.blocks.parameters())
    assert not any(parameter.is_meta for parameter in model.logits.parameters())


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5GiB", 3 * 2**29), ("64K", 64_000), ("300", 300), ("7B", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5XB", "5 G B", "nan", "1e3", "five", "1IB"])
def test_what_is_no_size_is_refused(text: str, run: Path, refusal: Refusal) -> None:
    line = f"--shard-size={text}: must be a size above 0 such as 5GB, 500MB or 2GiB"
    assert refusal("export", run, f"--shard-size={text}", "--output", "nowhere") == line


def test_options_that_cannot_be_are_refused(run: Path, tmp_path: Path, refusal: Refusal) -> None:
    words = ["export", run, "--output", tmp_path / "out"]
    assert refusal(*words, "--device", "cuda:99").startswith("--device=cuda:99: cannot be used")
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert "already exists and is not overwritten" in refusal(*words)


def test_files_are_mapped_anew_on_the_way(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a tensor at a time: the files are the same, and of many mappings few are there at once."""
    export(run, None, tmp_path / "one")
    for module in (saved_state, exported_module):
        monkeypatch.setattr(module, "MAPPED_BYTES", 0)
    export(run, None, tmp_path / "other")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    folder = Exported(tmp_path / "other")
    for name in folder.names:
        folder.tensor(name).sum()
        assert Path("/proc/self/maps").read_text().count(str(tmp_path / "other")) <= 2
