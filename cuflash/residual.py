"""The residual stream: y = x + branch, and where the gradients of branch and stream join."""
import numpy as np

from cuflash.sites import Rounder


def residual_forward(x: np.ndarray, branch: np.ndarray, rnd: Rounder) -> np.ndarray:
    """x + branch at site `residual.y`; any shape."""
    return rnd("residual.y", x + branch)


def residual_backward(dy: np.ndarray, dbranch: np.ndarray, rnd: Rounder) -> np.ndarray:
    """dy (along the stream) + dbranch (back through the branch's first operation), at site `residual.dx`."""
    return rnd("residual.dx", dy + dbranch)
