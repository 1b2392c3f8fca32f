"""The Triton kernels compile for every card in the tables, without that card, and fit its shared memory."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from longstride.kernels.backends.triton.configurations import ARCHITECTURES, SAFE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = pathlib.Path(__file__).parents[2]
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024, "sm_86": 99 * 1024}  # a program's most
KERNELS = ("forward", "dkdv", "dq")
DEFAULTS = [
    *(f"{kernel}:{case}" for kernel in KERNELS for case in ("bfloat16:64:folded", "float16:128:natural")),
    "forward:bfloat16:64:merged",
    *(f"{kernel}:bfloat16:64:stairs" for kernel in KERNELS),
    "dkdv:bfloat16:64:natural:resume",
    "dq:bfloat16:64:merged",
    "closed:bfloat16:64:folded:resume",
    "delta:bfloat16:64",
    "gather:bfloat16:64",
    "groups:bfloat16:64",
    # Selections, and rounds of hashing.
    *(f"{kernel}:bfloat16:64:listed" for kernel in KERNELS),
    *(f"{kernel}:bfloat16:64:listed:resume:overlap3" for kernel in KERNELS),
]
DESCRIBED = [
    "forward:bfloat16:64:merged:described",
    "dkdv:bfloat16:64:natural:described",
    "dq:float16:128:natural:described",
]


def shipped(architecture: str) -> list[str]:
    """Every configuration of a table, at the widest head that it serves."""
    dtypes = {2: "bfloat16", 4: "float32"}
    return [
        f"{kernel}:{dtypes[widest.bytes_an_element]}:{widest.width}:folded:{','.join(map(str, one[:4]))}"
        for widest, row in ARCHITECTURES.get(architecture, SAFE).items()
        for kernel, candidates in row._asdict().items()
        for one in candidates
    ]


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
    assert set(ARCHITECTURES) - {"interpreter"} <= set(SHARED_BYTES)


@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_default_and_shipped_kernels_compile_without_spilling(architecture: str) -> None:
    defaults = [*DEFAULTS, *(DESCRIBED if architecture == "sm_90" else ())] if architecture in ARCHITECTURES else []
    for found in _compiled(architecture, [*defaults, *shipped(architecture)]):
        print(found)
        assert found["shared"] <= SHARED_BYTES[architecture], found
        assert found["spilled_bytes"] == 0, found
        case = found["case"].removeprefix(f"{architecture}:")
        if architecture == "sm_90" and case in defaults and not case.startswith(("delta", "gather", "groups")):
            assert found["wgmma"], found


def test_warps_specialise_where_the_compiler_can() -> None:
    """One producer and two consumers, by their registers; elsewhere the same program for twice as many warps."""
    from longstride.kernels.backends.triton.call import SPECIALIZES

    cases = [
        "specialized:bfloat16:128:natural:128,128,4,2",
        "specialized:float16:64:stairs:128,128,4,3",
        "forward:bfloat16:128:natural:128,128,8,1,128:marked",
    ]
    for found in _compiled("sm_90", cases):
        print(found)
        assert found["shared"] <= SHARED_BYTES["sm_90"], found
        assert found["wgmma"] and found["local_in_loops"] == 0, found
        assert found["specializes"] == (SPECIALIZES and "specialized" in found["case"]), found


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_second_passes_in_16_bits_keep_next_to_nothing_on_the_stack(architecture: str) -> None:
    cases = [case.replace("folded", "merged:resume") for case in shipped(architecture) if not case.startswith("closed")]
    cases = [case.replace("merged", "folded") if case.startswith("dkdv") else case for case in cases]
    for found in _compiled(architecture, [case for case in cases if "bfloat16" in case]):
        print(found)
        assert found["spilled_bytes"] <= 8, found


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_passes_over_selections_compile_without_spilling(architecture: str) -> None:
    for found in _compiled(architecture, selected(architecture)):
        print(found)
        assert found["shared"] <= SHARED_BYTES[architecture], found
        assert found["spilled_bytes"] == 0, found


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_all_kernels_compile_and_fit(architecture: str) -> None:
    for found in _compiled(architecture, ALL):
        print(found)
        assert found["shared"] <= SHARED_BYTES[architecture], found


def _compiled(architecture: str, cases: list[str]) -> list[dict]:
    """What the compiler says, from a process in which triton compiles instead of interpreting."""
    from triton.backends import backends

    if architecture.startswith("gfx") and "amd" not in backends:
        pytest.skip("this triton has no AMD backend")
    names = [f"{architecture}:{case}" for case in cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/harness/compile_triton.py"), *names],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
