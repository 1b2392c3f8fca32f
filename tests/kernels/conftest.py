"""Small tiles for all tests of kernels, so that small contexts have full, partial, ragged and absent ones."""

from collections.abc import Iterator

import pytest

from tests.harness.backends import HAS_TRITON, use_tiles
from tests.harness.interpreter import quicken


@pytest.fixture(scope="package", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """For as long as kernels are tested."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if HAS_TRITON:
            quicken(monkeypatch)
        yield


@pytest.fixture
def tiles_of_a_card() -> None:
    """For tests that want no small tiles."""


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_TRITON or "tiles_of_a_card" in request.fixturenames:
        return
    from longstride.kernels.backends.triton import decode

    use_tiles(monkeypatch, (16, 16), closed=16)
    # So that single queries have several tiles and several splits, some of them without a key.
    monkeypatch.setattr(decode, "LONGEST_TILE", 16)
    monkeypatch.setattr(decode, "KEYS_A_SPLIT", 16)
