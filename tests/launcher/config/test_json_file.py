"""Hand-written JSON: what is wrong with it is told with line and column."""

from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.config.loading import flattened, load_json_object, parse_override, put


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', ":2:7: not JSON: Expecting value"),
        ('{"a": 1\n "b": 2}', ":2:2: not JSON: Expecting ',' delimiter"),
        (
            '{"a": {"b": 1,\n  "b": 2}, "a": [{"x": 1}, {"x": 2}]}',
            ': key "b" occurs twice in one object, as 1 and as 2; keep one',
        ),
        (
            '{"a": {"b": 1}, "a": [{"x": 1}, {"x": 2}]}',
            ': key "a" occurs twice in one object, as {"b": 1} and as [{"x": 1}, {"x": 2}]; keep one',
        ),
        ('{"a": NaN}', ": NaN is not JSON; give a finite number"),
        ("[1]", ": must hold a JSON object"),
        ("", ":1:1: not JSON: Expecting value"),
    ],
)
def test_wrong_text_is_told_by_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_json_object(path)
    assert f"{path}{message}" in str(caught.value).splitlines()


def test_missing_and_binary_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        load_json_object(tmp_path / "none.json")
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="must be UTF-8; byte 7 is not"):
        load_json_object(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=1", 1), ("a.b=1e-3", 1e-3), ("a.b=word", "word"), ("a.b=[1, 2]", [1, 2]), ("a.b=x=y", "x=y"), ("a.b=", "")],
)
def test_override_values_are_json_or_else_text(text: str, value: object) -> None:
    assert parse_override(text) == (["a", "b"], value)


@pytest.mark.parametrize("text", ["steps", "=1", "a..b=1", ".a=1"])
def test_override_without_a_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be path\.to\.key=value"):
        parse_override(text)


def test_put_makes_objects_on_the_way_and_refuses_values() -> None:
    content: dict[str, object] = {"a": 1}
    put(content, ["b", "c"], 2)
    assert content == {"a": 1, "b": {"c": 2}}
    with pytest.raises(ConfigError, match=r"^a=1: has no key x to override$"):
        put(content, ["a", "x"], 2)


def test_flattened_names_every_value() -> None:
    assert flattened({"a": {"b": [1, {"c": 2}], "d": {}}}) == {"a.b": [1, {"c": 2}], "a.d": {}}
