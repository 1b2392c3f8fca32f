"""A modality is one file: one that nothing but the registry knows is sampled, and scored, under its own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.modalities.modality import Content, Option
from longstride.data_pipelines.modalities.text import Text
from longstride.launcher import cli
from tests.harness.tiny_models import tiny_export


class Genome(Text):
    """Bytes whose samples are FASTA files."""

    name, words, output_suffix = "genome", "genomes", ".fa"
    prompt_help = "a genome to continue"
    keep_option = Option("--keep-bases", "N", "of --prompt-genome", int)

    def header(self, size: int, properties: object) -> bytes:
        return b">sample\n"

    def read_prompt(self, content: Content, keep: object, properties: object, context: int) -> bytes:
        assert isinstance(keep, int)
        return content.read(0, keep)


def test_new_modality_needs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODALITIES, "genome", Genome())
    model = str(tiny_export(tmp_path / "model", "text", modality="genome"))
    (tmp_path / "in").write_bytes(b"ACGTACGT")
    prompt = ["--prompt-genome", str(tmp_path / "in"), "--keep-bases", "3", "--bytes", "5"]
    assert cli.main(["sample", model, *prompt, "--output", str(tmp_path / "out.fa")]) == 0
    made = (tmp_path / "out.fa").read_bytes()
    assert made.startswith(b">sample\nACG") and len(made) == len(b">sample\n") + 8
    assert cli.main(["sample", model, "--output", str(tmp_path / "out.txt")]) == 2
    assert "must be a .fa file, as the model writes genomes" in capsys.readouterr().err
    assert cli.main(["sample", model, "--likelihood", str(tmp_path / "in"), "--decoded"]) == 0
    assert '"tokens": 8' in capsys.readouterr().out
