"""Recurrences over positions: ``delta_rule(q, k, v, log_decay, beta)``."""

from longstride.kernels.recurrences.delta import delta_rule
