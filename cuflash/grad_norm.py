"""The global gradient norm and clipping by it (Pascanu et al. 2013)."""
from collections.abc import Iterable

import numpy as np

from cuflash.reduce import block_sums, row_sum


def grad_norm(gradients: Iterable[np.ndarray]) -> float:
    """√Σg² over all arrays: the `block_sums` of each array's squares, one after the other, by `row_sum`."""
    sums = [block_sums(g * g) for g in gradients]
    if not sums:
        raise ValueError("gradients: needs at least one array")
    return float(np.sqrt(row_sum(np.concatenate(sums))))


def clip_factor(norm: float, grad_clip: float) -> float:
    """What gradients are multiplied by: min(1, grad_clip/(norm + 1e-6)), as torch; 1 where grad_clip is 0."""
    return min(1.0, grad_clip / (norm + 1e-6)) if grad_clip > 0 else 1.0
