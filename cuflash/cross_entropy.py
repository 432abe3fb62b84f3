"""Softmax cross-entropy, fused: loss = log Σ exp(z) − z[target], mean over all rows."""
import numpy as np

from cuflash import functions
from cuflash.reduce import row_sum, total_sum
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
        the loss, and what backward needs.
    """
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
    dz, l, target = saved
    dz *= (rnd.dtype(scale) / l)[:, None]
    dz[np.arange(len(dz)), target[:, 0]] -= rnd.dtype(scale)
    return rnd("loss.dlogits", dz.reshape(shape))


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x) if x.dtype == np.float64 else functions.exp(x)


def _log(x: np.ndarray) -> np.ndarray:
    return np.log(x) if x.dtype == np.float64 else functions.log(x)
