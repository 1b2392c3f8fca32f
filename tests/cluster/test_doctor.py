"""`longstride doctor --hostfile`: a host that is alike, one with other data, and one that is not there."""

import json
import subprocess
from pathlib import Path

from longstride.data_pipelines.building import build
from tests.cluster.person import LONGSTRIDE, Person

_NOBODY = "10.73.0.9"  # an address of the hosts' network that none of them has


def test_hosts_are_asked_for_what_they_have(person: Person, data: Path, tmp_path: Path) -> None:
    """Replace the run's data folder on node2 by another one, by a mount."""
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / f"texts/{number}.txt").write_text(f"other bytes {number} " * 200)
    build([tmp_path / "texts"], tmp_path / "other", validation_fraction=0.2)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"node1 slots=1\nnode2 slots=2\n{_NOBODY} slots=1\n")
    inside = ["nsenter", "-t", str(person.hosts[1].pid), "-m", "--"]
    subprocess.run([*inside, "mount", "--bind", str(tmp_path / "other"), str(data)], check=True)
    try:
        code = person.ends([*LONGSTRIDE, "doctor", str(person.config), "--hostfile", str(hostfile), "--json"])
    finally:
        subprocess.run([*inside, "umount", str(data)], check=True)
    report = json.loads(person.said().splitlines()[-1])
    findings = {
        name: [finding for finding in report["findings"] if finding["subject"] == name]
        for name in ("node1", "node2", _NOBODY)
    }
    assert code == 1, person.said()
    assert [(finding["state"], finding["text"]) for finding in findings["node1"]] == [
        ("ok", "answers; the same versions and code, the same data; no GPUs")
    ]
    (different,) = findings["node2"]
    assert (different["state"], different["text"]) == ("broken", "has other data than this host")
    (missing,) = findings[_NOBODY]
    assert missing["state"] == "broken" and missing["mend"] == f"`ssh {_NOBODY} true` must work without a password"
    assert not person.run.exists()
