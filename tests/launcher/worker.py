"""A rank of a test's run: launcher/train.py itself, with something more done as the environment asks."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import launcher.train as entry


def dump_master_weights(path: str) -> None:
    """Saves the fp32 master weights as they are in the engine after each step, by DeepSpeed's own debugging calls."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    import launcher.loop as loop

    train_step = loop.train_step
    steps: list[dict[str, Any]] = []

    def step_and_dump(engine: Any, taken: Any, micro_batch: int, ranks: Any) -> Any:
        line = train_step(engine, taken, micro_batch, ranks)
        masters = {}
        if hasattr(engine.optimizer, "fp32_groups"):  # ZeRO 0 in half precision
            pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
            by_parameter = {id(p): m for ps, ms in pairs for p, m in zip(ps, ms, strict=True)}
            masters = {name: by_parameter[id(p)] for name, p in engine.module.named_parameters()}
        else:
            sharded = engine.zero_optimization()
            for name, parameter in engine.module.named_parameters():
                masters[name] = safe_get_full_fp32_param(parameter) if sharded else parameter
        steps.append({name: master.detach().clone().cpu() for name, master in masters.items()})
        if ranks.is_first:
            torch.save(steps, path)
        return line

    loop.train_step = step_and_dump


def work_in_chunks(rows: int) -> None:
    """Lets the model take even short contexts as it takes long ones: so many rows at a time."""
    import sparse_model.feed_forward as feed_forward
    import sparse_model.output as output

    feed_forward.LONG_ROWS = feed_forward.CHUNK_ROWS = output.CHUNK_ROWS = rows


def stop_answering(step: int) -> None:
    """Lets the last rank hang before its next collective, after a step."""
    import launcher.loop as loop

    gather = loop.gather_float64
    calls = []

    def gather_or_hang(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > step and os.environ["RANK"] != "0":
            time.sleep(60)
        return gather(*args)

    loop.gather_float64 = gather_or_hang


def remove_after_step_2(path: str) -> None:
    """Lets a file vanish under the run."""
    import launcher.loop as loop

    train_step = loop.train_step

    def train_and_remove(engine: Any, *args: Any) -> Any:
        line = train_step(engine, *args)
        if line["step"] == 2:
            Path(path).unlink(missing_ok=True)
        return line

    loop.train_step = train_and_remove


def fail_evaluation(step: int) -> None:
    """Lets the evaluation after a step fail."""
    import launcher.loop as loop

    evaluate = loop.evaluate_split

    def evaluate_or_fail(engine: Any, *args: Any) -> Any:
        if engine.global_steps == step:
            raise RuntimeError("the evaluation fails")
        return evaluate(engine, *args)

    loop.evaluate_split = evaluate_or_fail


def signal_rank_1(number: int, step: int, where: str) -> None:
    """Has the second rank get a signal while it computes a step, or the evaluation behind it."""
    import launcher.loop as loop

    name = {"step": "train_step", "evaluation": "evaluate_split"}[where]
    work = getattr(loop, name)

    def work_and_be_signalled(engine: Any, *args: Any) -> Any:
        if os.environ["RANK"] == "1" and engine.global_steps == step - (where == "step"):
            os.kill(os.getpid(), number)
        return work(engine, *args)

    setattr(loop, name, work_and_be_signalled)


def work(arguments: list[str]) -> NoReturn:
    """The whole rank, as its environment asks; ends the process."""
    if "FAIL_EVALUATION_AT_STEP" in os.environ:
        fail_evaluation(int(os.environ["FAIL_EVALUATION_AT_STEP"]))
    if "DUMP_MASTER_WEIGHTS" in os.environ:
        dump_master_weights(os.environ["DUMP_MASTER_WEIGHTS"])
    if "CHUNK_ROWS" in os.environ:
        work_in_chunks(int(os.environ["CHUNK_ROWS"]))
    if "REMOVE_AFTER_STEP_2" in os.environ:
        remove_after_step_2(os.environ["REMOVE_AFTER_STEP_2"])
    if "SIGNAL_RANK_1" in os.environ:
        number, step, where = os.environ["SIGNAL_RANK_1"].split(",")
        signal_rank_1(int(number), int(step), where)
    if "HANG_AFTER_STEP" in os.environ:
        stop_answering(int(os.environ["HANG_AFTER_STEP"]))
    entry.leave(run(arguments))


def run(arguments: list[str]) -> int:
    """launcher/train.py's exit code; 1 with a traceback for what it does not foresee, as Python ends."""
    try:
        return entry.main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
