"""Losses in bits."""

from __future__ import annotations

import math

import pytest

from longstride.launcher.output.metrics_file import bits_per_byte


def test_bits_are_nats_over_log_two() -> None:
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0)
