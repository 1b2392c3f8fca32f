"""A run, or several beside each other, as one page of HTML: `longstride report`.

It reads run folders, and calls other verbs for what takes the model.
"""

from longstride.launcher.reporting.report import run
