"""`longstride doctor`: whether this machine, and the hosts of a run, have what a run needs; each finding with its mend.

Imports no torch: whatever may crash or hang is asked of a child with a time-out.
"""

from longstride.launcher.doctor.examination import run
