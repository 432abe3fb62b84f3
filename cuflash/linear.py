"""Linear layer: y = x·wᵀ + b, weights as (out, in)."""
import numpy as np

from cuflash.dot import common_format, dot_fp32
from cuflash.reduce import column_sum
from cuflash.sites import Rounder

Saved = tuple[np.ndarray, str]


def linear_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, rnd: Rounder, *,
                   y_site: str = "linear.y") -> tuple[np.ndarray, Saved]:
    """x·wᵀ + b, rounded once after the bias.

    Args:
        x: (…, in), rounded at `linear.x`.
        w: (out, in), rounded at `linear.w`.
        b: (out,) or None, rounded at `linear.w` too.
        y_site: the site of the result; `logits` for the model's head.

    Returns:
        y (…, out), and what backward needs: the rounded x and its format.
    """
    x = rnd("linear.x", x)
    y = _dot(_rows(x), rnd("linear.w", w[None])[0].T, rnd, rnd.format("linear.x"), rnd.format("linear.w"))
    if b is not None:
        y += rnd("linear.w", b[None, None])[0, 0]
    return rnd(y_site, y.reshape(*x.shape[:-1], len(w))), (x, rnd.format("linear.x"))


def linear_backward(dy: np.ndarray, saved: Saved, w: np.ndarray, rnd: Rounder, *,
                    bias: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Gradients: dx = dy·w, dw = dyᵀ·x, db = sum of dy over the rows (`column_sum`).

    Args:
        dy: (…, out), rounded at `linear.dy`.
        saved: from the forward.
        w: (out, in), rounded at `linear.w`.

    Returns:
        dx (…, in) at site `linear.dx`; dw (out, in) and db (out,), None without bias, at `linear.dw`.
    """
    x, x_format = saved
    dy = rnd("linear.dy", dy)
    dy_format = rnd.format("linear.dy")
    dx = _dot(_rows(dy), rnd("linear.w", w[None])[0], rnd, dy_format, rnd.format("linear.w")).reshape(x.shape)
    dw = _dot(_rows(dy).T, _rows(x), rnd, dy_format, x_format)
    db = rnd("linear.dw", column_sum(dy)[None, None])[0, 0] if bias else None
    return rnd("linear.dx", dx), rnd("linear.dw", dw[None])[0], db


def _dot(a: np.ndarray, b: np.ndarray, rnd: Rounder, format_a: str, format_b: str) -> np.ndarray:
    """(M, K)·(K, N) by the precision's accumulator; `auto` is the BLAS library outside attention."""
    if rnd.dtype == np.float64:
        return a @ b
    accumulator = "library" if rnd.precision.accumulator == "auto" else rnd.precision.accumulator
    if accumulator in ("hopper", "ampere") and common_format(format_a, format_b) is None:
        accumulator = "sequential"  # numerics.md section 5
    return dot_fp32(a, b, None, accumulator, format_a, format_b)


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])
