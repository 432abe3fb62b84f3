"""The operations a precision chooses, and the sums whose order the contract fixes.

Sections 5 to 7 of numerics.md: which accumulator and exp a product or function takes, and the
order of row sums and of δ.
"""
from typing import Any

import numpy as np

from cuflash import functions, mufu
from cuflash.accumulators import common_format, dot_fp32
from cuflash.sites import Rounder

LOG2E = 1.4426950408889634


class Arithmetic:
    """Dot product, exp and log as the precision of `rnd` says, on NumPy arrays."""

    def __init__(self, rnd: Rounder) -> None:
        self.rnd, self.precision = rnd, rnd.precision
        self.real: Any = rnd.dtype
        # On a CPU `auto` is BLAS; a GPU's own accumulator is named to get its bits here.
        self.accumulator = "library" if self.precision.accumulator == "auto" else self.precision.accumulator
        self.exp_kind = "library" if self.precision.is_fp64 else self.precision.exp
        self.log2e = self.real(LOG2E)

    def dot(self, a: np.ndarray, site_a: str, b: np.ndarray, site_b: str, c: np.ndarray | None = None) -> np.ndarray:
        """a·b + c; the operands' formats are those of their sites."""
        if self.real is np.float64:
            return np.matmul(a, b) + (0.0 if c is None else c)
        format_a, format_b = self.rnd.format(site_a), self.rnd.format(site_b)
        accumulator = self.accumulator
        if accumulator in ("hopper", "ampere") and common_format(format_a, format_b) is None:
            accumulator = "sequential"
        return dot_fp32(a, b, c, accumulator, format_a, format_b)

    def exp(self, x: np.ndarray, site: str | None = None) -> np.ndarray:
        """e^x; `site` is the one that x was rounded at."""
        if self.exp_kind == "library":
            return np.exp(x)
        if self.exp_kind == "mufu":
            return mufu.ex2_mufu(x * self.log2e)
        return functions.exp(x, format=site and self.rnd.format(site))

    def exp2(self, x: np.ndarray) -> np.ndarray:
        """2^x."""
        if self.exp_kind == "library":
            return np.exp2(x)
        return mufu.ex2_mufu(x) if self.exp_kind == "mufu" else functions.exp2(x)

    def log(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm."""
        if self.exp_kind == "library":
            return np.log(x)
        return mufu.log_mufu(x) if self.exp_kind == "mufu" else functions.log(x)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c, rounded once where the arrays are fp32."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return a * b + c if a.dtype == np.float64 else functions.fma(a, b, c)


def add_columns(sums: np.ndarray, p: np.ndarray, alpha: np.ndarray | None = None) -> None:
    """Adds p (…, columns) to four sums (…, 4) in place: sum t takes columns with (c mod 8)//2 = t, ascending.

    A thread of the mma fragment holds just the columns of one sum. Under `fa2` the first addition also
    scales the sum by alpha (…), in one rounding, as torch's compiler contracts it.
    """
    if p.shape[-1] % 8:
        p = np.concatenate([p, np.zeros((*p.shape[:-1], -p.shape[-1] % 8), p.dtype)], axis=-1)
    pairs = p.reshape(*p.shape[:-1], p.shape[-1] // 8, 4, 2)
    for block in range(pairs.shape[-3]):
        for element in range(2):
            if alpha is not None and (block, element) == (0, 0):
                sums[...] = fma(sums, alpha[..., None], pairs[..., 0, :, 0])
            else:
                sums += pairs[..., block, :, element]


def join_columns(sums: np.ndarray) -> np.ndarray:
    """The four sums (…, 4) joined as two shuffles join them: (s0 + s2) + (s1 + s3)."""
    return (sums[..., 0] + sums[..., 2]) + (sums[..., 1] + sums[..., 3])


def row_sum(p: np.ndarray) -> np.ndarray:
    """Sum over the last axis in the order of `add_columns`."""
    sums = np.zeros((*p.shape[:-1], 4), p.dtype)
    add_columns(sums, p)
    return join_columns(sums)


def delta_sum(products: np.ndarray) -> np.ndarray:
    """δ's sum over the last axis: sum t of eight takes elements 8t…8t+7 of each 64, then t+4, t+2, t+1.

    At head dims from 65 to 96 four sums take those of each 32, as FlashAttention-2 has it.
    """
    d = products.shape[-1]
    width = 32 if 64 < d <= 96 else 64
    if d % width:
        pad = np.zeros((*products.shape[:-1], -d % width), products.dtype)
        products = np.concatenate([products, pad], axis=-1)
    eights = products.reshape(*products.shape[:-1], products.shape[-1] // width, width // 8, 8)
    sums = np.zeros((*products.shape[:-1], width // 8), products.dtype)
    for block in range(eights.shape[-3]):
        for element in range(8):
            sums += eights[..., block, :, element]
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]
