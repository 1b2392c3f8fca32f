"""The environment file that every host is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster.environment import host_environment, plain_values, write_host_environment

SHELL = {
    "PATH": "/venv/bin:/usr/bin",
    "OMP_NUM_THREADS": "4",
    "NCCL_DEBUG": "INFO",
    "DS_ACCELERATOR": "cpu",
    "HOME": "/home/me",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
}
HANDED_ON = {name: SHELL[name] for name in ("DS_ACCELERATOR", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH")}


def test_hosts_are_told_where_programs_are_and_no_secrets(tmp_path: Path) -> None:
    assert host_environment(SHELL, tmp_path, tmp_path) == HANDED_ON


def test_own_files_come_over_it(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / ".deepspeed_env").write_text("# mine\n\nOMP_NUM_THREADS=2\nNCCL_IB_HCA=mlx5_0\nOTHER=a=b\n")
    (here / ".deepspeed_env").write_text("OMP_NUM_THREADS=3\n")
    told = host_environment(SHELL, home, here)
    assert told == HANDED_ON | {"OMP_NUM_THREADS": "3", "NCCL_IB_HCA": "mlx5_0", "OTHER": "a=b"}
    (tmp_path / "named").write_text("OMP_NUM_THREADS=5\n")
    told = host_environment(SHELL | {"DS_ENV_FILE": str(tmp_path / "named")}, home, here)
    assert told == HANDED_ON | {"OMP_NUM_THREADS": "5"}


def test_wrong_own_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\nexport B=2\n")
    with pytest.raises(ConfigError, match=r"\.deepspeed_env:2: export B=2: must be NAME=value"):
        host_environment({}, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="DS_ENV_FILE=gone: no such file"):
        host_environment({"DS_ENV_FILE": "gone"}, tmp_path, tmp_path)


def test_written_file_is_what_the_launcher_reads_and_never_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    files = [write_host_environment(run, HANDED_ON), write_host_environment(run, {"A": "b=c"})]
    assert [file.name for file in files] == ["hosts-1.env", "hosts-2.env"]
    read = [dict(line.split("=", maxsplit=1) for line in file.read_text().splitlines()) for file in files]
    assert read == [HANDED_ON, {"A": "b=c"}]  # as deepspeed.launcher.runner takes lines apart
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]  # own files may hold secrets
    for value in ('a"b', "a\nb"):
        with pytest.raises(ConfigError, match="environment: PATH holds a quote or a line's end"):
            write_host_environment(run, {"PATH": value})
    assert len(list(run.iterdir())) == 2


def test_values_that_mpirun_or_srun_would_get_in_quotes_are_left_out() -> None:
    told = {"PATH": "/a:/b", "COMMAS": "a,b", "BLANKS": "a b"}
    assert plain_values(told, commas=True) == ({"PATH": "/a:/b", "COMMAS": "a,b"}, ["BLANKS"])
    assert plain_values(told, commas=False) == ({"PATH": "/a:/b"}, ["COMMAS", "BLANKS"])
