"""A rank of a test's run: launcher/train.py itself, with changes that the environment requests."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import longstride.launcher.train as entry
from longstride.launcher import cli
from longstride.launcher.output import nonblocking_output
from longstride.launcher.ranks.processes import Ranks, leave
from longstride.launcher.stops import StopFlag
from longstride.sparse_model import Division
from tests.harness import counting
from tests.harness.runs import timeouts
from tests.hostile.generators.lost_workers import lose_worker


def dump_buffers(folder: Path) -> None:
    """Save the buffers of each rank before its first step and after every step: ``rank-R.pt``, a list."""
    import longstride.launcher.training.loop as loop

    train_step = loop.train_step
    buffers: list[dict[str, Any]] = []

    def step_and_dump(engine: Any, taken: Any, stage: Any, ranks: Any, *args: Any) -> Any:
        def keep() -> None:
            buffers.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})

        if not buffers:
            keep()
        line = train_step(engine, taken, stage, ranks, *args)
        keep()
        torch.save(buffers, folder / f"rank-{ranks.rank}.pt")
        return line

    loop.train_step = step_and_dump


def fill_padding(byte: int) -> None:
    """Put a byte after the end of every short context of a batch."""
    import longstride.launcher.training.loop as loop

    score = loop.score

    def fill_and_score(engine: Any, batch: Any, *args: Any) -> Any:
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        return score(engine, replace(batch, tokens=batch.tokens.where(real, byte)), *args)

    loop.score = fill_and_score


def dump_master_weights(path: str) -> None:
    """Save the engine's fp32 master weights after each step, with DeepSpeed's debugging calls."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    import longstride.launcher.training.loop as loop
    from longstride.launcher.engine.states import TABLES

    train_step = loop.train_step
    steps: list[dict[str, Any]] = []

    def step_and_dump(engine: Any, taken: Any, stage: Any, ranks: Any, *args: Any) -> Any:
        line = train_step(engine, taken, stage, ranks, *args)
        masters = {}
        if hasattr(engine.optimizer, "fp32_groups"):  # ZeRO 0 in half precision
            pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
            by_parameter = {id(p): m for ps, ms in pairs for p, m in zip(ps, ms, strict=True)}
            masters = {name: by_parameter[id(p)] for name, p in engine.module.named_parameters()}
        else:
            sharded = engine.zero_optimization()
            for name, parameter in engine.module.named_parameters():
                masters[name] = safe_get_full_fp32_param(parameter) if sharded else parameter
        if engine.tables is not None:
            shares = ranks.gather_objects(engine.tables.share()["fp32"])
            rows = masters[TABLES] = torch.empty(engine.tables.shape)
            for first, share in enumerate(shares):
                rows[first :: len(shares)] = share
        steps.append({name: master.detach().clone().cpu() for name, master in masters.items()})
        if ranks.is_first:
            torch.save(steps, path)
        return line

    loop.train_step = step_and_dump


def dump_logits(path: str) -> None:
    """Save the logits of the engine at its last checkpoint, and their tokens."""
    import longstride.launcher.checkpoints.saving as saving

    take_probe = saving.take_probe

    def take_and_dump(engine: Any, config: Any, folder: Path, ranks: Any) -> Any:
        tokens = torch.arange(config.model.context)[None] * 37 % 256
        engine.eval()
        with torch.no_grad():
            logits = engine(tokens)
        engine.train()
        if ranks.is_first:
            torch.save({"tokens": tokens, "logits": logits}, path)
        return take_probe(engine, config, folder, ranks)

    saving.take_probe = take_and_dump


def tell_flushes(log: Path) -> None:
    """Log each fsync, with the size of the file, and each rename, in order."""
    fsync, rename = os.fsync, Path.rename

    def tell(*words: object) -> None:
        with log.open("a") as file:
            print(*words, file=file)

    def fsync_and_tell(descriptor: int) -> None:
        fsync(descriptor)
        tell("flush", os.fstat(descriptor).st_size, Path(f"/proc/self/fd/{descriptor}").readlink())

    def tell_and_rename(path: Path, target: Path) -> Path:
        tell("rename", 0, target)
        return rename(path, target)

    os.fsync, Path.rename = fsync_and_tell, tell_and_rename  # type: ignore[method-assign]


def work_in_chunks(rows: int) -> None:
    """Make the model treat short contexts like long ones: ``rows`` rows at a time."""
    import longstride.sparse_model.feed_forwards.dense as dense
    import longstride.sparse_model.output as output

    dense.LONG_ROWS = dense.CHUNK_ROWS = output.CHUNK_ROWS = rows


def remove_after_step_2(path: str) -> None:
    """Remove a file during the run."""
    import longstride.launcher.training.loop as loop

    train_step = loop.train_step

    def train_and_remove(engine: Any, *args: Any) -> Any:
        line = train_step(engine, *args)
        if line["step"] == 2:
            Path(path).unlink(missing_ok=True)
        return line

    loop.train_step = train_and_remove


def fail_evaluation(step: int) -> None:
    """Make the evaluation after a step fail."""
    import longstride.launcher.training.loop as loop

    evaluate = loop.evaluate_split

    def evaluate_or_fail(engine: Any, *args: Any) -> Any:
        if engine.global_steps == step:
            raise RuntimeError("the evaluation fails")
        return evaluate(engine, *args)

    loop.evaluate_split = evaluate_or_fail


def give_scores(scores: dict[str, float]) -> None:
    """Replace the bits per byte of the evaluations of some steps."""
    import longstride.launcher.training.loop as loop

    evaluate = loop.evaluate_split

    def evaluate_and_replace(engine: Any, *args: Any) -> Any:
        line = evaluate(engine, *args)
        return line | {"bits_per_byte": scores.get(str(line["step"]), line["bits_per_byte"])}

    loop.evaluate_split = evaluate_and_replace


def signal_rank_1(number: int, step: int, where: str) -> None:
    """Send a signal to the second rank while it computes a step, or the evaluation after it."""
    import longstride.launcher.training.loop as loop

    name = {"step": "train_step", "evaluation": "evaluate_split"}[where]
    work = getattr(loop, name)

    def work_and_be_signalled(engine: Any, *args: Any) -> Any:
        if os.environ["RANK"] == "1" and engine.global_steps == step - (where == "step"):
            os.kill(os.getpid(), number)
        return work(engine, *args)

    setattr(loop, name, work_and_be_signalled)


def halt(where: str, step: int, how: str) -> None:
    """Make the last rank stop at a step: as in a debugger, dead, in an endless loop, or failing.

    If it shares contexts with other ranks, it stops in the first exchange of a forward or backward pass.
    """
    import longstride.launcher.training.loop as loop
    from longstride.launcher.checkpoints.saving import Saver

    owner, name = {"evaluation": (loop, "evaluate_split"), "save": (Saver, "save")}.get(where, (loop, "train_step"))
    work, swap = getattr(owner, name), Division.swap

    def halt_now() -> None:
        seconds = [f"{timeout.total_seconds():g}" for timeout in timeouts()]
        print("time-outs of groups and store:", *seconds, flush=True)
        if how in ("stopped", "killed"):
            os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        while how == "endless":
            pass
        if how == "raises":
            raise RuntimeError("no memory is left")

    def swap_and_halt(self: Division, values: Any, *counts: Any) -> Any:
        is_backward = torch._C._current_graph_task_id() >= 0
        if where == ("backward" if is_backward else "forward"):
            halt_now()
        return swap(self, values, *counts)

    def work_and_halt(engine: Any, *args: Any) -> Any:
        done = engine._engine.global_steps if where == "save" else engine.global_steps
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        if last and done == step - (name == "train_step"):
            if where in ("forward", "backward"):
                Division.swap = swap_and_halt  # type: ignore[method-assign]
            else:
                halt_now()
        return work(engine, *args)

    setattr(owner, name, work_and_halt)


def mark_moments(path: Path, seconds: float) -> None:
    """Make rank 0 write a line at the beginning of each activity of a run, and make every rank slow."""
    import longstride.launcher.checkpoints.saving as saving
    import longstride.launcher.evaluation.evaluate as evaluate
    import longstride.launcher.training.loop as loop

    def mark(word: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with path.open("a") as file:
                file.write(f"{word}\n")
        time.sleep(seconds)

    def marked(module: Any, name: str, word: str) -> None:
        original = getattr(module, name)

        def work(*args: Any, **named: Any) -> Any:
            mark(word)
            return original(*args, **named)

        setattr(module, name, work)

    mark("begin")
    marked(loop, "train_step", "step")
    marked(loop, "evaluate_split", "evaluation")
    marked(evaluate, "evaluation_line", "evaluated")
    marked(saving.Saver, "save", "save")
    gather_objects = Ranks.gather_objects

    def gather_and_mark(ranks: Ranks, value: object) -> list:
        if sys._getframe(1).f_globals["__name__"] == saving.__name__:
            mark("saving")
        return gather_objects(ranks, value)

    Ranks.gather_objects = gather_and_mark  # type: ignore[method-assign]


class _SpoiltGradient(torch.autograd.Function):
    """Return the loss unchanged, with NaN as gradients."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * float("nan")


_SPOILS = {
    "loss": lambda loss: loss * float("nan"),
    "gradient": _SpoiltGradient.apply,
    "spike": lambda loss: loss * 3.0,
}


def spoil(what: str, rank: int, steps: range, how_often: int) -> None:
    """Change the last micro-batch of one rank at some steps, and print each rank's verdicts.

    ``how_often``: in how many steps at most.
    """
    import longstride.launcher.training.loop as loop

    score = loop.score
    done = []

    def score_and_spoil(engine: Any, *args: Any) -> Any:
        scored = score(engine, *args)
        is_last = (engine.micro_steps + 1) % engine.gradient_accumulation_steps() == 0
        is_here = is_last and int(os.environ.get("RANK", "0")) == rank
        if is_here and engine.global_steps + 1 in steps and len(done) < how_often:
            done.append(engine.global_steps)
            spoilt = _SPOILS[what](scored.nats)
            scored = scored._replace(nats=spoilt, loss=spoilt)
        return scored

    loop.score = score_and_spoil
    train_step = loop.train_step

    def step_and_tell(engine: Any, taken: Any, stage: Any, ranks: Any, guards: Any, *args: Any) -> Any:
        line = train_step(engine, taken, stage, ranks, guards, *args)
        print("verdict", line["step"], guards.verdict, flush=True)
        return line

    loop.train_step = step_and_tell


def tell_versions(versions: dict[str, str]) -> None:
    """Make this rank see other versions of installed packages."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: versions.get(name) or version(name)


def spoil_after_load() -> None:
    """Make the weights that are loaded from another layout slightly wrong."""
    import torch

    import longstride.launcher.checkpoints.restoring as restoring

    load = restoring.load_converted

    def load_and_spoil(engine: Any, *inputs: Any) -> None:
        load(engine, *inputs)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.001)

    restoring.load_converted = load_and_spoil


def kill_in_conversion(number: int) -> None:
    """Kill this rank when it reads piece ``number`` of a checkpoint of another layout."""
    import longstride.launcher.checkpoints.saved_state as saved_state

    elements = saved_state.SavedState.elements
    calls = itertools.count(1)

    def count(self: Any, *args: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return elements(self, *args)

    saved_state.SavedState.elements = count


def work(arguments: list[str], stop: StopFlag | None = None) -> NoReturn:
    """Run the whole rank, as its environment requests, and end the process. ``stop`` may listen already."""
    if "VERSIONS" in os.environ:
        tell_versions(json.loads(os.environ["VERSIONS"]))
    if "SPOIL_AFTER_LOAD" in os.environ:
        spoil_after_load()
    if "KILL_IN_CONVERSION" in os.environ:
        kill_in_conversion(int(os.environ["KILL_IN_CONVERSION"]))
    if "SPOIL" in os.environ:
        what, *numbers = os.environ["SPOIL"].split(",")
        rank, first, last, how_often = map(int, numbers)
        spoil(what, rank, range(first, last + 1), how_often)
    if "HALT" in os.environ:
        where, step, how = os.environ["HALT"].split(",")
        halt(where, int(step), how)
    if "LOSE_WORKER" in os.environ:
        what, when, rank_of_worker, at, note = os.environ["LOSE_WORKER"].split(",", 4)
        lose_worker(what, when, int(rank_of_worker), int(at), Path(note))
    if "MARKS" in os.environ:
        mark_moments(Path(os.environ["MARKS"]), float(os.environ["MARK_SECONDS"]))
    if "FAIL_EVALUATION_AT_STEP" in os.environ:
        fail_evaluation(int(os.environ["FAIL_EVALUATION_AT_STEP"]))
    if "SCORES" in os.environ:
        give_scores(json.loads(os.environ["SCORES"]))
    if "FILL_PADDING" in os.environ:
        fill_padding(int(os.environ["FILL_PADDING"]))
    if "DUMP_MASTER_WEIGHTS" in os.environ:
        dump_master_weights(os.environ["DUMP_MASTER_WEIGHTS"])
    if "DUMP_LOGITS" in os.environ:
        dump_logits(os.environ["DUMP_LOGITS"])
    if "DUMP_BUFFERS" in os.environ:
        dump_buffers(Path(os.environ["DUMP_BUFFERS"]))
    if "COUNTING" in os.environ:
        counting.register()
    if "CHUNK_ROWS" in os.environ:
        work_in_chunks(int(os.environ["CHUNK_ROWS"]))
    if "FLUSHES" in os.environ:
        tell_flushes(Path(os.environ["FLUSHES"]))
    if "REMOVE_AFTER_STEP_2" in os.environ:
        remove_after_step_2(os.environ["REMOVE_AFTER_STEP_2"])
    if "SIGNAL_RANK_1" in os.environ:
        number, step, where = os.environ["SIGNAL_RANK_1"].split(",")
        signal_rank_1(int(number), int(step), where)
    with nonblocking_output():
        leave(run(arguments, stop))


def run(arguments: list[str], stop: StopFlag | None) -> int:
    """Return the exit code of launcher/train.py, or of a verb; print the traceback of any other exception."""
    try:
        return cli.main(arguments) if "VERB" in os.environ else entry.main(arguments, stop)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    work(sys.argv[1:])
