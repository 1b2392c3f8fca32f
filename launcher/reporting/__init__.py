"""`longstride report`: a run, or several runs in comparison, as one page of HTML.

It reads run folders, and calls other verbs for results that need the model.
"""

from longstride.launcher.reporting.page import run
