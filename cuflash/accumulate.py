"""Gradients of a step: sums over micro-batches, in fp32."""
from typing import Any

import numpy as np

from cuflash import launch


def accumulate(total: np.ndarray | None, g: np.ndarray, out: Any = None) -> np.ndarray:
    """total + g, or g itself where it is the first (total None).

    Args:
        out: on a GPU, a contiguous array of fp32 for the result; by default total itself, or a new one.
    """
    if launch.on_gpu(g):
        g = launch.flat(g)
        if total is not None and out is not None and out is not total:
            raise ValueError("accumulate: total must lie in out")
        out = total if total is not None else launch.empty(g.shape) if out is None else out
        launch.run("accumulate", "accumulate", launch.elementwise(g.size), 256, (out, g, np.int64(g.size)),
                   {"ADD": total is not None, "G_T": launch.c_type(g)})
        return out
    return g if total is None else total + g
