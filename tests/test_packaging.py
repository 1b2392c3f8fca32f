"""One name in site-packages: Longstride as a wheel, an editable install and a checkout, next to other packages."""

import email
import json
import re
import shutil
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from longstride.data_pipelines.building import build
from longstride.launcher.cli import VERBS
from tests.harness.installations import ROOMS, Installation, bare, built, copy_checkout, foreign_kernels, watch
from tests.harness.runs import ROOT, configuration
from tests.harness.tiny_models import add_hub_files, tiny_export

WAYS = ("wheel", "editable", "checkout")
SEVERAL_VERBS = """
from longstride.launcher import cli

codes = []
for words in {}:
    try:
        codes.append(cli.main(words))
    except SystemExit as ended:
        codes.append(ended.code)
print(codes)
"""
# Each case has a process of its own, in which torch is imported already, since that takes seconds.
BESIDE = """
import os, sys, torch

theirs = "import kernels"
ours = "from longstride.kernels import sparse_attention; from longstride.kernels.patterns import Local"
checks = '''
assert kernels.FOREIGN and sys.modules["kernels.backends"].FOREIGN
assert kernels.__file__.endswith("site-packages/kernels/__init__.py"), kernels.__file__
import longstride.kernels.backends
assert not hasattr(longstride.kernels.backends, "FOREIGN")
q, k, v = torch.randn(3, 1, 1, 8, 4)
assert sparse_attention(q, k, v, Local(2)).shape == q.shape
'''
cases = ["; ".join([theirs, ours]) + checks, "; ".join([ours, theirs]) + checks]
cases += [
    f"import {name}, longstride.{name}; assert {name}.FOREIGN and {name} is not longstride.{name}"
    for name in ("launcher", "data_pipelines", "sparse_model")
]
for case in cases:
    child = os.fork()
    if not child:
        try:
            exec(case)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""
# On Python's path, a checkout has nothing but folders without code.
NO_BARE_NAMES = """
import importlib, sys

sys.path.append({root!r})
for name in ("kernels", "launcher", "data_pipelines", "sparse_model"):
    module = importlib.import_module(name)
    assert module.__file__ is None and importlib.util.find_spec(name) is module.__spec__
    assert not any(word[0] != "_" for word in vars(module)), vars(module)
"""
GENERATE = """
import torch, transformers

model = transformers.AutoModelForCausalLM.from_pretrained({model!r}, trust_remote_code=True)
shape = tuple(model.generate(max_new_tokens=3, inputs=torch.zeros(1, 2, dtype=int)).shape)
assert shape == (1, 5), shape
try:
    from kernels import get_kernel
    import kernels
    print(kernels.__file__)
except ImportError:
    print("no kernels")
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the checkout's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return built("build_wheel", copy_checkout(folder / "checkout"), folder)


@pytest.fixture
def installation(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Installation:
    """Install Longstride in the way of the test's parameter."""
    if request.param == "checkout":
        return bare(tmp_path / "python", copy_checkout(tmp_path / "checkout"))
    installation = bare(tmp_path / "python", tmp_path)
    if request.param == "wheel":
        installation.pip("install", wheel)
    else:
        installation.pip("install", "--editable", copy_checkout(tmp_path / "checkout"))
    return installation


def contents(wheel: Path) -> dict[str, bytes]:
    """Read every file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = (data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(text.decode())


def test_wheel_is_the_rooms_under_one_name(wheel: Path) -> None:
    rooms = {path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    expected = {f"longstride/{path.relative_to(ROOT)}": path for path in rooms if path.parent.name != "__pycache__"}
    for pattern in ("*.py", "py.typed", "testing/*.py"):
        expected |= {str(path.relative_to(ROOT)): path for path in (ROOT / "longstride").glob(pattern)}
    files = contents(wheel)
    assert {name.split("/")[0] for name in files if name not in expected} == {"longstride-0.1.0.dist-info"}
    assert {name: files.get(name) for name in expected} == {name: path.read_bytes() for name, path in expected.items()}


def test_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = built("build_sdist", copy_checkout(tmp_path / "checkout"), tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(built("build_wheel", unpacked, tmp_path / "wheel")) == contents(wheel)


def test_metadata_is_complete(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["Name"] == "longstride" and fields["Summary"] and fields["Keywords"]
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload() == (ROOT / "README.md").read_text()
    assert set(fields["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    classifiers = fields.get_all("Classifier", [])
    prefix = "Programming Language :: Python :: 3."
    assert [each for each in classifiers if each.startswith(prefix)] == [f"{prefix}{minor}" for minor in range(10, 14)]
    assert "Typing :: Typed" in classifiers and "longstride/py.typed" in contents(wheel)
    assert fields.get_all("Project-URL")
    extras = {"completion", "remote", "gs", "az", "hf", "audio", "formats", "serve", "transformers", "lm_eval", "onnx"}
    extras |= {"clients", "demo", "docs", "dev"}
    assert {extra.replace("-", "_") for extra in fields.get_all("Provides-Extra", [])} == extras
    assert not [key for key in fields if key.startswith("License")]  # the owner's to choose


@pytest.mark.parametrize("installation", ["wheel"], indirect=True)
def test_everything_runs_from_a_wheel_beside_foreign_kernels(installation: Installation, tmp_path: Path) -> None:
    foreign_kernels(installation.packages)
    ended = watch(installation, tmp_path / "watched")

    def run(*words: object) -> str:
        return installation.run(*words, WATCHED=str(tmp_path / "watched")).decode(errors="replace")

    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text("sparse attention over long sequences " * 20)
    content = configuration(tmp_path / "data", tmp_path / "run")
    content["train"] |= {"steps": 2, "checkpoint_every": 2, "evaluate_every": 2}
    (tmp_path / "run.json").write_text(json.dumps(content))
    build([tmp_path / "texts"], tmp_path / "data", validation_fraction=0.25)
    program = installation.packages / "longstride" / "launcher" / "train.py"

    run("longstride", "train", "--config", "run.json", "--processes", "1")  # by DeepSpeed's runner
    verbs = [[*verb.words.split(), "--help"] for verb in VERBS]
    verbs += [["config", "schema"], ["plan", "demo"], ["data", "build", "texts", "--output", "data again"]]
    verbs += [["evaluate", "run"], ["export", "run", "--output", "model"]]
    verbs += [["sample", "model", "--prompt", "sparse ", "--bytes", "8"]]
    output = run("python", "-c", SEVERAL_VERBS.format(verbs))
    assert output.count("usage: longstride") == len(VERBS)
    assert "\nsparse " in output and output.splitlines()[-1].endswith(f"{[0] * len(verbs)}")

    ranks = [process for process in ended() if process.argv[0] == str(program)]
    assert len(ranks) == 1 and len(ranks[0].files) > 40
    for process in ended():
        assert process.kernels == str(installation.packages / "kernels" / "__init__.py")
        for file, names in process.files.items():
            assert len(names) == 1 and Path(file).is_relative_to(installation.prefix), (process.argv, file, names)


@pytest.mark.parametrize("installation", WAYS, indirect=True)
def test_foreign_packages_and_our_rooms_share_a_process(installation: Installation) -> None:
    installation.run("python", "-c", NO_BARE_NAMES.format(root=str(ROOT)))
    foreign_kernels(installation.packages)
    for name in ("launcher", "data_pipelines", "sparse_model"):
        (installation.packages / f"{name}.py").write_text("FOREIGN = True\n")
    installation.run("python", "-c", BESIDE)


@pytest.mark.clients
@pytest.mark.parametrize("installation", WAYS, indirect=True)
def test_transformers_generates_with_and_without_the_registrys_kernels(
    installation: Installation, tmp_path: Path
) -> None:
    add_hub_files(tiny_export(tmp_path / "model", "text"))
    offline = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}

    def generate() -> str:
        script = GENERATE.format(model=str(tmp_path / "model"))
        return installation.run("python", "-c", script, **offline).decode().splitlines()[-1]

    installation.pip("install", "kernels")
    assert generate() == str(installation.packages / "kernels" / "__init__.py")
    installation.pip("uninstall", "kernels")
    assert generate() == "no kernels"


@pytest.mark.parametrize("lock", sorted((ROOT / "locks").glob("python3.*.txt")), ids=lambda lock: lock.stem)
def test_locks_have_a_version_in_range_of_every_package(wheel: Path, lock: Path) -> None:
    made_for = re.fullmatch(
        r"# Made by `make locks` for Python (3\.\d+): .*, with (.*)\.", lock.read_text().splitlines()[0]
    )
    assert made_for and lock.stem == f"python{made_for[1]}"
    pins = {requirement.name: requirement for requirement in map(Requirement, lock.read_text().splitlines()[1:])}
    requirements = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist", [])]
    for extra in ("", *made_for[2].split(", ")):
        target = {"extra": extra, "python_version": made_for[1], "python_full_version": f"{made_for[1]}.0"}
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate(target):
                (pin,) = pins[canonicalize_name(requirement.name)].specifier
                assert requirement.specifier.contains(pin.version), (
                    f"{lock.name}: {pin} is not {requirement}: make locks"
                )


def test_locks_and_image_are_of_the_pythons_that_the_package_allows(wheel: Path) -> None:
    locks = {path.stem.removeprefix("python") for path in (ROOT / "locks").glob("python3.*.txt")}
    assert locks == {
        f"3.{minor}" for minor in range(20) if f"3.{minor}" in SpecifierSet(metadata(wheel)["Requires-Python"])
    }
    image = re.search(r"^ARG PYTHON=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert image and image[1] in locks
