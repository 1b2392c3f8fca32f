"""Multinomial logistic regression with an L2 penalty, fitted in float64.

Letters: n examples, C features, K classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
HELD_OUT = 10  # one example in so many chooses the penalty
_MOST_STEPS = 2000  # of LBFGS
_ROUGH, _EXACT = 1e-5, 1e-7  # largest component of the gradient at the end: to compare penalties, and of the result
_HISTORY = 20  # steps that LBFGS remembers


class Classifier(NamedTuple):
    """A linear classifier of standardised features: the argmax of weight · (x - mean) / scale + bias."""

    weight: Tensor  # (K, C) float64
    bias: Tensor  # (K,)
    mean: Tensor  # (C,)
    scale: Tensor  # (C,)
    penalty: float

    def logits(self, features: Tensor) -> Tensor:
        """Return (n, K) from features (n, C)."""
        return F.linear((features - self.mean) / self.scale, self.weight, self.bias)


def objective(parameters: Tensor, features: Tensor, classes: Tensor, penalty: float) -> Tensor:
    """Return the mean cross-entropy in nats plus penalty / 2 · ‖weight‖²; the bias has no penalty.

    Args:
        parameters: (K, C + 1), each row a class's weight and bias.
        features: (n, C).
        classes: (n,) int64 below K.
        penalty: of the weights.
    """
    weight, bias = parameters[:, :-1], parameters[:, -1]
    return F.cross_entropy(F.linear(features, weight, bias), classes) + penalty / 2 * weight.square().sum()


def minimise(start: Tensor, features: Tensor, classes: Tensor, penalty: float, tolerance: float = _EXACT) -> Tensor:
    """Return the parameters (K, C + 1) that minimise ``objective``, by LBFGS from ``start``.

    The objective is convex. ``tolerance`` is the largest component of the gradient at the end.
    """
    parameters = start.clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [parameters],
        max_iter=_MOST_STEPS,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
    )

    def evaluate() -> Tensor:
        solver.zero_grad()
        loss = objective(parameters, features, classes, penalty)
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(evaluate)
    return parameters.detach()


def fit(features: Tensor, classes: Tensor, num_classes: int) -> Classifier:
    """Fit a classifier. Equal arguments give equal bits on one machine with one number of threads.

    The penalty with the least cross-entropy on a held-out tenth is taken, and all examples are fitted with it again.

    Args:
        features: (n, C) of any precision, at least two examples.
        classes: (n,) int64 below ``num_classes``.
        num_classes: K.
    """
    features = features.double()
    mean, scale = features.mean(0), features.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    inputs = (features - mean) / scale
    # The same examples for all layers, in any order of the data.
    order = np.argsort(np.random.Philox(key=np.array([0, len(inputs)], dtype=np.uint64)).random_raw(len(inputs)))
    held_out, fitted = (
        (inputs[part], classes[part]) for part in torch.from_numpy(order).tensor_split([max(1, len(order) // HELD_OUT)])
    )
    solution, choices = torch.zeros(num_classes, inputs.shape[1] + 1, dtype=torch.float64), []
    for penalty in PENALTIES:  # each begins at the solution of the larger one, which is near
        solution = minimise(solution, *fitted, penalty, _ROUGH)
        choices.append((float(objective(solution, *held_out, 0.0)), penalty, solution))
    _, penalty, solution = min(choices, key=lambda choice: choice[0])
    solution = minimise(solution, inputs, classes, penalty)
    return Classifier(solution[:, :-1], solution[:, -1], mean, scale, penalty)
