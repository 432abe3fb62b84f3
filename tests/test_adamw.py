import math

import numpy as np
import pytest

from cuflash.adamw import adamw_update
from cuflash.formats import is_representable
from cuflash.precision import Precision
from cuflash.sites import Rounder

from .finite import Watcher, rounder

OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def scalar_adamw(w: float, gradients: list[float], lr: float, beta1: float, beta2: float, eps: float,
                 weight_decay: float) -> float:
    """Algorithm 2 of the paper, as printed, on one number."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        w = w - lr * (m_hat / (math.sqrt(v_hat) + eps) + weight_decay * w)
    return w


@pytest.mark.parametrize(
    "precision,bound", [("fp64", 1e-14), ("fp32", 2e-6)]
)  # 20 steps of about 12 roundings
def test_it_is_the_algorithm(precision, bound):
    rng = np.random.default_rng(7)
    rnd = rounder(precision, "bwd")
    w0, gradients = rng.standard_normal((2, 3)), rng.standard_normal((20, 2, 3))
    w = w0.astype(rnd.dtype)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in enumerate(gradients, 1):
        adamw_update(w, g.astype(rnd.dtype), m, v, rnd, step=step, **OPTIONS)
    for i in np.ndindex(2, 3):
        assert abs(w[i] - scalar_adamw(w0[i], list(gradients[(slice(None), *i)]), **OPTIONS)) < bound


def test_the_gradient_is_clipped_first():
    def once(g: list[float], clip: float) -> np.ndarray:
        w, m, v = np.zeros((3, 1, 2), np.float32)
        adamw_update(w, np.array([g], np.float32), m, v, rounder("fp32", "bwd"), step=1, lr=1e-2, clip=clip)
        return np.concatenate([w, m, v])

    assert np.array_equal(once([1, 2], 0.5), once([0.5, 1], 1.0))


def test_sites():
    """All four by name; those set to bf16 hold bf16 afterwards."""
    seen = Watcher()
    p = Precision.named("fp32").round("adam.m=bf16", "adam.v=bf16", "weight=bf16")
    w, m, v = np.full((3, 4), 0.3, np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)
    w, m, v = w[0].copy(), m, v
    adamw_update(w, np.full(4, 0.7, np.float32), m, v, Rounder(p, "bwd", watch=seen), step=1, **OPTIONS)
    assert seen.sites == ["grad", "adam.m", "adam.v", "weight"]
    assert all(is_representable(a, "bf16").all() and a.any() for a in (w, m, v))
