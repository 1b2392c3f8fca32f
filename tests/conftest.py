"""Set before anything imports triton or computes: kernels run in Triton's interpreter where there is no GPU."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# A machine that does something else meanwhile is slow now and then.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What a test computes in this process may take all cores: the next one has one again, and its bits."""
    yield
    torch.set_num_threads(1)
