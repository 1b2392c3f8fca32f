"""The costs of a run, and a trial of its start: `longstride plan`, `new` and `train --dry-run`.

`costs` imports torch and `dry_run` DeepSpeed, so nothing imports them before they are needed.
"""

from longstride.launcher.planning.plan import peak_bytes, plan_run, sum_of_flops
