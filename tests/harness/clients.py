"""Rows of docs/clients.md: what a test against a real package holds, and, as a plugin of pytest, the table of all.

``make clients`` loads this plugin. Once every such test has passed, the table is made of the tests that ran. If the
page has another one, the page is written anew and the run fails, so that no table is committed that tests did not make.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- made by make clients: begin -->", "<!-- made by make clients: end -->"
Test = TypeVar("Test", bound=Callable[..., None])


def client(package: str, what: str, result: str) -> Callable[[Test], Test]:
    """Marks a test as one of `make clients`, and names the row of docs/clients.md that it stands for.

    Args:
        package: as it is installed, such as "peft".
        what: is done with it, in a few words.
        result: what comes out, which the test holds: "works" says too little.
    """
    return lambda test: pytest.mark.clients(package, what, result)(test)


class Table:
    """Gathers rows from reports, which workers of xdist send to the process that has the page."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A row holds where every part of every case of its test passed."""
        for name, row in report.user_properties:
            if name == "client":
                self.rows[tuple(row)] = self.rows.get(tuple(row), True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Holds the page to what was found."""
        if exitstatus != pytest.ExitCode.OK or hasattr(session.config, "workerinput"):
            return
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        made = before + BEGIN + "\n" + table(self.rows) + END + after
        if made != text:
            PAGE.write_text(made)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\n{PAGE}: had another table than the tests make; it is written anew: look at it, and commit it")


def table(rows: dict[tuple[str, str, str], bool]) -> str:
    """The rows that hold, as Markdown, by package, with the versions that `make clients` installs."""
    pinned = dict(re.findall(r'"(\w+)(?:\[\w+\])?==([\d.]+)"', (PAGE.parents[1] / "setup.py").read_text()))
    lines = ["| client | what | result |", "|---|---|---|"]
    last = None
    for package, what, result in sorted(row for row, held in rows.items() if held):
        name = "" if package == last else f"{package} {pinned.get(package, '')}".strip()
        lines.append(f"| {name} | {what} | {result} |")
        last = package
    return "\n".join(lines) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    """Whoever loads this plugin runs all tests of clients: of a part, the table would be one of a part."""
    config.pluginmanager.register(Table(), "clients-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts a test's row where its reports carry it."""
    for item in items:
        for mark in item.iter_markers("clients"):
            if mark.args:
                item.user_properties.append(("client", list(mark.args)))
