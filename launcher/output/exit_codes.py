"""How a training run ends, as numbers: what a launcher, a scheduler or a restart goes by. See docs/training.md."""

DONE = 0
UNFORESEEN = 1  # a traceback tells it, or a line that the end could not be saved
WRONG_INPUT = 2  # a person can mend it; a line tells it
REQUEUE = 75  # asked to stop, and saved: --resume auto goes on (EX_TEMPFAIL of sysexits.h)
GUARDED = 76  # a guard stopped the run
HUNG = 77  # a collective took longer than its time-out, or another process was lost
STOPPED = 130  # left at once, as shells count Ctrl-C
DOCUMENTED = (DONE, UNFORESEEN, WRONG_INPUT, REQUEUE, GUARDED, HUNG, STOPPED)
RESTARTABLE = (UNFORESEEN, HUNG)  # for what another attempt may get past
