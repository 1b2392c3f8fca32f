"""Routing attention against its formulas written out, and its centroids."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.launcher.planning.costs import dense_pairs, work
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import small
from tests.harness.stochastic import with_gradients
from tests.sparse_model.test_transformer import awake

C, H, N, D = 64, 4, 40, 16
LOCAL = {"heads": 1, "window": 4}


def routing(**changes: Any) -> dict[str, Any]:
    return {"attention": {"type": "routing", "clusters": 5, "window": 6, "local": LOCAL, **changes}}


def mixer_of(**changes: Any) -> Any:
    mixer: Any = awake(layers=1, **changes).double().blocks[0].attention
    if hasattr(mixer, "balance"):
        torch.nn.init.normal_(mixer.balance)
    return mixer


def turned(x: Tensor, base: float) -> Tensor:
    """(B, n, D): pairs of channels turned by their positions (Su et al. 2021)."""
    place = torch.arange(x.shape[1], dtype=torch.float64)[:, None]
    angles = place * base ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    a, b = x[..., 0::2], x[..., 1::2]
    cosines, sines = angles.cos().float(), angles.sin().float()  # as the table is kept
    both = (a * cosines - b * sines, a * sines + b * cosines)
    return torch.stack(both, -1).flatten(-2)


def reads_of(mixer: Any, q: Tensor, k: Tensor, head: int) -> list[list[list[int]]]:
    """Of a routed head, q and k (B, n, D): the keys of each query (Roy et al. 2020, section 4)."""
    found = []
    for b in range(len(q)):
        ours, theirs = ((x[b] @ mixer.centroids[head].T + mixer.balance[head]).argmax(-1).tolist() for x in (q, k))
        rows = []
        for i in range(q.shape[1]):
            last = i if mixer.config.shared_query_key else i + 1
            members = [j for j in range(last) if theirs[j] == ours[i]][-mixer.config.window :]
            rows.append(members or ([i] if mixer.config.shared_query_key else []))
        found.append(rows)
    return found


def by_loops(mixer: Any, x: Tensor, base: float | None) -> Tensor:
    """(B, n, C) of rows x; softmax by softmax."""
    config, local, outs = mixer.config, mixer.local, []
    rows = x @ mixer.query_key_value.weight.T + mixer.query_key_value.bias
    names = ["local_q", "local_k", "q"] + ([] if config.shared_query_key else ["k"]) + ["v"]
    part = dict(zip(names, rows.split([width for width in mixer.widths if width], -1), strict=True))
    for head in range(H):
        number = head if head < local else head - local
        own = slice(number * D, number * D + D)
        v = part["v"][..., head * D : head * D + D]
        if head < local:
            q, k = part["local_q"][..., own], part["local_k"][..., own]
            window = config.local.window
            each = [[list(range(max(0, i + 1 - window), i + 1)) for i in range(x.shape[1])]] * len(x)
        else:
            q, k = part["q"][..., own], part["q" if config.shared_query_key else "k"][..., own]
            q, k = (
                (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() for y in (q, k)
            )
            each = reads_of(mixer, q, k, number)
        if base is not None:
            q, k = turned(q, base), turned(k, base)
        out = torch.zeros_like(v)
        for b in range(len(x)):
            for i, keys in enumerate(each[b]):
                if keys:
                    out[b, i] = (q[b, i] @ k[b, keys].T / math.sqrt(D)).softmax(-1) @ v[b, keys]
        outs.append(out)
    return torch.cat(outs, -1) @ mixer.projection.weight.T + mixer.projection.bias


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_query_key": False, "rotary": {"base": 100}}, {"window": 64, "local": {"heads": 2, "window": 9}}],
    ids=str,
)
def test_it_is_the_papers_formula(changes: dict[str, Any]) -> None:
    """Rows and every gradient; centroids have none."""
    rotary = changes.get("rotary")
    options = {key: value for key, value in changes.items() if key != "rotary"}
    mixer = mixer_of(**routing(**options), **({"rotary": rotary} if rotary else {}))
    inputs = [torch.randn(2, N, C, dtype=torch.float64, requires_grad=True), *mixer.parameters()]
    found = with_gradients(lambda x, *_: mixer(x).rows, inputs)
    wanted = with_gradients(lambda x, *_: by_loops(mixer, x, rotary and rotary["base"]), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_centroids_move_towards_the_mean_directions_of_their_members(shared: bool) -> None:
    """λc + (1 - λ)m (Roy et al. 2020, algorithm 1), with m of length 1 as in routing-transformer's Kmeans, by loops."""
    mixer = mixer_of(**routing(decay=0.9, shared_query_key=shared)).train()
    mixer.centroids[:, 0] = mixer.centroids[:, 1:3].mean(1)  # which one of both agrees with more
    mixer.balance.zero_()
    before = mixer.centroids.clone()
    x = torch.randn(3, 8, C, dtype=torch.float64)
    given = mixer(x)
    q, k, _ = (y.detach() for y in mixer.heads_of(mixer.query_key_value(x)))
    mixer.observe(given.statistics[0])
    empty = 0
    for head in range(H - 1):
        members: dict[int, list[Tensor]] = {}
        for vector in (q if shared else k)[:, 1 + head].flatten(0, 1):
            members.setdefault(int((before[head] @ vector).argmax()), []).append(vector)
        for number in range(5):
            wanted = before[head, number]
            if number in members:
                total = torch.stack(members[number]).sum(0)
                wanted = 0.9 * wanted + 0.1 * total / total.norm()
            empty += number not in members
            size = len(members.get(number, [])) / (3 * 8 / 5)
            balance = 0.1 * math.sqrt(D) * max(-1, 1 - size)
            torch.testing.assert_close(float(mixer.balance[head, number]), balance)
            torch.testing.assert_close(mixer.centroids[head, number], wanted)
    assert empty


def test_first_centroids_are_directions_and_no_parameters() -> None:
    model = SparseTransformer(small(layers=2, **routing()))
    (first, second) = (block.attention.centroids for block in model.blocks)  # type: ignore[union-attr]
    assert first.shape == (3, 5, D) and not torch.equal(first, second)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(3, 5))
    assert not any("centroids" in name for name, _ in model.named_parameters())
    assert mixer_of(**routing(keys="random")).train()(torch.randn(1, N, C).double()).statistics == ()


def test_separate_queries_and_keys_begin_equal() -> None:
    mixer: Any = SparseTransformer(small(layers=1, **routing(shared_query_key=False))).blocks[0].attention
    q, k, _ = mixer.heads_of(mixer.query_key_value(torch.randn(1, N, C)))
    torch.testing.assert_close(q[:, 1:], k[:, 1:])
    assert not torch.allclose(q[:, :1], k[:, :1])


def test_random_keys_are_of_positions_alone() -> None:
    """As many in each cluster, and others in each head; so of content nothing, and of distance nothing."""
    mixer = mixer_of(**routing(keys="random", clusters=8))
    found = mixer.clusters(torch.randn(2, 3, 4096, D))
    assert torch.equal(found[0], found[1]) and torch.equal(
        mixer.clusters(torch.zeros(2, 3, 1, D), 77), found[..., 77:78]
    )
    counts = torch.nn.functional.one_hot(found[0], 8).sum(1).double()
    assert (counts / 512 - 1).abs().max() < 5 / 512**0.5
    for distance in (1, 2, 8, 64):
        assert abs((found[0, :, distance:] == found[0, :, :-distance]).double().mean() - 1 / 8) < 0.03
    assert abs((found[0, 0] == found[0, 1]).double().mean() - 1 / 8) < 0.03


def test_pairs_are_at_most_what_is_counted() -> None:
    """As many as there can be: all in one cluster."""
    for changes in ({}, {"shared_query_key": False}, {"window": 64}, {"local": None}):
        config = small(layers=1, **routing(clusters=1, **changes))
        mixer: Any = SparseTransformer(config).blocks[0].attention
        q, k, _ = mixer.heads_of(mixer.query_key_value(torch.randn(1, N, C)))
        read = sum(int(mixer.allowed(q, k, head)(torch.arange(N)).sum()) for head in range(H))
        counted = work(config).layers[0]
        assert counted.pairs == read <= dense_pairs(config)
        heads = H if "local" in changes else H - 1
        assert counted.bound == f"at most {mixer.config.window} keys a query of {heads} routed heads"
