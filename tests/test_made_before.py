"""Files of older versions are read, resumed and computed as before; made_before/README.md says how they were made.

Results that depend on rounding have tolerances, as processors round differently. All others must be equal to the bit.
"""

import importlib.metadata
import json
import platform
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from longstride.launcher import cli
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.harness.runs import spawn

MADE = Path(__file__).parent / "made_before"
EXPECTED: dict[str, Any] = json.loads((MADE / "expected.json").read_text())
DATA = {"zero2_fp32": "text", "zero3_bf16": "text", "zero1_fp16": "pictures"}  # of each run
# Relative tolerances of a loss. Other dropout moves these runs' losses by some 1e-4. So a resume that lost its random
# states fails in fp32 on any machine, and in half precision on a machine like the one that made the files.
# Attention now rounds the factors of its products to bf16, on CPUs with bf16 products.
LIKE_MACHINE = {"fp32": 1e-6, "fp16": 1e-6, "bf16": 3e-5}
ROUNDING = {"zero2_fp32": 1e-6, "zero3_bf16": 1e-3, "zero1_fp16": 1e-3}
OTHER_DROPOUT = 2e-3
GRADIENTS = 10  # a gradient's norm has so many times the tolerance of a loss
# Attention now also sums in another order, which moves some of its results to the next fp16. With a hundredth, a tenth
# or all of them moved at random, 24 times each, losses moved by 3e-7 at most. Norms of gradients moved by 8e-5 at most
# (5e-5 by root mean square at the step that moved most), as they are norms of numbers in fp16.
FP16_GRADIENTS = 1e-4
WRONG_INPUT = 2  # an exit code


def machine() -> dict[str, Any]:
    """Return what the last bits depend on, in the form of expected.json."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "longstride": importlib.metadata.version("longstride"),
        "torch": torch.__version__,
        "torch_build_crc32": zlib.crc32(torch.__config__.show().encode()),
        "numpy": np.__version__,
        "processor": f"{platform.machine()} {names[0] if names else platform.processor()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def computes_the_same_bits() -> bool:
    """Whether this machine is like the one that made the files, for any version of Longstride."""
    return machine() | {"longstride": None} == EXPECTED["machine"] | {"longstride": None}


def drops_the_same() -> bool:
    """Whether the same state of a generator has dropout keep the same elements; a build or a processor may differ."""
    mask = torch.empty(4096).bernoulli_(0.9, generator=torch.Generator().manual_seed(0))
    return zlib.crc32(mask.numpy().tobytes()) == EXPECTED["kept_crc32"]


def rounding(name: str) -> float:
    """Return the relative tolerance of a run's losses if only the machine differs."""
    if not computes_the_same_bits():
        return ROUNDING[name]
    return LIKE_MACHINE[name.rpartition("_")[2]]


def copied(name: str, folder: Path) -> Path:
    """Copy a file or folder, as the originals must not change."""
    if (MADE / name).is_dir():
        return shutil.copytree(MADE / name, folder / name)
    return shutil.copy(MADE / name, folder / name)


def weights_of(name: str) -> list[str]:
    """Return the options by which a verb takes the weights of a name in expected.json."""
    return ["--weights", "ema"] if name.endswith("_ema") else []


def resume(name: str, folder: Path, *overrides: str) -> tuple[Path, str]:
    """Resume a copy of a run folder from step 4 to 8; return it and the first rank's standard error."""
    run, data = copied(name, folder), copied(DATA[name], folder)
    words = ["--config", str(run / "config.json"), "--resume", "auto", f"train.output={run}", f"data.path={data}"]
    world_size = EXPECTED["runs"][name]["processes"]
    ended = spawn([*words, *overrides], world_size, {"CUDA_VISIBLE_DEVICES": ""})
    assert ended.codes == [0] * world_size, ended.stderr
    return run, ended.stderr[0]


def check_lines(run: Path, name: str, tolerance: float) -> None:
    """Check that a run's metrics.jsonl has its first four steps as before, then those of the undisturbed run."""
    before, lines = (MADE / name / "metrics.jsonl").read_text(), (run / "metrics.jsonl").read_text()
    assert lines.startswith(before)
    after = [json.loads(line) for line in lines.removeprefix(before).splitlines()]
    tolerance = tolerance if drops_the_same() else OTHER_DROPOUT
    of_norms = max(GRADIENTS * tolerance, FP16_GRADIENTS if name.endswith("fp16") else 0.0)
    rounded = {"loss_nats": tolerance, "grad_norm": of_norms}
    assert len(after) == len(EXPECTED["runs"][name]["lines"])
    for line, expected in zip(after, EXPECTED["runs"][name]["lines"], strict=True):
        for key, value in expected.items():
            assert line[key] == (pytest.approx(value, rel=rounded[key], abs=0) if key in rounded else value), key


@pytest.mark.parametrize("name", ["text", "pictures", "sounds"])
def test_data_folder_is_whole(name: str, tmp_path: Path) -> None:
    assert cli.main(["data", "verify", str(copied(name, tmp_path))]) == 0


@pytest.mark.parametrize("name", DATA)
def test_run_goes_on_as_if_undisturbed(name: str, tmp_path: Path) -> None:
    run, log = resume(name, tmp_path)
    assert f"longstride: continuing from {run}/checkpoints/step-00000004\n" in log
    assert "converted" not in log
    check_lines(run, name, rounding(name))


def test_run_goes_on_in_another_layout_without_its_universal_form(tmp_path: Path) -> None:
    run, log = resume("zero3_bf16", tmp_path, "deepspeed=zero2_bf16")
    assert "converted for 2 processes in ZeRO 2 (" in log
    assert not list(run.glob("checkpoints/.*"))
    check_lines(run, "zero3_bf16", ROUNDING["zero3_bf16"])


@pytest.mark.parametrize("name", ["zero2_fp32", "zero1_fp16_ema"])
def test_run_has_the_same_score(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = name.removesuffix("_ema")
    run, data = copied(trained, tmp_path), copied(DATA[trained], tmp_path)
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--data", str(data), *weights_of(name)]) == 0
    line = json.loads(capsys.readouterr().out)
    expected = EXPECTED["evaluations"][name]
    assert line["tokens"] == expected["tokens"]
    assert line["loss_nats"] == pytest.approx(expected["loss_nats"], rel=rounding(trained), abs=0)


@pytest.mark.parametrize("name", EXPECTED["fingerprints"])
def test_run_is_exported_as_the_same_model(name: str, tmp_path: Path) -> None:
    """Compare the fingerprint; the export itself checks the loss."""
    run, output = copied(name.removesuffix("_ema"), tmp_path), tmp_path / "export"
    assert cli.main(["export", str(run), "--output", str(output), *weights_of(name)]) == 0
    assert json.loads((output / "config.json").read_text())["fingerprint"] == EXPECTED["fingerprints"][name]


def test_exported_model_computes_the_same_logits() -> None:
    content = json.loads((MADE / "model/config.json").read_text())
    model = SparseTransformer(ModelConfig.model_validate(content["model"])).eval()
    model.load_state_dict(load_file(MADE / "model/model.safetensors"))
    with torch.no_grad():
        logits = model(torch.tensor([EXPECTED["tokens"]]))[0, 7::8]
    expected = torch.from_numpy(np.load(MADE / "logits.npy"))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_exported_model_writes_the_same_sample(tmp_path: Path) -> None:
    """Compare the bytes if the machine computes the same bits."""
    sample, output = EXPECTED["sample"], tmp_path / "sample.txt"
    words = ["--prompt", sample["prompt"], "--bytes", str(sample["bytes"]), "--seed", str(sample["seed"])]
    model = str(copied("model", tmp_path))
    assert cli.main(["sample", model, *words, "--device", "cpu", "--output", str(output)]) == 0
    written, expected = output.read_bytes(), bytes.fromhex(sample["hex"])
    assert len(written) == len(expected) and written.startswith(sample["prompt"].encode())
    if computes_the_same_bits():
        assert written == expected


def test_compressed_file_comes_back_where_bits_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expect the text or nothing on other machines."""
    model, packed = copied("model", tmp_path), copied("poem.lsz", tmp_path)
    output = tmp_path / "poem.txt"
    code = cli.main(["decompress", str(packed), "--model", str(model), "--output", str(output)])
    if code and not computes_the_same_bits():
        assert (code, output.exists()) == (WRONG_INPUT, False)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the model computes different bits here than where it was compressed; decompress it there")
        return
    assert code == 0
    assert output.read_bytes() == (MADE / "poem.txt").read_bytes()
