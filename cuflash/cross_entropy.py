"""Softmax cross-entropy, fused: loss = log Σ exp(z) − z[target], mean over all rows."""
import functools
from typing import Any

import numpy as np

from cuflash import functions, kernels, launch
from cuflash.reduce import row_sum, row_threads, total_sum, total_sum_cuda
from cuflash.sites import Rounder

Saved = tuple[np.ndarray, np.ndarray, np.ndarray]


def cross_entropy_forward(logits: np.ndarray, targets: np.ndarray, rnd: Rounder) -> tuple[float, Saved]:
    """Mean loss in nats.

    m = max(z); e = exp(z − m); l = Σe (`row_sum`); loss = log(l) − (z[target] − m); their mean is
    `total_sum`/rows.

    Args:
        logits: (…, vocab_size).
        targets: integers, (…).

    Returns:
        the loss (for CuPy arrays one too, of no axes), and what backward needs.
    """
    if launch.on_gpu(logits):
        return _forward_cuda(logits, targets, rnd)
    z = logits.reshape(-1, logits.shape[-1])
    target = targets.reshape(-1, 1)
    e = z - np.max(z, axis=-1, keepdims=True)
    at_target = np.take_along_axis(e, target, axis=-1)[:, 0]
    e = _exp(e)
    l = row_sum(e)  # noqa: E741
    losses = _log(l) - at_target
    return float(total_sum(losses) / rnd.dtype(len(losses))), (e, l, target)


def cross_entropy_backward(saved: Saved, shape: tuple[int, ...], scale: float, rnd: Rounder) -> np.ndarray:
    """Gradient of scale·(sum of the losses): (e·(scale/l)) − scale·[column = target], at site `loss.dlogits`.

    Args:
        saved: from the forward; its memory is reused for the result.
        shape: of the logits.
        scale: 1/rows for the mean; 1/(rows of all micro-batches) under gradient accumulation.
    """
    if launch.on_gpu(saved[0]):
        return _backward_cuda(saved, shape, scale, rnd)
    dz, l, target = saved
    dz *= (rnd.dtype(scale) / l)[:, None]
    dz[np.arange(len(dz)), target[:, 0]] -= rnd.dtype(scale)
    return rnd("loss.dlogits", dz.reshape(shape))


def cross_entropy(logits: np.ndarray, targets: np.ndarray, scale: float, fwd: Rounder,
                  bwd: Rounder) -> tuple[float, np.ndarray]:
    """Loss and gradient of the logits: forward and backward, on a GPU by one kernel that reads them once.

    The memory of the logits is reused for the gradient where their dtypes allow.
    """
    if launch.on_gpu(logits) and bwd.watch is None:
        dlogits = _gradient_array(logits, bwd)
        return _run(logits, launch.indices(targets), dlogits, scale, bwd, loss=True)[0], dlogits
    loss, saved = cross_entropy_forward(logits, targets, fwd)
    return loss, cross_entropy_backward(saved, logits.shape, scale, bwd)


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x) if x.dtype == np.float64 else functions.exp(x)


def _log(x: np.ndarray) -> np.ndarray:
    return np.log(x) if x.dtype == np.float64 else functions.log(x)


# ---- CUDA ---------------------------------------------------------------------------------------

def _forward_cuda(logits: Any, targets: Any, rnd: Rounder) -> tuple[Any, Any]:
    targets = launch.indices(targets)
    loss, statistics = _run(logits, targets, None, 0.0, rnd, loss=True)
    return loss, (logits, statistics, targets)


def _backward_cuda(saved: Any, shape: tuple[int, ...], scale: float, rnd: Rounder) -> Any:
    logits, statistics, targets = saved
    dlogits = _gradient_array(logits, rnd)
    _run(logits, targets, dlogits, scale, rnd, loss=False, statistics=statistics)
    return launch.shown(rnd, "loss.dlogits", dlogits.reshape(shape))


def _gradient_array(logits: Any, rnd: Rounder) -> Any:
    dtype = launch.storage(launch.rounding(rnd, "loss.dlogits").format)
    return logits if dtype == logits.dtype and rnd.watch is None else launch.empty(logits.shape, dtype)


def _run(logits: Any, targets: Any, dlogits: Any, scale: float, rnd: Rounder, *, loss: bool,
         statistics: Any = None) -> tuple[Any, Any]:
    """One launch: loss, gradient or both. (mean loss, m and l of each row)"""
    V, (z, z_stride) = logits.shape[-1], _rows(logits)
    dz, dz_stride = (z, z_stride) if dlogits is None else _rows(dlogits)
    rows, threads = len(z), row_threads(V)
    losses = launch.empty(rows) if loss else None
    if statistics is None:
        statistics = launch.empty((rows, 2))
    shared = -(-V // 8) * 8 * z.itemsize
    staged = loss and shared + 512 <= _shared_limit()
    aligned = all(x.data.ptr % 16 == 0 and stride * x.itemsize % 16 == 0
                  for x, stride in ((z, z_stride), (dz, dz_stride)))
    site = ("loss.dlogits", launch.rounding(rnd, "loss.dlogits"))
    launch.run("cross_entropy", "cross_entropy", rows, threads,
               (z, np.int64(z_stride), targets, statistics if losses is None else losses, statistics, dz,
                np.int64(dz_stride),
                np.float32(scale), launch.place(logits.shape, rnd)),
               {"WIDTH": V, "THREADS": threads, "STAGED": staged, "ALIGNED": aligned, "LOSS": loss,
                "GRADIENT": dlogits is not None, "Z_T": launch.c_type(z), "DZ_T": launch.c_type(dz)}, (site,),
               shared=shared if staged else 0)
    return total_sum_cuda(losses, rows) if loss else None, statistics


def _rows(x: Any) -> tuple[Any, int]:
    """x as (rows, vocab_size), and the distance of its rows, which may be padded."""
    x = x.reshape(-1, x.shape[-1])
    if x.strides[1] != x.itemsize:
        raise ValueError(f"logits: the last axis must be contiguous, got strides {x.strides}")
    return x, x.strides[0] // x.itemsize


@functools.cache
def _shared_limit() -> int:
    """Bytes of shared memory that a block may have."""
    return kernels.import_cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
