"""A run, or several beside each other, as one page of HTML: `longstride report`.

It reads run folders alone: what takes the model is asked of other verbs, in processes of their own.
"""

from longstride.launcher.reporting.report import run
