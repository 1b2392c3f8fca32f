"""The order of many shards for many ranks, planned from a manifest alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling.order_at_scale import measure, paper_manifest, plan_rank
from tests.harness.data.streams import open_stream


def test_ranks_together_read_what_one_process_would(tmp_path: Path) -> None:
    found = measure(tmp_path, 200, 24, [1, 3, 24])
    assert [path.name for path in (tmp_path / "many").iterdir()] == ["manifest.json"]  # shards on paper
    assert [(row["ranks"], row["equal"]) for row in found["ranks"]] == [(1, True), (3, True), (24, True)]
    assert 199 * 2**27 < found["content_bytes"] <= 200 * 2**27


def test_another_order_would_be_seen(tmp_path: Path) -> None:
    data = paper_manifest(tmp_path, 20)
    one, other = (open_stream(data, context=12_288, global_batch=4, seed=seed) for seed in (0, 1))
    assert plan_rank(one, 0, 1) != plan_rank(other, 0, 1)
    whole = plan_rank(one, 0, 1)
    halves = [plan_rank(one, rank, 2) for rank in (0, 1)]
    for step, (ids, shards) in enumerate(whole):
        assert len(set(ids)) == 4 and all(name.startswith("train-") for name in (Path(x).name for x in shards))
        assert halves[0][step][0] + halves[1][step][0] == ids
        assert halves[1][step][0] + halves[0][step][0] != ids
