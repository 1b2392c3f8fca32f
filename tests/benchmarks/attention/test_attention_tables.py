"""Tables of attention say what result files say."""

from typing import Any

from benchmarks.attention.tables import SHOWN_CONTEXT, summary, tables_of


def timing(context: int = SHOWN_CONTEXT, head_width: int = 64, dtype: str = "float32") -> dict[str, Any]:
    ratios = {"forward": 2.0, "backward": 3.0, "both": 2.5}
    missing = {"ratio_to_flex": dict.fromkeys(ratios), "fraction_of_ideal": dict.fromkeys(ratios)}
    sizes = {"context": context, "head_width": head_width, "dtype": dtype, "stride": 128, "summary": 8, "heads": 4}
    return {"pattern": "local", "density": 0.01, "ratio_to_dense": ratios, **missing, **sizes}


def results(*timings: dict[str, Any]) -> dict[str, Any]:
    return {"device": "A card", "threads": 1, "torch": "2", "date": "2026-01-01", "timings": list(timings)}


def test_the_readme_has_one_table_with_a_column_for_each_device() -> None:
    card = {**timing(), "ratio_to_flex": {"both": 4.5}}
    other = {**results(timing(context=64), timing(), timing(head_width=128)), "device": "A CPU"}
    heading, _, columns, rule, *lines = summary([{**results(card), "device_type": "cuda"}, other]).splitlines()
    assert columns == "| pattern | share of pairs | A card, float32 | A card over FlexAttention | A CPU, float32 |"
    assert lines == ["| local | 1.0% | 2.5× | 4.5× | 2.5× |"]
    assert "width 64" in heading and rule.count("|") == columns.count("|")


def test_each_head_width_and_dtype_has_its_own_table() -> None:
    found = tables_of(results(timing(), timing(head_width=128), timing(dtype="bfloat16"), timing(context=64)))
    assert [sum(line.startswith("| local") for line in one.splitlines()) for one in found] == [1, 1, 1]
    wanted = ("width 64, float32", "width 128, float32", "width 64, bfloat16")
    assert all(words in one for words, one in zip(wanted, found, strict=True))


def test_a_file_without_the_shown_context_has_no_table() -> None:
    assert tables_of(results(timing(context=64))) == tables_of(results()) == []


def test_a_card_also_shows_flex_attention_and_the_ideal() -> None:
    phases = ("forward", "backward", "both")
    row = {
        **timing(dtype="bfloat16"),
        "dense_kernel": {"forward": "flash", "backward": "cudnn", "both": "cudnn"},
        "ratio_to_flex": dict(zip(phases, (4.0, 5.0, 4.5), strict=True)),
        "fraction_of_ideal": dict(zip(phases, (0.71, 0.62, None), strict=True)),
    }
    (found,) = tables_of({**results(row), "device_type": "cuda"})
    assert "attention (the faster in each phase: flash, cudnn) in the same run" in found
    header, rule, line = found.splitlines()[2:]
    assert "| × FlexAttention forward | × FlexAttention both | of ideal forward | of ideal backward |" in header
    assert line == "| local | 1.0% | 2.0× | 3.0× | 2.5× | 4.0× | 4.5× | 71% | 62% |"
    assert header.count("|") == rule.count("|") == line.count("|")


def test_what_was_not_measured_on_a_card_is_a_dash() -> None:
    missing: dict[str, Any] = dict.fromkeys(("forward", "backward", "both"))
    row = {**timing(), "ratio_to_dense": missing, "ratio_to_flex": missing, "fraction_of_ideal": missing}
    (found,) = tables_of({**results(row), "device_type": "cuda"})
    assert found.splitlines()[-1] == "| local | 1.0% | – | – | – | – | – | – | – |"
