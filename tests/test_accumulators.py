"""cuflash.dot against models in Python integers, which share nothing with it."""
import math
import tracemalloc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cuflash.accumulators import ACCUMULATORS, common_format, dot, dot_fp32
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
                           f"{float(got[tuple(wrong[0])]).hex()} is not {float(want[tuple(wrong[0])]).hex()}"


# ---- operands -----------------------------------------------------------------------------------

def held(x, name):
    """x as fp32 values of the format; what overflows is the largest number."""
    x = np.asarray(x, np.float32)
    f = format_named(name)
    if f.exponent_bits == 8 and name not in ("bf16", "fp32"):
        return (x.view(np.int32) & -1 << 23 - f.mantissa_bits).view(np.float32)
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}[name]
    return np.where(np.isfinite(x), np.clip(x, -f.max, f.max), x).astype(dtype).astype(np.float32)


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
        a, b = scattered(rng, sa, -wide, wide), scattered(rng, sb, -wide, wide)
        c = scattered(rng, sc, -140, 128)
    elif kind == "one sign":
        a, b, c = abs(a), abs(b), abs(c)
    elif kind == "top significands":  # sums of products just below 4
        a, b, c = (np.full(s, 2.0 - 2.0**-f.mantissa_bits) for s in (sa, sb, sc))
        a, b = a * rng.choice([1, -1], (rows, 1)), b * rng.choice([1, 2], (1, cols))
        c *= rng.choice([1, -1], sc)
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
        a, b, c = (some(rng, x, 0.6, [0.0, -0.0]) for x in (a, b, c))
        a[:3], b[:, :3] = 0, 0
    elif kind == "lonely":  # rows and columns whose largest elements never meet
        high, low = ((10, 14), (-24, -4)) if name == "fp16" else ((30, 34), (-45, -5))
        a, b = scattered(rng, sa, *low), scattered(rng, sb, *low)
        a[:, ::2], b[1::2] = scattered(rng, a[:, ::2].shape, *high), scattered(rng, b[1::2].shape, *high)
        a, b[:, :3] = some(rng, a, 0.2, [0.0]), some(rng, b[:, :3], 0.7, [0.0])
        if name != "fp16":
            scales = [1, 2.0**-75, 2.0**51]
            a, b = a * rng.choice(scales, (rows, 1)), b * rng.choice(scales, (1, cols))
        c = c * rng.choice([0, 2.0**-140, 2.0**-90, 1], sc)
    elif kind == "non-finite":
        odd = [INF, -INF, math.nan, 0.0]
        a, b, c = some(rng, a, 0.01, odd), some(rng, b, 0.01, odd), some(rng, c, 0.05, odd)
    elif kind == "overflow":
        if name == "fp16":
            c = rng.choice([-1, 1], sc) * np.float32(3.4028235e38)
            a, b = a * 60000, b * 60000
        else:
            a, b = scattered(rng, sa, 61, 65), scattered(rng, sb, 61, 65)
            c = rng.choice([-1, 0, 1], sc) * np.float32(3.4028235e38)
    elif kind == "overflow by sum":  # and back: Inf stays
        low, high = (13, 15) if name == "fp16" else (60, 63)
        signs = np.where(np.arange(depth) // 16 % 2, -1, 1)
        a, b, c = signs * abs(scattered(rng, sa, low, high)), abs(scattered(rng, sb, low, high)), c * 2.0**110
    elif kind == "zero term":  # products below 2^-133: the exponent of a zero is the largest
        a, b = scattered(rng, sa, -73, -69), scattered(rng, sb, -73, -69)
        c = np.zeros(sc)
    elif kind == "last bits at 2^-149":  # some products just have finer ones
        e = -6 if name == "fp16" else f.mantissa_bits - 75
        a, b = scattered(rng, sa, e, e + 2), scattered(rng, sb, e, e + 2)
        c = rng.integers(-2**24, 2**24, sc) * 2.0**-149
    elif kind == "ties":  # sums midway between two fp32 numbers, or off by a bit of fp64 or less
        last = 2.0**-f.mantissa_bits
        a, b = (rng.choice([1, 1 - last, 1 + last, -1], s) * rng.choice([0.5, 1], s) for s in (sa, sb))
        c = rng.integers(2**22, 2**24, sc) * rng.choice([-1, 1], sc)
        if name != "fp16":
            subnormal = rng.choice([1, 2.0**-74], (rows, 1))
            a, b = a * subnormal, b * rng.choice([1, 2.0**-75], (1, cols))
            c = c * np.where(subnormal < 1, 2.0**-149, 1)
    return held(a, name), held(b, name), np.asarray(c, np.float32)


KINDS = ("normal", "wide", "one sign", "top significands", "cancellation", "small integers",
         "subnormal operands", "subnormal accumulator", "zeros", "lonely", "non-finite", "overflow",
         "overflow by sum", "zero term", "last bits at 2^-149", "ties")
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
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "e8m11", "e8m12", "fp32"])
@pytest.mark.parametrize("accumulator", ["sequential", "exact"])
def test_fma_and_exact(accumulator, name, kind):
    rng = np.random.default_rng([KINDS.index(kind), len(name), 1])
    for depth in DEPTHS:
        a, b, c = operands(kind, name, rng, depth)
        got = dot_fp32(a, b, c, accumulator, name, name)
        assert_same_bits(got, model(a, b, c, accumulator, name))


@pytest.mark.parametrize("start, half", [
    (1, 2.0**-24), (2.0**-130, 2.0**-150), (np.finfo(np.float32).max, 2.0**103)])
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_exact_where_two_doubles_are_not_enough(start, half, sign):
    """start + half is midway between two fp32 numbers, what decides is far below the terms that cancel."""
    scale = 2.0**50 if half < 1 else 2.0**-50  # halves and less as products of two fp32 numbers
    terms = [(start, 1), (half * scale, 1 / scale), (sign * half * scale, 2.0**-75 / scale),
             (2.0**90, 2.0**60), (-2.0**90, 2.0**60)]
    for order in range(20):
        pairs = np.random.default_rng(order).permutation(np.array(terms)).astype(np.float32)
        a, b, c = pairs[None, :, 0], pairs[:, 1, None], np.zeros((1, 1), np.float32)
        assert_same_bits(dot_fp32(a, b, c, "exact", "fp32", "fp32"), model(a, b, c, "exact", "fp32"))


# ---- what a product is, whatever its accumulator --------------------------------------------------

DEFINED = ("sequential", "hopper", "ampere", "exact")


@pytest.mark.parametrize("accumulator", DEFINED)
def test_blocks_do_not_change_bits(accumulator):
    """More rows, columns and k than one block holds, of wide exponents, against model and slices."""
    rng = np.random.default_rng(1)
    a, b, c = operands("wide", "bf16", rng, 600, 70, 1100)
    a[:, 300] = a[:, 17] = 0
    a[20, 590], b[3, 1050] = INF, math.nan
    whole = dot_fp32(a, b, c, accumulator, "bf16", "bf16")
    assert_same_bits(dot_fp32(b.T, a.T, c.T, accumulator, "bf16", "bf16").T, whole)
    for i, j in (((0, 1), (0, 1)), ((19, 24), (1020, 1060)), ((63, 70), (0, 30)), ((0, 70), (1099, 1100))):
        i, j = slice(*i), slice(*j)
        got = dot_fp32(a[i], b[:, j], c[i, j], accumulator, "bf16", "bf16")
        assert_same_bits(got, whole[i, j])
    rows, cols = [5, 20, 66], [0, 1023, 1024, 1050]
    want = model(a[rows], b[:, cols], c[np.ix_(rows, cols)], accumulator, "bf16")
    assert_same_bits(whole[np.ix_(rows, cols)], want)


@pytest.mark.parametrize("accumulator", DEFINED)
@pytest.mark.parametrize("shape_a, shape_b, shape_c", [
    ((3, 5, 20), (3, 20, 4), (3, 5, 4)), ((2, 1, 7, 9), (3, 9, 2), (2, 1, 1, 2)), ((6, 4), (5, 4, 8), (8,)),
    ((1, 3), (3, 1), ()), ((2, 130, 17), (17, 260), (130, 1))])
def test_leading_axes_broadcast_like_matmul(accumulator, shape_a, shape_b, shape_c):
    rng = np.random.default_rng(2)
    a, b, c = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in (shape_a, shape_b, shape_c))
    got = dot(a, b, c, accumulator=accumulator)
    shape = np.matmul(np.zeros(shape_a), np.zeros(shape_b)).shape
    assert got.shape == shape and got.dtype == np.float32 and got.flags.c_contiguous
    c = np.broadcast_to(c, shape)
    a, b = np.broadcast_to(a, (*shape[:-2], *shape_a[-2:])), np.broadcast_to(b, (*shape[:-2], *shape_b[-2:]))
    for index in np.ndindex(shape[:-2]):
        assert_same_bits(got[index], dot(a[index], b[index], c[index], accumulator=accumulator))
    want = np.matmul(a.astype(np.float64), b.astype(np.float64)) + c.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)  # 20 terms below 16: 20 · 16 · 2^-24


@pytest.mark.parametrize("accumulator", DEFINED)
def test_strides_do_not_change_bits(accumulator):
    rng = np.random.default_rng(3)
    a, b, _ = operands("normal", "bf16", rng, 40, 60, 50)
    want = dot_fp32(np.ascontiguousarray(a[::-2, ::2]), np.ascontiguousarray(b[::2, 5:]), None, accumulator,
                    "bf16", "bf16")
    assert_same_bits(dot_fp32(a[::-2, ::2], b[::2, 5:], None, accumulator, "bf16", "bf16"), want)
    got = dot_fp32(np.asfortranarray(a)[::-2, ::2], b.T.copy().T[::2, 5:], None, accumulator, "bf16", "bf16")
    assert_same_bits(got, want)


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_zero_nan_and_empty_sizes(accumulator):
    one = np.ones((1, 1), np.float16)
    assert dot(-one, 0 * one, accumulator=accumulator).view(np.int32) == 0
    assert dot(one, -one, one.astype(np.float32), accumulator=accumulator).view(np.int32) == 0
    for a, b, c in ((INF, 0, 0), (INF, 1, -INF), (math.nan, 1, 0), (1, 1, -math.nan)):
        got = dot(one * a, one * b, one * c, accumulator=accumulator)
        assert got.view(np.int32) == NAN_WORD, (a, b, c)
    assert dot(-one * INF, one, one, accumulator=accumulator) == -INF
    nothing = np.empty((2, 3, 0), np.float16), np.empty((0, 2), np.float16)
    start = np.array([[-0.0, 1.5], [math.nan, 2.0**-149], [-2, INF]], np.float32)
    assert_same_bits(dot(*nothing, start, accumulator=accumulator), np.broadcast_to(start, (2, 3, 2)))
    assert not dot(*nothing, accumulator=accumulator).view(np.int32).any()
    for shape_a, shape_b, shape in (((0, 5), (5, 3), (0, 3)), ((4, 5), (5, 0), (4, 0)),
                                    ((0, 4, 5), (5, 3), (0, 4, 3))):
        a, b = np.ones(shape_a, np.float16), np.ones(shape_b, np.float16)
        assert dot(a, b, accumulator=accumulator).shape == shape


def test_library_is_matmul():
    rng = np.random.default_rng(4)
    a, b, c = operands("normal", "fp32", rng, 33)
    assert_same_bits(dot(a, b, c, accumulator="library"), np.matmul(a, b) + c)


def test_accumulators_differ():
    """1 and terms of half an ulp are summed before they are rounded, except by `sequential`."""
    a = np.array([[1, 2.0**-12, 2.0**-12]], np.float16)
    b = np.array([[1], [2.0**-12], [2.0**-12]], np.float16)
    got = {name: dot(a, b, accumulator=name).item() for name in DEFINED}
    up = 1 + 2.0**-23
    assert got == {"sequential": 1.0, "hopper": up, "ampere": up, "exact": up}
    a[0, 1:] = 2.0**-13  # four terms of 2^-25: on hopper's grid, below ampere's
    more = np.concatenate([a, a[:, 1:]], axis=1), np.concatenate([b, b[1:]])
    got = {name: dot(*more, accumulator=name).item() for name in DEFINED}
    assert got == {"sequential": 1.0, "hopper": up, "ampere": 1.0, "exact": 1.0 + 2.0**-23}


@pytest.mark.parametrize("shape", [(1500, 16, 1500), (30, 10000, 30), (1, 64, 100000)])
@pytest.mark.parametrize("accumulator", DEFINED)
def test_memory_is_bounded(accumulator, shape):
    rows, depth, cols = shape
    a, b = np.ones((rows, depth), np.float32), np.ones((depth, cols), np.float32)
    tracemalloc.start()
    try:
        out = dot_fp32(a, b, None, accumulator, "bf16", "bf16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (out == depth).all()
    assert peak < 1.3 * out.nbytes + (16 << 20)  # a NaN mask, a block's arrays


def test_numpy_settings_are_left_alone():
    before = np.getbufsize(), np.geterr()
    a, b = np.full((2, 3), 3e38, np.float32), np.full((3, 300), 3e38, np.float32)
    with np.errstate(all="raise"):
        for accumulator in DEFINED:
            dot_fp32(a, b, None, accumulator, "tf32", "tf32")
    assert (np.getbufsize(), np.geterr()) == before


# ---- formats ------------------------------------------------------------------------------------

@pytest.mark.parametrize("a, b, common", [
    ("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16"), ("tf32", "tf32", "tf32"), ("bf16", "fp16", "tf32"),
    ("fp8_e4m3", "fp8_e4m3", "bf16"), ("fp8_e5m2", "fp16", "fp16"), ("fp8_e4m3", "bf16", "bf16"),
    ("e5m8", "fp8_e4m3", "fp16"), ("e5m8", "bf16", "tf32"), ("e6m8", "e6m8", "tf32"),
    ("e8m1", "e2m10", "tf32"),
    ("fp32", "bf16", None), ("fp32", "fp32", None), ("e5m11", "bf16", None)])
def test_common_format(a, b, common):
    got = common_format(a, b)
    assert (got and got.name) == common
    assert common_format(format_named(b), format_named(a)) == got


@pytest.mark.parametrize("accumulator", ["hopper", "ampere"])
def test_subnormals_count_in_the_common_format(accumulator):
    """2^-9 is subnormal in fp8_e4m3 but normal in bf16, 2^-20 subnormal in fp16 but normal in tf32."""
    rng = np.random.default_rng(5)
    a = rng.choice(np.array([2.0**-9, 3 * 2.0**-9, 448, -1.5]), (12, 40)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.choice(np.array([2.0**-16, 2.0**-15, 57344, -1.25]), (40, 12)).astype(ml_dtypes.float8_e5m2)
    wide = [x.astype(np.float32) for x in (a, b)]
    start = rng.standard_normal((12, 12)).astype(np.float32)
    assert_same_bits(dot(a, b, start, accumulator=accumulator), model(*wide, start, accumulator, "bf16"))

    a = rng.choice(np.array([2.0**-20, 7 * 2.0**-24, 1.125, -300]), (12, 40)).astype(np.float16)
    b = rng.choice(np.array([2.0**-20, 2.0**-126, 1e30, -1.25]), (40, 12)).astype(ml_dtypes.bfloat16)
    wide = [x.astype(np.float32) for x in (a, b)]
    assert_same_bits(dot(a, b, start, accumulator=accumulator), model(*wide, start, accumulator, "tf32"))
    bf16_pair = a.astype(np.float32), np.ones((40, 1), np.float32)
    fp16_pair = a, np.ones((40, 1), np.float16)
    assert_same_bits(dot(*fp16_pair, accumulator=accumulator),
                     model(*bf16_pair, np.zeros((12, 1), np.float32), accumulator, "fp16"))


def test_format_of_float32_operands():
    a, b = np.float32([[1.125, 2.0**-16]]), np.float32([[1.0], [3.0]])
    assert dot(a, b, accumulator="hopper", format="tf32") == 1.125 + 3 * 2.0**-16
    assert dot(a, b, accumulator="hopper", format=format_named("e6m3")) == 1.125 + 3 * 2.0**-16
    mixed = dot(a, b.astype(ml_dtypes.bfloat16), accumulator="ampere", format="tf32")
    assert mixed == 1.125 + 3 * 2.0**-16


# ---- bad input ----------------------------------------------------------------------------------

A, B = np.ones((2, 3), ml_dtypes.bfloat16), np.ones((3, 4), ml_dtypes.bfloat16)
F32 = np.float32([[1.0, 1.1]])


@pytest.mark.parametrize("args, kwargs, error, message", [
    ((A, B), {"accumulator": "hoper"}, ValueError, "unknown accumulator 'hoper': did you mean 'hopper'"),
    ((A, B), {"accumulator": None}, ValueError, "unknown accumulator None: valid: sequential, hopper"),
    ((A, B), {"format": "tf23"}, ValueError, "unknown format 'tf23': did you mean 'tf32'"),
    ((A, B), {"format": "tf32"}, ValueError, r"a is bf16 and b bf16 by their dtypes: drop format='tf32'"),
    ((A, A), {}, ValueError, r"equal K, got a \(2, 3\), b \(2, 3\)"),
    ((A[0], B), {}, ValueError, r"a must be \(…, M, K\) and b \(…, K, N\) with equal K, got a \(3,\)"),
    ((np.stack([A] * 2), np.stack([B] * 3)), {}, ValueError, r"leading axes must broadcast, got a \(2, 2"),
    ((A, B, np.ones((3, 4), np.float32)), {}, ValueError, r"c must broadcast to \(2, 4\), got \(3, 4\)"),
    ((A.astype(np.float64), B), {}, TypeError, "a must have one of the dtypes float32, .* got float64"),
    ((A, B.astype(np.int32)), {}, TypeError, "b must have one of the dtypes .* got int32"),
    ((A, B, np.ones(4)), {}, TypeError, "c must have one of the dtypes .* got float64"),
    ((A, [[1.0]]), {}, TypeError, "b must be a NumPy array, got list"),
    ((A, B, 1.0), {}, TypeError, "c must be a NumPy array, got float"),
    ((F32, F32.T), {"format": "tf32"}, ValueError, r"a\[0, 1\] = 1.1 is not a value of tf32 \(1 of 2"),
    ((F32, F32.T), {"accumulator": "hopper"}, ValueError, "both fp32 and fp32: use accumulator='sequential'"),
    ((A, B.astype(np.float32)), {"accumulator": "ampere"}, ValueError, "both bf16 and fp32: use"),
    ((F32 * 0, F32.T * 0), {"accumulator": "hopper", "format": "e5m11"}, ValueError, "both e5m11 and"),
])
def test_bad_input(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        dot(*args, **kwargs)
