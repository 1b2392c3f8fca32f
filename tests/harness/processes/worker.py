"""A rank of a test's run: launcher/train.py itself, with changes that the environment requests."""

# ruff: noqa: E402  libraries are settled before they are imported
import functools
import importlib.metadata
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from longstride.launcher.output import nonblocking_output, settle_libraries

settle_libraries(os.environ)

import longstride.launcher.checkpoints.saving as saving
import longstride.launcher.engine.tables as tables
import longstride.launcher.evaluation.evaluate as evaluate
import longstride.launcher.train as entry
import longstride.launcher.training.loop as loop
import longstride.launcher.training.profile as profile
from longstride.launcher import cli
from longstride.launcher.checkpoints import restoring
from longstride.launcher.ranks.processes import Ranks, leave
from longstride.launcher.stops import StopFlag
from longstride.sparse_model import Division
from longstride.sparse_model import output as model_output
from longstride.sparse_model.feed_forwards import dense
from tests.harness import counting
from tests.harness.runs import timeouts
from tests.hostile.generators import faults
from tests.hostile.generators.lost_workers import lose_worker


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Make a decorated function replace ``owner.name``; it gets the original before the arguments."""
    original = getattr(owner, name)

    def put(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def replacement(*args: Any, **named: Any) -> Any:
            return function(original, *args, **named)

        setattr(owner, name, replacement)

    return put


def dump_buffers(folder: str) -> None:
    """Save the buffers of each rank before its first step and after every step: ``rank-R.pt``, a list."""
    buffers: list[dict[str, Any]] = []

    @replacing(loop, "train_step")
    def step_and_dump(train_step: Any, engine: Any, taken: Any, stage: Any, ranks: Any, *args: Any) -> Any:
        def keep() -> None:
            buffers.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})

        if not buffers:
            keep()
        line = train_step(engine, taken, stage, ranks, *args)
        keep()
        torch.save(buffers, f"{folder}/rank-{ranks.rank}.pt")
        return line


def fill_padding(byte: str) -> None:
    """Put a byte after the end of every short context of a batch."""

    @replacing(loop, "score")
    def fill_and_score(score: Any, engine: Any, batch: Any, *args: Any) -> Any:
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        return score(engine, replace(batch, tokens=batch.tokens.where(real, int(byte))), *args)


def dump_master_weights(path: str) -> None:
    """Save the engine's fp32 master weights after each step, with DeepSpeed's debugging calls."""
    from deepspeed.utils import safe_get_full_fp32_param

    steps: list[dict[str, Any]] = []

    @replacing(loop, "train_step")
    def step_and_dump(train_step: Any, engine: Any, taken: Any, stage: Any, ranks: Any, *args: Any) -> Any:
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
        masters |= engine.held.whole()
        steps.append({name: master.detach().clone().cpu() for name, master in masters.items()})
        if ranks.is_first:
            torch.save(steps, path)
        return line


def dump_logits(path: str) -> None:
    """Save the logits of the engine at its last checkpoint, and their tokens."""

    @replacing(saving, "take_probe")
    def take_and_dump(take_probe: Any, engine: Any, config: Any, folder: Path, ranks: Any) -> Any:
        tokens = torch.arange(config.model.context)[None] * 37 % 256
        engine.eval()
        with torch.no_grad():
            logits = engine(tokens)
        engine.train()
        if ranks.is_first:
            torch.save({"tokens": tokens, "logits": logits}, path)
        return take_probe(engine, config, folder, ranks)


def tell_flushes(log: str) -> None:
    """Log each fsync, with the size of the file, and each rename, in order."""

    def tell(*words: object) -> None:
        with Path(log).open("a") as file:
            print(*words, file=file)

    @replacing(os, "fsync")
    def fsync_and_tell(fsync: Any, descriptor: int) -> None:
        fsync(descriptor)
        tell("flush", os.fstat(descriptor).st_size, Path(f"/proc/self/fd/{descriptor}").readlink())

    @replacing(Path, "rename")
    def tell_and_rename(rename: Any, path: Path, target: Path) -> Path:
        tell("rename", 0, target)
        return rename(path, target)


def work_in_chunks(rows: int | str) -> None:
    """Make the model treat short contexts like long ones: ``rows`` rows at a time."""
    dense.LONG_ROWS = dense.CHUNK_ROWS = model_output.CHUNK_ROWS = int(rows)


def remove_after_step_2(path: str) -> None:
    """Remove a file during the run."""

    @replacing(loop, "train_step")
    def train_and_remove(train_step: Any, engine: Any, *args: Any) -> Any:
        line = train_step(engine, *args)
        if line["step"] == 2:
            Path(path).unlink(missing_ok=True)
        return line


def fail_evaluation(step: str) -> None:
    """Make the evaluation after a step fail."""

    @replacing(loop, "evaluate_split")
    def evaluate_or_fail(evaluate_split: Any, engine: Any, *args: Any) -> Any:
        if engine.global_steps == int(step):
            raise RuntimeError("the evaluation fails")
        return evaluate_split(engine, *args)


def give_scores(scores: str) -> None:
    """Replace the bits per byte of the evaluations of some steps: JSON of step and bits."""
    by_step = json.loads(scores)

    @replacing(loop, "evaluate_split")
    def evaluate_and_replace(evaluate_split: Any, engine: Any, *args: Any) -> Any:
        line = evaluate_split(engine, *args)
        return line | {"bits_per_byte": by_step.get(str(line["step"]), line["bits_per_byte"])}


def signal_rank_1(text: str) -> None:
    """Send a signal to the second rank while it computes a step, or the evaluation after it: NUMBER,STEP,WHERE."""
    number, step, where = text.split(",")

    @replacing(loop, {"step": "train_step", "evaluation": "evaluate_split"}[where])
    def work_and_be_signalled(work: Any, engine: Any, *args: Any) -> Any:
        if os.environ["RANK"] == "1" and engine.global_steps == int(step) - (where == "step"):
            os.kill(os.getpid(), int(number))
        return work(engine, *args)


def halt(text: str) -> None:
    """Make the last rank stop, WHERE,STEP,HOW: as in a debugger, dead, in an endless loop, or failing.

    If it shares contexts or experts with other ranks, it stops in the first exchange of a forward or backward pass.
    """
    where, step, how = text.split(",")
    name = {"evaluation": "evaluate_split", "save": "save"}.get(where, "train_step")

    def halt_now() -> None:
        seconds = [f"{timeout.total_seconds():g}" for timeout in timeouts()]
        print("time-outs of groups and store:", *seconds, flush=True)
        if how in ("stopped", "killed"):
            os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        while how == "endless":
            pass
        if how == "raises":
            raise RuntimeError("no memory is left")

    def swap_and_halt(swap: Any, division: Division, values: Any, *counts: Any) -> Any:
        is_backward = torch._C._current_graph_task_id() >= 0
        if where == ("backward" if is_backward else "forward"):
            halt_now()
        return swap(division, values, *counts)

    @replacing(saving.Saver if where == "save" else loop, name)
    def work_and_halt(work: Any, engine: Any, *args: Any) -> Any:
        done = engine._engine.global_steps if where == "save" else engine.global_steps
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        if last and done == int(step) - (name == "train_step"):
            if where in ("forward", "backward"):
                replacing(Division, "swap")(swap_and_halt)
            else:
                halt_now()
        return work(engine, *args)


def mark_moments(path: str) -> None:
    """Make rank 0 write a line at the beginning of each activity of a run, and make every rank slow."""

    def mark(word: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with Path(path).open("a") as file:
                file.write(f"{word}\n")
        time.sleep(float(os.environ["MARK_SECONDS"]))

    def mark_and_work(word: str) -> Callable[..., Any]:
        def work(original: Any, *args: Any, **named: Any) -> Any:
            mark(word)
            return original(*args, **named)

        return work

    mark("begin")
    replacing(loop, "train_step")(mark_and_work("step"))
    replacing(loop, "evaluate_split")(mark_and_work("evaluation"))
    replacing(evaluate, "evaluation_line")(mark_and_work("evaluated"))
    replacing(saving.Saver, "save")(mark_and_work("save"))

    @replacing(Ranks, "gather_objects")
    def gather_and_mark(gather_objects: Any, ranks: Ranks, value: object) -> list:
        if sys._getframe(2).f_globals["__name__"] == saving.__name__:
            mark("saving")
        return gather_objects(ranks, value)


def overflow_tables(step: str) -> None:
    """Make the squares of a table's gradients infinite in one step, and those of all others finite."""
    calls = []

    @replacing(tables.HeldTable, "reduce")
    def reduce_and_overflow(reduce: Any, table: Any, scale: float) -> torch.Tensor:
        calls.append(scale)
        squares: torch.Tensor = reduce(table, scale)
        return squares * math.inf if len(calls) == int(step) else squares


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


def spoil(text: str) -> None:
    """Change the last micro-batch of one rank at some steps, and print each rank's verdicts.

    The text is WHAT,RANK,FIRST,LAST,TIMES: the first and last step, and in how many steps at most.
    """
    what, *numbers = text.split(",")
    rank, first, last, how_often = map(int, numbers)
    done = []

    @replacing(loop, "score")
    def score_and_spoil(score: Any, engine: Any, *args: Any) -> Any:
        scored = score(engine, *args)
        is_last = (engine.micro_steps + 1) % engine.gradient_accumulation_steps() == 0
        is_here = is_last and int(os.environ.get("RANK", "0")) == rank
        if is_here and first <= engine.global_steps + 1 <= last and len(done) < how_often:
            done.append(engine.global_steps)
            spoilt = _SPOILS[what](scored.nats)
            scored = scored._replace(nats=spoilt, loss=spoilt)
        return scored

    @replacing(loop, "train_step")
    def step_and_tell(train_step: Any, engine: Any, taken: Any, stage: Any, ranks: Any, guards: Any, *args: Any) -> Any:
        line = train_step(engine, taken, stage, ranks, guards, *args)
        print("verdict", line["step"], guards.verdict, flush=True)
        return line


def tell_versions(versions: str) -> None:
    """Make this rank see other versions of installed packages: JSON of names and versions."""
    replacing(importlib.metadata, "version")(lambda version, name: json.loads(versions).get(name) or version(name))


def spoil_after_load(_: str) -> None:
    """Make the weights that are loaded slightly wrong."""

    @replacing(restoring, "load_state")
    def load_and_spoil(load: Any, engine: Any, *inputs: Any) -> None:
        load(engine, *inputs)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.001)


def finish_and(then: Callable[[], object]) -> None:
    """Do something after the end of each save in the background."""

    @replacing(saving.Saver, "finish")
    def finish_and_go_on(finish: Any, saver: Any) -> None:
        is_under_way = saver._pending is not None
        finish(saver)
        if is_under_way:
            then()


def fail_saves(text: str) -> None:
    """Make the saves of some steps fail on one rank as on a full disk: EFBIG needs no separate disk."""
    case = json.loads(text)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    finish_and(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited))  # what a thread writes comes after save

    @replacing(saving.Saver, "save")
    def limited(save: Any, saver: Any, *arguments: Any) -> None:
        saver.finish()
        fails = saver._engine.global_steps in case["steps"] and saver._ranks.rank == case["rank"]
        if fails and case["bytes"] is None:
            shutil.rmtree(case["folder"])
        elif fails:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case["bytes"], resource.RLIM_INFINITY))
        save(saver, *arguments)

    @replacing(loop, "train_step")
    def stop_in_step(train_step: Any, engine: Any, *arguments: Any) -> Any:
        if engine.global_steps + 1 == case["stop"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(engine, *arguments)


def cause_fault(text: str) -> None:
    """Make an operation on files fail, on one rank or on all."""
    case = json.loads(text)
    if case["rank"] in (None, int(os.environ["RANK"])):
        faults.arm(case["folder"], case["kind"], case["number"], case["log"])


CHANGES: dict[str, Callable[[str], object]] = {  # by variable; each gets its value
    "VERSIONS": tell_versions,
    "SPOIL_AFTER_LOAD": spoil_after_load,
    "SPOIL": spoil,
    "OVERFLOW_TABLES": overflow_tables,
    "HALT": halt,
    "LOSE_WORKER": lose_worker,
    "MARKS": mark_moments,
    "FAIL_EVALUATION_AT_STEP": fail_evaluation,
    "SCORES": give_scores,
    "FILL_PADDING": fill_padding,
    "DUMP_MASTER_WEIGHTS": dump_master_weights,
    "DUMP_LOGITS": dump_logits,
    "DUMP_BUFFERS": dump_buffers,
    "COUNTING": lambda _: counting.register(),
    "CHUNK_ROWS": work_in_chunks,
    "FLUSHES": tell_flushes,
    "REMOVE_AFTER_STEP_2": remove_after_step_2,
    "SIGNAL_RANK_1": signal_rank_1,
    "FAILING": fail_saves,
    "FAULT": cause_fault,
}


def work(arguments: list[str], stop: StopFlag | None = None) -> NoReturn:
    """Run the whole rank, as its environment requests, and end the process. ``stop`` may listen already."""
    profile._ENOUGH_SECONDS = 1e-9  # one product measures the peak: no test of whole runs depends on it
    for name, change in CHANGES.items():
        if name in os.environ:
            change(os.environ[name])
    if not os.environ.keys() & {"FLUSHES", "FAILING", "FAULT"}:
        os.fsync = lambda _: None  # what no test looks at need not wait for the disk
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
