#!/usr/bin/env bash
# {{title}}
# Written by `longstride slurm`; submit it with `sbatch {{script}}`. Stop it for good with `scancel JOB`.
{{directives}}
#SBATCH --chdir={{folder}}
#SBATCH --output={{log}}
# A job that starts again goes on writing its log, instead of emptying it.
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 comes to this script alone (B:), so many seconds before the time is up, or up to a minute earlier.
#SBATCH --signal=B:USR1@{{stop_seconds}}

set -u
training=""
told=0
woken=0

# Hands on what SLURM tells this script: srun passes USR1 on to every rank, which together save and stop.
stop() {
    woken=1
    told=1
    echo "longstride: told to save and stop" >&2
    if [ -n "$training" ]; then kill -USR1 "$training" 2>/dev/null; fi
}
trap stop USR1
trap woken=1 TERM # which scancel sends to the ranks as well: this script waits for their end

# One task a rank. srun must not end the others as soon as one has ended (--kill-on-bad-exit=1): they all stop with
# code {{requeue_code}} within moments of each other, and those that srun ended would report a kill in its place. A rank that is
# left alone for {{wait_seconds}} seconds is ended.
srun --kill-on-bad-exit=0 --wait={{wait_seconds}} {{command}} &
training=$!
# Told before there was anything to hand it on to.
if [ "$told" = 1 ]; then kill -USR1 "$training" 2>/dev/null; fi
while true; do
    woken=0
    wait "$training"
    code=$?
    # A signal wakes `wait` early: then the code is the signal's, and training still runs.
    if [ "$woken" = 0 ]; then break; fi
done
# Ranks that were still starting had nothing to save, and end by the signal itself (128 + 10).
if [ "$told" = 1 ] && [ "$code" = 138 ]; then code={{requeue_code}}; fi

# {{requeue_code}}: stopped and saved, with steps left to do. Everything else is final, so that a mistake cannot go round for ever;
# and so is a job that somebody has cancelled, which is told to stop in the same way but runs no longer for SLURM.
if [ "$code" = {{requeue_code}} ] && [ "$(squeue --noheader --format=%T --job="$SLURM_JOB_ID")" = RUNNING ]; then
    echo "longstride: saved; job $SLURM_JOB_ID waits for its next turn" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
