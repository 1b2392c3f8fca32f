"""The Triton kernels compile for every card in the tables, without that card, and their machine code is sound.

To compile them all takes minutes. What came of it is kept in benchmarks/results/compiled.json, and stands for the
kernels as long as their sources and Triton are the same; some are compiled each time, to hold the file to what comes
out. Any other Triton compiles them all. ``python -m benchmarks.attention.compiled`` writes the file anew.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

from benchmarks.attention.compiled import (
    DEFAULTS,
    FILE,
    KERNELS,
    TARGETS,
    cases_of,
    compiled,
    digest,
    shipped,
)
from benchmarks.report import ROOT
from longstride.kernels.backends.triton.configurations import ARCHITECTURES

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024, "sm_86": 99 * 1024}  # a program's most
RENEW = "run python -m benchmarks.attention.compiled"
DELTA_KERNELS = (
    "systems", "inverses", "solved", "states", "outputs", "written", "grad_states", "corrected", "pairs", "rows",
)  # fmt: skip
INDEXED_KERNELS = ("forward", "summed_weights", "dq", "pieces", "keys", "scores", "highest")
ANEW = ("gfx942", "sm_90")  # whose first case is compiled each time


def second_passes(architecture: str) -> list[str]:
    """Those of 16 bits."""
    cases = [case.replace("folded", "merged:resume") for case in shipped(architecture) if not case.startswith("closed")]
    cases = [case.replace("merged", "folded") if case.startswith("dkdv") else case for case in cases]
    return [case for case in cases if "bfloat16" in case]


def selected(architecture: str) -> list[str]:
    """Those of 16 bits as passes over selections have them; and where parts overlap."""
    cases = [case.replace("folded", "listed") for case in shipped(architecture) if not case.startswith("closed")]
    overlapping = [f"{kernel}:bfloat16:{width}:listed:overlap3" for kernel in KERNELS for width in (128, 256)]
    return [case for case in (*cases, *overlapping) if "bfloat16" in case]


ALL = [
    *(
        f"{kernel}:{dtype}:{width}:{shape}"
        for kernel in KERNELS
        for dtype in ("bfloat16", "float16", "float32")
        for width in (16, 64, 128, 256)
        for shape in ("natural", "folded")
    ),
    *(f"{kernel}:bfloat16:64:listed:resume" for kernel in KERNELS),
    *(f"{kernel}:bfloat16:{width}:merged:resume" for kernel in ("forward", "dq") for width in (64, 128)),
]


def test_every_architecture_has_a_limit() -> None:
    assert set(ARCHITECTURES) - {"interpreter"} <= set(SHARED_BYTES) == set(TARGETS)


def kept() -> dict[str, dict[str, Any]]:
    """What this Triton made of these sources, by case; nothing where another Triton did.

    Raises:
        AssertionError: the sources have changed since.
    """
    content = json.loads(FILE.read_text())
    if content["triton"] != triton.__version__:
        return {}
    assert content["sources"] == digest(), RENEW
    return {found["case"]: found for found in content["found"]}


@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_default_and_shipped_kernels_waste_nothing_a_visit(architecture: str) -> None:
    known, cases = kept(), cases_of(architecture)
    due = cases[: 1 if architecture in ANEW else 0] if known else cases
    anew = {found["case"]: found for found in compile_here(architecture, due)} if due else {}
    assert known.items() >= anew.items() or not known, f"{anew} is not what {FILE.name} has: {RENEW}"
    for found in ((known | anew)[f"{architecture}:{case}"] for case in cases):
        _check(found, architecture)
        case = found["case"].removeprefix(f"{architecture}:")
        if architecture == "sm_90" and case in DEFAULTS and not case.startswith(("delta", "gather", "groups")):
            assert found["wgmma"], found


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_second_passes_and_selections_waste_nothing_a_visit(architecture: str) -> None:
    second = [] if architecture not in ("sm_80", "sm_90") else second_passes(architecture)
    for found in compile_here(architecture, [*second, *selected(architecture)]):
        _check(found, architecture)


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_all_kernels_compile_and_fit(architecture: str) -> None:
    for found in compile_here(architecture, ALL):
        print(found)
        assert found["shared"] <= SHARED_BYTES[architecture], found


def delta_cases(architecture: str) -> list[str]:
    """All kernels of the gated delta rule."""
    return [
        f"{architecture}:{kernel}:{dtype}:{width}"
        for kernel in DELTA_KERNELS
        for dtype in ("bfloat16", "float32")
        for width in (64, 128)
    ]


def _here() -> list[str]:
    """Return the architectures for which this Triton compiles."""
    return ["sm_80", "sm_90", *(["gfx942"] if "amd" in triton.backends.backends else [])]


def test_largest_delta_kernels_spill_nothing() -> None:
    cases = [f"{each}:{kernel}:bfloat16:64" for each in _here() for kernel in ("grad_states", "rows")]
    _check_spills(cases, "compile_delta")


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", ("gfx942", "sm_80", "sm_90"))
def test_all_delta_kernels_spill_nothing(architecture: str) -> None:
    _check_spills(delta_cases(architecture), "compile_delta")


def test_largest_kernels_of_listed_keys_spill_nothing() -> None:
    cases = [f"{each}:{kernel}:bfloat16:128:16" for each in _here() for kernel in ("dq", "scores")]
    _check_spills(cases, "compile_indexed")


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", ("gfx942", "sm_80", "sm_90"))
def test_all_kernels_of_listed_keys_spill_nothing(architecture: str) -> None:
    sizes = [(width, group) for width in (64, 128) for group in (1, 32)]
    cases = [f"{architecture}:{name}:bfloat16:{width}:{group}" for name in INDEXED_KERNELS for width, group in sizes]
    _check_spills([*cases, *(f"{architecture}:{name}:float32:128:16" for name in INDEXED_KERNELS)], "compile_indexed")


def _check_spills(cases: list[str], program: str) -> None:
    """Assert that no kernel spills registers, and that each fits in shared memory."""
    for found in compile_here(cases[0].split(":")[0], cases, program):
        print(found)
        assert found["spilled_bytes"] == 0, found
        assert found["shared"] <= SHARED_BYTES[found["case"].split(":")[0]], found


def _check(found: dict[str, Any], architecture: str) -> None:
    """It fits; a visit moves nothing that was spilled, and no warps repeat what others compute."""
    print(found)
    assert found["shared"] <= SHARED_BYTES[architecture], found
    if architecture.startswith("gfx"):  # whose code says of the whole kernel alone what was spilled
        assert found["spilled_bytes"] == 0, found
        return
    closed = found["case"].split(":")[1].startswith("closed")  # a program's only visit: what is spilled is moved once
    for visit in found["visits"]:
        assert visit["local"] <= (visit["instructions"] // 20 if closed else 0), found
        assert visit["repeats"] < 1.02, found  # in fp32 the softmax multiplies too
        if found["fewest_products"] is not None:
            assert sum(visit["products"].values()) == found["fewest_products"], found


def compile_here(architecture: str, cases: list[str], program: str = "compile_triton") -> list[dict[str, Any]]:
    """What the compiler says."""
    if architecture.startswith("gfx") and "amd" not in triton.backends.backends:
        pytest.skip("this triton has no AMD backend")
    if program == "compile_triton":
        return compiled(architecture, cases)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, f"{ROOT}/tests/harness/{program}.py", *cases],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
