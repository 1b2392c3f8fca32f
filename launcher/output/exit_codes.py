"""Exit codes of a training run, for launchers, schedulers and restarts. See docs/training/resume.md."""

DONE = 0
UNFORESEEN = 1  # with a traceback, or with a line that says that the last state could not be saved
WRONG_INPUT = 2  # the user can mend it; a line says how
REQUEUE = 75  # stopped by request and saved: --resume auto goes on (EX_TEMPFAIL of sysexits.h)
GUARDED = 76  # stopped by a guard
HUNG = 77  # a collective timed out, or another process died: a rank, or one that reads data for a rank
STOPPED = 130  # left at once without saving; shells give Ctrl-C this code
UNREAD = 141  # the reader of standard output went away meanwhile; shells give SIGPIPE this code
DOCUMENTED = (DONE, UNFORESEEN, WRONG_INPUT, REQUEUE, GUARDED, HUNG, STOPPED)
RESTARTABLE = (UNFORESEEN, HUNG)  # another attempt may succeed
SSH_FAILED = 255  # ssh's own, for an error such as a lost host
