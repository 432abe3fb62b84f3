"""LayerNorm over the last axis: y = (x − mean)·rstd·w + b, rstd = 1/√(var + ε) (Ba et al. 2016, eq. 4)."""
import numpy as np

from cuflash import functions
from cuflash.reduce import column_sum, row_sum
from cuflash.sites import Rounder

EPS = 1e-5

Saved = tuple[np.ndarray, np.ndarray, np.ndarray]


def layernorm_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, rnd: Rounder) -> tuple[np.ndarray, Saved]:
    """Normalises each row of x.

    mean = sum(x)/C; d = x − mean; var = sum(d·d)/C, the sums as `row_sum`; x̂ = d·rstd; y = x̂·w (+ b).

    Args:
        x: (…, C).
        w: (C,).
        b: (C,) or None.
        rnd: site `ln.y`.

    Returns:
        y like x, and what backward needs.
    """
    C = x.shape[-1]
    xhat = x - (row_sum(x) / rnd.dtype(C))[..., None]
    variance = row_sum(xhat * xhat) / rnd.dtype(C)
    rstd = _rsqrt(variance + rnd.dtype(EPS))[..., None]
    xhat *= rstd
    y = xhat * w
    if b is not None:
        y += b
    return rnd("ln.y", y), (xhat, rstd, w)


def layernorm_backward(dy: np.ndarray, saved: Saved, rnd: Rounder, *,
                       bias: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Gradients of x, w and b (None without bias); site `ln.dx`.

    g = dy·w; dx = ((g − sum(g)/C) − x̂·(sum(g·x̂)/C))·rstd, the sums as `row_sum`; dw = sum of dy·x̂ and
    db = sum of dy over the rows, as `column_sum`.
    """
    xhat, rstd, w = saved
    C = rnd.dtype(dy.shape[-1])
    g = dy * w
    product = g * xhat
    dx = g
    dx -= (row_sum(g) / C)[..., None]
    scaled = xhat * (row_sum(product) / C)[..., None]
    dx -= scaled
    dx *= rstd
    dw = column_sum(np.multiply(dy, xhat, out=product))
    return rnd("ln.dx", dx), dw, column_sum(dy) if bias else None


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x) if x.dtype == np.float64 else functions.rsqrt(x)
