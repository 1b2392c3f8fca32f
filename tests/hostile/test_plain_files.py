"""What reads a file by its name reads plain files alone, and no more of them than there may be."""

from pathlib import Path

import pytest

from longstride.data_pipelines.plain_files import JSONError, open_plain, parse_json, read_plain
from tests.hostile.commands import Commands
from tests.hostile.generators.files import HOSTILE_JSON, NO_FILES, replace, sparse

VALID = {"a list", "a number", "null", "a key twice", "a surrogate", "300 MB of a string"}


@pytest.mark.parametrize("kind", NO_FILES)
def test_no_file_is_refused_before_a_byte_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "manifest.json"
    replace(path, kind)
    for follow_links in (True, False):
        with pytest.raises(OSError) as caught, open_plain(path, follow_links=follow_links):
            pass
        assert caught.value.filename == str(path) or "link" in kind


def test_links_to_plain_files_are_followed_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    (tmp_path / "name").symlink_to("blob")
    assert read_plain(tmp_path / "name", 7) == b"content"
    with pytest.raises(OSError, match="is a link"):
        read_plain(tmp_path / "name", 7, follow_links=False)


def test_length_is_known_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    sparse(path, 2**40)
    with pytest.raises(OSError, match="has 1,099,511,627,776 bytes; at most 1,000 are allowed"):
        read_plain(path, 1000)


@pytest.mark.parametrize("what", [what for what in HOSTILE_JSON if what not in VALID])
def test_hostile_json_is_refused_in_a_line(what: str) -> None:
    with pytest.raises(JSONError) as caught:
        parse_json(HOSTILE_JSON[what]())
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("what", [*NO_FILES, *HOSTILE_JSON])
def test_configuration(commands: Commands, tmp_path: Path, what: str) -> None:
    honest = commands("plan", "demo")
    assert honest.code == 0, honest.err
    path = tmp_path / "run.json"
    if what in NO_FILES:
        replace(path, what)
    else:
        path.write_bytes(HOSTILE_JSON[what]())
    outcome = commands("plan", path)
    outcome.check_bounded(honest)
    assert outcome.code == 2 and outcome.mistakes, outcome.err


def test_objects_and_lists_are_counted_within_each_other_alone() -> None:
    value = parse_json('{"[[[": ' + "[" * 63 + '"[{"' + "]" * 63 + ', "b": [[], {}]}')
    assert set(value) == {"[[[", "b"}
    with pytest.raises(JSONError, match="more than 64 deep"):
        parse_json('{"a": 1, "b": ' + "[" * 64 + "]" * 64 + "}")
