"""LayerNorm over the last axis: y = (x − mean)·rstd·w + b, rstd = 1/√(var + ε) (Ba et al. 2016, eq. 4)."""
from typing import Any

import numpy as np

from cuflash import functions, launch
from cuflash.reduce import CHUNK_ROWS, column_sum, join_chunks_cuda, row_sum, row_threads
from cuflash.residual import residual_backward, residual_forward
from cuflash.sites import Rounder

EPS = 1e-5

Saved = tuple[np.ndarray, np.ndarray, np.ndarray]


def layernorm_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, rnd: Rounder, *,
                      operand: Rounder | None = None) -> tuple[np.ndarray, Saved]:
    """Normalises each row of x.

    mean = sum(x)/C; d = x − mean; var = sum(d·d)/C, the sums as `row_sum`; x̂ = d·rstd; y = x̂·w (+ b).

    Args:
        x: (…, C).
        w: (C,).
        b: (C,) or None.
        rnd: site `ln.y`.
        operand: Rounder of the linear layer that alone takes y. On a GPU the kernel then also rounds y at its
            `linear.x`, so that the layer finds its operand ready.

    Returns:
        y like x, and what backward needs.
    """
    if launch.on_gpu(x):
        return _forward_cuda(x, None, w, b, rnd, rnd, operand)[1:]
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
    if launch.on_gpu(dy):
        dx, _, dw, db = _backward_cuda(dy, saved, None, rnd, None, bias)
        return dx, dw, db
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


def residual_layernorm_forward(x: np.ndarray, branch: np.ndarray, w: np.ndarray, b: np.ndarray | None,
                               rnd_residual: Rounder, rnd: Rounder, *,
                               operand: Rounder | None = None) -> tuple[np.ndarray, np.ndarray, Saved]:
    """`residual_forward`, then `layernorm_forward` of its result: one kernel on a GPU.

    Returns:
        the residual stream x + branch, y, and what backward needs.
    """
    if launch.on_gpu(x) and rnd.watch is None:
        return _forward_cuda(x, branch, w, b, rnd_residual, rnd, operand)
    stream = residual_forward(x, branch, rnd_residual)
    return stream, *layernorm_forward(stream, w, b, rnd, operand=operand)


def residual_layernorm_backward(
        dstream: np.ndarray, dy: np.ndarray, saved: Saved, rnd: Rounder, *, bias: bool = True,
        operand: Rounder | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """`layernorm_backward`, then `residual_backward` with the stream's gradient: one kernel on a GPU.

    Args:
        operand: Rounder of the linear layer that takes the gradient next.

    Returns:
        the gradient; the same as that layer's operand, rounded at its `linear.dy` on a GPU; dw and db.
    """
    if launch.on_gpu(dy) and rnd.watch is None:
        return _backward_cuda(dy, saved, dstream, rnd, operand, bias)
    dx, dw, db = layernorm_backward(dy, saved, rnd, bias=bias)
    dx = residual_backward(dstream, dx, rnd)
    return dx, dx, dw, db


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x) if x.dtype == np.float64 else functions.rsqrt(x)


# ---- CUDA ---------------------------------------------------------------------------------------

def _forward_cuda(x: Any, branch: Any, w: Any, b: Any, rnd_residual: Rounder, rnd: Rounder,
                  operand: Rounder | None) -> tuple[Any, Any, Any]:
    """(stream, y, saved); without a branch the stream is x."""
    x = launch.flat(x)
    C, rows = x.shape[-1], x.size // x.shape[-1]
    if rnd.watch is not None:
        operand = None  # the layer rounds y itself, and shows it
    sites = [("ln.y", launch.rounding(rnd, "ln.y"))]
    defines = _defines(C, bias=b is not None, residual=branch is not None, operand=operand is not None)
    y_rounding = sites[0][1]
    if branch is not None:
        branch, stream = launch.flat(branch), launch.result(x.shape, rnd_residual, "residual.y")
        sites.append(("residual.y", launch.rounding(rnd_residual, "residual.y")))
    else:
        stream = x
    if operand is not None:
        y_rounding = launch.rounding(operand, "linear.x")
        sites.append(("linear.x", y_rounding))
        if y_rounding.format == "fp32":
            y_rounding = sites[0][1]
    y, statistics = launch.empty(x.shape, launch.storage(y_rounding.format)), launch.empty((rows, 2))
    types = {"X_T": x, "BRANCH_T": x if branch is None else branch, "STREAM_T": stream, "Y_T": y}
    threads = row_threads(C)
    launch.run("layernorm", "layernorm_forward", max(1, min(rows, 32 * launch.multiprocessors())), threads,
               (x, branch if branch is not None else x, stream, w, b if b is not None else w, y, statistics,
                np.int64(rows), launch.place(x.shape, rnd_residual, rnd, operand or rnd)),
               {"FORWARD": True, **defines, **{name: launch.c_type(a) for name, a in types.items()}},
               tuple(sites))
    return stream, launch.shown(rnd, "ln.y", y), (stream, statistics, w)


def _backward_cuda(dy: Any, saved: Any, dstream: Any, rnd: Rounder, operand: Rounder | None,
                   bias: bool) -> tuple[Any, Any, Any, Any]:
    """(dx, dx as an operand, dw, db)."""
    x, statistics, w = saved
    dy = launch.flat(dy)
    C, rows = x.shape[-1], x.size // x.shape[-1]
    site = "ln.dx" if dstream is None else "residual.dx"
    sites = [("ln.dx", launch.rounding(rnd, "ln.dx"))]
    if dstream is not None:
        dstream = launch.flat(dstream)
        sites.append((site, launch.rounding(rnd, site)))
    dx = launch.result(x.shape, rnd, site)
    as_operand = dx
    if operand is not None and (rounding := launch.rounding(operand, "linear.dy")).format != "fp32":
        sites.append(("linear.dy", rounding))
        as_operand = launch.empty(x.shape, launch.storage(rounding.format))
    defines = _defines(C, bias=bias, residual=dstream is not None, operand=as_operand is not dx)
    types = {"DY_T": dy, "X_T": x, "DSTREAM_T": dx if dstream is None else dstream, "DX_T": dx,
             "DOPERAND_T": as_operand}
    chunks = max(1, -(-rows // CHUNK_ROWS))
    dw, db = (launch.empty((chunks, C)) if wanted else None for wanted in (True, bias))
    launch.run("layernorm", "layernorm_backward", chunks, row_threads(C),
               (dy, x, statistics, w, dx if dstream is None else dstream, dx, as_operand, dw,
                dw if db is None else db, np.int64(rows), launch.place(x.shape, rnd, rnd, operand or rnd)),
               {**defines, **{name: launch.c_type(a) for name, a in types.items()}}, tuple(sites))
    return (launch.shown(rnd, site, dx), as_operand, join_chunks_cuda(dw),
            join_chunks_cuda(db) if bias else None)


def _defines(C: int, *, bias: bool, residual: bool, operand: bool) -> dict[str, object]:
    return {"WIDTH": C, "THREADS": row_threads(C), "WHOLE": C % 4 == 0, "BIAS": bias, "RESIDUAL": residual,
            "OPERAND": operand}
