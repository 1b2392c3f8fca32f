"""A modality is one file: one that nothing but the registry knows is sampled, and scored, under its own words."""

import importlib
import json
from pathlib import Path

import pytest

from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher import cli
from tests.harness.runs import ROOT
from tests.harness.tiny_models import tiny_export


def test_new_modality_needs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs/examples/own_parts")
    genome = importlib.import_module("own_parts.genome").Genome()
    monkeypatch.setitem(MODALITIES, "genome", genome)
    model = tiny_export(tmp_path / "model", "text")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"data": {"modality": "genome", "properties": {}}}))
    (tmp_path / "in").write_bytes(b">one\nACGTA\nCGT\n")
    prompt = ["--prompt-genome", str(tmp_path / "in"), "--keep-bases", "3", "--bytes", "5"]
    assert cli.main(["sample", str(model), *prompt, "--output", str(tmp_path / "out.fa")]) == 0
    made = (tmp_path / "out.fa").read_bytes()
    assert made.startswith(b">sample\nACG") and len(made) == len(b">sample\n\n") + 8
    assert cli.main(["sample", str(model), "--output", str(tmp_path / "out.txt")]) == 2
    assert "must be a .fa file, as the model writes genomes" in capsys.readouterr().err
    assert cli.main(["sample", str(model), "--likelihood", str(tmp_path / "in"), "--decoded"]) == 0
    assert '"tokens": 8' in capsys.readouterr().out
