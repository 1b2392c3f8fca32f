"""Pictures of patterns, of a run's attention and loss, and of samples: `longstride show` and `data show`.

Matplotlib is imported where a picture is drawn.
"""

from longstride.launcher.drawing.samples import run_data_show
from longstride.launcher.drawing.show import run
