"""Configurations of parts that are refused, each in one line; test_config.py has those of the network."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from longstride.kernels import ConfigError
from tests.harness.configs import ATTENTIONS, MASKED, TWO_SIDED, small

Case = tuple[dict[str, Any], str]  # changes of a small model, and how the line begins
DENSE = {"type": "dense", "causal": False}
MPNET = {"type": "permuted", "share": 0.3, "span": 2}
FIXED_7 = {"type": "fixed", "stride": 7, "summary": 1}  # does not divide the context
LONG = {"context": 4096, "embedding": {"type": "tokens"}}
NO_ATTENTION = "only applies to attention, and no layer uses attention; remove it "
SHARED = ", as so many heads share keys, below heads=4"
NOT_DENSE = 'decides who reads whom, which objective permuted does; take {"type": "dense", "causal": false}'
ONE_SIDE = "reads no later positions, and objective permuted needs both sides; set it"
OWN_KEYS = "each head has keys and values of its own"
DIVIDES = "must divide heads=4; nearest"
SHARING: dict[str, dict[str, Any]] = {
    "moba": {"block": 6, "top": 3},
    "indexed": {"keys": 9},
    "adaptive_span": {"penalty": 0.0},
    "entmax": {"pattern": {"type": "strided", "stride": 8}},
    "fixed": {"stride": 8, "summary": 2},
}


def of(part: str, kind: str, rows: list[Case], **required: Any) -> Iterator[Case]:
    """Yield cases of one attention or feed-forward, whose lines begin with its path."""
    for changes, line in rows:
        yield {part: {"type": kind, **required, **changes}}, f"{part}.{line}"


CASES: list[Case] = [
    *of("attention", "adaptive_span", [
        ({"ramp": 1}, "ramp=1: must be greater than or equal to 2"),
        ({"penalty": -1.0}, "penalty=-1.0: must be greater than or equal to 0"),
        ({"limit": 41}, "limit=41: must be at most context 40; nearest 40"),
        ({"limit": 8, "initial": 9.0}, "initial=9.0: must be at most limit 8; nearest 8"),
        ({"initial": 41.0}, "initial=41.0: must be at most context 40; nearest 40"),
    ], penalty=0.01),
    *of("attention", "compressed", [
        ({"block": 41}, "block=41: must be at most context 40"),
        ({"block": 1}, "block=1: must be greater than or equal to 2"),
        ({"block": 6, "distance": 4}, "distance=4: must divide block=6; nearest 3"),
        ({"summary": "max"}, 'summary="max": must be '),
    ]),
    ({"attention": {"type": "compressed"}, "backend": "flex"},
     'attention.type="compressed": needs another backend than "flex"; nearest "auto"'),
    *of("attention", "entmax", [
        ({"pattern": FIXED_7}, "pattern.stride=7: must divide context 40; nearest 5, 8"),
        ({"pattern": {"type": "fixed", "index": 1}}, "pattern.index=1: must be left out"),
    ]),
    *((LONG | changes, line) for changes, line in of("attention", "entmax", [
        ({"pattern": {"type": "dense"}}, 'pattern.type="dense": rows read up to 4,096 keys and are not split; at'),
        ({"pattern": {"type": "fixed", "stride": 64, "summary": 33}}, 'pattern.type="fixed": rows read up to 2,1'),
    ])),
    *of("attention", "indexed", [
        ({"keys": 10, "block": 4}, "keys=10: must be a multiple of block=4; nearest 8"),
        ({"keys": 8, "block": 4, "window": 6}, "window=6: may lie in 3 blocks, of 12 positions; take keys of at least"),
        ({"keys": 2, "window": 3}, "window=3: may lie in 3 blocks, of 3 positions; take keys of at least"),
        *((local | {"local": {"heads": heads, "window": 3}}, f"local.heads={heads}: must be {line}")
          for local, heads, line in (
              ({}, 4, "below heads=4, as the indexer chooses for some heads; nearest 3"),
              ({"key_value_heads": 2}, 1, f"a multiple of 2{SHARED}; nearest 2"),
              ({"key_value_heads": 2}, 7, f"a multiple of 2{SHARED}; nearest 2"),
              ({"key_value_heads": 1}, 1, f"a multiple of 4{SHARED}; remove local"))),
        ({"index_heads": 0}, "index_heads=0: must be greater than 0"),
        ({"loss_weight": -1.0}, "loss_weight=-1.0: must be greater than or equal to 0"),
        ({"index_head": 2}, "index_head: unknown key; nearest index_heads"),
    ], keys=9),
    *(({"attention": {"type": "indexed", "keys": 9, "index_width": 7}, **changes}, f"attention{line}")
      for changes, line in (({"rotary": {}}, ".index_width=7: must be even; nearest 8"),
                            ({"backend": "flex"}, '.type="indexed": needs another backend than "flex"'),
                            ({"sinks": True}, ": indexed does not apply model.sinks; set it to false"))),
    *of("attention", "lsh", [
        ({"buckets": 7}, "buckets=7: each rotation gives two; nearest 6 or 8"),
        ({"buckets": 1}, "rounds=3: are all equal with a single bucket; nearest 1"),
        ({"key_value_heads": 2}, f"key_value_heads=2: must be left out: in lsh {OWN_KEYS}"),
    ], buckets=4, rounds=3, chunk=3),
    *(({"attention": {"type": "lsh", "buckets": 4, "chunk": 3}, **changes}, f'attention.type="lsh": {line}')
      for changes, line in (({"query_key_norm": True}, "has keys of unit length"),
                            ({"backend": "flex"}, 'needs another backend than "flex"'))),
    *of("attention", "match", [({"order": 1}, "order=1: must be "), ({"stride": 3}, "stride")], window=4),
    *of("attention", "moba", [
        ({"block": 41, "top": 1}, "block=41: must be at most context 40"),
        ({"block": 8, "top": 6}, "top=6: context 40 has 5 blocks; at most 5"),
    ]),
    *of("attention", "recurrent", [
        ({"cell": "lstm"}, 'cell="lstm": must be '),
        ({"width": 0}, "width=0: must be greater than 0"),
    ]),
    ({"attention": {"type": "recurrent"}, "query_key_norm": True}, f"query_key_norm: {NO_ATTENTION}"),
    ({"attention": {"type": "recurrent"}, "convolution": 3}, "attention: recurrent does not apply model.convolution"),
    *of("attention", "nsa", [
        ({"block": 5, "selected_block": 8}, "distance=2: must divide block=5; nearest 1"),
        ({"selected_block": 7}, "distance=2: must divide selected_block=7; nearest 1"),
        ({"selected_block": 2}, "selected_block=2: must be from block=4 to context 40"),
        ({"selected_block": 42}, "selected_block=42: must be from block=4 to context 40"),
        ({"selected": 6}, "selected=6: context 40 has 5 blocks; take at most 5"),
        ({"selected": 2}, "selected=2: must be greater than or equal to 3"),
        ({"key_value_heads": 3}, f"key_value_heads=3: {DIVIDES} 2"),
    ], block=4, distance=2, selected_block=8, selected=4, window=5),
    *(({"attention": {"type": "recurrent"}, option: True}, f"{option}: {NO_ATTENTION}")
      for option in ("output_gate", "sinks")),
    ({"attention": {"type": "moba", "block": 6, "top": 3}, "sinks": True},
     "attention: moba does not apply model.sinks; set it to false"),
    ({"attention": {"type": "synthesizer", "kind": ["dense", "attention"]}, "output_gate": True},
     "attention: synthesizer does not apply model.output_gate; set it to false"),
    *of("attention", "routing", [
        ({"decay": 1.0}, "decay=1.0: must be less than 1"),
        ({"keys": "rooted"}, 'keys="rooted": must be '),
        ({"local": {"heads": 4, "window": 3}}, "local.heads=4: must be below heads=4, as some heads are "),
        ({"key_value_heads": 2}, f"key_value_heads=2: must be left out: in routing {OWN_KEYS}"),
    ], clusters=5, window=6),
    ({"attention": {"type": "routing", "clusters": 5, "window": 6}, "backend": "flex"},
     'attention.type="routing": needs another backend than "flex"; nearest "auto"'),
    *of("attention", "synthesizer", [
        ({"kind": "randm"}, 'kind="randm": must be a kind of scores, or a list of them; nearest random'),
        ({"kind": ["dense", "rnd"]}, 'kind=["dense", "rnd"]: must be a kind of scores, or a list of them; '),
        ({"kind": []}, "kind=[]: must name each kind once"),
        ({"kind": ["dense", "dense"]}, 'kind=["dense", "dense"]: must name each kind once'),
        ({"kind": "attention"}, 'kind="attention": is plain attention; use '),
        ({"kind": "random", "rank": 3}, "rank=3: only applies to factorized_random, and kind is random; leave it out"),
        ({"kind": "random", "hidden": 3}, "hidden=3: only applies to dense and factorized_dense, and kind is random"),
        ({"kind": "dense", "fixed": True}, "fixed=true: only applies to random and factorized_random, and kind is"),
        ({"kind": "factorized_dense", "blocks": 7}, "blocks=7: must divide context 40; nearest 8"),
        ({"kind": "dense", "pattern": {"type": "loca", "window": 3}}, 'pattern.type="loca": must be a '),
        ({"kind": "dense", "pattern": {"type": "fixed", "index": 1}}, "pattern.index=1: must be left out"),
        ({"kind": "dense", "pattern": FIXED_7}, "pattern.stride=7: must divide context 40; nearest 5, 8"),
    ]),
    *(({"attention": {"type": "synthesizer", "kind": "random"}, **changes}, f"{line}: {NO_ATTENTION}")
      for changes, line in (({"rotary": {}}, "rotary"), ({"query_key_norm": True}, "query_key_norm"),
                            ({"query_key_ratio": 0.5}, "query_key_ratio=0.5"))),
    *of("attention", "compressive", [
        ({"memory": 0}, "memory=0: must be greater than 0"),
        ({"memory": 2}, "rate=3: must be at most memory 2, whose rows it takes"),
        ({"compression": "most used"}, "compression="),
    ], memory=8, compressed=4, rate=3),
    *of("attention", "transformer_xl", [
        ({"memory": -1}, "memory=-1: must be greater than or equal to 0"),
        ({"position_channels": 7}, "position_channels=7: must be a multiple of 2"),
        ({"key_value_heads": 2}, f"key_value_heads=2: must be left out: in transformer_xl {OWN_KEYS}"),
    ], memory=8),
    *(({"attention": {"type": "transformer_xl", "memory": 8}, **changes}, f'attention.type="transformer_xl": {line}')
      for changes, line in (({"rotary": {}}, "has relative positions of its own; set model.rotary to null"),
                            ({"query_key_norm": True}, "adds biases to queries, which are not normalised; set "),
                            ({"backend": "flex"}, 'needs another backend than "flex"'))),
    ({"attention": {"type": "transformer_xl", "memory": 8}, "convolution": 3},
     "attention: transformer_xl does not apply model.convolution; set it to null"),
    # Heads that share keys and values.
    *(case for kind, required in SHARING.items()
      for case in of("attention", kind, [({"key_value_heads": 3}, f"key_value_heads=3: {DIVIDES} 2")], **required)),
    ({"attention": {**ATTENTIONS["heads"], "key_value_heads": 3}}, f"attention.key_value_heads=3: {DIVIDES} 2"),
    ({"attention": [{"type": "dense", "key_value_heads": 9}]}, f"attention[0].key_value_heads=9: {DIVIDES} 4"),
    *of("attention", "dense", [
        ({"key_value_heads": 0}, "key_value_heads=0: must be an integer of at least 1"),
        ({"key_value_heads": True}, "key_value_heads=true: must be an integer"),
        ({"key_value_head": 2}, "key_value_head: unknown key for dense; nearest key_val"),
    ]),
    # Groups of heads.
    *(({"attention": {"heads": heads}}, f"attention.heads{line}") for heads, line in [
        ([], ": must be a list of 1 to 4 objects, one for each head; it has 0"),
        (4, ": must be a list of patterns with counts"),
        ([{"type": "dense"}], "[0].count: missing: how many heads have this pattern"),
        ([{"count": 0, "type": "dense"}], "[0].count=0: must be an integer from 1 to heads="),
        ([{"count": 3, "type": "dense"}], "=[3]: counts add up to 3; must be heads=4"),
        ([{"count": 4, "type": "dens"}], '[0].type="dens": must be a pattern'),
        ([{"count": 4, "type": "column", "stride": 7}], "[0].stride=7: must divide"),
        ([{"cout": 4, "type": "dense"}], "[0].count: missing"),
        ([{"count": 4, "type": "strided", "stride": 8, "combine": "interleaved"}],
         '[0].combine="interleaved": takes turns by layer'),
        ([{"count": 3, "type": "strided", "stride": 8, "combine": "multihead"}],
         '[0].combine="multihead": strided splits over 2 factors'),
        ([{"count": 10**9, "type": "dense"}], "[0].count=1000000000: must"),
    ]),
    ({"attention": {"heads": [{"count": 4, "type": "dense"}], "type": "dense"}},
     "attention.type: must be inside the entries"),
    ({"attention": {"head": [{"count": 4, "type": "dense"}]}}, "attention.head: unknown key; nearest heads"),
    ({"attention": [{"type": "dense"}, {"heads": [{"count": 5, "type": "dense"}]}]},
     "attention[1].heads[0].count=5: must be"),
    # Feed-forwards and tables of n-grams.
    *(({"feed_forward": feed_forward}, f"feed_forward{line}") for feed_forward, line in [
        ([], ": must be a list of 1 to 20,000 objects, one for each feed-forward; it has 0"),
        ("dense", '="dense": must be an object, or a list of them'),
        ({"type": "expert"}, '.type="expert": is not known; '),
        ([{}, {"activation": "relu"}], '[1].activation="relu": must be '),
        ({"actvation": "relu"}, ".actvation: unknown key; nearest activation"),
    ]),
    *of("feed_forward", "experts", [
        ({"count": 1}, "top=2: must be at most count 1; nearest 1"),
        ({"top": 3}, "top=3: must be 1 or 2, or an average with"),
        ({"capacity": 0.0}, "capacity=0.0: must be greater than 0"),
        ({"zero": -1}, "zero=-1: must be greater than or equal to 0"),
        ({"routing": "thresholds"}, 'routing="thresholds": must be '),
        *(({"routing": "threshold", **changes}, line) for changes, line in [
            ({"zero": 1}, "zero=1: threshold routing already lets rows have no expert; leave it out"),
            ({"capacity": 1.0}, "capacity=1.0: threshold routing has no capacity; set it to null"),
            ({"balance": 0.5}, "balance=0.5: threshold routing has no balance loss; leave it out"),
            ({"top": 8}, "top=8: threshold routing leaves some of 8 experts out; take a smaller top"),
            ({"top": 9}, "top=9: must be at most count 8; nearest 8"),
        ]),
    ], count=8),
    *of("feed_forward", "product_keys", [
        ({"top": 10}, "top=10: must be at most keys 9; nearest 9"),
        ({"query_width": 7}, "query_width=7: must be even, for two halves; nearest 6, 8"),
        ({"keys": 46_341}, "keys=46341: must be less than or equal to 46340"),
    ], keys=9, top=4),
    *(({"ngrams": {"rows": 8, **tables}}, f"ngrams.{line}") for tables, line in [
        ({"rows": 2**29}, "rows=536870912: of 5 orders must be below 2**31 in all; at most 429496729"),
        ({"orders": [3, 2]}, "orders=[3, 2]: must ascend; such as [2, 3]"),
        ({"orders": [1, 2]}, "orders[0]=1: must be greater than or equal to 2"),
        ({"orders": [2, 40]}, "orders=[2, 40]: the longest must be below context 40"),
    ]),
    # Objectives, and the sides that they need.
    *(({"objective": MASKED, **TWO_SIDED["linformer"], **changes}, line) for changes, line in [
        ({"attention": {"type": "dense"}}, "attention: dense reads no later positions, and objective masked needs"),
        ({"attention": {"type": "moba", "block": 4, "top": 2}}, "attention: moba reads no later positions"),
        ({"attention": {"type": "indexed", "keys": 8}}, "attention: indexed reads no later positions"),
        ({"attention": {"type": "lsh", "buckets": 4, "chunk": 5}}, "attention: lsh reads no later positions, and obj"),
        ({"attention": {"type": "routing", "clusters": 4, "window": 5}}, "attention: routing reads no later positions"),
        ({"objective": {"type": "autoregressive"},
          "attention": {"type": "entmax", "pattern": {"type": "local", "window": 3, "causal": False}}},
         "attention: local reads later positions, which objective autoregressive predicts; leave out"),
        ({"convolution": 3, "attention": DENSE}, "convolution: reads no later pos"),
        ({"ngrams": {"rows": 9}}, "ngrams: reads no later positions"),
        ({"objective": {"type": "autoregressive"}}, "attention: linformer reads later positions, which objective auto"),
        ({"objective": {"type": "mask"}}, 'objective.type="mask": is not known; nearest masked'),
        ({"objective": {**MASKED, "random": 0.7, "unchanged": 0.4}}, "objective.unchanged=0.4: must be at most 0.3"),
        ({"rotary": {"base": 1000}}, 'attention.type="linformer": adds up keys of all positions, which rotary turns'),
        ({"attention": {"type": "linformer", "rows": 41}}, "attention.rows=41: must be at most context 40"),
    ]),
    *(({"objective": MPNET, "attention": DENSE, **changes}, line) for changes, line in [
        ({"attention": {"type": "dense"}}, f"attention: dense {NOT_DENSE}"),
        ({"attention": {"type": "linformer", "rows": 4}}, f"attention: linformer {NOT_DENSE}"),
        ({"attention": {"type": "moba", "block": 4, "top": 2}}, f"attention: moba {NOT_DENSE}"),
        ({"attention": {"type": "indexed", "keys": 8}}, f"attention: indexed {NOT_DENSE}"),
        ({"convolution": 3}, f"convolution: {ONE_SIDE}"),
        ({"ngrams": {"rows": 9}}, f"ngrams: {ONE_SIDE}"),
        ({"feed_forward": {"type": "experts", "count": 2, "capacity": 1.0}}, "feed_forward: experts with a capacity"),
        ({"backend": "flex"}, 'backend="flex": cannot compute objective permuted; take auto'),
        ({"objective": {**MPNET, "span": 1, "unchanged": 0, "compensate": False, "random": 0.1}},
         "objective.random=0.1: replaces masks, but compensate false has no"),
    ]),
    # Absurd sizes.
    ({"layers": 10**18}, f"layers={10**18}: must be less than or equal to 10000"),
    ({"heads": 2**40}, f"heads={2**40}: must be less than or equal to 4096"),
    ({"width": 2**40}, f"width={2**40}: must be less than or equal to 1048576"),
    ({"vocabulary": 2**40}, f"vocabulary={2**40}: must be less than or equal to 16777216"),
    ({"context": int("9" * 38)}, f"context={'9' * 38}: must be less than or equal to 1073741824"),
    ({"feed_forward_ratio": 1e9}, "feed_forward_ratio=1000000000.0: times width 64 must be at most 16,777,216"),
    ({"layers": 10_000, "heads": 64}, "heads=64: times 10000 layers must be at most 262,144 heads in total; at"),
    ({"context": 2**30 - 40, "attention": {"type": "column", "stride": 2**20}}, "attention.stride=1048576: must"),
    ({"attention": {"type": "local", "window": 2**63}}, f"attention.window={2**63}: must be at most {2**62}"),
    ({"attention": [{"type": "dense"}] * 10_001}, "attention: must be a list of 1 to 10,000 objects, one"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), CASES, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_what_is_wrong_is_named_in_one_line_at_once(changes: dict[str, Any], line: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value), str(caught.value)
    assert time.perf_counter() - begun < 2
