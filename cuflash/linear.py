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
    y = _dot(_rows(x), round_weight(rnd, "linear.w", w).T, rnd, rnd.format("linear.x"), rnd.format("linear.w"))
    if b is not None:
        y += round_weight(rnd, "linear.w", b)
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
    dx = _dot(_rows(dy), round_weight(rnd, "linear.w", w), rnd, dy_format, rnd.format("linear.w")).reshape(x.shape)
    dw = _dot(_rows(dy).T, _rows(x), rnd, dy_format, x_format)
    first = rnd.samples[0]
    db = round_weight(rnd, "linear.dw", column_sum(dy), first) if bias else None
    return rnd("linear.dx", dx), round_weight(rnd, "linear.dw", dw, first), db


def round_weight(rnd: Rounder, site: str, w: np.ndarray, sample: int = 0) -> np.ndarray:
    """A weight or bias at a site of axes (out, in). Its random words do not depend on the batch's samples.

    sample: tells the micro-batches of a step apart, where each has its own value.
    """
    samples, rnd.samples = rnd.samples, (sample,)
    try:
        return rnd(site, w.reshape(1, -1, w.shape[-1])).reshape(w.shape)
    finally:
        rnd.samples = samples


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
