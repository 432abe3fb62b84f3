"""The residual stream: y = x + branch, and where the gradients of branch and stream join."""
from typing import Any

import numpy as np

from cuflash import launch
from cuflash.sites import Rounder


def residual_forward(x: np.ndarray, branch: np.ndarray, rnd: Rounder) -> np.ndarray:
    """x + branch at site `residual.y`; any shape."""
    if launch.on_gpu(x):
        return _sum_cuda(x, branch, rnd, "residual.y")
    return rnd("residual.y", x + branch)


def residual_backward(dy: np.ndarray, dbranch: np.ndarray, rnd: Rounder) -> np.ndarray:
    """dy (along the stream) + dbranch (back through the branch's first operation), at site `residual.dx`."""
    if launch.on_gpu(dy):
        return _sum_cuda(dy, dbranch, rnd, "residual.dx")
    return rnd("residual.dx", dy + dbranch)


# ---- CUDA ---------------------------------------------------------------------------------------

def _sum_cuda(x: Any, branch: Any, rnd: Rounder, site: str) -> Any:
    x, branch = launch.flat(x), launch.flat(branch)
    y = launch.result(x.shape, rnd, site)
    launch.run("residual", "residual", launch.elementwise(x.size), 256,
               (x, branch, y, np.int64(x.size), launch.place(x.shape, rnd)),
               {"ROUNDED": site.replace(".", "_"), "X_T": launch.c_type(x), "BRANCH_T": launch.c_type(branch),
                "Y_T": launch.c_type(y)}, ((site, launch.rounding(rnd, site)),))
    return launch.shown(rnd, site, y)
