"""Exit codes of a training run, for launchers, schedulers and restarts. See docs/training/resume.md."""

DONE = 0
UNFORESEEN = 1  # with a traceback, or a line that says that the last state could not be saved
WRONG_INPUT = 2  # a mistake of the user; a line says how to correct it
REQUEUE = 75  # stopped by request and saved: --resume auto continues (EX_TEMPFAIL of sysexits.h)
GUARDED = 76  # stopped by a guard
HUNG = 77  # a collective timed out, or another rank or a loader worker died
STOPPED = 130  # stopped at once without saving; shells use this code for Ctrl-C
UNREAD = 141  # standard output was closed meanwhile; shells use this code for SIGPIPE
DOCUMENTED = (DONE, UNFORESEEN, WRONG_INPUT, REQUEUE, GUARDED, HUNG, STOPPED)
RESTARTABLE = (UNFORESEEN, HUNG)  # another attempt may succeed
SSH_FAILED = 255  # ssh itself failed, as when a host is lost
