"""Pictures of patterns, of a run's attention and loss, and of samples: `longstride show` and `data show`.

Matplotlib is imported where a picture is drawn.
"""

from longstride.launcher.drawing.samples import add_data_show_arguments, run_data_show
from longstride.launcher.drawing.show import add_arguments, run
