"""`longstride new`, `plan`, `doctor`, `train` and `slurm`: a run, and what it will cost."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from longstride.launcher.verbs.shared import (
    WEIGHTS,
    Verb,
    add_config_argument,
    add_override_arguments,
    add_trust_argument,
    path,
    place,
    register,
    step_named,
)

VERBS: list[Verb] = []
verb = partial(register, VERBS)

HOSTFILE = Path("/job/hostfile")  # where the deepspeed launcher looks for one
LAUNCHERS = ("pdsh", "openmpi", "mpich", "slurm")
SIZES = ("tiny", "small", "base")  # that `longstride new` has recipes of
SOME_HOSTS = "HOST[:SLOT,…][@…]"


def add_from_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--from` and its options, of every verb that starts a run."""
    add = parser.add_argument
    what = "take the first weights from an exported folder or from another run; the optimiser starts over"
    add("--from", type=place, dest="source", metavar="MODEL|RUN", help=what)
    which = "take this checkpoint of the other run (best: the lowest validation loss; default: the newest)"
    add("--from-step", type=step_named, metavar="N|best", help=which)
    which = "take the other run's weights as trained, or their moving average (default: trained)"
    add("--from-weights", choices=WEIGHTS, default="trained", help=which)
    how = "resize position tables for another context: repeat or interpolate the learned rows, or draw fresh ones"
    add("--from-positions", choices=("repeat", "interpolate", "fresh"), help=how)
    add("--from-partly", action="store_true", help="take the parameters that fit the model, and draw the others")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that training has in every launcher."""
    add_config_argument(parser, "--config")
    start = "continue from the newest checkpoint if there is one, from the one with the lowest validation loss, "
    start += "never, or from that of a step (default: never)"
    parser.add_argument("--resume", default="never", metavar="auto|best|never|STEP", help=start)
    add_from_arguments(parser)
    add_trust_argument(parser)
    again = "repeat a step of the run with its batch, print the result, and write nothing"
    parser.add_argument("--replay", metavar="STEP", help=again)
    parts = "record N steps: a table, and in the run folder a trace (profile/trace.json) and the seconds of each part"
    parser.add_argument("--profile", metavar="N", help=parts)
    add_override_arguments(parser)


@verb(
    "new",
    "a configuration that fits",
    "planning.new.run",
    "longstride new mine",
    "longstride new routed --like enwik8_routing --size tiny --data data/mine",
)
def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="name of the run: writes NAME.json, to train into runs/NAME")
    folder = "fit this folder of `longstride data build` or `index` (default: data/NAME)"
    add("--data", type=place, metavar="DIR", help=folder)
    like = "shrink this preset of ds_configs/experiments (default data: the preset's), in place of the recipe"
    add("--like", metavar="PRESET", help=like)
    kind = "refuse data of another modality than this (default: take what the folder says)"
    add("--modality", metavar="text|image|audio", help=kind)
    size = "tiny: minutes of two cores; small: an hour or more of a large card; base: eight of them (default: tiny)"
    add("--size", default=SIZES[0], metavar="|".join(SIZES), help=size)
    add("--output", type=path, metavar="FILE.json", help="write this new file (default: NAME.json)")
    many = "fit a run of so many processes (default: one for each GPU, or by the cores)"
    add("--processes", metavar="W", help=many)
    memory = "fit so much memory of each GPU, for a run on another machine (default: as found on this one)"
    add("--memory", metavar="GIB", help=memory)


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of launcher/train.py, with those that only launchers set."""
    add_rank_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # set by the deepspeed launcher
    # Set by `longstride train`: the file by which it requests a stop, and the time at which it began.
    parser.add_argument("--stop-file", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=None, help=argparse.SUPPRESS)


@verb(
    "plan",
    "what a run will cost",
    "planning.plan.run",
    "longstride plan mine.json --processes 2",
    "longstride plan enwik8_fixed --processes 1 8 train.micro_batch=1",
)
def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser, "config")
    add = parser.add_argument
    many = "plan for each of these numbers of processes (default: as many as the batch allows, at most 8)"
    add("--processes", nargs="+", default=[], metavar="W", help=many)
    size = "assume so many contexts in the train split, if the data is not on this machine"
    add("--contexts", type=int, metavar="N", help=size)
    kind = "plan for CPUs or GPUs (default: cpu where model.backend is cpu; this machine's with --measure; else cuda)"
    add("--device", choices=("cpu", "cuda"), default=None, help=kind)
    rates = parser.add_mutually_exclusive_group()
    reached = "estimate hours at this rate of a process, in TFLOP/s; 40 %% of a card's peak is good"
    rates.add_argument("--tflops", metavar="X", help=reached)
    timed = "estimate hours by timing a block of each kind on this machine; takes a minute"
    rates.add_argument("--measure", action="store_true", help=timed)
    rates.add_argument("--rate-of", type=path, metavar="RUN", help="estimate hours at the rate of another run")
    add("--json", action="store_true", help="print one JSON object in place of tables")
    add_override_arguments(parser)


@verb(
    "doctor",
    "what is missing here for a run",
    "doctor.run",
    "longstride doctor mine.json",
    "longstride doctor mine.json --hostfile hosts --json",
)
def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=place, nargs="?", metavar="CONFIG", help="also check what this run needs on this machine")
    many = "check for so many processes on this machine (default: one for each GPU, or 1)"
    add("--processes", type=int, metavar="N", help=many)
    add("--hostfile", type=path, metavar="FILE", help="check the hosts of this file too, lines such as `node1 slots=4`")
    program = "check that this launcher is installed, for the hosts (default: pdsh)"
    add("--launcher", choices=LAUNCHERS, default=LAUNCHERS[0], help=program)
    add("--json", action="store_true", help="print one JSON object in place of lines")
    add_override_arguments(parser)


@verb(
    "train",
    "train, or continue training",
    "cluster.start.run",
    "longstride train --config mine.json --processes 2",
    "longstride train --config mine.json --resume auto --max-restarts 5 train.steps=20000",
)
def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add_rank_arguments(parser)
    add = parser.add_argument
    local = "start so many processes on this host (default: one for each GPU, or one on a CPU)"
    add("--processes", type=int, default=None, metavar="N", help=local)
    lines = f"start them on the hosts of this file, lines such as `node1 slots=4` (default: {HOSTFILE} if it is there)"
    add("--hostfile", type=path, default=None, metavar="FILE", help=lines)
    reach = "reach several hosts by this launcher (default: pdsh)"
    add("--launcher", choices=LAUNCHERS, default=None, help=reach)
    include = "use only these hosts and slots of the hostfile, such as node1@node2:0,2 (pdsh, slurm)"
    add("--include", default="", metavar=SOME_HOSTS, help=include)
    exclude = "use all hosts and slots of the hostfile except these (pdsh, slurm)"
    add("--exclude", default="", metavar=SOME_HOSTS, help=exclude)
    meet = "let processes meet at this address of the first host (default: found by asking the host)"
    add("--master-addr", default=None, metavar="ADDRESS", help=meet)
    add("--master-port", type=int, metavar="PORT", help="let processes meet at this port (default: a free one)")
    words = "give pdsh, mpirun or srun these options too; one text after =, such as --launcher-args='-v'"
    add("--launcher-args", default="", metavar="WORDS", help=words)
    tried = "print the plan, and take the first step of one process on this machine; start and write nothing"
    add("--dry-run", action="store_true", help=tried)
    again = "restart up to N times from the newest checkpoint after a process or host died (default: 0)"
    add("--max-restarts", type=int, default=0, metavar="N", help=again)


@verb(
    "slurm",
    "a batch script for SLURM",
    "cluster.slurm.run",
    "longstride slurm --config mine.json --nodes 2 --processes-per-node 8 --time 1-0",
    "longstride slurm --config mine.json --nodes 2 --processes-per-node 8 --time 12:00:00 --gpus --submit",
)
def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser, "--config")
    add_from_arguments(parser)
    add = parser.add_argument
    add("--nodes", required=True, type=int, metavar="N", help="train on so many hosts")
    add("--processes-per-node", required=True, type=int, metavar="M", help="start so many processes on each host")
    add("--time", required=True, metavar="[D-]HH:MM:SS", help="have SLURM end the job after this time")
    add("--partition", metavar="P", help="partition to queue the job in (default: SLURM's)")
    add("--account", metavar="A", help="account to charge (default: SLURM's)")
    add("--gpus", action="store_true", help="ask for a GPU for each process")
    cores = "give each process, with its loader workers, so many cores (default: SLURM's)"
    add("--cpus-per-process", type=int, metavar="C", help=cores)
    lines = "add a line #SBATCH --OPTION to the script, such as qos=long or mem=0; repeatable"
    add("--sbatch", action="append", default=[], metavar="OPTION", help=lines)
    add("--job-name", metavar="NAME", help="name the job and the script so (default: the run folder's name)")
    stop = "save and stop so many seconds before the time is up (default: 120)"
    add("--stop-seconds", type=int, default=120, metavar="S", help=stop)
    add("--output-dir", type=path, metavar="DIR", help="write script and logs here (default: the run folder)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--submit", action="store_true", help="hand the script to sbatch")
    action.add_argument("--print", action="store_true", dest="print_only", help="print the script, and write nothing")
    add_override_arguments(parser)
