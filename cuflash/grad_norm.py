"""The global gradient norm and clipping by it (Pascanu et al. 2013)."""
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from cuflash import launch
from cuflash.reduce import BLOCK, block_sums, block_sums_cuda, row_sum, row_threads

AT_ONCE = 1 << 20  # elements whose squares are summed together


def grad_norm(gradients: Iterable[np.ndarray]) -> float:
    """√Σg² over all arrays: the `block_sums` of each array's squares, one after the other, by `row_sum`."""
    sums, some = [], []
    for g in gradients:
        some.append(g)
        if sum(g.size for g in some) > AT_ONCE:
            sums.append(_block_sums_of_squares(some))
            some = []
    if some:
        sums.append(_block_sums_of_squares(some))
    if not sums:
        raise ValueError("gradients: needs at least one array")
    return float(np.sqrt(row_sum(np.concatenate(sums))))


def _block_sums_of_squares(arrays: list[np.ndarray]) -> np.ndarray:
    """The `block_sums` of each array's squares, one after the other."""
    begins = list(itertools.accumulate((-(-g.size // BLOCK) * BLOCK for g in arrays), initial=0))
    squares = np.zeros(begins[-1], arrays[0].dtype)
    for g, begin in zip(arrays, begins):
        np.multiply(g, g, out=squares[begin:begin + g.size].reshape(g.shape))
    return block_sums(squares)


def clip_factor(norm: float, grad_clip: float) -> float:
    """What gradients are multiplied by: min(1, grad_clip/(norm + 1e-6)), as torch; 1 where grad_clip is 0."""
    return min(1.0, grad_clip / (norm + 1e-6)) if grad_clip > 0 else 1.0


# ---- CUDA ---------------------------------------------------------------------------------------

def grad_norm_cuda(gradients: Any, grad_clip: float, losses: Any, failed: Any, step: Any) -> tuple[Any, Any]:
    """`grad_norm` and `clip_factor` on the device, of gradients in one buffer: (norm, factor), no axes.

    Args:
        gradients: fp32, each array padded with zeros to a multiple of 8192 elements (`flat.Flat.buffer`).
        losses: fp32, those of the step's micro-batches.
        failed: int32, one element: set to `step` where the norm or a loss is not finite, unless it is set.
        step: int32, one element.
    """
    sums = block_sums_cuda(gradients, squares=True)
    norm, factor = launch.empty(()), launch.empty(())
    threads = row_threads(sums.size)
    launch.run("grad_norm", "grad_norm", 1, threads,
               (sums, np.int64(sums.size), np.float64(grad_clip), norm, factor, losses,
                np.int32(losses.size), failed, step), {"THREADS": threads})
    return norm, factor
