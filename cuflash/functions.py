"""exp, exp2, log, rsqrt, erf, tanh and fma as fixed sequences of fp32 operations (numerics §6).

Every step rounds once, to nearest even, in the order written; cuda/functions.cuh does the same steps,
so both give the same bits.

All take and return fp32 arrays, work in cache-sized blocks whatever the size, and accept `out=`, which may
be the argument itself. NaN stays NaN, nothing is flushed to zero, and no floating-point warning is given:
overflow is Inf. Errors in ulp: docs/functions.md.
"""
import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuflash.formats import Format, format_named

Array = NDArray[np.float32]
Kernel = Callable[[Array, Array], None]  # (a block of x, its results)

_BLOCK = 1 << 15  # elements at once: the temporaries of a block (three of fp64) stay in the L2 cache


# ---- constants, equal to those of cuda/functions.cuh (a test compares them) ----------------------

def _fp32(*values: float) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, values))


(ROUND,) = _fp32(12582912)  # 1.5·2^23: adding it rounds to an integer, kept in the low bits
(LOG2E, LN2) = _fp32(1.442695, 0.6931472)
# ln 2 = high + low in two 16-bit pieces, so that n·high and n·low are exact for |n| < 256.
(LN2_HIGH, LN2_LOW) = _fp32(0.69314575, 1.4286197e-06)
# e^r = 1 + r·p(r) for |r| <= ln 2 / 2, and 2^r for |r| <= 1/2; minimax in relative error
EXP_P = _fp32(1, 0.49999994, 0.16666521, 0.041668266, 0.008368677, 0.0013820734)
EXP2_P = _fp32(0.6931472, 0.24022648, 0.0555036, 0.009618506, 0.0013390806, 0.00015326466)
# ln(1 + f) = f + f²·(f·p(f) - 1/2) for 1 + f in [√½, √2], minimax in relative error
LOG_P = _fp32(0.33333313, -0.2500001, 0.20002119, -0.16667996, 0.14219552, -0.12405588, 0.11888164,
              -0.11675658, 0.067466445)
# erf t = t + t·p(t²) up to ERF_SPLIT; above it 1 - exp(-(t + t·q(t))), which is 1 in fp32 from t = 4
(ERF_SPLIT,) = _fp32(0.921875)
ERF_P = _fp32(0.12837917, -0.37612635, 0.11283696, -0.026859399, 0.005201033, -0.00081427075,
              8.3701125e-05)
ERF_Q = _fp32(0.12851378, 0.63572025, 0.10525927, -0.02288832, 0.0032144438, -0.00021392296)
# tanh t = t + t·(s·p(s)), s = t², up to TANH_SPLIT; above it 1 - 2/(e^2t + 1), which is 1 from t = 10
(TANH_SPLIT,) = _fp32(0.625)
TANH_P = _fp32(-0.3333328, 0.13331442, -0.053739715, 0.020639088, -0.0057049873)

_SQRT_HALF_BITS = 0x3F3504F3  # the fp32 below √½: significands are taken from [√½, √2)
_MIN_NORMAL = np.float32(2.0**-126)


# ---- blocks --------------------------------------------------------------------------------------

_local = threading.local()


def _scratch(count: int, dtype: type, size: int) -> list[NDArray]:
    """`count` arrays of `size` <= _BLOCK elements, the thread's own, kept from call to call."""
    kept = _local.__dict__.setdefault(np.dtype(dtype).char, [])
    while len(kept) < count:
        kept.append(np.empty(_BLOCK, dtype))
    return [array[:size] for array in kept[:count]]


def _checked(name: str, value: ArrayLike) -> Array:
    array = np.asarray(value)
    if array.dtype != np.float32:
        raise TypeError(f"{name}: got dtype {array.dtype}, valid: float32")
    return array


def _apply(kernel: Callable[..., None], operands: dict[str, ArrayLike], out: Array | None) -> Array:
    """`kernel(*blocks, out_block)` over the broadcast operands."""
    inputs = [_checked(name, value) for name, value in operands.items()]
    shape = np.broadcast_shapes(*(array.shape for array in inputs))
    if out is None:
        out = np.empty(shape, np.float32)
    elif not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise ValueError(f"out: got {got}, valid: a float32 array of shape {shape}")
    if out.size == 0:
        return out
    operand_flags: list[Any] = [["readonly", "overlap_assume_elementwise"]] * len(inputs)
    operand_flags.append(["writeonly", "overlap_assume_elementwise"])
    iterator = np.nditer([*inputs, out], ["external_loop", "buffered", "copy_if_overlap"], operand_flags,
                         buffersize=_BLOCK)
    with iterator, np.errstate(all="ignore"):
        for blocks in iterator:
            kernel(*blocks)
    return out


def _horner(x: Array, coefficients: tuple[np.float32, ...], out: Array) -> None:
    """c0 + x·(c1 + x·(c2 + …)), a rounding per operation; out is not x."""
    np.multiply(x, coefficients[-1], out=out)
    for coefficient in coefficients[-2:0:-1]:
        np.add(out, coefficient, out=out)
        np.multiply(out, x, out=out)
    np.add(out, coefficients[0], out=out)


# ---- fma -----------------------------------------------------------------------------------------

def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike, out: Array | None = None) -> Array:
    """a·b + c with one rounding to nearest even, as the hardware's fused multiply-add.

    Args:
        a, b, c: fp32, broadcast against each other.
        out: fp32 array for the result; may be one of the operands.

    Returns:
        fp32, of the broadcast shape. Subnormals are kept; overflow is ±Inf, Inf·0 and Inf − Inf are NaN.
    """
    return _apply(_fma_block, {"a": a, "b": b, "c": c}, out)


def _fma_block(a: Array, b: Array, c: Array, out: Array) -> None:
    # The product is exact in fp64 and the sum is rounded there once. Rounding it again, to fp32, can go
    # wrong only where the fp64 sum is a tie of fp32 (its low 29 bits are 1000…) or the result is subnormal.
    # There an inexact sum is moved to its odd neighbour on the exact sum's side (round to odd): no tie.
    product, total, small = _scratch(3, np.float64, out.size)
    (tail,) = _scratch(1, np.int64, out.size)
    np.multiply(a, b, out=product, dtype=np.float64)
    np.add(product, c, out=total, dtype=np.float64)
    np.bitwise_and(total.view(np.int64), (1 << 29) - 1, out=tail)
    np.abs(total, out=small)
    at = np.flatnonzero((tail == 1 << 28) | (small < _MIN_NORMAL))
    if at.size:
        p, s, addend = product[at], total[at], c[at].astype(np.float64)
        back = s - p
        error = (p - (s - back)) + (addend - back)  # s + error = p + addend exactly: TwoSum (Knuth)
        even = s.view(np.int64) & 1 == 0
        away = np.sign(error) * np.sign(s) * even  # +1 where the exact sum is larger in magnitude
        total[at] = (s.view(np.int64) + away.astype(np.int64)).view(np.float64)
    np.copyto(out, total, casting="same_kind")


# ---- exp and exp2 --------------------------------------------------------------------------------

def exp(x: ArrayLike, format: Format | str | None = None, out: Array | None = None) -> Array:
    """e^x by fused multiply-adds (numerics §6).

    exp(0) = 1, exp(x) <= 1 for x <= 0, +0 below −104, +Inf on overflow.

    Args:
        x: fp32.
        format: a format known to hold x. With at most 10 mantissa bits a table is used: same bits, faster.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_with_table(_exp_block, format), {"x": x}, out)


def exp2(x: ArrayLike, format: Format | str | None = None, out: Array | None = None) -> Array:
    """2^x by fused multiply-adds; exact at integers, +0 from −150 down. Else as `exp`."""
    return _apply(_with_table(_exp2_block, format), {"x": x}, out)


# Here fp64 stands in for fma: products are exact in it, and so are both reductions to r.
_ROUND64 = 1.5 * 2.0**52  # ROUND of fp64


def _exp_block(x: Array, out: Array) -> None:
    n, r, w = _scratch(3, np.float64, x.size)
    np.clip(x, np.float32(-104), np.float32(89), out=out)
    np.copyto(r, out)
    np.multiply(r, float(LOG2E), out=n)
    np.add(n, _ROUND64, out=n)
    np.subtract(n, _ROUND64, out=w)
    np.multiply(w, float(LN2_HIGH) + float(LN2_LOW), out=w)
    np.subtract(r, w, out=w)
    np.copyto(out, w, casting="same_kind")
    np.copyto(r, out)
    _exp_core(n, r, w, _EXP_STEPS, out)


def _exp2_block(x: Array, out: Array) -> None:
    n, r, w = _scratch(3, np.float64, x.size)
    np.clip(x, np.float32(-150), np.float32(128), out=out)
    np.copyto(r, out)
    np.add(r, _ROUND64, out=n)
    np.subtract(n, _ROUND64, out=w)
    np.subtract(r, w, out=r)
    _exp_core(n, r, w, _EXP2_STEPS, out)


def _exp_core(n: NDArray, r: NDArray, w: NDArray, steps: tuple[tuple[float, float], ...], out: Array) -> None:
    """out = 2^n · (1 + r·p(r)) for n given as n + _ROUND64; the fp64 arrays are used up."""
    value: float | NDArray = steps[0][0]
    for addend, big in steps[1:]:
        np.multiply(value, r, out=w)
        value = w
        np.add(w, addend, out=w)
        if big:
            np.subtract(w, big, out=w)
        else:
            np.copyto(out, w, casting="same_kind")
            np.copyto(w, out)
    # Into the exponent, of which fp64 has enough: a result below 2^-126 or past 2^127 is rounded by the cast.
    # Shifting out the upper bits of n + _ROUND64 leaves those of n; a NaN from fp32 leaves 0.
    exponent, bits = n.view(np.int64), w.view(np.int64)
    np.left_shift(exponent, 52, out=exponent)
    np.add(bits, exponent, out=bits)
    np.copyto(out, w, casting="same_kind")


def _fused_steps(coefficients: tuple[np.float32, ...], reach: float) -> tuple[tuple[float, float], ...]:
    """(addend, big) of each step w = fma(w, r, c), |r| <= reach, for c from the last coefficient to 1.

    Where all results lie in one binade, adding c + big, with big 1.5·2^52 of fp32's last places there, rounds
    the exact sum to fp32 by itself, and big is taken off again. Elsewhere big is 0 and the fp64 sum is cast:
    two roundings, which give the bits of one for all arguments (docs/functions.md).
    """
    last = float(coefficients[-1])
    steps, ends = [(last, 0.0)], [last, last]
    for c in [*map(float, coefficients[-2::-1]), 1.0]:
        ends = [end * r + c for end, r in zip(ends, (-reach, reach))]
        low, high = (math.frexp(end)[1] for end in ends)
        big = 1.5 * 2.0 ** (low - 24 + 52) if low == high else 0.0
        steps.append((c + big, big))
    return tuple(steps)


_EXP_STEPS = _fused_steps(EXP_P, 0.34658)
_EXP2_STEPS = _fused_steps(EXP2_P, 0.5)


def _with_table(kernel: Kernel, format: Format | str | None) -> Kernel:
    """`kernel`, by table where the format's values are few."""
    if format is None:
        return kernel
    mantissa_bits = (format_named(format) if isinstance(format, str) else format).mantissa_bits
    if mantissa_bits > 10:
        return kernel
    shift = 16 if mantissa_bits <= 7 else 13
    table = _table(kernel, shift)
    low = np.uint32((1 << shift) - 1)

    def look_up(x: Array, out: Array) -> None:
        bits = x.view(np.uint32)
        if np.bitwise_or.reduce(bits) & low:  # a value outside the format (or a NaN's payload): same bits
            return kernel(x, out)
        (index,) = _scratch(1, np.int64, x.size)
        np.right_shift(bits, np.uint32(shift), out=index)
        np.take(table, index, out=out, mode="wrap")  # "raise" would copy through a buffer
    return look_up


@cache
def _table(kernel: Kernel, shift: int) -> Array:
    """`kernel` of every fp32 number whose low `shift` bits are zero, by its upper bits."""
    bits = np.arange(1 << 32 - shift, dtype=np.uint32) << np.uint32(shift)
    table = _apply(kernel, {"x": bits.view(np.float32)}, None)
    table.flags.writeable = False
    return table


# ---- log and rsqrt -------------------------------------------------------------------------------

def log(x: ArrayLike, out: Array | None = None) -> Array:
    """Natural logarithm; log(1) = +0, log(±0) = −Inf, NaN below zero, log(+Inf) = +Inf.

    Args:
        x: fp32, subnormals included.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_log_block, {"x": x}, out)


def _log_block(x: Array, out: Array) -> None:
    f, n, h, w, t = _scratch(5, np.float32, x.size)
    special = ~((x > 0) & (x < np.inf))
    subnormal = x < _MIN_NORMAL
    np.copyto(f, x)
    np.multiply(f, np.float32(2.0**23), out=f, where=subnormal)
    # x = 2^k · (1 + f) with 1 + f in [√½, √2)
    bits, k = f.view(np.int32), t.view(np.int32)
    np.subtract(bits, _SQRT_HALF_BITS, out=k)
    np.right_shift(k, 23, out=k)
    np.copyto(n, k, casting="unsafe")  # exact
    np.left_shift(k, 23, out=k)
    np.subtract(bits, k, out=bits)
    np.subtract(n, np.float32(23), out=n, where=subnormal)
    np.subtract(f, np.float32(1), out=f)
    _horner(f, LOG_P, w)
    np.multiply(w, f, out=w)
    np.subtract(w, np.float32(0.5), out=w)
    np.multiply(f, f, out=t)
    np.multiply(w, t, out=w)
    # n·ln 2 + f + w: the first sum as an unevaluated pair, so that only the last addition costs accuracy
    np.multiply(n, LN2_HIGH, out=t)  # exact
    np.add(t, f, out=h)
    np.subtract(h, t, out=t)
    np.subtract(f, t, out=f)  # what h lost
    np.multiply(n, LN2_LOW, out=n)  # exact
    np.add(w, n, out=w)
    np.add(f, w, out=w)
    limit = np.where(x == 0, np.float32(-np.inf), np.where(x > 0, x, np.float32(np.nan)))[special]
    np.add(h, w, out=out)
    out[special] = limit


def rsqrt(x: ArrayLike, out: Array | None = None) -> Array:
    """1/√x, correctly rounded: taken in fp64, then rounded, which is right for every fp32 x (all are tested).

    rsqrt(±0) = ±Inf, rsqrt(+Inf) = +0, NaN below zero.

    Args:
        x: fp32, subnormals included.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_rsqrt_block, {"x": x}, out)


def _rsqrt_block(x: Array, out: Array) -> None:
    (wide,) = _scratch(1, np.float64, x.size)
    np.sqrt(x, out=wide, dtype=np.float64)
    np.divide(1.0, wide, out=wide)
    np.copyto(out, wide, casting="same_kind")


# ---- erf and tanh --------------------------------------------------------------------------------

def erf(x: ArrayLike, out: Array | None = None) -> Array:
    """Error function, odd to the bit; the GELU of numerics §4 uses it.

    Args:
        x: fp32.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_erf_block, {"x": x}, out)


def _erf_block(x: Array, out: Array) -> None:
    t, w, u, s = _scratch(4, np.float32, x.size)
    np.abs(x, out=t)
    np.minimum(t, np.float32(4), out=w)
    _horner(w, ERF_Q, u)
    np.multiply(u, w, out=u)
    np.add(u, w, out=u)
    np.negative(u, out=u)
    _exp_block(u, u)
    np.subtract(np.float32(1), u, out=u)
    np.multiply(t, t, out=s)
    _horner(s, ERF_P, w)
    np.multiply(w, t, out=w)
    np.add(w, t, out=w)
    np.copyto(u, w, where=t <= ERF_SPLIT)
    np.copysign(u, x, out=out)


def tanh(x: ArrayLike, out: Array | None = None) -> Array:
    """Hyperbolic tangent, odd to the bit.

    Args:
        x: fp32.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_tanh_block, {"x": x}, out)


def _tanh_block(x: Array, out: Array) -> None:
    t, w, u, s = _scratch(4, np.float32, x.size)
    np.abs(x, out=t)
    np.minimum(t, np.float32(10), out=u)
    np.add(u, u, out=u)
    _exp_block(u, u)
    np.add(u, np.float32(1), out=u)
    np.divide(np.float32(2), u, out=u)
    np.subtract(np.float32(1), u, out=u)
    np.multiply(t, t, out=s)
    _horner(s, TANH_P, w)
    np.multiply(w, s, out=w)
    np.multiply(w, t, out=w)
    np.add(w, t, out=w)
    np.copyto(u, w, where=t <= TANH_SPLIT)
    np.copysign(u, x, out=out)
