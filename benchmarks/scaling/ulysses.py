"""What Ulysses sequence parallelism communicates: deepspeed.sequence.layer.DistributedAttention (Jacobs et al. 2023).

Letters: B contexts, N positions, H heads, U ranks that share a context, e bytes of an element.

Each of U ranks has N/U positions of all heads; an all_to_all makes of them all positions of H/U heads, of q, k and v
each, and another one gives the outputs back: four a layer and forward pass, over B·N/U·width·e bytes a rank. The
backward pass does the same with their gradients, and a recomputed block its forward pass again.

Heads must divide by U: DeepSpeed has a way for those that do not, in which ranks have unequal work. It is not counted
here. Nothing of this is wired into Longstride's model yet: its attention would get all positions of H/U heads, which
its patterns are made for, and everything else is a function of a position and its row of the embedding.
"""

from __future__ import annotations

from benchmarks.scaling.collectives import Collective
from longstride.launcher.config.run_config import RunConfig
from longstride.sparse_model import ModelConfig

FORWARD_AND_BACKWARD, RECOMPUTED = 2, 3  # passes that exchange


def attention_collectives(
    *,
    ranks: int,
    batch: int,
    context: int,
    heads: int,
    query_key_width: int,
    value_width: int,
    element_bytes: int,
    passes: int = FORWARD_AND_BACKWARD,
    layers: int = 1,
) -> list[Collective]:
    """Of one layer's attention or of several; widths are those of a head."""
    assert heads % ranks == 0 and context % ranks == 0, (heads, context, ranks)
    positions = batch * context // ranks * heads * element_bytes
    times = passes * layers
    return [
        Collective("all_to_all", positions * query_key_width, 2 * times, what="queries and keys"),
        Collective("all_to_all", positions * value_width, 2 * times, what="values and outputs"),
    ]


def step_collectives(config: RunConfig, ranks: int, micro_batches: int) -> list[Collective]:
    """Of one step of a run whose contexts are shared by so many ranks each."""
    model, train = config.model, config.train
    return attention_collectives(
        ranks=ranks,
        batch=train.micro_batch,
        context=model.context,
        heads=model.heads,
        query_key_width=model.query_key_width // model.heads,
        value_width=model.width // model.heads,
        element_bytes=4 if config.precision == "fp32" else 2,
        passes=RECOMPUTED if train.activation_checkpointing else FORWARD_AND_BACKWARD,
        layers=model.layers * micro_batches,
    )


def shares(model: ModelConfig) -> list[int]:
    """The numbers of ranks, powers of 2, that a context can be shared by: they divide heads and positions."""
    return [u for u in (2**power for power in range(20)) if model.heads % u == 0 and model.context % u == 0]
