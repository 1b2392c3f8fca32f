"""A whole run whose data comes from a web server that fails."""

from collections.abc import Callable
from pathlib import Path

from tests.harness.runs import metrics, spawn
from tests.hostile.generators.http_servers import FaultyServer


def test_training_from_a_failing_server_reads_what_the_disk_holds(
    trained: Callable[..., Path], data: Path, config_file: Path, tmp_path: Path
) -> None:
    """Every fifth request fails; two ranks share a cache; no figure of the run differs from that on the disk."""
    server = FaultyServer(data, share=0.2, seed=1, stall_seconds=2)
    changes = ["data.remote.timeout_seconds=0.5", f"data.remote.cache={tmp_path / 'cache'}"]
    with server as url:
        ended = spawn(["--config", str(config_file), f"data.path={url}", *changes], 2, {"no_proxy": "127.0.0.1"})
    assert ended.codes == [0, 0], ended.stderr
    assert any(request.fault for request in server.requests)
    assert metrics(tmp_path / "run") == metrics(trained("zero0-fp32", 2))


def test_missing_server_is_told_in_one_line(config_file: Path, tmp_path: Path) -> None:
    changes = ["data.path=http://127.0.0.1:9/data", "data.remote.attempts=1"]
    ended = spawn(["--config", str(config_file), *changes], 1, {"no_proxy": "127.0.0.1"})
    assert ended.codes == [2]
    (line,) = [line for line in ended.stderr[0].splitlines() if "error" in line]
    assert line.startswith("longstride: error: http://127.0.0.1:9/data/manifest.json: ")
    assert not (tmp_path / "run").exists()
