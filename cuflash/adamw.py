"""AdamW (Loshchilov & Hutter 2019, algorithm 2), in the operation order of torch.optim.AdamW."""
import math

import numpy as np

from cuflash.linear import round_weight
from cuflash.sites import Rounder


def adamw_update(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, rnd: Rounder, *, step: int, lr: float,
                 beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.0,
                 clip: float = 1.0) -> None:
    """One update of a parameter, in place.

    g ← clip·g; w ← w·(1 − lr·λ); m ← m + (g − m)·(1 − β₁); v ← v·β₂ + (g·g)·(1 − β₂);
    w ← w − (m/(√v/√(1 − β₂ᵗ) + ε))·(lr/(1 − β₁ᵗ)). Each scalar is one fp64 expression rounded once to
    fp32; each array operation rounds once.

    Args:
        w, m, v: weight and moments, of one shape, overwritten; sites `weight`, `adam.m`, `adam.v`.
        g: gradient; site `grad`. Its memory is reused.
        step: t, from 1.
        clip: what the gradient is multiplied by first (`clip_factor`).
    """
    f = rnd.dtype
    if clip != 1.0:
        g *= f(clip)
    g = round_weight(rnd, "grad", g)
    if weight_decay:
        w *= f(1 - lr * weight_decay)
    change = g - m
    change *= f(1 - beta1)
    m += change
    m[...] = round_weight(rnd, "adam.m", m)
    np.multiply(g, g, out=change)
    change *= f(1 - beta2)
    v *= f(beta2)
    v += change
    v[...] = round_weight(rnd, "adam.v", v)
    np.sqrt(v, out=change)
    change /= f(math.sqrt(1 - beta2 ** step))
    change += f(eps)
    np.divide(m, change, out=change)
    change *= f(lr / (1 - beta1 ** step))
    w -= change
    w[...] = round_weight(rnd, "weight", w)

