"""Accumulators of dot.py that need no tensor core: fma in fp32, and the exact sum.

A panel takes x (n, K, rows), y (n, K, cols) and adds their products to out (n, rows, cols) in place,
cols at most INNER. All are fp32 of any strides; floating-point warnings are off.
"""
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

INNER = 1024         # columns of a block: the axis of NumPy's inner loops
ELEMENTS = 1 << 16   # of a block: a few arrays of it stay in a core's cache
CHUNK = 256          # k at once, a multiple of every tensor-core group

NAN = 0x7FFFFFFF     # what the hardware writes for every NaN


def canonical(out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Zeros to +0 and NaNs to the hardware's, in place."""
    out += np.float32(0)
    nan = np.isnan(out)
    if nan.any():
        out.view(np.int32)[nan] = NAN
    return out


def blocks(out: NDArray[np.float32]) -> Iterator[slice]:
    """Slices of out's rows, ELEMENTS at most in each where a single row allows."""
    step = max(1, ELEMENTS // (out.shape[0] * out.shape[2]))
    for i in range(0, out.shape[1], step):
        yield slice(i, i + step)


# ---- sequential ---------------------------------------------------------------------------------

def sequential_panel(x: NDArray, y: NDArray, out: NDArray, *, mantissa_bits: int) -> None:
    """acc = fma(a, b, acc), k ascending; mantissa_bits: of both operands' formats together.

    Where a product is exact in fp32, the fma is a product and a sum. Otherwise fp64 holds the product.
    """
    # A product has at most mantissa_bits + 2 bits, the last of them no lower than its exponent less mantissa_bits.
    smallest = 2.0**(-149 + mantissa_bits) if mantissa_bits <= 22 else np.inf
    for k in range(0, x.shape[1], CHUNK):
        xk, yk = x[:, k:k + CHUNK], np.ascontiguousarray(y[:, k:k + CHUNK])
        y_low, y_high = _range(yk)
        for i in blocks(out):
            xi = np.ascontiguousarray(xk[:, :, i])
            x_low, x_high = _range(xi)
            exact = (x_low * y_low >= smallest) & (x_high * y_high < 2.0**128)
            acc = np.ascontiguousarray(out[:, i])
            _fma_chunk(xi[..., None], yk[:, :, None], acc, exact)
            out[:, i] = acc


def _range(x: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Smallest magnitude but 0 and largest finite one, for each k."""
    a = np.abs(x).astype(np.float64)
    a[~np.isfinite(a)] = 0
    return np.where(a == 0, np.inf, a).min(axis=(0, 2)), a.max(axis=(0, 2))


def _fma_chunk(x: NDArray, y: NDArray, acc: NDArray, exact: NDArray[np.bool_]) -> None:
    p = np.empty_like(acc)
    if not exact.all():
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        p64, acc64, spare = (np.empty(acc.shape) for _ in range(3))
    for k in range(x.shape[1]):
        if exact[k]:
            np.multiply(x[:, k], y[:, k], out=p)
            np.add(acc, p, out=acc)
        else:
            np.multiply(x64[:, k], y64[:, k], out=p64)
            np.copyto(acc64, acc)
            _add_rounded(p64, acc64, acc, spare)


def _add_rounded(p: NDArray, q: NDArray, out: NDArray, s: NDArray) -> None:
    """out (fp32) = p + q (fp64), rounded once; s is scratch.

    fl64(p + q) rounds to fp32 as p + q does unless it is a point midway between two fp32 numbers,
    whose last 28 bits are 0 (subnormal results included). Such sums are moved off by the sign of their error.
    """
    np.add(p, q, out=s)
    low = s.view(np.int64) & 0x0FFFFFFF
    if low.min(initial=1) == 0:
        at = np.flatnonzero(low == 0)
        sum_, error = _two_sum(p.reshape(-1)[at], q.reshape(-1)[at])
        off = np.flatnonzero(np.isfinite(sum_) & (error != 0))
        s.reshape(-1)[at[off]] = np.nextafter(sum_[off], np.copysign(np.inf, error[off]))
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
    _add_rounded(s, e, out, np.empty_like(s))


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
