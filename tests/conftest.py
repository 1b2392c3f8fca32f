"""Settings made before anything imports triton: without a GPU, kernels run in Triton's interpreter."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# A busy machine is slow now and then.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def same_arithmetic() -> Iterator[None]:
    """Seed torch before each test. Then restore the number of threads, and ``linear``, which ZeRO 3 replaces."""
    torch.manual_seed(0)
    linear = torch.nn.functional.linear
    yield
    torch.set_num_threads(1)
    torch.nn.functional.linear = linear
