"""Pictures of patterns, of a model's attention, of a run's loss and of samples: `longstride show …` and `data show`.

Matplotlib is imported where a picture is drawn.
"""

from longstride.launcher.drawing.samples import add_data_show_arguments, run_data_show
from longstride.launcher.drawing.show import (
    add_attention_arguments,
    add_loss_arguments,
    add_pattern_arguments,
    run_attention,
    run_loss,
    run_pattern,
)
