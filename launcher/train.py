"""`deepspeed launcher/train.py --config X.json [--resume auto|never|STEP] [--replay STEP] [path.to.key=value …]`.

`longstride train` starts the same. Every mistake of a person is found before a process group or a file is made.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":
    # Python puts this folder first on the path, where the names of our rooms would shadow others' (config, data). The
    # folder that holds `longstride` takes its place, so that nothing need be installed.
    _here = Path(__file__).resolve().parent
    _root = next(folder for folder in _here.parents if (folder / "longstride" / "__init__.py").exists())
    sys.path = [str(_root), *(entry for entry in sys.path if Path(entry or ".").resolve() != _here)]

from longstride.launcher.stops import StopFile, StopFlag, TimeIsUp

if __name__ == "__main__":
    _stop = StopFlag()
    _stop.listen()  # the imports below take seconds

from longstride.launcher.config import RunConfig, add_trust_argument, check_world_size, load_config
from longstride.launcher.output import (
    exit_codes,
    exit_on_mistake,
    lasting_output,
    mute_accelerator_warning,
    report,
    say,
)
from longstride.launcher.ranks import adopt_place
from longstride.launcher.stops import LauncherGone

if TYPE_CHECKING:
    import torch

    from longstride.launcher.data import RunData
    from longstride.launcher.ranks import Ranks
    from longstride.launcher.training import Asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that training has however it is started."""
    parser.add_argument(
        "--config", required=True, metavar="X.json|NAME", help="the run, or the name of one in ds_configs/experiments"
    )
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto|never|STEP",
        help="go on from the newest checkpoint if there is one, never, or from that of a step (default: never)",
    )
    add_trust_argument(parser)
    parser.add_argument(
        "--replay",
        default=None,
        metavar="STEP",
        help="feed the batch of a step of the run again, print what it gives, and write nothing",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="path.to.key=value", help="changes to the configuration; values are JSON"
    )


def main(arguments: list[str], stop: StopFlag | None = None) -> int:
    """One rank's whole run; returns its exit code. ``stop`` may listen already."""
    parser = argparse.ArgumentParser(prog="launcher/train.py", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher's own
    # Those of `longstride train`: where its wish to stop will stand, and when it began, by the clock.
    parser.add_argument("--stop-file", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    own = StopFlag()
    mute_accelerator_warning()
    try:
        adopt_place(os.environ)
        return _begin(options, stop or own)
    except (OSError, ValueError) as error:
        return report(error)
    finally:
        own.close()


def _begin(options: argparse.Namespace, stop: StopFlag) -> int:
    """Reads the configuration and says what else may ask for a stop, then runs."""
    gone = LauncherGone(os.environ)
    stop.add_source(gone)
    if options.stop_file is not None and os.environ.get("RANK", "0") == "0":
        stop.add_source(StopFile(options.stop_file), handled_only=options.replay is None)  # a replay handles no stop
    config = load_config(options.config, options.overrides)
    if config.train.max_seconds is not None:
        stop.add_source(TimeIsUp(config.train.max_seconds, options.started or _process_start()))
    return _run(config, options, stop, gone)


def _process_start() -> float:
    import psutil

    return psutil.Process().create_time()


def _run(config: RunConfig, options: argparse.Namespace, stop: StopFlag, gone: LauncherGone) -> int:
    """Checks everything that can be checked alone, then trains, or replays a step."""
    # Late: with deepspeed come seconds, which a mistake in the file should not cost.
    from longstride.launcher.data import RunData, check_output, check_replay, resolve_steps
    from longstride.launcher.engine import build as ours
    from longstride.launcher.engine import compile_kernels, prepare_accelerator
    from longstride.launcher.ranks import ranks_from_environment
    from longstride.launcher.training import Asked, choose_start, replay_step

    ranks = ranks_from_environment(os.environ)
    check_world_size(config, ranks.world_size)
    on_cpu = prepare_accelerator()
    ours.quieten(config)
    ours.check_section(config, ranks.world_size, on_cpu)
    _check_attention(config, ranks.local_rank)
    # Before the data, which may take a while.
    if options.replay is None:
        check_output(config.train.output, options.resume)
    else:
        check_replay(config, options.resume, options.replay)
    data = RunData(config, ranks)
    epochs = config.train.epochs
    config = resolve_steps(config, data, ranks)
    if options.replay is not None:
        return replay_step(config, int(options.replay), data, ranks, trusted=options.trust_checkpoint)
    asked = Asked(options.resume, epochs, options.trust_checkpoint)
    choose_start(config, asked, data, ranks)
    compile_kernels(config.model, config.train.micro_batch, *_attention_runs_in(config, ranks.local_rank))
    stop.listen()
    return _train_together(config, ranks, data, asked, stop, gone)


def _train_together(
    config: RunConfig, ranks: Ranks, data: RunData, asked: Asked, stop: StopFlag, gone: LauncherGone
) -> int:
    """Joins the other ranks and trains; returns the exit code."""
    from longstride.launcher.checkpoints import NotSavedError
    from longstride.launcher.engine import build as ours
    from longstride.launcher.ranks import barrier, process_group, run_lock
    from longstride.launcher.stops import StopAskedError
    from longstride.launcher.training import Guards, GuardStopError, Training, begin, prepare_folder, restore

    output = Path(config.train.output)
    group = process_group(ranks, config.train.timeout_seconds, output, lambda: gone() is not None)
    with group as watch, stop.handled(), run_lock(output, ranks):
        checkpoint = begin(config, asked, data, ranks)
        with exit_on_mistake(lambda: barrier(ranks)):
            engine = ours.build_engine(config, ranks)
            state = restore(engine, checkpoint, config, ranks) if checkpoint is not None else None
            prepare_folder(config, checkpoint, ranks)
            guards = Guards(config.train.guards, checkpoint.manifest.guards if checkpoint else None)
            code, told = exit_codes.DONE, None
            try:
                Training(engine, config, ranks, data, guards, stop, watch, trusted=asked.trusted).run(state)
            except StopAskedError as stopping:
                code, told = exit_codes.REQUEUE, f"stopped by {stopping}; --resume auto goes on"
            except GuardStopError as stopped:
                code, told = exit_codes.GUARDED, f"stopped by a guard: {stopped}"
            except NotSavedError as error:
                code, told = exit_codes.UNFORESEEN, f"error: {error}"
            if told is not None:
                if ranks.is_first:
                    say(told)
                barrier(ranks)  # a launcher ends all ranks once one has ended
            engine.destroy()
    return code


def _attention_runs_in(config: RunConfig, local_rank: int) -> tuple[torch.dtype, torch.device]:
    """The type and the device of the model's attention in training."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from longstride.launcher.config import precision

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return dtypes[precision(config.deepspeed)], torch.device(get_accelerator().device_name(local_rank))


def _check_attention(config: RunConfig, local_rank: int) -> None:
    """Whether the model's backend can run where and as training will; ConfigError if not."""
    from longstride.kernels import ConfigError, check_backend

    model = config.model
    dtype, device = _attention_runs_in(config, local_rank)
    try:
        check_backend(
            model.backend,
            device=device,
            dtype=dtype,
            head_width=model.query_key_width // model.heads,
            value_width=model.width // model.heads,
            training=True,
        )
    except ConfigError as error:
        raise error.under("model") from None


def leave(code: int) -> NoReturn:
    """Ends the process as Python does, but without the destructors of C++ libraries.

    A communication thread that still winds up can meet them there, and now and then aborts a rank that has done all its
    work, with the process group destroyed and every rank past its last collective.
    """
    for child in multiprocessing.active_children():  # loader workers, which ignore what would ask them to end
        child.kill()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a log on a disk that is full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with lasting_output():
        leave(main(sys.argv[1:], _stop))
