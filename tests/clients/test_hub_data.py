"""huggingface_hub reads a data folder behind ``hf://``, here from a hub of our own that knows one repository."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from longstride.data_pipelines.building.build import build
from tests.harness.clients import client
from tests.harness.data.builds import write_files
from tests.hostile.generators.http_servers import QuietHandler, serving


@client(
    "huggingface_hub", "`longstride data verify hf://…` of a data folder, from a local hub", "complete, read by ranges"
)
def test_data_folder_on_a_hub_is_verified(tmp_path: Path) -> None:
    texts = write_files(tmp_path / "texts", {f"{n}.txt": f"text {n}\n".encode() * 200 for n in range(20)})
    hub = tmp_path / "hub"
    build([texts], hub / "mine", validation_fraction=0.2, shard_bytes=10_000)
    parts: list[str] = []  # of shards that were asked for

    class Hub(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            path = unquote(urlsplit(self.path).path)
            if path == "/api/datasets/me/set":
                self.answer(json.dumps({"id": "me/set", "sha": "0" * 40, "siblings": []}).encode())
            elif path == "/api/datasets/me/set/tree/main/mine":
                entries = [
                    {"type": "file", "path": f"mine/{file.name}", "size": file.stat().st_size, "oid": "0" * 40}
                    for file in sorted((hub / "mine").iterdir())
                ]
                self.answer(json.dumps(entries).encode())
            else:
                content = (hub / path.removeprefix("/datasets/me/set/resolve/main/")).read_bytes()
                interval = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if interval:
                    parts.append(path)
                    content = content[int(interval[1]) : int(interval[2]) + 1]
                self.answer(content, 206 if interval else 200)

    with serving(Hub) as url:
        command = [sys.executable, "-m", "longstride.launcher.cli", "data", "verify", "hf://datasets/me/set/mine"]
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines()[-1] == "hf://datasets/me/set/mine: whole"
    assert {Path(part).name for part in parts} == {
        file.name for file in (hub / "mine").iterdir() if file.suffix in (".tar", ".npy")
    }
