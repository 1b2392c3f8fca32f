"""docs/results.md says what the result files of benchmarks/paper/paper.py say."""

from pathlib import Path
from typing import Any

from benchmarks.paper.tables import order_line, plot, table_2, table_3


def run(pattern: str, seed: int, bits: float, seconds: float, dataset: str = "text") -> dict[str, Any]:
    return {
        "dataset": dataset,
        "pattern": pattern,
        "seed": seed,
        "bits_per_byte": bits,
        "seconds_per_step": seconds,
        "steps": 20,
        "training_curve": [[10, bits + 1], [20, bits]],
        "parameters": 1_000,
        "bytes_trained": 2_000,
        "held_out_bytes": 50,
    }


def results(size: str = "small") -> dict[str, Any]:
    case = {"name": "text", "source": "texts", "context": 64, "stride": 8, "summary": 2, "layers": 1, "heads": 1}
    about = {"device": "A machine", "threads": 2, "torch": "2", "date": "2026-01-01", "dtype": "float32"}
    runs = [
        *(run("dense", seed, 3.0 + 0.1 * seed, 2.0 + 2.0 * seed) for seed in (0, 1)),
        *(run("fixed", seed, 2.5 + 0.1 * seed, 1.0) for seed in (0, 1)),
        *(run("strided", seed, 3.5, 0.5) for seed in (0, 1)),
    ]
    minima = [
        {
            "dataset": "text",
            "pattern": "fixed",
            "seed": seed,
            "minimum_context": least,
            "bits_per_byte": 3.0,
            "bytes": 9,
        }
        for seed in (0, 1)
        for least in (0, 32)
    ]
    return {
        **about, "size": size, "seconds": 90.0, "cases": {"text": {**case, "width": 8}}, "runs": runs,
        "minimum_contexts": minima,
    }  # fmt: skip


def test_speed_is_the_mean_of_the_seeds_own_ratios() -> None:
    lines = table_2(results()).splitlines()[2:]
    assert lines == [
        "| text | dense | 3.0500 (3.0000–3.1000) | 3.000 | 1.00× | 2 | 1.00 (enwik8) | 1.00× |",
        "| text | fixed | 2.5500 (2.5000–2.6000) | 1.000 | 3.00× | 2 | 0.99 (enwik8) | 2.38× |",
        "| text | strided | 3.5000 (3.5000–3.5000) | 0.500 | 6.00× | 2 | 1.13 (enwik8) | 3.74× |",
    ]


def test_the_order_is_told_as_it_came_out() -> None:
    found = results()
    assert order_line("text", found["runs"]).startswith("Bits per byte on text: fixed < dense < strided; the paper's")
    for one in found["runs"]:
        one["bits_per_byte"] = -one["bits_per_byte"]
    assert order_line("text", found["runs"]).startswith("Bits per byte on text: strided < dense < fixed; the paper's")


def test_minimum_contexts_have_a_row_each() -> None:
    lines = table_3(results()).splitlines()
    assert lines[-2:] == ["| 0 | 3.0000 (3.0000–3.0000) | 2 |", "| 32 | 3.0000 (3.0000–3.0000) | 2 |"]


def test_the_picture_has_a_line_and_a_dot_a_run_and_a_line_of_their_mean(tmp_path: Path, monkeypatch) -> None:
    from matplotlib.axes import Axes

    drawn = []
    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: (drawn.append(a), real(self, *a, **k))[1])
    plot(results(), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5_000
    assert len(drawn) == 3 * (2 + 2 + 1) and (40.0, 3.0, "o") in drawn
    assert ([30.0, 60.0], [4.05, 3.05]) in drawn  # dense: steps 10 and 20 at 3 seconds
