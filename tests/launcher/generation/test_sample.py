"""Sampling from an exported folder: what is written, that it needs no deepspeed, and what is refused."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from longstride.launcher import cli
from longstride.launcher.generation.sample import write_text
from tests.harness.runs import ROOT, files_under, plain_environment
from tests.harness.tiny_models import tiny_export
from tests.hostile.commands import Commands
from tests.launcher.conftest import Refusal


def sampled(capture: pytest.CaptureFixture[bytes], exported: Path, *options: str) -> bytes:
    assert cli.main(["sample", str(exported), *options]) == 0
    return capture.readouterr().out


def test_sample_writes_prompt_and_bytes_as_they_are(
    exported: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    first, again, other = (
        sampled(capsysbinary, exported, "--prompt-file", str(tmp_path / "prompt"), "--bytes", "40", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert first == again != other
    assert first.startswith(b"ab\xff") and len(first) == 43


def test_sample_fills_the_context_unless_told(exported: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert len(sampled(capsysbinary, exported, "--prompt", "häl")) == 64


def test_sample_slides_beyond_the_context_where_asked(
    exported: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert cli.main(["sample", str(exported), "--prompt", "x" * 70, "--bytes", "50", "--slide"]) == 0
    found = capsysbinary.readouterr().out
    assert found.startswith(b"x" * 70) and len(found) == 120


@pytest.mark.parametrize(
    "verb",
    [["sample"], ["sample", "--temperature", "0", "--bytes", "5"], ["sample", "--likelihood"], ["compress", "--model"]],
    ids=" ".join,
)
def test_a_model_of_no_numbers_is_told_in_one_line(
    exported: Path, tmp_path: Path, refusal: Refusal, verb: list[str]
) -> None:
    weights = load_file(exported / "model.safetensors")
    weights["norm.weight"][3] = float("nan")
    save_file(weights, exported / "model.safetensors")
    (tmp_path / "file").write_bytes(b"abc")
    arguments = {
        "--likelihood": ["sample", str(exported), "--likelihood", str(tmp_path / "file")],
        "--model": ["compress", str(tmp_path / "file"), "--model", str(exported), "--output", str(tmp_path / "x.lsz")],
    }.get(verb[-1], [verb[0], str(exported), *verb[1:]])
    assert refusal(*arguments) == f"{exported}: its logits are not finite; export it again, or in fp32"


def test_several_samples_on_a_terminal_have_their_numbers(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["sample", str(exported), "--prompt", "ab", "--bytes", "5", "--count", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("=== sample 1 ===\nab") and "\n=== sample 2 ===\nab" in out


def test_pictures_and_sounds_are_kept_from_a_terminal(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rule = "pictures, which need a file, such as --output samples.png, or a pipe"
    assert rule in refusal("sample", tiny_export(tmp_path / "image", "image"))


def test_sample_stops_quietly_where_nobody_reads(exported: Path, commands: Commands) -> None:
    ended = commands("sample", exported, stdout="closed", seconds=120.0)
    assert (ended.err, ended.code) == ("", 141)


def test_terminal_shows_whole_characters_and_no_controls() -> None:
    shown = io.StringIO()
    write_text([b"h\xc3", b"\xa4l\t\n", b"\x1b[2J\xff", b"\xe2\x82"], shown)
    assert shown.getvalue() == "häl\t\n[2J\ufffd\ufffd\n"


def test_terminal_of_another_encoding_shows_what_it_can() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_text(["häl".encode()], shown)
    shown.seek(0)
    assert shown.read() == "h?l\n"


def test_plan_sample_and_compress_need_no_deepspeed(exported: Path, tmp_path: Path) -> None:
    """A plan writes no file and no line beside itself."""
    folder = tmp_path / "empty"
    folder.mkdir()
    config = str(exported / "config.json")
    program = (
        "import sys\n"
        "for name in ('deepspeed', 'triton', 'mpi4py', 'webdataset'): sys.modules[name] = None\n"
        "from longstride.launcher.cli import main\n"
        "assert main(['plan', 'paper_small', 'model.layers=1']) == 0\n"
        "print('planned', file=sys.stderr)\n"
        f"assert main(['sample', {str(exported)!r}, '--bytes', '3']) == 0\n"
        f"assert main(['sample', {str(exported)!r}, '--likelihood', {config!r}]) == 0\n"
        f"words = ['compress', {config!r}, '--model', {str(exported)!r}, '--output', {str(tmp_path / 'out.lsz')!r}]\n"
        "assert main(words) == 0\n"
    )
    environment = plain_environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(b"parameters  269,312, ") and ended.stderr.startswith(b"planned\n")
    assert not files_under(folder)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--bytes", "65"], "prompt and sample are 65 tokens: they must fit in the model's context of 64"),
        (["--temperature", "-1"], "temperature=-1.0: must be a number from 0"),
        (["--top-k", "0"], "top_k=0: must be an integer of at least 1"),
        (["--prompt-file", "nowhere"], "--prompt-file=nowhere: No such file or directory"),
        (["--device", "tpu"], "--device=tpu: cannot be used"),
        (["--device", "cuda:99"], "--device=cuda:99: cannot be used"),
        (["--seed", "99999999999999999999999"], "--seed=99999999999999999999999: must be from 0"),
    ],
)
def test_sample_refuses_options_before_it_writes(
    exported: Path, options: list[str], message: str, refusal: Refusal
) -> None:
    assert message in refusal("sample", exported, *options)
