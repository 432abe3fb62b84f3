"""Accumulators of accumulators.py that need no tensor core: fma in fp32, and the exact sum.

A panel takes x (n, K, rows), y (n, K, cols) and adds their products to out (n, rows, cols) in place,
cols at most INNER. All are fp32 of any strides; floating-point warnings are off.
"""
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

INNER = 1024         # columns of a block: the axis of NumPy's inner loops
ELEMENTS = 1 << 16   # of a block: fewer cost more in calls, more no longer fit the cache
CHUNK = 256          # k at once, a multiple of every tensor-core group

_NAN = 0x7FFFFFFF    # what the hardware writes for every NaN


def canonical(out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Zeros to +0 and NaNs to the hardware's, in place."""
    out += np.float32(0)
    if np.isnan(np.maximum.reduce(out, axis=None, initial=0)):  # one pass where there is none
        out.view(np.int32)[np.isnan(out)] = _NAN
    return out


def blocks(out: NDArray[np.float32]) -> Iterator[slice]:
    """Slices of out's rows with at most ELEMENTS each, or one row."""
    step = max(1, ELEMENTS // (out.shape[0] * out.shape[2]))
    for i in range(0, out.shape[1], step):
        yield slice(i, i + step)


# ---- sequential ---------------------------------------------------------------------------------

def sequential_panel(x: NDArray, y: NDArray, out: NDArray) -> None:
    """acc = fma(a, b, acc), k ascending.

    Three ways, by what the values of one k allow: where fp32 holds every product, a product and a sum in fp32
    (always for fp16, nearly always for bf16 and tf32); where products have at most 24 bits, the sum in fp64,
    cast; else the sum in fp64, cast where the cast cannot round wrongly, and repaired first where it can.
    """
    for k in range(0, x.shape[1], CHUNK):
        xk, yk = x[:, k:k + CHUNK], np.ascontiguousarray(y[:, k:k + CHUNK])
        y_bits, y_low, y_high = _extent(yk)
        for i in blocks(out):
            xi = np.ascontiguousarray(xk[:, :, i])
            x_bits, x_low, x_high = _extent(xi)
            bits = x_bits + y_bits  # a product's last bit is no lower than its exponent less this, less 1
            tiny = x_low * y_low < np.ldexp(1.0, bits - 148)  # may have bits below 2^-149
            acc = np.ascontiguousarray(out[:, i])
            _fma_chunk(xi[..., None], yk[:, :, None], acc, bits <= 22, tiny, x_high * y_high < 2.0**128)
            out[:, i] = acc


def _extent(x: NDArray) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]]:
    """For each k of x (n, K, m): mantissa bits in use, smallest magnitude but 0, largest finite magnitude."""
    words = np.bitwise_or.reduce(x.view(np.int32), axis=(0, 2)) & 0x7FFFFF
    bits = 24 - np.frexp((words & -words).astype(np.float64))[1]  # by the lowest bit set
    a = np.abs(x).astype(np.float64)
    a[~np.isfinite(a)] = 0
    return np.where(words == 0, 0, bits), np.where(a == 0, np.inf, a).min(axis=(0, 2)), a.max(axis=(0, 2))


def _fma_chunk(x: NDArray, y: NDArray, acc: NDArray, short: NDArray, tiny: NDArray, below: NDArray) -> None:
    """acc takes the products of x (n, K, rows, 1) and y (n, K, 1, cols).

    For each k: short, products have at most 24 bits; tiny, some may be finer than 2^-149; below, than 2^128.
    """
    exact = short & ~tiny & below
    p = np.empty_like(acc)
    if not exact.all():
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        p64, acc64, total = np.empty((3, *acc.shape))
    for k in range(x.shape[1]):
        if exact[k]:
            np.multiply(x[:, k], y[:, k], out=p)
            np.add(acc, p, out=acc)
            continue
        np.multiply(x64[:, k], y64[:, k], out=p64)
        np.copyto(acc64, acc)
        if short[k]:
            # acc and p of 24 bits: fl64 is exact, or one is below 2^-28 of the other and cannot bring the sum
            # to a point midway between two fp32 numbers, so that two roundings are one.
            np.add(acc64, p64, out=total)
            np.copyto(acc, total, casting="unsafe")
        else:
            _add_rounded(p64, acc64, acc, total, bool(tiny[k]))


def _add_rounded(p: NDArray, q: NDArray, out: NDArray, s: NDArray, tiny: bool) -> None:
    """out (fp32) = p + q (fp64), rounded once; s is scratch, all contiguous.

    fl64(p + q) rounds to fp32 as p + q does unless it is a point midway between two fp32 numbers: its last 29
    bits are 100… or, where p + q may be finer than 2^-149 (tiny), it is subnormal. Such sums are moved off
    by the sign of their error.
    """
    np.add(p, q, out=s)
    doubtful = (s.view(np.int64) & 0x1FFFFFFF) == 1 << 28
    if tiny:
        doubtful |= (np.abs(s) < 2.0**-126) & (s != 0)
    at = np.flatnonzero(doubtful)
    if len(at) > s.size // 16:  # gathering costs more than the whole
        error = _two_sum(p, q)[1].reshape(-1)
        at = at[error[at] != 0]
        error = error[at]
    else:
        error = _two_sum(p.reshape(-1)[at], q.reshape(-1)[at])[1]
    if len(at):
        sum_ = s.reshape(-1)[at]
        s.reshape(-1)[at] = np.where(error != 0, np.nextafter(sum_, np.copysign(np.inf, error)), sum_)
    np.copyto(out, s, casting="unsafe")


def _two_sum(a: NDArray, b: NDArray) -> tuple[NDArray, NDArray]:
    """a + b as its rounded value and the rounding's error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


# ---- exact --------------------------------------------------------------------------------------

def exact_panel(x: NDArray, y: NDArray, out: NDArray) -> None:
    """The exact sum of all products and out, rounded once to fp32.

    Products are exact in fp64. Their sum is carried as s + e + t by two TwoSums a term, with t's magnitude
    bounded by `rest`, so the result is known wherever both ends of the interval round alike; the others
    are summed as integers.
    """
    for i in blocks(out):
        s = out[:, i].astype(np.float64)
        e, rest = np.zeros_like(s), np.zeros_like(s)
        for k in range(x.shape[1]):
            p = x[:, k, i, None].astype(np.float64) * y[:, k, None].astype(np.float64)
            s, error = _two_sum(s, p)
            e, error = _two_sum(e, error)
            rest += np.abs(error)
        # fl(rest) may lie below the true sum by K roundings of 2^-53 each: 1 % covers any K < 2^46.
        rest *= 1.01
        finite = np.isfinite(s)
        low, high = np.empty((2, *s.shape), np.float32)
        _add_rounded_toward(s, e - rest, -np.inf, rest, low)
        _add_rounded_toward(s, e + rest, np.inf, rest, high)
        low[~finite] = high[~finite] = s[~finite]
        for n, r, j in np.argwhere((low != high) & finite):
            low[n, r, j] = _exact_dot(x[n, :, i][:, r], y[n, :, j], out[n, i][r, j])
        out[:, i] = low


def _add_rounded_toward(s: NDArray, e: NDArray, direction: float, rest: NDArray, out: NDArray) -> None:
    # e was itself rounded where rest is not 0: one step outward keeps the bound.
    e = np.where(rest > 0, np.nextafter(e, direction), e)
    _add_rounded(s, e, out, np.empty_like(s), tiny=True)


def _exact_dot(a: NDArray, b: NDArray, c: np.float32) -> np.float32:
    total = Fraction(float(c)) + sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b))
    return _nearest_fp32(total)


def _nearest_fp32(x: Fraction) -> np.float32:
    """x rounded once, ties to even."""
    n = abs(x)
    exponent = max(n.numerator.bit_length() - n.denominator.bit_length() - 1, -126)
    while n >= Fraction(2)**(exponent + 1):
        exponent += 1
    unit = Fraction(2)**(exponent - 23)
    value = round(n / unit) * unit
    result = np.inf if value >= 2**128 else float(value)
    return np.float32(-result if x < 0 else result)
