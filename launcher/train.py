"""`deepspeed launcher/train.py --config X.json [--resume auto|best|never|STEP] [--profile N] [path.to.key=value …]`.

`longstride train` starts this script. Mistakes that one rank can detect are reported before it joins the process group.
The others, such as a damaged checkpoint, are reported by all ranks afterwards.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first on the path, where our packages would shadow others (config, data). It is replaced
    # by the folder of `longstride`, so that nothing needs to be installed.
    sys.path[0] = str(next(folder for folder in Path(__file__).resolve().parents if (folder / "longstride").is_dir()))

from longstride.launcher.output import (
    AgreedError,
    exit_codes,
    exit_on_mistake,
    mistake,
    nonblocking_output,
    print_if_slow,
    report,
    say,
    settle_libraries,
)
from longstride.launcher.stops import LauncherGone, StopFile, StopFlag, time_is_up
from longstride.launcher.verbs import add_script_arguments


def main(arguments: list[str], stop: StopFlag | None = None) -> int:
    """Take part in a run as one rank; return the exit code. ``stop`` may already listen."""
    parser = argparse.ArgumentParser(prog="launcher/train.py", description=__doc__.splitlines()[0])
    add_script_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    settle_libraries(os.environ)
    with closing(StopFlag()) as fresh_stop:
        try:
            return train(options, stop or fresh_stop)
        except (OSError, ValueError) as error:
            return report(error)


def train(options: argparse.Namespace, stop: StopFlag) -> int:
    """Check the setup on this rank, meet the others, and train; or replay a step. Return the exit code."""
    from longstride.kernels import ConfigError  # late, like everything that imports torch: a stop may come meanwhile
    from longstride.launcher.config import load_config
    from longstride.launcher.ranks import Ranks, adopt_launcher_variables, process_group, run_lock

    adopt_launcher_variables(os.environ)
    is_first, replays = os.environ.get("RANK", "0") == "0", options.replay is not None
    stop.add_source(launcher_gone := LauncherGone(os.environ))
    stop_file = StopFile(options.stop_file) if options.stop_file is not None and is_first else None
    if stop_file is not None:
        stop.add_source(stop_file, handled_only=not replays)  # a replay never enters stop.handled
    # `longstride train` has already printed the notices.
    notify = say if options.started is None and is_first else None
    config = load_config(options.config, options.overrides, notify).with_lasting_data()
    if config.train.max_seconds is not None:
        stop.add_source(time_is_up(config.train.max_seconds, options.started))

    # Late: a mistake in the file should not wait for the import of DeepSpeed, which takes seconds.
    with print_if_slow("importing torch and DeepSpeed"):
        from longstride.launcher import training
        from longstride.launcher.checkpoints import restore
        from longstride.launcher.data import WeightSource, profile_steps
        from longstride.launcher.engine import build_engine

    source = WeightSource.of(options, options.resume)
    profiled, trusted = profile_steps(options.profile, options.replay), options.trust_checkpoint
    ranks = replace(Ranks.from_environment(os.environ), sequence_parallel=config.train.sequence_parallel or 1)
    config.check_world_size(ranks.world_size)
    run = training.set_up(config, ranks, options.resume, options.replay)
    run, config = replace(run, stop=stop, profile_steps=profiled, trusted=trusted, source=source), run.config
    if replays:
        return training.replay_step(run, int(options.replay))
    problem, initial = None, None
    try:
        with print_if_slow("reading the data and the run folder"):
            initial = training.open_initial(run, *training.choose_start(run).candidates[:1])
    except (OSError, ValueError) as error:
        problem = mistake(error)
        if ranks.world_size == 1 or problem is None:
            raise
        # Perhaps only this rank has the problem, and the others wait for it: it is reported once all have met.
    else:
        with print_if_slow("compiling kernels"):
            training.compile_step(run)
        stop.listen()

    group = process_group(ranks, config.train.timeout_seconds, run.folder, launcher_gone)
    # `stop.handled` is outside `reporting`: after a rank dies, its launcher sends SIGTERM to the others.
    with group as watchdog, stop.handled(), watchdog.reporting(), run_lock(run.folder, ranks):
        with exit_on_mistake(ranks.barrier):
            training.check_agreement(run, watchdog.hosts)  # first: it names the rank that differs
            ranks.agree(problem)
        checkpoint = training.begin(run)
        with exit_on_mistake(ranks.barrier):
            try:
                config.check_hosts(watchdog.hosts)
            except ConfigError as error:  # on all ranks: only they know where the launcher placed them
                raise AgreedError(str(error)) from None
            initial = training.agree_on_initial(run, initial, checkpoint, watchdog.hosts)
            with print_if_slow("building the engine"):
                placed = ranks.run_on_first(lambda: training.claim_folders(config))
                engine = build_engine(placed if ranks.is_first else config, ranks, initial.fill if initial else None)
            with print_if_slow("loading the checkpoint"):
                state = restore(engine, checkpoint, config, ranks) if checkpoint else None
            if initial is not None:
                initial.check(run, engine)
                run = replace(run, origin=initial.record)
            if checkpoint is not None:
                run = replace(run, origin=checkpoint.manifest.origin)
            training.prepare_folder(run, checkpoint)
            for line in initial.lines() if initial is not None and ranks.is_first else ():
                say(line)
            if stop_file is not None:
                stop_file.mark_begun()
            code = exit_codes.DONE
            try:
                training.Trainer(run, engine, checkpoint, watchdog).train(state)
            except Exception as error:
                code, line = training.early_end(error, run, engine.global_steps)
                if ranks.is_first:
                    say(line)
                ranks.barrier()  # a launcher ends all ranks once one has ended
            engine.destroy()
            if stop_file is not None and launcher_gone():
                stop_file.remove()  # the launcher can no longer do it
    return code


if __name__ == "__main__":
    with nonblocking_output():  # before anything is printed, and before a library keeps the streams
        listening = StopFlag()
        listening.listen()  # the imports take seconds
        from longstride.launcher.ranks import leave

        leave(main(sys.argv[1:], listening))
