"""`deepspeed launcher/train.py --config X.json [--resume auto|best|never|STEP] [--profile N] [path.to.key=value …]`.

`longstride train` starts the same. Every mistake of the user is found before a process group or a file is made.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":
    # Python puts this folder first on the path, where the names of our rooms would shadow others' (config, data). The
    # folder that holds `longstride` takes its place, so that nothing need be installed.
    _here = Path(__file__).resolve().parent
    _root = next(folder for folder in _here.parents if (folder / "longstride" / "__init__.py").exists())
    sys.path = [str(_root), *(entry for entry in sys.path if Path(entry or ".").resolve() != _here)]

from longstride.launcher.output import lasting_output
from longstride.launcher.stops import StopFile, StopFlag, TimeIsUp

if __name__ == "__main__":
    _output = contextlib.ExitStack()
    _output.enter_context(lasting_output())  # before anything can be said, or a library keeps the streams
    _stop = StopFlag()
    _stop.listen()  # the imports below take seconds

from longstride.kernels import ConfigError
from longstride.launcher.config import load_config
from longstride.launcher.data import FromOptions
from longstride.launcher.output import (
    AgreedError,
    exit_codes,
    exit_on_mistake,
    mistake,
    report,
    said_where_slow,
    say,
    settle_libraries,
    settle_output,
)
from longstride.launcher.ranks import adopt_place
from longstride.launcher.stops import LauncherGone
from longstride.launcher.verbs import add_rank_arguments

if TYPE_CHECKING:
    from longstride.launcher.data import Run
    from longstride.launcher.training import InitialWeights


def main(arguments: list[str], stop: StopFlag | None = None) -> int:
    """One rank's whole run; returns its exit code. ``stop`` may listen already."""
    parser = argparse.ArgumentParser(prog="launcher/train.py", description=__doc__.splitlines()[0])
    add_rank_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # set by the deepspeed launcher
    # Set by `longstride train`: the file by which it asks for a stop, and the time at which it began, by the clock.
    parser.add_argument("--stop-file", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    fresh_stop = StopFlag()
    settle_libraries(os.environ)
    try:
        adopt_place(os.environ)
        return _run(options, stop or fresh_stop)
    except (OSError, ValueError) as error:
        return report(error)
    finally:
        fresh_stop.close()


def _run(options: argparse.Namespace, stop: StopFlag) -> int:
    """Checks everything that this rank can check alone, then trains, or replays a step."""
    launcher_gone = LauncherGone(os.environ)
    stop.add_source(launcher_gone)
    stop_file = None
    if options.stop_file is not None and os.environ.get("RANK", "0") == "0":
        stop_file = StopFile(options.stop_file)
        stop.add_source(stop_file, handled_only=options.replay is None)  # a replay handles no stop
    # `longstride train` has said already what the command line changes.
    alone = options.started is None and os.environ.get("RANK", "0") == "0"
    config = load_config(options.config, options.overrides, say if alone else None).with_lasting_data()
    source = FromOptions.of(options, options.resume)
    if config.train.max_seconds is not None:
        import psutil

        stop.add_source(TimeIsUp(config.train.max_seconds, options.started or psutil.Process().create_time()))

    # Late: deepspeed takes seconds to import, which a mistake in the file should not cost.
    with said_where_slow("importing torch and DeepSpeed"):
        from longstride.launcher.data import Run, RunData, check_output, check_replay, profile_steps, resolve_steps
        from longstride.launcher.engine import check_engine, compile_kernels, prepare_accelerator
        from longstride.launcher.ranks import Ranks
        from longstride.launcher.training import check_samples, choose_start, open_initial, replay_step
        from longstride.sparse_model import Division

    ranks = Ranks.from_environment(os.environ)
    config.check_world_size(ranks.world_size)
    ranks = replace(ranks, sequence_parallel=config.train.sequence_parallel or 1)
    prepare_accelerator(config)
    check_engine(config, ranks)
    # Before the data, which may take a while.
    if options.replay is None:
        check_output(config.train.output, options.resume)
    else:
        check_replay(config, options.resume, options.replay)
    profiled = profile_steps(options.profile, options.replay)
    data = RunData(config, ranks)
    check_samples(config, data)
    run = Run(
        config=resolve_steps(config, data, ranks),
        ranks=ranks,
        data=data,
        stop=stop,
        resume=options.resume,
        epochs=config.train.epochs,
        trusted=options.trust_checkpoint,
        profile_steps=profiled,
        source=source,
    )
    if options.replay is not None:
        return replay_step(run, int(options.replay))
    try:
        with said_where_slow("reading the data and the run folder"):
            start = choose_start(run)
            initial = open_initial(run, *start.candidates[:1])
    except (OSError, ValueError) as error:
        wrong = mistake(error)
        if ranks.world_size == 1 or wrong is None:
            raise
        # This rank may have met it alone, and the others wait for it: it is told once all have come together.
        return _train(run, None, wrong, stop, launcher_gone, stop_file)
    train, apart, padded = config.train, config.data.apart, not data.packed
    division = Division(ranks.sequence_rank, ranks.sequence_parallel, None, train.sequence_exchange)
    with said_where_slow("compiling kernels"):
        compile_kernels(
            config.model,
            train.micro_batch,
            config.precision,
            ranks.device,
            train=train,
            apart=apart,
            padded=padded,
            division=division,
        )
    stop.listen()
    return _train(run, initial, None, stop, launcher_gone, stop_file)


def _train(
    run: Run,
    initial: InitialWeights | None,
    wrong: str | None,
    stop: StopFlag,
    launcher_gone: LauncherGone,
    stop_file: StopFile | None,
) -> int:
    """Joins the other ranks and trains; returns the exit code.

    Args:
        initial: where the first weights come from.
        wrong: the user's mistake that this rank has met in its data or the run folder.
    """
    from longstride.data_pipelines.order import LostWorkerError
    from longstride.launcher.checkpoints import NotSavedError, restore
    from longstride.launcher.data import discard_start
    from longstride.launcher.engine import build_engine
    from longstride.launcher.ranks import process_group, run_lock
    from longstride.launcher.stops import StopAskedError
    from longstride.launcher.training import (
        Guards,
        GuardStopError,
        Plateau,
        Trainer,
        agreed_initial,
        begin,
        check_agreement,
        claim_places,
        prepare_folder,
    )

    config, ranks = run.config, run.ranks
    group = process_group(ranks, config.train.timeout_seconds, run.folder, lambda: launcher_gone() is not None)
    # A loss is reported while stops are handled: a launcher that has seen it sends the other ranks SIGTERM.
    with group as watchdog, stop.handled(), watchdog.reporting(), run_lock(run.folder, ranks):
        with exit_on_mistake(ranks.barrier):
            check_agreement(run, watchdog.hosts)  # first: it says who has something else, and what
            ranks.agree(wrong)
        checkpoint = begin(run)
        with exit_on_mistake(ranks.barrier):
            try:
                config.check_hosts(watchdog.hosts)
            except ConfigError as error:  # of all ranks: where launchers place them, only the ranks can tell
                raise AgreedError(str(error)) from None
            initial = agreed_initial(run, initial, checkpoint, watchdog.hosts)
            with said_where_slow("building the engine"):
                placed = ranks.first_works(lambda: claim_places(config))
                engine = build_engine(
                    placed if ranks.is_first else config, ranks, None if initial is None else initial.fill
                )
            with said_where_slow("loading the checkpoint"):
                state = restore(engine, checkpoint, config, ranks) if checkpoint is not None else None
            if initial is not None:
                initial.check(run, engine)
            if checkpoint is not None:
                run = replace(run, origin=checkpoint.manifest.origin)
            elif initial is not None:
                run = replace(run, origin=initial.record)
            prepare_folder(run, checkpoint)
            for line in initial.lines() if initial is not None and ranks.is_first else ():
                say(line)
            guards = Guards(config.train.guards, checkpoint.manifest.guards if checkpoint else None)
            plateau = Plateau(run, checkpoint.manifest.plateau if checkpoint else None)
            code, ending = exit_codes.DONE, None
            if stop_file is not None:
                stop_file.mark_begun()
            try:
                trainer = Trainer(run, engine, guards, plateau, watchdog)
                trainer.train(state, checkpoint.manifest.content_seen if checkpoint is not None else 0)
            except StopAskedError as stopping:
                code, ending = exit_codes.REQUEUE, f"stopped by {stopping}; --resume auto goes on"
                if engine.global_steps == 0:
                    ending = f"stopped by {stopping} before the first step; nothing is kept"
                    if ranks.is_first:
                        discard_start(run.folder)
            except LostWorkerError as lost:
                code, ending = exit_codes.HUNG, f"lost a process that reads data: {lost}; --resume auto goes on"
            except GuardStopError as stopped:
                code, ending = exit_codes.GUARDED, f"stopped by a guard: {stopped}"
            except NotSavedError as error:
                code, ending = exit_codes.UNFORESEEN, f"error: {error}"
            if ending is not None:
                if ranks.is_first:
                    say(ending)
                ranks.barrier()  # a launcher ends all ranks once one has ended
            engine.destroy()
            if stop_file is not None and launcher_gone():
                stop_file.remove()  # nobody else is left who would
    return code


def leave(code: int) -> NoReturn:
    """Ends the process as Python does, but without the destructors of C++ libraries.

    A communication thread that is still ending can meet them there. Now and then that aborts a rank that has done all
    its work, with the process group destroyed and every rank past its last collective.
    """
    for child in multiprocessing.active_children():  # loader workers, which ignore softer signals
        child.kill()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a log on a disk that is full
        settle_output()
    os._exit(code)


if __name__ == "__main__":
    with _output:
        leave(main(sys.argv[1:], _stop))
