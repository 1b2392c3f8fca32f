"""Rows of docs/clients.md: each test against a real package is a row; a pytest plugin makes the table.

``make clients`` loads this plugin. If all such tests pass, the table is made from the tests that ran. If the page has a
different table, the page is rewritten and the run fails, so that every committed table comes from tests. A run that
failed, or that selected some of the tests, leaves the page alone.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- made by make clients: begin -->", "<!-- made by make clients: end -->"
Test = TypeVar("Test", bound=Callable[..., None])


def client(package: str, what: str, result: str) -> Callable[[Test], Test]:
    """Mark a test as one of `make clients`, and name its row of docs/clients.md.

    Args:
        package: as installed, such as "peft".
        what: is done with it, in a few words.
        result: what the test asserts; "works" is too little.
    """
    return lambda test: pytest.mark.clients(package, what, result)(test)


class Table:
    """Collects rows from reports, which workers of xdist send to the main process."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record whether every part of every case of a row's test passed."""
        for name, row in report.user_properties:
            if name == "client":
                self.rows[tuple(row)] = self.rows.get(tuple(row), True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Compare the page with the table, and rewrite it if they differ."""
        config = session.config
        is_part = config.option.keyword or config.option.collectonly or config.option.lf
        is_part = is_part or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        if exitstatus != pytest.ExitCode.OK or hasattr(config, "workerinput") or is_part:
            return
        text = PAGE.read_text()
        before, _, tail = text.partition(BEGIN)
        _, _, after = tail.partition(END)
        updated = before + BEGIN + "\n" + table(self.rows) + END + after
        if updated != text:
            PAGE.write_text(updated)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\n{PAGE}: had another table than the tests make; it is written anew: look at it, and commit it")


def table(rows: dict[tuple[str, str, str], bool]) -> str:
    """Format the rows that passed as Markdown, by package, with the versions that `make clients` installs."""
    pinned = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?==([\d.]+)"', (PAGE.parents[1] / "setup.py").read_text()))
    lines = ["| client | what | result |", "|---|---|---|"]
    last = None
    for package, what, result in sorted(row for row, passed in rows.items() if passed):
        name = "" if package == last else f"{package} {pinned.get(package, '')}".strip()
        lines.append(f"| {name} | {what} | {result} |")
        last = package
    return "\n".join(lines) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    """Register the table as a plugin."""
    config.pluginmanager.register(Table(), "clients-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attach each test's row to its reports."""
    for item in items:
        for mark in item.iter_markers("clients"):
            if mark.args:
                item.user_properties.append(("client", list(mark.args)))
