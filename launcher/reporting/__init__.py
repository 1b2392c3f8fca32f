"""A run, or several beside each other, as one page of HTML: `longstride report`.

Imports neither torch nor deepspeed: what takes the model is asked of other verbs, in processes of their own.
"""

from longstride.launcher.reporting.report import run
