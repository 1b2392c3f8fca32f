"""The README says what the result files say."""

from benchmarks.readme_table import README, with_tables


def test_the_readme_agrees_with_the_measurements() -> None:
    assert with_tables(README.read_text()) == README.read_text(), "run python benchmarks/readme_table.py"
