"""Pictures of patterns, of a model's attention, of a run's loss and of samples: `longstride show …` and `data show`.

Matplotlib is imported where a picture is drawn.
"""

from longstride.launcher.drawing.samples import run_data_show
from longstride.launcher.drawing.series import (
    MEAN_SHARE,
    MOST_NAME_CHARACTERS,
    Event,
    Metrics,
    Series,
    read_metrics,
    smoothed,
)
from longstride.launcher.drawing.show import run_attention, run_loss, run_pattern
