"""The machine of a measurement, and how fast it copies and multiplies: the two ceilings of every kernel."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from longstride.kernels.backends import has_bf16_products
from tests.harness.runs import ROOT, free_port, plain_environment, rank_environment

COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}  # of the source; far beyond every cache
MATMUL_EDGE = {"cuda": 8_192, "cpu": 1_536}
REPEATS = {"cuda": 20, "cpu": 5}


def about(device: torch.device) -> dict[str, Any]:
    """Return the machine, the versions and the date, which every result file begins with."""
    facts = {
        "device": device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": next((d.version for d in importlib.metadata.distributions(name="triton")), None),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["multiprocessors"] = properties.multi_processor_count
        facts["memory_bytes"] = properties.total_memory
        facts["cache_bytes"] = cache_bytes(device)
        facts["cuda"] = torch.version.cuda or torch.version.hip
    return facts


def device_name(device: torch.device) -> str:
    """Return the model of the GPU, or that of the processor with its instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    model = next(names, platform.processor() or platform.machine())
    bf16 = " BF16" if has_bf16_products() else ""
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}{bf16}"


def slug(device: torch.device) -> str:
    """Return the device's name as part of a file name."""
    return "-".join(re.findall(r"[a-z0-9]+", device_name(device).lower()))


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's last-level cache; 0 for a CPU, whose inputs are not rotated."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20))


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_bytes(field: str, process: int | str = "self") -> int:
    """Read a field of a process's memory from /proc: VmRSS, its peak VmHWM, or RssAnon."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run_ranks(module: str, arguments: Sequence[object], ranks: int, **variables: str) -> list[str]:
    """Run a module in as many processes as ranks, with these environment variables; return their standard outputs.

    Raises:
        RuntimeError: one failed.
    """
    words, port = [sys.executable, "-m", module, *map(str, arguments)], free_port()
    environments = [plain_environment() | rank_environment(rank, ranks, port) | variables for rank in range(ranks)]
    processes = [
        subprocess.Popen(words, cwd=ROOT, env=each, stdout=subprocess.PIPE, text=True) for each in environments
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{' '.join(words)}: exit codes {[process.returncode for process in processes]}")
    return outputs


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Measure bytes a second of a large copy on the device, counting both reads and writes."""
    size = (num_bytes or COPY_BYTES[device.type]) // 4
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _seconds(lambda: target.copy_(source), device)


def matmul_flops(device: torch.device, dtype: torch.dtype, edge: int | None = None) -> float:
    """Measure operations a second of a large matrix product of random numbers."""
    edge = edge or MATMUL_EDGE[device.type]
    a, b = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    return 2 * edge**3 / _seconds(lambda: a @ b, device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time a call: the median on a GPU, the minimum on a CPU, which other programs use too."""
    runs = []
    for _ in range(REPEATS[device.type] + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        runs.append(time.perf_counter() - start)
    return statistics.median(runs[2:]) if device.type == "cuda" else min(runs[2:])
