"""What makes far copying form: ``python -m benchmarks.lessons``.

A network of two layers learns to copy repeated random strings in contexts of 128, until it can: the lesson. It goes on
for some steps in contexts of 512. Then it is scored in contexts of 2,048 without training there, with dense attention
and with MoBA in the second layer. Each row changes one thing of the network.

Rows are written as they finish; a second call trains only the missing ones.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from benchmarks.learner import Learner
from benchmarks.machine import about
from benchmarks.reach_tasks import SYMBOLS, TASKS, Task, repeated
from benchmarks.reach_training import best_device, new_learner, score, solved_at
from benchmarks.recipe import changed, preset
from benchmarks.report import DASH, append_row, has_row, markdown, new_parser, open_rows, rounded
from longstride.launcher.config import TrainConfig

DENSE, MOBA = {"type": "dense"}, {"type": "moba", "block": 2, "top": 16}
STEP_BYTES, MOST_STEPS, MIDDLE_STEPS = 8_192, 250, 40
SCORED = 4  # contexts
SETTINGS: dict[str, Any] = {
    "output": "none",
    "steps": 10_000,
    "global_batch": 1,
    "micro_batch": 1,
    "learning_rate": 0.01,
    "optimizer": {"type": "muon", "rates": {"matrices": 0.01}},
    "betas": [0.9, 0.95],
    "warmup_steps": 20,
    "schedule": "constant",
}
CHANGES: dict[str, dict[str, Any]] = {  # of the network; "window" is that of its first layer
    "as described": {},
    "window of 64 in the first layer": {"window": 64},
    "window of 128 in the first layer": {"window": 128},
    "rotary positions of base 10⁸": {"rotary": {"base": 1e8}},
    "rotary positions of base 10⁸, no convolution": {"rotary": {"base": 1e8}, "convolution": None},
    "rotary positions of base 10,000": {"rotary": {}},
    "four heads of 32": {"heads": 4},
    "queries and keys not normalised": {"query_key_norm": False},
}
LESSON = Task(repeated(16, 48, 4), context=128, floor=0.0)
MIDDLE = Task(repeated(64, 192, 4), context=512, floor=0.0)


class Pupil:
    """A network that is trained in stages."""

    def __init__(self, changes: dict[str, Any], seed: int) -> None:
        demo = changed(preset("demo")["model"], {"ngrams": None})
        self.model = demo | {"vocabulary": SYMBOLS + 2, "rotary": None, "layers": 2, **changes}
        self.window = self.model.pop("window", 8)
        self.train = TrainConfig.model_validate(SETTINGS | {"seed": seed})
        self.learner: Learner | None = None
        self.seed, self.steps = seed, 0

    def learn(self, task: Task, attention: dict[str, Any], steps: int, *, until_solved: bool = True) -> bool:
        """Train for at most some steps with an attention in the second layer; return whether the task is solved."""
        self.use(task.context, attention)
        assert self.learner is not None
        curve: list[float] = []
        for number in range(steps):
            seed = (self.seed, task.context, self.steps + number)
            tokens, scored = task.batch(seed, task.context, STEP_BYTES // task.context)
            nats = self.learner.step(tokens, self.steps + number)
            curve.append(float(nats[scored].mean()) / math.log(2))
            if until_solved and solved_at(curve, task.floor) is not None:
                break
        self.steps += len(curve)
        return solved_at(curve, task.floor) is not None

    def use(self, context: int, attention: dict[str, Any]) -> None:
        """Make the network of a context and an attention, with the present weights and state of the optimiser."""
        content = self.model | {"context": context, "attention": [{"type": "local", "window": self.window}, attention]}
        before, self.learner = self.learner, new_learner(content, self.train)
        if before is not None:
            self.learner.load(before.state())

    def scored(self, task: Task, attention: dict[str, Any]) -> float:
        """Return the bits of the bytes that can be known, in contexts that are not trained on."""
        self.use(task.context, attention)
        assert self.learner is not None
        return float(score(task, self.learner.network.eval(), SCORED)["bits"])


def change_row(name: str, seed: int) -> dict[str, Any]:
    """Measure a change of the network: the steps of the lesson, and the bits far away without training there."""
    pupil = Pupil(CHANGES[name], seed)
    is_solved = pupil.learn(LESSON, DENSE, MOST_STEPS)
    row: dict[str, Any] = {"lesson": pupil.steps if is_solved else None}
    pupil.learn(MIDDLE, DENSE, MIDDLE_STEPS, until_solved=False)
    return row | {
        way: rounded(pupil.scored(TASKS["induction"], far)) for way, far in (("dense", DENSE), ("moba", MOBA))
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    open_rows(options, "lessons", about(best_device()) | {"threads": 1})
    for seed in range(options.seeds):
        for name in CHANGES:
            row = {"name": name, "seed": seed}
            if not has_row(options.output, row):
                append_row(options.output, row | change_row(name, seed))
    return 0


def table(result: dict[str, Any]) -> str:
    """Format a result file; cells have a figure for each seed."""

    def cells(name: str, key: str, form: str) -> str:
        rows = [row[key] for row in result["rows"] if row["name"] == name]
        return ", ".join(DASH if value is None else format(value, form) for value in rows)

    columns = (("lesson", "d"), ("dense", ".2f"), ("moba", ".2f"))
    lines = [[name, *(cells(name, *column) for column in columns)] for name in CHANGES]
    text = f"{result['device']}, one thread, torch {result['torch']}, {result['date']}.\n\n"
    return text + markdown(["the network", "steps of the lesson", "at 2,048: dense", "MoBA"], lines)


if __name__ == "__main__":
    sys.exit(main())
