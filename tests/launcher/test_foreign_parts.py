"""Parts of other packages: the example of docs/examples, installed, through every verb; and what is refused."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError, sparse_attention
from longstride.kernels.patterns import Local, pattern_from_json, pattern_to_json
from longstride.launcher import cli
from longstride.sparse_model import ModelConfig
from tests.harness.configs import small
from tests.harness.runs import ROOT, configuration, plain_environment
from tests.hostile.commands import Commands

Command = Callable[..., str]

PACKAGE = "longstride-own-parts 0.1"
PARTS: dict[str, Any] = {
    "attention": [
        {"type": "gated_recurrence"},
        {"type": "recent_blocks", "size": 8},
        {"type": "own_parts.recurrence:GatedRecurrence", "remember": 2.0},
    ],
    "feed_forward": {"type": "gated_linear"},
    "layers": 3,
    "embedding": {"type": "learned"},
    "backend": "auto",
    "dropout": 0.0,
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and install the example package, as a user would, into a folder of its own."""
    folder = tmp_path_factory.mktemp("packages")
    source = shutil.copytree(ROOT / "docs/examples/own_parts", folder / "source")  # where the build leaves files
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
    return folder / "site"


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process import the example package, too."""
    monkeypatch.syspath_prepend(packages)
    yield packages
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_parts"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def command(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A function of a folder and words -> what a verb said there where the example package is installed."""
    with Commands(tmp_path_factory.mktemp("commands"), PYTHONPATH=packages) as commands:

        def run(folder: Path, *words: object, code: int = 0) -> str:
            ended = commands(*words, folder=folder, seconds=120.0)
            assert ended.code == code, ended.err
            return ended.out + ended.err

        yield run


def test_installed_parts_go_through_every_verb(
    packages: Path, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, genomes = functools.partial(command, tmp_path), tmp_path / "genomes"
    genomes.mkdir()
    for number in range(12):
        (genomes / f"{number}.fa").write_text(f">{number}\n" + "ACGTTGCA\nCCGATA\n" * (50 + number))
    content = configuration(tmp_path / "data", tmp_path / "run")
    content["model"] |= PARTS
    (tmp_path / "run.json").write_text(json.dumps(content))

    run("data", "build", genomes, "--modality", "genome", "--output", "data")
    run("train", "--config", "run.json", "--processes", "2", "--dry-run")
    run("rank", "--config", "run.json", "train.steps=4")
    with (packages / "own_parts/recurrence.py").open("a") as file:
        file.write("# another version\n")
    resumed = run("rank", "--config", "run.json", "--resume", "auto")
    assert f"notice: own_parts.recurrence:GatedRecurrence comes from {PACKAGE}, source " in resumed
    starts = [json.loads(line) for line in (tmp_path / "run/starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 4]
    assert all("own_parts.recurrence:GatedRecurrence" in start["versions"] for start in starts)
    assert "bits per byte on validation" in run("evaluate", "run")
    run("report", "run", "--output", "report.html")
    run("export", "run", "--output", "model")
    recorded = json.loads((tmp_path / "model/config.json").read_text())["code"]
    assert list(recorded) == [
        "own_parts.recurrence:GatedRecurrence",
        "own_parts.gated_linear:GatedLinear",
        "own_parts.recent_blocks:RecentBlocks",
    ]
    assert all(each.startswith(f"{PACKAGE}, source ") for each in recorded.values())

    refused = run("sample", "model", code=2)
    assert f'type="gated_linear": is from another package (exported with {PACKAGE})' in refused
    assert "--trust-code" in refused
    sampled = run("sample", "model", "--trust-code", "--bytes", "20", "--output", "sample.fa")
    assert "notice" not in sampled and len((tmp_path / "sample.fa").read_bytes()) == len(b">sample\n\n") + 20
    assert "bits per byte on validation" in run("evaluate", "model", "--data", "data", "--trust-code")
    assert cli.main(["sample", str(tmp_path / "model"), "--trust-code"]) == 2  # where nothing is installed
    printed, missing = capsys.readouterr()
    assert printed == ""
    assert 'model.attention[0].type="gated_recurrence": must be a pattern\'s name; nearest ' in missing
    assert missing.count(f"(exported with {PACKAGE})") == missing.count("longstride: error")
    run("rank", "--config", "run.json", "--from", "model", "--trust-code", "train.output=again", "train.steps=1")

    config = tmp_path / "model/config.json"
    config.write_text(config.read_text().replace(recorded["own_parts.recurrence:GatedRecurrence"], "other 2.0"))
    said = run("sample", "model", "--trust-code", "--bytes", "1")
    assert "was exported with own_parts.recurrence:GatedRecurrence of 'other 2.0', but " in said


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_attention_over_an_installed_pattern(installed: Path, length: int, backend: str) -> None:
    pattern = pattern_from_json({"type": "recent_blocks", "size": 8})
    assert pattern_from_json(pattern_to_json(pattern)) == pattern
    q, k, v = torch.randn(3, 1, 2, length, 16, generator=torch.Generator().manual_seed(length))
    found = sparse_attention(q, k, v, pattern, backend=backend)
    torch.testing.assert_close(found, sparse_attention(q, k, v, pattern, backend="reference"))


def test_an_installed_mixer_declares_what_it_supports(installed: Path) -> None:
    config = small(attention=PARTS["attention"][0])
    config.require("padding")
    with pytest.raises(ConfigError, match=r"^attention: gated_recurrence reads whole contexts"):
        config.require("documents")
    with pytest.raises(ConfigError, match=r"^attention: gated_recurrence computes whole contexts"):
        config.check_division(2)
    with pytest.raises(ConfigError, match=r"gated_recurrence does not apply model\.convolution"):
        small(attention=PARTS["attention"][0], convolution=3)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention": {"type": "no_such:Pattern"}}, r'attention\.type="no_such:Pattern": cannot be imported \(Mod'),
        ({"attention": {"type": "json:Pattern"}}, r'attention\.type="json:Pattern": cannot be imported \(Attribute'),
        ({"attention": {"type": "json:dumps"}}, r'attention\.type="json:dumps": must name a class, and json:dumps is '),
        ({"attention": {"type": "json:JSONDecoder"}}, r"attention\.type=.*must name a pattern, or a MixerConfig"),
        ({"attention": {"type": ":"}}, r'attention\.type=":": cannot be imported \(ValueError'),
        ({"attention": {"type": "gated_recurence"}}, r"attention\.type=.*nearest gated_recurrence"),
        ({"attention": {"type": "recent_block"}}, r"attention\.type=.*nearest recent_blocks"),
        ({"attention": {"type": "recent_blocks"}}, r"attention\.size: missing; recent_blocks needs it"),
        ({"feed_forward": {"type": "gated_linar"}}, r"feed_forward\.type=.*nearest gated_linear"),
        ({"feed_forward": {"type": "own_parts.recurrence:GatedRecurrence"}}, "must name a FeedForwardConfig, and own"),
        ({"attention": {"type": "gated_recurrence", "remembr": 1.0}}, r"remembr: unknown key; nearest remember"),
    ],
)
def test_wrong_types_are_told(installed: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        small(**changes)


def test_schema_names_what_is_installed(command: Command, tmp_path: Path) -> None:
    text = command(tmp_path, "config", "schema")
    assert all(f'"{name}"' in text for name in ("gated_recurrence", "recent_blocks", "gated_linear"))


def test_two_packages_of_one_name_are_refused(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[longstride.patterns]\nrecent_blocks = other:Blocks\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="registered more than once; give one of other:Blocks, own_parts"):
        pattern_from_json({"type": "recent_blocks", "size": 8})


def test_modality_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    information = tmp_path / "site/other-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[longstride.modalities]\nmidi = other:Midi\n")
    words = [sys.executable, "-m", "longstride.launcher.cli", "data", "build", "x", "--output", "y"]
    environment = plain_environment() | {"PYTHONPATH": str(tmp_path / "site")}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=300, text=True)
    assert ended.returncode == 2 and ended.stdout == "", ended.stderr
    assert "error: longstride.modalities: other:Midi cannot be imported (ModuleNotFoundError" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_only_what_is_named_is_imported(installed: Path) -> None:
    ModelConfig.model_json_schema()
    assert pattern_from_json({"type": "local", "window": 3}) == Local(3)
    with pytest.raises(ConfigError):
        pattern_from_json({"type": "recent"})
    assert "own_parts" not in sys.modules and (installed / "own_parts").exists()
    assert ModelConfig.foreign_types({"attention": [{"heads": [{"type": "a:B"}, {"type": "local"}]}]}) == ["a:B"]
