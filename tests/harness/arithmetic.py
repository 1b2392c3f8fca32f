"""Tests under each arithmetic that this processor has: ``python -m tests.harness.arithmetic [--second] TESTS``.

MKL, oneDNN and torch choose their kernels by the processor, and other kernels round otherwise. Variables of the
environment make them choose as they would elsewhere. A setting counts if it changes bits of a probe on this machine:
``make arithmetic`` runs the tests under every one of these, one after another. ``--second`` is for continuous
integration: the tests run under the first one alone, without what does not depend on it, such as Triton's interpreter,
which computes in numpy.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

# In the order of how much they change.
SETTINGS = (
    "MKL_CBWR=COMPATIBLE",
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_CBWR=AVX2,STRICT",
    "MKL_CBWR=AVX512,STRICT",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",  # without products of bf16
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
)
PROBE = "probe"
SECOND = (  # Triton, tests that choose an arithmetic themselves, and files in which torch rounds nothing
    "-k=not triton and not kernels_compile and not another_arithmetic",
    *(f"--ignore=tests/kernels/test_{name}.py" for name in ("cache", "launch_plans", "on_a_card", "patterns", "plan")),
    *(f"--ignore=tests/kernels/test_{name}.py" for name in ("reach", "sections")),
    *(
        f"--ignore=tests/sparse_model/test_{name}.py"
        for name in ("abilities", "config", "ngrams", "refusals", "strict")
    ),
    "--ignore=tests/launcher/compression/test_arithmetic_coding.py",
)


def main(arguments: list[str]) -> int:
    """Run the tests under each arithmetic. Return the exit code: 1 if tests fail under a setting."""
    if arguments == [PROBE]:
        print(digest())
        return 0
    only_second = "--second" in arguments
    tests = [argument for argument in arguments if argument != "--second"]
    variables = {setting.split("=")[0] for setting in SETTINGS}
    default = {name: value for name, value in os.environ.items() if name not in variables}
    mkl = "with" if torch.backends.mkl.is_available() else "without"
    print(f"arithmetic: {torch.backends.cpu.get_cpu_capability()} of {_processor()}, {mkl} MKL", flush=True)
    digests, failed = {probed(default): "the default"}, []
    for setting in SETTINGS:
        name, value = setting.split("=")
        environment = default | {name: value}
        result = probed(environment)
        if result in digests:
            print(f"arithmetic: {setting} computes what {digests[result]} computes here: left out", flush=True)
            continue
        digests[result] = setting
        print(f"arithmetic: {setting}", flush=True)
        begun = time.monotonic()
        chosen = SECOND if only_second else ()
        code = subprocess.run([sys.executable, "-m", "pytest", *chosen, *tests], env=environment).returncode
        print(f"arithmetic: {setting}: exit code {code}, {time.monotonic() - begun:.0f} s", flush=True)
        failed += [setting] * (code != 0)
        if only_second:
            break
    print(f"arithmetic: tested under {len(digests) - 1} besides the default; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def probed(environment: dict[str, str]) -> str:
    """Return the digest that a process with this environment computes."""
    command = [sys.executable, "-m", "tests.harness.arithmetic", PROBE]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def digest() -> str:
    """Return a checksum of products, exponentials and sums, in fp32 and bf16."""
    torch.set_num_threads(1)
    normal = np.random.default_rng(0).standard_normal((364, 256), dtype=np.float32)  # the same under every setting
    a, b = torch.from_numpy(normal).split([64, 300])
    half_a, half_b = a.bfloat16(), b.bfloat16()
    chunks = torch.bmm(a.view(4, 16, 256), b[:256].view(4, 64, 256).mT)
    results = (
        a @ b.T,
        a[:1] @ b.T,
        chunks,
        half_a @ half_b.T,
        a.exp(),
        a.softmax(-1),
        a.sum(-1),
        torch.nn.functional.gelu(a),
    )
    return hashlib.sha256(b"".join(result.float().numpy().tobytes() for result in results)).hexdigest()


def _processor() -> str:
    """Name the processor's vector instructions, of those that matter here."""
    described = Path("/proc/cpuinfo")
    words = set(described.read_text().split()) if described.exists() else set()
    return ", ".join(sorted(words & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})) or "unknown vector instructions"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
