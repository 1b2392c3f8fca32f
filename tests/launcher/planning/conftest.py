"""What tests of plans share."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from longstride.launcher import cli

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """A function of words -> the JSON object of `longstride plan words --json`."""

    def run(*words: str) -> dict[str, Any]:
        assert cli.main(["plan", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run
