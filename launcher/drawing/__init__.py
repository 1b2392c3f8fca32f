"""Pictures of patterns, attention, losses and samples: `longstride show …` and `data show`.

Matplotlib is imported when a picture is drawn.
"""

from longstride.launcher.drawing.samples import run_data_show
from longstride.launcher.drawing.show import (
    MEAN_SHARE,
    MOST_NAME_CHARACTERS,
    Event,
    Metrics,
    Series,
    read_metrics,
    run_attention,
    run_loss,
    run_pattern,
    smoothed,
)
