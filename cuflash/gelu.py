"""GELU, the erf form: y = x·Φ(x), Φ(x) = (1 + erf(x/√2))/2 (Hendrycks & Gimpel 2016)."""
import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import functions, launch
from cuflash.sites import Rounder

SQRT_HALF = math.sqrt(0.5)
INV_SQRT_TWO_PI = 1 / math.sqrt(2 * math.pi)
STORAGE = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def gelu_forward(x: np.ndarray, rnd: Rounder, *, x_format: str = "fp32") -> np.ndarray:
    """x·(½ + ½·erf(x·√½)), one rounding per operation, then site `gelu.y`.

    Args:
        x: any shape, fp32 or (precision fp64) fp64.
        x_format: a 16-bit format that x is known to be in takes the same bits from a table.
    """
    if launch.on_gpu(x):
        return _forward_cuda(x, rnd)
    return rnd("gelu.y", _apply(_gelu, x, x_format))


def gelu_backward(dy: np.ndarray, x: np.ndarray, rnd: Rounder, *, x_format: str = "fp32") -> np.ndarray:
    """dx = dy·(Φ(x) + x·φ(x)), φ(x) = exp(−½·x·x)/√(2π), at site `gelu.dx`."""
    if launch.on_gpu(x):
        return _backward_cuda(dy, x, rnd)
    slope = _apply(_slope, x, x_format)
    return rnd("gelu.dx", np.multiply(dy, slope, out=slope))


def _cdf(x: np.ndarray) -> np.ndarray:
    half = x.dtype.type(0.5)
    return half + half * _erf(x * x.dtype.type(SQRT_HALF))


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * _cdf(x)


def _slope(x: np.ndarray) -> np.ndarray:
    kind = x.dtype.type
    pdf = _exp(kind(-0.5) * x * x) * kind(INV_SQRT_TWO_PI)
    return _cdf(x) + x * pdf


def _apply(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, x_format: str) -> np.ndarray:
    if x_format not in STORAGE or x.dtype == np.float64:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # x·x may overflow: φ is 0 there
            return function(x)
    table = _table(function, x_format)
    index = np.empty(x.shape, np.intp)
    if x_format == "bf16":
        np.right_shift(x.view(np.uint32), np.uint32(16), out=index)
    else:
        index[...] = x.astype(STORAGE[x_format]).view(np.uint16)
    return np.take(table, index, mode="wrap")


@functools.cache
def _table(function: Callable[[np.ndarray], np.ndarray], x_format: str) -> np.ndarray:
    """The function at all 65,536 values of a 16-bit format, indexed by their bits."""
    return _apply(function, np.arange(1 << 16, dtype=np.uint16).view(STORAGE[x_format]).astype(np.float32),
                  "fp32")


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x) if x.dtype == np.float64 else functions.exp(x)


def _erf(x: np.ndarray) -> np.ndarray:
    return _erf64(x).astype(np.float64) if x.dtype == np.float64 else functions.erf(x)


_erf64 = np.frompyfunc(math.erf, 1, 1)  # NumPy has no erf


# ---- CUDA ---------------------------------------------------------------------------------------

def _forward_cuda(x: Any, rnd: Rounder) -> Any:
    x = launch.flat(x)
    y = launch.result(x.shape, rnd, "gelu.y")
    launch.run("gelu", "gelu_forward", _blocks(x.size), 1024,
               (x, y, np.int64(x.size), launch.place(x.shape, rnd)),
               {"X_T": launch.c_type(x), "Y_T": launch.c_type(y)},
               (("gelu.y", launch.rounding(rnd, "gelu.y")),))
    return launch.shown(rnd, "gelu.y", y)


def _backward_cuda(dy: Any, x: Any, rnd: Rounder) -> Any:
    dy, x = launch.flat(dy), launch.flat(x)
    dx = launch.result(x.shape, rnd, "gelu.dx")
    launch.run("gelu", "gelu_backward", _blocks(x.size), 1024,
               (dy, x, dx, np.int64(x.size), launch.place(x.shape, rnd)),
               {"BACKWARD": True, "DY_T": launch.c_type(dy), "X_T": launch.c_type(x),
                "DX_T": launch.c_type(dx)},
               (("gelu.dx", launch.rounding(rnd, "gelu.dx")),))
    return launch.shown(rnd, "gelu.dx", dx)


def _blocks(size: int) -> int:
    """As many as run at once: each fills its table once."""
    return max(1, min(-(-size // 8192), 2 * launch.multiprocessors()))
