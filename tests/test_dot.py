"""cuflash.dot against models in Python integers, which share nothing with it."""
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cuflash.dot import ACCUMULATORS, common_format, dot, dot_fp32
from cuflash.formats import format_named

INF, NAN_WORD = math.inf, 0x7FFFFFFF
UNIT = 300  # model integers count 2^-300: products of fp32 numbers are multiples of 2^-298

EMIN = {"bf16": -126, "fp16": -14, "tf32": -126}
TENSOR_CORE = {"hopper": (25, -133, 16, 8), "ampere": (24, -132, 8, 4)}  # F, exponent of zero, L, L for tf32


# ---- models -------------------------------------------------------------------------------------

def to_int(x):
    n, d = float(x).as_integer_ratio()
    return (n << UNIT) // d


def exponent(x, emin):
    return max(math.frexp(x)[1] - 1, emin)


def cut(n, bit):
    """n toward zero to a multiple of 2^bit."""
    n, sign = abs(n), -1 if n < 0 else 1
    return sign * (n >> bit << bit)


def add_special(terms):
    """The IEEE sum of terms of which one is not finite: NaN or Inf."""
    total = 0.0
    for t in terms:
        total += t if not math.isfinite(t) else 0.0
    return total


def tensor_core_model(a, b, c, accumulator, name):
    """One result by the formula of numerics §5."""
    F, zero, L, L_tf32 = TENSOR_CORE[accumulator]
    L = L_tf32 if name == "tf32" else L
    for k in range(0, len(a), L):
        pairs = list(zip(a[k:k + L], b[k:k + L]))
        pairs += [(0.0, 0.0)] * (L - len(pairs))
        terms = [x * y for x, y in pairs] + [c]  # only asked whether Inf or NaN
        if not all(map(math.isfinite, terms)):
            c = add_special(terms)
            continue
        exact = [(to_int(x) * to_int(y) >> UNIT, exponent(x, EMIN[name]) + exponent(y, EMIN[name])
                  if x * y else zero) for x, y in pairs]
        exact.append((to_int(c), exponent(c, -126) if c else zero))
        e_max = max(e for _, e in exact)
        total = sum(cut(n, e_max - F + UNIT) for n, _ in exact)
        total = cut(total, max(abs(total).bit_length() - 24, UNIT - 149))
        c = math.copysign(INF, total) if abs(total) >= 1 << 128 + UNIT else math.ldexp(total, -UNIT)
    return c


def nearest(n):
    """The integer n in 2^-300 as fp32, ties to even."""
    bit = max(abs(n).bit_length() - 24, UNIT - 149)
    kept = round(Fraction(abs(n), 1 << bit)) << bit
    value = INF if kept >= 1 << 128 + UNIT else math.ldexp(kept, -UNIT)
    return -value if n < 0 else value


def sequential_model(a, b, c):
    for x, y in zip(a, b):
        finite = all(map(math.isfinite, (x, y, c)))
        c = nearest((to_int(x) * to_int(y) >> UNIT) + to_int(c)) if finite else x * y + c
    return c


def exact_model(a, b, c):
    terms = [x * y for x, y in zip(a, b)] + [c]
    if not all(map(math.isfinite, terms)):
        return add_special(terms)
    return nearest(sum(to_int(x) * to_int(y) >> UNIT for x, y in zip(a, b)) + to_int(c))


def model(a, b, c, accumulator, name):
    """fp32 (M, N) of the model."""
    one = {"sequential": sequential_model, "exact": exact_model}.get(
        accumulator, lambda *args: tensor_core_model(*args, accumulator, name))
    return np.array([[one(row.tolist(), col.tolist(), float(start)) for col, start in zip(b.T, starts)]
                     for row, starts in zip(a, c)], np.float32)


def assert_same_bits(got, want):
    """Bit equality; a zero is +0 and a NaN the hardware's."""
    want = want + np.float32(0)
    words = np.where(np.isnan(want), NAN_WORD, want.view(np.int32))
    wrong = np.argwhere(got.view(np.int32) != words)
    assert not len(wrong), f"{len(wrong)} of {want.size} wrong, first at {wrong[0]}: " \
                           f"{got[tuple(wrong[0])].hex()} is not {want[tuple(wrong[0])].hex()}"


# ---- operands -----------------------------------------------------------------------------------

def held(x, name):
    """x as fp32 values of the format; what overflows is the largest number."""
    x = np.asarray(x, np.float32)
    if name == "tf32":
        return (x.view(np.int32) & ~0x1FFF).view(np.float32)
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}[name]
    top = format_named(name).max
    return np.where(np.isfinite(x), np.clip(x, -top, top), x).astype(dtype).astype(np.float32)


def scattered(rng, shape, low, high):
    """Random signs and mantissas, binary exponents uniform over [low, high)."""
    return rng.choice([-1, 1], shape) * np.ldexp(rng.uniform(1, 2, shape), rng.integers(low, high, shape))


def some(rng, x, share, values):
    return np.where(rng.random(x.shape) < share, rng.choice(np.array(values), x.shape), x)


def operands(kind, name, rng, depth, rows=14, cols=14):
    """a (rows, depth), b (depth, cols), c (rows, cols) of one kind, in the format (c in fp32)."""
    f = format_named(name)
    sa, sb, sc = (rows, depth), (depth, cols), (rows, cols)
    a, b, c = (rng.standard_normal(s) for s in (sa, sb, sc))
    wide = 12 if name == "fp16" else 30
    if kind == "wide":
        a, b, c = scattered(rng, sa, -wide, wide), scattered(rng, sb, -wide, wide), scattered(rng, sc, -wide, wide)
    elif kind == "one sign":
        a, b, c = abs(a), abs(b), abs(c)
    elif kind == "top significands":  # sums of products just below 4
        a, b, c = (np.full(s, 2.0 - 2.0**-f.mantissa_bits) * rng.choice([1, 1, 1, 0.5], s) for s in (sa, sb, sc))
    elif kind == "cancellation":
        half = depth // 2
        a[:, half:2 * half] = a[:, :half]
        b[half:2 * half] = -b[:half]
        order = rng.permutation(depth)
        a, b, c = a[:, order], b[order], c * 2.0**-30 * rng.integers(0, 2, sc)
    elif kind == "small integers":
        a, b, c = (rng.integers(-3, 4, s) for s in (sa, sb, sc))
    elif kind == "subnormal operands":
        a, b = rng.integers(-2000, 2000, sa) * f.smallest, b * rng.choice([1, 2.0**10], sb)
        c = c * f.smallest
    elif kind == "subnormal accumulator":
        low = -75 if name != "fp16" else -14
        a, b = scattered(rng, sa, low, low + 13), scattered(rng, sb, low, low + 13)
        c = rng.integers(-2**24, 2**24, sc) * 2.0**-149
    elif kind == "zeros":
        a, b, c = some(rng, a, 0.6, [0.0, -0.0]), some(rng, b, 0.6, [0.0, -0.0]), some(rng, c, 0.6, [0.0, -0.0])
        a[:3], b[:, :3] = 0, 0
    elif kind == "lonely":  # rows and columns whose largest elements never meet
        a, b = scattered(rng, sa, -14, -10), scattered(rng, sb, -14, -10)
        a[:, ::2] *= 2.0**24 if name != "fp16" else 2.0**8
        b[::2] *= 0 if rng.random() < 0.3 else 2.0**-10 if name == "fp16" else 2.0**-60
        c = c * rng.choice([0, 2.0**-20, 2.0**-90, 1], sc)
    elif kind == "non-finite":
        odd = [INF, -INF, math.nan, 0.0]
        a, b, c = some(rng, a, 0.01, odd), some(rng, b, 0.01, odd), some(rng, c, 0.05, odd)
    elif kind == "overflow":
        if name == "fp16":
            c = rng.choice([-1, 1], sc) * np.float32(3.4028235e38)
            a, b = a * 60000, b * 60000
        else:
            a, b = scattered(rng, sa, 61, 64), scattered(rng, sb, 61, 64)
            c = rng.choice([-1, 0, 1], sc) * np.float32(3.4028235e38)
    elif kind == "ties":  # sums that fall midway between two fp32 numbers, or just off
        a, b = rng.choice([1, -1, 2.0**-12, 2.0**-14], sa), rng.choice([1, 2.0**-12, 2.0**-13], sb)
        c = rng.integers(2**23, 2**24, sc) * rng.choice([-1, 1], sc)
    return held(a, name), held(b, name), np.asarray(c, np.float32)


KINDS = ("normal", "wide", "one sign", "top significands", "cancellation", "small integers", "subnormal operands",
         "subnormal accumulator", "zeros", "lonely", "non-finite", "overflow", "ties")
DEPTHS = (1, 5, 16, 37, 48)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("accumulator", ["hopper", "ampere"])
def test_tensor_core(accumulator, name, kind):
    rng = np.random.default_rng([KINDS.index(kind), len(name)])
    for depth in DEPTHS:
        a, b, c = operands(kind, name, rng, depth)
        got = dot_fp32(a, b, c, accumulator, name, name)
        assert_same_bits(got, model(a, b, c, accumulator, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize("accumulator", ["sequential", "exact"])
def test_fma_and_exact(accumulator, name, kind):
    rng = np.random.default_rng([KINDS.index(kind), len(name), 1])
    for depth in DEPTHS:
        a, b, c = operands(kind, name, rng, depth)
        got = dot_fp32(a, b, c, accumulator, name, name)
        assert_same_bits(got, model(a, b, c, accumulator, name))
