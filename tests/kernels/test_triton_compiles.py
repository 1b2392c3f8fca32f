"""The Triton kernels compile for every card in the tables, without that card, and their machine code is sound.

To compile them all takes minutes. What came of it is kept in compiled.json, and stands for the kernels as long as their
sources and Triton are the same; some are compiled each time, to hold the file to what comes out. Any other Triton
compiles them all. ``PYTHONPATH=. python tests/kernels/test_triton_compiles.py`` writes the file anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from longstride.kernels.backends.triton.configurations import ARCHITECTURES, SAFE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = pathlib.Path(__file__).parents[2]
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024, "sm_86": 99 * 1024}  # a program's most
FIELDS = ("case", "shared", "spilled_bytes", "wgmma", "fewest_products")
VISITS = ("instructions", "products", "local", "repeats")
KEPT = pathlib.Path(__file__).with_name("compiled.json")
# What machine code and what is read in it depend on.
SOURCES = (
    *(f"kernels/backends/triton/{name}.py" for name in ("*_kernel", "tile", "packing", "configurations")),
    "tests/harness/compile_triton.py",
    "benchmarks/attention/generated_code.py",
)
RENEW = "run PYTHONPATH=. python tests/kernels/test_triton_compiles.py"
EVERY = 20  # of how many kept cases one is compiled each time
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
        f"{kernel}:{dtypes[widest.bytes_an_element]}:{widest.width}:folded:"
        + ",".join(str(field or 0) for field in (*one[:4], one.maxnreg))
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


def defaults_of(architecture: str) -> list[str]:
    """Those of the kernels as they are chosen by default, in many shapes; of cards with a table of their own."""
    return [*DEFAULTS, *(DESCRIBED if architecture == "sm_90" else ())] if architecture in ARCHITECTURES else []


def standing(architecture: str) -> list[str]:
    """All that is held by default."""
    return list(dict.fromkeys([*defaults_of(architecture), *shipped(architecture)]))


def kept() -> dict[str, dict[str, Any]]:
    """What this Triton made of these sources, by case; nothing where another Triton did.

    Raises:
        AssertionError: the sources have changed since.
    """
    import triton

    content = json.loads(KEPT.read_text())
    if content["triton"] != triton.__version__:
        return {}
    assert content["sources"] == digest(), RENEW
    return {found["case"]: found for found in content["found"]}


def digest() -> int:
    """A check sum of what machine code, and what is read in it, depend on."""
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return zlib.crc32(b"".join(path.read_bytes() for path in paths))


def few(found: dict[str, Any]) -> dict[str, Any]:
    """Of what the compiler says, what rules are about."""
    visits = [{name: visit[name] for name in VISITS} for visit in found.get("visits", ())]
    return {name: found[name] for name in FIELDS if name in found} | {"visits": visits}


@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_default_and_shipped_kernels_waste_nothing_a_visit(architecture: str) -> None:
    known, cases, defaults = kept(), standing(architecture), defaults_of(architecture)
    compiled = {found["case"]: few(found) for found in _compiled(architecture, cases[:: EVERY if known else 1])}
    assert known.items() >= compiled.items() or not known, f"{compiled} is not what {KEPT.name} has: {RENEW}"
    for found in ((known | compiled)[f"{architecture}:{case}"] for case in cases):
        _check(found, architecture)
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
        assert found["wgmma"] and not any(visit["local"] for visit in found["visits"]), found
        assert found["specializes"] == (SPECIALIZES and "specialized" in found["case"]), found


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_second_passes_in_16_bits_waste_nothing_a_visit(architecture: str) -> None:
    cases = [case.replace("folded", "merged:resume") for case in shipped(architecture) if not case.startswith("closed")]
    cases = [case.replace("merged", "folded") if case.startswith("dkdv") else case for case in cases]
    for found in _compiled(architecture, [case for case in cases if "bfloat16" in case]):
        _check(found, architecture)


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_passes_over_selections_waste_nothing_a_visit(architecture: str) -> None:
    for found in _compiled(architecture, selected(architecture)):
        _check(found, architecture)


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", sorted(SHARED_BYTES))
def test_all_kernels_compile_and_fit(architecture: str) -> None:
    for found in _compiled(architecture, ALL):
        print(found)
        assert found["shared"] <= SHARED_BYTES[architecture], found


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


def _compiled(architecture: str, cases: list[str]) -> list[dict[str, Any]]:
    """What the compiler says, from a process in which triton compiles instead of interpreting."""
    from triton.backends import backends

    if architecture.startswith("gfx") and "amd" not in backends:
        pytest.skip("this triton has no AMD backend")
    names = [f"{architecture}:{case}" for case in cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))  # another Triton may be on it
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/harness/compile_triton.py"), *names],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _write() -> None:
    """Compile all that is held by default, and keep what came of it."""
    import triton

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_all = pool.map(lambda architecture: _compiled(architecture, standing(architecture)), sorted(SHARED_BYTES))
        rows = [json.dumps(few(found)) for some in of_all for found in some]
    head = f'{{"triton": "{triton.__version__}", "sources": {digest()}, "found": ['
    KEPT.write_text(head + "\n" + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    _write()
