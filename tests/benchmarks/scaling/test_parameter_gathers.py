"""The order in which modules use their parameters, and what ZeRO 3 gathers for it."""

from collections import Counter
from itertools import chain

from benchmarks.scaling.parameter_gathers import FETCH, Limits, gathers, persistent, trace
from longstride.launcher.config import load_config


def test_every_module_is_fetched_forward_and_backward() -> None:
    found = trace(load_config("paper_small", ["model.layers=2"]))
    modules = [event.module for event in found.events if event.kind == FETCH]
    assert modules.count("blocks.1.attention.projection") == 2
    assert modules.index("embedding") < modules.index("blocks.0") < modules.index("blocks.1") < modules.index("logits")


def test_weights_of_modules_that_are_not_called_belong_to_their_parent() -> None:
    # Long contexts go through feed-forward in chunks, which call no module.
    found = trace(load_config("paper_small", ["model.context=131072", "model.layers=2", "train.micro_batch=2"]))
    assert "blocks.0.feed_forward.expand.weight" in found.parameters["blocks.0.feed_forward"]
    assert not found.parameters["blocks.0.feed_forward.expand"]


def test_limits_keep_release_and_fetch_ahead() -> None:
    found = trace(load_config("paper_small"))
    every = set(found.numel)
    assert not gathers(found, Limits())  # every parameter is small enough to stay
    none_kept = Limits(persistence=0)
    assert Counter(chain.from_iterable(gathers(found, none_kept))) == dict.fromkeys(every, 1)
    released = gathers(found, Limits(persistence=0, max_reuse_distance=0, prefetch_bucket=0))
    twice = {name for name, count in Counter(chain.from_iterable(released)).items() if count == 2}
    # The last module's weights are needed again at once, and the embedding has no gradient to hand on.
    assert len(twice) > 0.9 * len(every) and max(Counter(chain.from_iterable(released)).values()) == 2
    assert len(gathers(found, none_kept)) < len(released)  # what is fetched ahead comes in fewer calls


def test_small_parameters_persist_until_their_sum_is_too_large() -> None:
    numel = {"a": 10, "b": 200, "c": 10, "d": 10}
    assert persistent(numel, Limits(persistence=100)) == ["a", "c", "d"]
    assert persistent(numel, Limits(persistence=100, model_persistence=20)) == ["a", "c"]


def test_limits_come_from_the_run() -> None:
    section = {"zero_optimization": {"stage3_max_reuse_distance": 5, "stage3_prefetch_bucket_size": 7}}
    assert Limits.of(section) == Limits(max_reuse_distance=5, prefetch_bucket=7)
