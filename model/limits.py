"""Where a fix stops working, without training: ties at a given row maximum, under a precision.

Source: arXiv 2510.04212, section 4 and appendix C: where P̄ of the tied keys rounds back to 1, and where it
vanishes, so that l = 0 and O is NaN.
"""
import math
from dataclasses import dataclass

import numpy as np

from cuflash.attention import flash_attention
from cuflash.fixes import Fix, as_fix
from cuflash.philox import Key
from cuflash.precision import Precision, as_precision
from cuflash.sites import Rounder

DIM = 16  # head dim; q is 1 in its first feature and 0 elsewhere, so S is k's first feature


@dataclass(frozen=True)
class Limits:
    """Of two tied keys, as a row of limits.csv; row maxima above and below zero.

    `inert`: the largest |r_m| up to which P̄ is 1 all the same. `nan`: the smallest |r_m| from which on O is not
    finite, infinite where none is. `zero`: the same for O = 0, which is as wrong.
    """

    fix: str
    precision: str
    side: str
    inert: float
    zero: float
    nan: float


def limits(fix: Fix | str, precision: Precision | str, *, largest: float = 512.0,
           count: int = 4096) -> tuple[Limits, Limits]:
    """For maxima above and below zero: `count` of them in geometric steps from 2⁻¹², each to bf16's digits."""
    fix, p = as_fix(fix), as_precision(precision)
    maxima = np.unique(np.geomspace(2.0**-12, largest, count).astype(np.float32).view(np.uint32) >> 16 << 16)
    maxima = maxima.astype(np.uint32).view(np.float32)
    return (_side(fix, p, maxima, "above 0"), _side(fix, p, -maxima, "below 0"))


def _side(fix: Fix, p: Precision, maxima: np.ndarray, side: str) -> Limits:
    n = len(maxima)
    q, k = np.zeros((n, 1, 1, DIM), np.float32), np.zeros((n, 1, 2, DIM), np.float32)
    q[..., 0], k[..., 0] = 1, maxima[:, None, None]
    v = np.ones((n, 1, 2, DIM), np.float32)
    ones = np.zeros(n, bool)

    def watch(rnd: Rounder, site: str, x: np.ndarray, y: np.ndarray) -> None:
        if site == "attn.p":
            ones[np.asarray(rnd.samples)] = (y == 1).reshape(len(ones[np.asarray(rnd.samples)]), -1).all(axis=1)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        o = flash_attention(q, k, v, scale=1.0, precision=p, fix=fix, key=Key(0), watch=watch)
    o = np.asarray(o, np.float32)[:, 0, 0, 0]
    sizes = np.abs(maxima)
    return Limits(str(fix), p.name, side, float(sizes[ones].max(initial=0)), _first(sizes[o == 0]),
                  _first(sizes[~np.isfinite(o)]))


def _first(sizes: np.ndarray) -> float:
    return float(sizes.min()) if len(sizes) else math.inf
