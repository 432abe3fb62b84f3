"""Linear layer: y = x·wᵀ + b, weights as (out, in)."""
import functools
from typing import Any

import numpy as np

from cuflash import kernels, launch
from cuflash.accumulators import common_format, dot_fp32
from cuflash.kernel_header import device_accumulator
from cuflash.precision import Rounding
from cuflash.reduce import column_sum, column_sum_cuda
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
    if launch.on_gpu(x):
        return _forward_cuda(x, w, b, rnd, y_site)
    x = rnd("linear.x", x)
    y = _dot(_rows(x), round_weight(rnd, "linear.w", w).T, rnd, rnd.format("linear.x"),
             rnd.format("linear.w"))
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
    if launch.on_gpu(dy):
        return _backward_cuda(dy, saved, w, rnd, bias)
    x, x_format = saved
    dy = rnd("linear.dy", dy)
    dy_format = rnd.format("linear.dy")
    dx = _dot(_rows(dy), round_weight(rnd, "linear.w", w), rnd, dy_format,
              rnd.format("linear.w")).reshape(x.shape)
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


# ---- CUDA ---------------------------------------------------------------------------------------

# `library` is cuBLAS, which sums products of 16-bit operands in fp32 and rounds the sum once to a 16-bit
# result. The bit-defined accumulators run cuda/linear.cu.

_DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # cublasMath_t: a split of k is summed in fp32 too
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def _forward_cuda(x: Any, w: Any, b: Any, rnd: Rounder, y_site: str) -> tuple[Any, Saved]:
    x = launch.flat(rnd("linear.x", x))
    formats = rnd.format("linear.x"), rnd.format("linear.w")
    shape = (*x.shape[:-1], len(w))
    y = _product_cuda(_rows(x), round_weight(rnd, "linear.w", w).T, formats, rnd, y_site, shape,
                      bias=None if b is None else round_weight(rnd, "linear.w", b))
    return launch.shown(rnd, y_site, y.reshape(shape)), (x, formats[0])


def _backward_cuda(dy: Any, saved: Saved, w: Any, rnd: Rounder, bias: bool) -> tuple[Any, Any, Any]:
    x, x_format = saved
    dy = rnd("linear.dy", dy)
    rows, dy_format, first = _rows(dy), rnd.format("linear.dy"), int(rnd.samples[0])
    dx = _product_cuda(rows, round_weight(rnd, "linear.w", w), (dy_format, rnd.format("linear.w")), rnd,
                       "linear.dx", x.shape)
    dw = _product_cuda(rows.T, _rows(x), (dy_format, x_format), rnd, "linear.dw", w.shape, sample=first)
    db = None
    if bias:
        db = column_sum_cuda(dy, "linear.dw", launch.rounding(rnd, "linear.dw"),
                             launch.place((1, len(w)), rnd, sample=first))
    if rnd.watch is not None:
        dw, db = (g if g is None else round_weight(rnd, "linear.dw", g, first) for g in (dw, db))
    return launch.shown(rnd, "linear.dx", dx.reshape(x.shape)), dw, db


def _product_cuda(a: Any, b: Any, formats: tuple[str, str], rnd: Rounder, site: str, shape: tuple[int, ...],
                  *, bias: Any = None, sample: int | None = None) -> Any:
    """(M, K)·(K, N) + bias, rounded at a site: (M, N), its rows padded to 16 bytes.

    shape: of the result in the network, (samples, rows, N).
    """
    accumulator = rnd.precision.accumulator
    rounding, place = launch.rounding(rnd, site), launch.place(shape, rnd, sample=sample)
    if accumulator in ("auto", "library"):
        return _library(a, b, common_format(*formats), site, rounding, place, bias)
    accumulator = device_accumulator(rnd.precision, kernels.capability(a.device.id))
    common = None if accumulator == "sequential" else common_format(*formats)
    c = _padded(len(a), b.shape[1], launch.storage(rounding.format))
    strides = [stride // x.itemsize for x in (a, b) for stride in x.strides]
    bias = None if bias is None else launch.cast(bias, np.dtype(np.float32))
    launch.run("linear", "linear", (-(-len(a) // 64), -(-b.shape[1] // 64)), 128,
               (a, b, bias if bias is not None else np.uint64(0), c, np.int32(len(a)), np.int32(b.shape[1]),
                np.int32(a.shape[1]), *map(np.int64, strides), np.int64(c.strides[0] // c.itemsize), place),
               {"PRODUCT_KERNEL": True, "A_T": launch.c_type(a), "B_T": launch.c_type(b),
                "C_T": launch.c_type(c), "A_ROWS": strides[1] == 1, "B_ROWS": strides[3] == 1,
                "ROUNDED": site.replace(".", "_")},
               ((site, rounding),),
               products=f"PRODUCT(linear, {common.name})\n" if common else "SEQUENTIAL_PRODUCT(linear)\n")
    return c


def _padded(rows: int, columns: int, dtype: np.dtype) -> Any:
    """An empty matrix whose rows start at multiples of 128 bytes where they would not be aligned to 16."""
    width = columns if columns % 8 == 0 else -(-columns // 64) * 64
    return launch.empty((rows, width), dtype)[:, :columns]


def _library(a: Any, b: Any, common: Any, site: str, rounding: Rounding, place: np.ndarray, bias: Any) -> Any:
    """By cuBLAS, in the operands' common format, or fp32 where there is none."""
    from cupy.cuda import cublas, runtime
    types = {"bfloat16": runtime.CUDA_R_16BF, "float16": runtime.CUDA_R_16F, "float32": runtime.CUDA_R_32F}
    operand = launch.storage(common.name if common else "fp32")
    a, b = (launch.cast(x, operand) if x.dtype != operand else x for x in (a, b))
    (M, K), N = a.shape, b.shape[1]
    # cuBLAS rounds its fp32 sum once. Given a start value it erred by more, so a bias is added afterwards.
    directly = bias is None and (rounding.format == "fp32" or rounding.mode == "rne" and operand.itemsize == 2
                                 and operand == launch.storage(rounding.format))
    c = _padded(M, N, launch.storage(rounding.format) if directly else np.dtype(np.float32))
    tf32 = common is not None and common.name == "tf32"
    compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else cublas.CUBLAS_COMPUTE_32F
    (b_op, ldb), (a_op, lda) = _order(b), _order(a)
    # It has columns first, so it is given Cᵀ = Bᵀ·Aᵀ.
    cublas.gemmEx(_handle(runtime.getDevice()), b_op, a_op, N, M, K, _ONE.ctypes.data, b.data.ptr,
                  types[b.dtype.name], ldb, a.data.ptr, types[a.dtype.name], lda, _ZERO.ctypes.data,
                  c.data.ptr, types[c.dtype.name], c.strides[0] // c.itemsize, compute,
                  cublas.CUBLAS_GEMM_DEFAULT)
    return c if directly else _finished(c, bias, site, rounding, place)


def _finished(c: Any, bias: Any, site: str, rounding: Rounding, place: np.ndarray) -> Any:
    """c + bias at a site, of an fp32 matrix with contiguous rows; in place where the result is fp32."""
    (rows, columns), dtype = c.shape, launch.storage(rounding.format)
    y = c if dtype == c.dtype else _padded(rows, columns, dtype)
    launch.run("linear", "linear_finish", rows, min(256, -(-columns // 128) * 32),
               (c, c if bias is None else launch.cast(bias, np.dtype(np.float32)), y, np.int32(columns),
                np.int64(c.strides[0] // c.itemsize), np.int64(y.strides[0] // y.itemsize), place),
               {"FINISH_KERNEL": True, "BIAS": bias is not None, "Y_T": launch.c_type(y),
                "WHOLE": columns % 4 == 0, "ROUNDED": site.replace(".", "_")}, ((site, rounding),))
    return y


def _order(x: Any) -> tuple[int, int]:
    """cuBLAS's (operation, leading dimension) of a matrix with rows or columns contiguous."""
    down, along = (stride // x.itemsize for stride in x.strides)
    if along == 1:
        return 0, max(down, 1)  # CUBLAS_OP_N
    if down == 1:
        return 1, max(along, 1)  # CUBLAS_OP_T
    raise ValueError(f"operand: rows or columns must be contiguous, got strides {x.strides}")


@functools.cache
def _handle(device: int) -> int:
    from cupy.cuda import cublas
    handle = cublas.create()
    cublas.setMathMode(handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
    return handle
