"""The global gradient norm and clipping by it (Pascanu et al. 2013)."""
from collections.abc import Iterable

import numpy as np

from cuflash.reduce import total_sum


def grad_norm(gradients: Iterable[np.ndarray]) -> float:
    """√Σg² over all arrays: squares summed by `total_sum` in each array, the arrays' sums in the order given."""
    total = None
    for g in gradients:
        squares = total_sum(g * g)
        total = squares if total is None else total + squares
    if total is None:
        raise ValueError("gradients: needs at least one array")
    return float(np.sqrt(total))


def clip_factor(norm: float, grad_clip: float) -> float:
    """What gradients are multiplied by: min(1, grad_clip/(norm + 1e-6)), as torch; 1 where grad_clip is 0."""
    return min(1.0, grad_clip / (norm + 1e-6)) if grad_clip > 0 else 1.0
