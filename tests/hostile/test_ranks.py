"""Ranks that were given different runs: all end before the first step, and one line says what differs and where."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from longstride.data_pipelines.shards import index_tars
from longstride.launcher.output import exit_codes
from tests.harness.data.tars import write_tar
from tests.harness.runs import Ended, Rank, configuration, free_port, metrics, plain_environment, rank_environment

SECONDS = 60.0  # that a run of some steps may take here; the difference itself is found within one


class Differs(NamedTuple):
    """A difference of the last rank."""

    changes: dict[str, object]  # of the configuration, by dotted path; the ellipsis takes a key away
    message: str  # how the line begins; HOST stands for this host
    data: str = "data"  # the folder
    versions: dict[str, str] = {}  # noqa: RUF012


DIFFERENCES = {
    "rate": Differs({"train.learning_rate": 0.03}, "train.learning_rate=0.003: rank 0 on HOST has it, "),
    "dropout": Differs({"model.dropout": 0.2}, "model.dropout=0.1: rank 0 on HOST has it, "),
    "a key that is missing": Differs({"model.dropout": ...}, "model.dropout=0.1: rank 0 on HOST has it, "),
    "a key too many": Differs({"model.convolution": 4}, "model.convolution: rank 0 on HOST leaves it out, "),
    "seed": Differs({"train.seed": 7}, "train.seed=0: rank 0 on HOST has it, "),
    "seed of the data": Differs({"data.seed": 7}, "data.seed=0: rank 0 on HOST has it, "),
    "width": Differs({"model.width": 64}, "model.width=32: rank 0 on HOST has it, "),
    "steps": Differs({"train.steps": 4}, "train.steps=8: rank 0 on HOST has it, "),
    "batch": Differs({"train.micro_batch": 1}, "train.micro_batch=2: rank 0 on HOST has it, "),
    "precision": Differs({"deepspeed": "zero{stage}_bf16"}, "deepspeed.bf16.enabled"),
    "ZeRO stage": Differs({"deepspeed": "zero{other}_fp32"}, "deepspeed."),
    "package": Differs({}, "torch=", versions={"torch": "1.0.0"}),
    "data": Differs({}, "data.path=", "other"),
    "validation data": Differs({}, "data.path=", "other validation"),
    "length of the data": Differs({}, "data.path=", "longer"),
}
SAMPLE = ("rate", "a key that is missing", "package", "validation data")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data folder, a copy of it, and some with another split."""
    folder = tmp_path_factory.mktemp("places")
    splits = {"data": ("sparse", "dense"), "other": ("stride", "dense"), "other validation": ("sparse", "bytes")}
    for name, words in (splits | {"longer": ("sparse sparse", "dense")}).items():
        tars = folder / f"{name} tars"
        tars.mkdir()
        for split, word in zip(("train", "validation"), words, strict=True):
            members = [(f"{number}.txt", f"{number} {word} ".encode() * 200) for number in range(4)]
            write_tar(tars / f"{split}-0.tar", members)
        index_tars([str(tars)], folder / name, unpack=True)
    shutil.copytree(folder / "data", folder / "copy")
    return folder


def run_ranks(places: Path, output: Path, difference: Differs, world_size: int, stage: int, *words: str) -> Ended:
    """Run ranks of which the last differs."""
    port, ranks = free_port(), []
    for rank in range(world_size):
        is_other = rank == world_size - 1
        content = configuration(places / (difference.data if is_other else "data"), output)
        content["deepspeed"] = f"zero{stage}_fp32"
        for path, value in difference.changes.items() if is_other else ():
            *parents, key = path.split(".")
            section = content
            for parent in parents:
                section = section[parent]
            if value is ...:
                del section[key]
            else:
                section[key] = value
                if isinstance(value, str):
                    section[key] = value.format(stage=stage, other=(stage + 1) % 4)
        file = output.parent / f"rank-{rank}.json"
        file.write_text(json.dumps(content))
        environment = plain_environment() | rank_environment(rank, world_size, port)
        environment["VERSIONS"] = json.dumps(difference.versions if is_other else {})
        ranks.append(Rank(["--config", str(file), *words], environment))
    try:
        for rank in ranks:
            rank.wait(SECONDS)
    finally:
        texts = [rank.end() for rank in ranks]
    return Ended([rank.returncode for rank in ranks], [out for out, _ in texts], [error for _, error in texts])


def check_refused_start(
    places: Path, tmp_path: Path, difference: Differs, world_size: int, stage: int, *words: str
) -> None:
    """Check that all ranks end by 2 before anything is written, and that the first gives the reason in one line."""
    ended = run_ranks(places, tmp_path / "run", difference, world_size, stage, *words)
    assert ended.codes == [exit_codes.WRONG_INPUT] * world_size, ended.stderr
    lines = [line for text in ended.stderr for line in text.splitlines() if line.startswith("longstride: ")]
    (line,) = lines
    host = socket.gethostname()
    assert line in ended.stderr[0] and len(line) < 1000, line
    assert line.startswith(f"longstride: error: {difference.message.replace('HOST', host)}"), line
    second = rf"rank {world_size - 1} on {re.escape(host)}"  # a difference of data names it at the end
    assert re.search(rf", and {second} (has \S|leaves it out; )| for {second}; give", line), line
    assert not any("Traceback" in text for text in ended.stderr), ended.stderr
    assert not list(tmp_path.glob("run/*")) or "--resume" in words


@pytest.mark.parametrize("what", SAMPLE)
def test_ranks_that_were_given_other_runs_say_so(places: Path, tmp_path: Path, what: str) -> None:
    check_refused_start(places, tmp_path, DIFFERENCES[what], 2, 0)


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("what", DIFFERENCES)
def test_every_number_of_ranks_under_every_stage(
    places: Path, tmp_path: Path, what: str, stage: int, world_size: int
) -> None:
    check_refused_start(places, tmp_path, DIFFERENCES[what], world_size, stage)


def test_equal_data_elsewhere_goes_on_and_a_resume_is_held_too(places: Path, tmp_path: Path) -> None:
    """Allow hosts to differ in paths of data, readers and notes; require all else to be equal, also at a resume."""
    host_own = {"data.workers": 1, "data.prefetch": 3, "notes": "mine", "data.remote": {"cache": str(tmp_path)}}
    ended = run_ranks(places, tmp_path / "run", Differs(host_own, "", "copy"), 2, 1)
    assert ended.codes == [exit_codes.DONE] * 2, ended.stderr
    lines = metrics(tmp_path / "run")
    changed = Differs({"train.learning_rate": 0.03}, "train.learning_rate=0.003: rank 0 on HOST has it, ")
    check_refused_start(places, tmp_path, changed, 2, 1, "--resume", "4")
    assert metrics(tmp_path / "run") == lines
