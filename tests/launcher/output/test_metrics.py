"""Losses in bits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from longstride.launcher.output.metrics_file import content_of, loss_fields, read_lines


@pytest.mark.parametrize(("tokens", "content"), [(64, 64), (2036, 1457), (3, 1), (5, 0)])
@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("byte", ["bits_per_byte"]),
        ("dimension", ["bits_per_byte", "bits_per_dimension"]),
        ("pixel", ["bits_per_pixel"]),
    ],
)
def test_bits_are_all_nats_over_log_two_and_content(unit: str, names: list[str], tokens: int, content: int) -> None:
    line = loss_fields(math.log(256), tokens, content, unit)
    assert (line["loss_nats"], line["tokens"]) == (math.log(256), tokens)
    assert [name for name in line if name.startswith("bits_per_")] == names
    wanted = 8.0 * tokens / content if content else math.nan
    assert [line[name] for name in names] == pytest.approx([wanted] * len(names), nan_ok=True)
    assert line.get("bytes") == (None if unit == "pixel" else content)
    assert content_of(line) == (tokens if unit == "pixel" else content)


@pytest.mark.parametrize("count", ["-1", "1.5", "true", "[]", "null", str(2**63)])
def test_a_line_of_no_number_of_bytes_is_damaged(tmp_path: Path, count: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "bytes": {count}}}\n{{"step": 2, "bytes": 3}}\n')
    assert [*read_lines(tmp_path)] == [{}, {"step": 2, "bytes": 3}]
