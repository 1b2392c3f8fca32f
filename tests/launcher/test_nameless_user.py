"""A user id without a name and without a home folder, as containers have it: every verb works or names the setting."""

import getpass
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.launcher import cli
from longstride.launcher.cluster.hosts import Hosts
from longstride.launcher.cluster.placement import write_hosts_environment
from longstride.launcher.config import load_config
from longstride.launcher.data import TrainingData
from longstride.launcher.engine import device as device_module
from longstride.launcher.output import settle_libraries
from longstride.launcher.ranks import Ranks
from tests.hostile.generators.http_servers import FaultyServer

ROOT = Path(__file__).parents[2]
BY_NAME = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
CACHES = ("XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
NO_HOME = "cache=null: this user has no home folder; name another folder, or set XDG_CACHE_HOME"


def unknown(uid: int) -> None:
    """As ``pwd.getpwuid`` does for a user id that no file of users has."""
    raise KeyError(f"getpwuid(): uid not found: {uid}")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of a process that has become such a user."""
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in (*BY_NAME, *CACHES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(RuntimeError):
        Path.home()
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    return tmp_path / "temporary"


@pytest.fixture
def url(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the data folder is served."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with FaultyServer(data, share=0, seed=1) as url:
        yield url


@pytest.mark.parametrize(("words", "key"), [("evaluate {run} --data {url}", "data.remote."), ("data show {url}", "")])
def test_remote_data_without_a_cache_is_refused_in_one_line(
    temporary: Path, url: str, trained: Callable[..., Path], capsys: pytest.CaptureFixture[str], words: str, key: str
) -> None:
    filled = words.format(url=url, run=trained("zero0-fp32", 2)).split()
    capsys.readouterr()
    assert cli.main(filled) == 2
    assert capsys.readouterr().err == f"longstride: error: {key}{NO_HOME}\n"


def test_remote_data_is_read_where_a_cache_is_named(
    temporary: Path, url: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["data", "verify", url]) == 0  # has one of its own
    cache = temporary.parent / "cache"
    config = load_config(config_file, [f"data.path={url}", f"data.remote.cache={cache}"])
    assert TrainingData(config, Ranks.from_environment({})).modality == "text"
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "xdg"))
    assert cli.main(["data", "show", url]) == 0
    assert cache.is_dir() and (temporary / "xdg/longstride").is_dir()


@pytest.mark.parametrize("cache", ["~/mine", "~nobody-has-this-name/mine"])
def test_home_folders_that_are_not_there_are_told(temporary: Path, cache: str) -> None:
    with pytest.raises(DataError) as told:
        _ = RemoteSettings(cache=cache).cache_folder
    assert str(told.value) == f"cache={cache}: there is no such home folder; name a folder by its full path"


def test_blocks_are_compiled_and_hosts_get_their_environment(
    temporary: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(device_module, "run_parts", lambda *words, **options: compiled.append(words))
    config = load_config(config_file, ["train.compile=true"])
    device_module.compile_kernels(config.model, 1, "fp32", torch.device("cpu"), train=config.train)
    assert len(compiled) == 1
    hosts = Hosts("pdsh", temporary / "hosts", {"a": (0,)}, "10.0.0.1", 20000)
    assert "MASTER_ADDR=10.0.0.1\n" in write_hosts_environment(hosts, temporary / "run").read_text()


def test_compilers_get_folders_that_nobody_else_writes(temporary: Path) -> None:
    environment: dict[str, str] = {}
    settle_libraries(environment)
    mine = temporary / f"longstride-{os.getuid()}"
    assert environment == {
        "TRITON_CACHE_DIR": str(mine / "triton_cache_dir"),
        "TORCHINDUCTOR_CACHE_DIR": str(mine / "torchinductor_cache_dir"),
    }
    assert mine.stat().st_mode & 0o777 == 0o700
    again: dict[str, str] = {}
    settle_libraries(again)
    assert again == environment
    mine.chmod(0o777)
    settle_libraries(other := {})
    mine.rmdir()
    mine.symlink_to(temporary)
    settle_libraries(another := {})
    folders = {Path(folder).parent for folder in (*other.values(), *another.values())}
    assert len(folders) == 2 and not folders & {mine, temporary}
    named = dict.fromkeys(environment, "/mine")
    settle_libraries(named)
    assert set(named.values()) == {"/mine"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "{tmp}", "USER": "me"}, set()),
        ({"HOME": "{tmp}"}, {"TORCHINDUCTOR_CACHE_DIR"}),
        ({"HOME": "/nowhere", "USER": "me"}, {"TRITON_CACHE_DIR"}),
        ({"HOME": "/nowhere", "USER": "me", "TRITON_HOME": "/mine"}, {"TRITON_HOME"}),
    ],
)
def test_defaults_that_can_be_used_stay(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: set[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=temporary))
    environment = {name: value for name, value in os.environ.items() if name in CACHES}
    settle_libraries(environment)
    assert set(environment) == expected


@pytest.mark.campaign
def test_a_compiled_run_of_such_a_user_trains(config_file: Path, tmp_path: Path) -> None:
    """In processes of their own, for which the file of users is hidden as Python starts."""
    (tmp_path / "site").mkdir()
    script = "import pwd\ndef unknown(uid):\n    raise KeyError(uid)\npwd.getpwuid = unknown\n"
    (tmp_path / "site/sitecustomize.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name not in (*BY_NAME, *CACHES)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]), "TMPDIR": str(tmp_path)}
    words = ["train", "--config", str(config_file), "train.compile=true", "model.backend=auto", "train.steps=2"]
    command = [sys.executable, "-m", "longstride.launcher.cli", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "~").exists()
    assert (tmp_path / f"longstride-{os.getuid()}" / "torchinductor_cache_dir").is_dir()
