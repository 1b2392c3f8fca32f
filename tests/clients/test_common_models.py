"""transformers' own common tests of models, on ours."""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.harness.clients import client
from tests.harness.runs import ROOT

APPLICABLE, NOT_APPLICABLE = 39, 121


@pytest.fixture
def common(tmp_path: Path) -> Path:
    """Create the package ``transformers_tests`` from sources that pip fetches once per environment."""
    package = f"transformers-{version('transformers')}"
    package_folder = Path(sys.prefix) / "share" / f"{package}-tests"
    if not package_folder.is_dir():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        fetch += ["--no-binary", "transformers", "--dest", str(tmp_path), package.replace("-", "==")]
        subprocess.run(fetch, check=True)
        sources = tmp_path / "made/transformers_tests"
        for stub, name in {
            "exporters/test_export": "ExportTesterMixin",
            "generation/test_utils": "GenerationTesterMixin",
        }.items():
            # Which the source package leaves out.
            (sources / stub).parent.mkdir(parents=True)
            (sources / f"{stub}.py").write_text(f'class {name}:\n    """None."""\n')
        with tarfile.open(tmp_path / f"{package}.tar.gz") as archive:
            for name in ("test_modeling_common.py", "test_training_mixin.py"):
                member = archive.extractfile(f"{package}/tests/{name}")
                assert member is not None
                (sources / name).write_bytes(member.read())
        package_folder.parent.mkdir(exist_ok=True)
        shutil.copytree(sources.parent, f"{package_folder}.partial", dirs_exist_ok=True)
        Path(f"{package_folder}.partial").rename(package_folder)
    return package_folder


@client(
    "transformers",
    "its own common tests of models",
    f"{APPLICABLE} pass, {NOT_APPLICABLE} do not apply: tests/harness/common_models.py says why",
)
def test_common_tests_of_models_pass(common: Path, tmp_path: Path) -> None:
    """Run in a separate process with another configuration, as these tests have their own marks and warnings."""
    report = tmp_path / "report.xml"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"),
            *("-q", "--tb=short", "-W", "ignore", f"--junitxml={report}", str(ROOT / "tests/harness/common_models.py")),
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{common}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    reasons = (ROOT / "tests/harness/common_models.py").read_text()
    passed = 0
    skipped = []
    for case in ElementTree.parse(report).iter("testcase"):
        skip = case.find("skipped")
        passed += skip is None
        skipped += [] if skip is None else [(case.get("name"), skip.get("message"))]
    assert not [case for case in skipped if case[1] not in reasons]
    assert (passed, len(skipped)) == (APPLICABLE, NOT_APPLICABLE)
