#!/usr/bin/env bash
# {{title}}
# Written by `longstride slurm`; submit it with `sbatch {{script}}`. Stop it for good with `scancel JOB`.
{{directives}}
#SBATCH --chdir={{folder}}
#SBATCH --output={{log}}
# After a requeue the job appends to its log.
#SBATCH --open-mode=append
#SBATCH --requeue
# SLURM sends USR1 to this script alone (B:), so many seconds before the time is up, or up to a minute earlier.
#SBATCH --signal=B:USR1@{{stop_seconds}}

set -u
training=""
stopping=0
woken=0

# Forwards SLURM's signal: srun passes USR1 on to every rank; together they save and stop.
stop() {
    woken=1
    stopping=1
    echo "longstride: told to save and stop" >&2
    if [ -n "$training" ]; then kill -USR1 "$training" 2>/dev/null; fi
}
trap stop USR1
trap woken=1 TERM # scancel sends TERM to the ranks too: this script waits for their end

# One task a rank. All ranks exit with code {{requeue_code}} within moments of each other. Once one has exited, srun must not kill
# the others (--kill-on-bad-exit=0): it would report the kill. After {{wait_seconds}} seconds it does kill them.
srun --kill-on-bad-exit=0 --wait={{wait_seconds}} {{command}} &
training=$!
# The signal came before there was anything to forward it to.
if [ "$stopping" = 1 ]; then kill -USR1 "$training" 2>/dev/null; fi
while true; do
    woken=0
    wait "$training"
    code=$?
    # A signal ends `wait` early: then the code is the signal's, and training still runs.
    if [ "$woken" = 0 ]; then break; fi
done
# Ranks that were still starting had nothing to save; the signal itself ended them (128 + 10).
if [ "$stopping" = 1 ] && [ "$code" = 138 ]; then code={{requeue_code}}; fi

# Code {{requeue_code}}: stopped and saved, with steps left. Any other code is final, so that a mistake is not repeated for ever.
# A cancelled job is final too: its ranks exit with the same code, but SLURM no longer counts it as running.
if [ "$code" = {{requeue_code}} ] && [ "$(squeue --noheader --format=%T --job="$SLURM_JOB_ID")" = RUNNING ]; then
    echo "longstride: saved; job $SLURM_JOB_ID waits for its next turn" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
