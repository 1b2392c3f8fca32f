"""The table of docs/clients.md: written by a full run that passed, and by no other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import clients
from tests.harness.clients import BEGIN, END, Table

SOURCE = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("changes", "status", "is_written"),
    [
        ({}, pytest.ExitCode.OK, True),
        ({}, pytest.ExitCode.TESTS_FAILED, False),
        ({"args_source": SOURCE.ARGS}, pytest.ExitCode.OK, False),  # a path
        ({"keyword": "peft"}, pytest.ExitCode.OK, False),
        ({"collectonly": True}, pytest.ExitCode.OK, False),
        ({"workerinput": {}}, pytest.ExitCode.OK, False),
    ],
)
def test_full_runs_that_passed_write_the_table(
    changes: dict[str, Any], status: int, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, table = tmp_path / "docs/clients.md", Table()
    before = f"above\n{BEGIN}\n| old |\n{END}\nbelow\n"
    page.parent.mkdir()
    page.write_text(before)
    (tmp_path / "setup.py").write_text('"peft[all]==1.2.3"')
    monkeypatch.setattr(clients, "PAGE", page)
    for what, passed in (("works", True), ("is skipped", False)):
        report: Any = SimpleNamespace(user_properties=[("client", ["peft", what, "figures"])], passed=passed)
        table.pytest_runtest_logreport(report)
    option = SimpleNamespace(**{"keyword": "", "collectonly": False, "lf": False} | changes)
    config = {"option": option, "args_source": SOURCE.TESTPATHS} | changes
    session: Any = SimpleNamespace(config=SimpleNamespace(**config), exitstatus=status)
    table.pytest_sessionfinish(session, status)
    if not is_written:
        assert page.read_text() == before and session.exitstatus == status
        return
    row = "| peft 1.2.3 | works | figures |"
    assert page.read_text() == f"above\n{BEGIN}\n| client | what | result |\n|---|---|---|\n{row}\n{END}\nbelow\n"
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    table.pytest_sessionfinish(session, status)
    assert page.read_text().count(row) == 1
