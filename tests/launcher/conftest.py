"""Data and runs that tests share: each is made once a session, however many workers there are."""

import fcntl
import io
import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longstride.data_pipelines.building.build import build
from longstride.launcher import cli, train
from longstride.launcher.output.exit_codes import WRONG_INPUT
from tests.harness.runs import configuration, files_under, spawn
from tests.harness.tiny_models import random_export
from tests.hostile.commands import Commands

Make = Callable[[Path], None]
Refusal = Callable[..., str]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, Make], Path]:
    """A function (name, make) -> folder that calls make once for all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def get(name: str, make: Make) -> Path:
        folder = base / "shared" / name
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                partial = folder.with_name(f"{name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial)
                partial.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def data(shared: Callable[[str, Make], Path]) -> Path:
    """A small data folder of words."""

    words = random.Random(0)
    lists = [[words.choice(["sparse", "dense", "stride", "byte", "long"]) for _ in range(300)] for _ in range(12)]
    return shared("data", lambda folder: build_texts(folder, lists)) / "data"


@pytest.fixture(scope="session")
def short_documents(shared: Callable[[str, Make], Path]) -> Path:
    """A data folder of 300 documents, several of which meet in each context of 64 bytes."""
    words, some = random.Random(0), ["sparse", "dense", "stride", "byte"]
    lists = [[words.choice(some) for _ in range(words.randint(1, 12))] for _ in range(300)]
    return shared("short documents", lambda folder: build_texts(folder, lists)) / "data"


def build_texts(folder: Path, lists: Iterable[list[str]]) -> None:
    """Build FOLDER/data of a document for each list of words."""
    (folder / "source").mkdir()
    for number, words in enumerate(lists):
        (folder / f"source/{number}.txt").write_text(" ".join(words))
    build([folder / "source"], folder / "data", validation_fraction=0.2)


@pytest.fixture
def config_file(data: Path, tmp_path: Path) -> Path:
    """The tiny run as a file; its output is tmp_path / "run"."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(configuration(data, tmp_path / "run"), indent=1))
    return path


@pytest.fixture
def exported(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An exported model whose every parameter is random: its bytes are anything. Its parameter changes the model."""
    return random_export(tmp_path / "model", **getattr(request, "param", {}))


@pytest.fixture
def run_copy(trained: Callable[..., Path], tmp_path: Path) -> Path:
    """A finished run of one process, to be spoilt; `config_file` is its configuration."""
    return Path(shutil.copytree(trained("alone", 1), tmp_path / "run"))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that all modules see, which stands."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """A function of a command line -> its refusal in one line; it checks code, form, files and standard output."""

    def run(*words: object) -> str:
        before = files_under(tmp_path), sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        try:
            code: Any = cli.main(list(map(str, words)))
        except SystemExit as ended:  # of argparse
            code = ended.code
        assert code == WRONG_INPUT
        assert (files_under(tmp_path), sorted(tmp_path.rglob("*"))) == before
        out, error = capsys.readouterr()
        (line,) = error.splitlines()
        assert out == "" and line.startswith("longstride: error: ")
        return line.removeprefix("longstride: error: ")

    return run


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """A function of train.py's arguments -> the lines of its refusal; it checks code, form and files."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> list[str]:
        before = files_under(tmp_path)
        capsys.readouterr()
        assert train.main(list(arguments)) == WRONG_INPUT
        assert files_under(tmp_path) == before
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("longstride: error: ") for line in lines), lines
        return [line.removeprefix("longstride: error: ") for line in lines]

    return run


def chunks(name: str) -> dict[str, str]:
    """Runs under ZeRO 2 and 3 compute their short contexts in chunks, as long ones are."""
    return {"CHUNK_ROWS": "24"} if name.startswith(("zero2", "zero3")) else {}


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs command lines in processes that are forked from one that has everything imported."""
    with Commands(tmp_path_factory.mktemp("commands")) as ready:
        yield ready


@pytest.fixture(scope="session")
def trained(shared: Callable[[str, Make], Path], data: Path) -> Callable[..., Path]:
    """A function (name, world_size, *overrides) -> run folder of eight steps, made once.

    {folder} in an override stands for the folder around the run's.
    """

    def get(name: str, world_size: int, *overrides: str) -> Path:
        def make(folder: Path) -> None:
            config = folder / "run.json"
            config.write_text(json.dumps(configuration(data, folder / "run")))
            placed = [override.replace("{folder}", str(folder)) for override in overrides]
            ended = spawn(["--config", str(config), *placed], world_size, chunks(name))
            assert ended.codes == [0] * world_size, ended.stderr

        return shared(name, make) / "run"

    return get


@pytest.fixture(scope="session")
def resumed(shared: Callable[[str, Make], Path], trained: Callable[..., Path]) -> Callable[..., tuple[Path, Path]]:
    """A function (name, world_size, *overrides) -> (trained run, a copy of it gone on from step 4).

    The copy has `masters.pt` beside it: the trainer's fp32 master weights after each of its steps.
    """

    def get(name: str, world_size: int, *overrides: str) -> tuple[Path, Path]:
        whole = trained(name, world_size, *overrides)

        def make(folder: Path) -> None:
            shutil.copytree(whole, folder / "run")
            arguments = ["--config", str(whole.parent / "run.json"), "--resume", "4", *overrides]
            arguments.append(f"train.output={folder / 'run'}")
            extra = {"DUMP_MASTER_WEIGHTS": str(folder / "masters.pt")} | chunks(name)
            ended = spawn(arguments, world_size, extra)
            assert ended.codes == [0] * world_size, ended.stderr
            assert "_load_legacy_checkpoint" not in "".join(ended.stdout)  # what DeepSpeed prints in some layouts
            (folder / "stderr").write_text(ended.stderr[0])

        return whole, shared(f"{name}-resumed", make) / "run"

    return get
