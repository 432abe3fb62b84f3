"""`ex2.approx.f32` and `lg2.approx.f32` of NVIDIA's function unit, to the bit: exp = `mufu` (numerics §6).

The unit interpolates by parabolas over 64 equal segments of the fraction, in fixed point, with a square
whose low partial products are left out (S. F. Oberman and M. Y. Siu, "A High-Performance Area-Efficient
Multifunction Interpolator", ARITH 2005). The coefficients were found from all 2^23 fractions on an H200;
for each segment they are the only ones that give the results seen. tests/gpu/test_mufu.py compares every
one of the 2^32 arguments.
"""
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuflash.functions import LN2, Array, _apply

Table = tuple[tuple[int, int, int], ...]

_FRACTION = (1 << 23) - 1
_MIN_NORMAL = np.float32(2.0**-126)
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)

# ---- tables: (c0, c1, c2) by the upper six bits of the fraction; with u the lower 17 bits, the value is
# (c0·2^s + bias + c1·u + c2·square(u)) · 2^-38, less 1 for ex2

_EX2_SHIFT, _EX2_BIAS = 13, 6114
_EX2 = (
    (3, 22713, 494), (365386, 22960, 501), (734750, 23210, 506), (1108133, 23463, 511),
    (1485586, 23718, 518), (1867145, 23977, 521), (2252860, 24238, 527), (2642777, 24502, 532),
    (3036940, 24768, 541), (3435393, 25038, 546), (3838184, 25311, 551), (4245365, 25586, 559),
    (4656977, 25865, 564), (5073072, 26147, 568), (5493699, 26431, 577), (5918905, 26719, 583),
    (6348741, 27010, 589), (6783258, 27304, 596), (7222505, 27602, 600), (7666538, 27902, 609),
    (8115404, 28206, 615), (8569160, 28513, 622), (9027854, 28824, 627), (9491545, 29138, 633),
    (9960285, 29455, 641), (10434129, 29776, 647), (10913133, 30100, 655), (11397354, 30428, 661),
    (11886846, 30759, 670), (12381669, 31094, 677), (12881882, 31432, 686), (13387539, 31775, 691),
    (13898703, 32121, 699), (14415435, 32471, 705), (14937793, 32824, 715), (15465837, 33182, 721),
    (15999633, 33543, 730), (16539242, 33908, 739), (17084727, 34277, 748), (17636150, 34651, 753),
    (18193579, 35028, 763), (18757078, 35409, 773), (19326714, 35795, 779), (19902551, 36185, 787),
    (20484659, 36579, 796), (21073106, 36977, 806), (21667961, 37380, 813), (22269293, 37787, 822),
    (22877175, 38198, 833), (23491674, 38614, 842), (24112865, 39035, 849), (24740822, 39460, 858),
    (25375616, 39889, 870), (26017322, 40324, 877), (26666015, 40763, 887), (27321773, 41207, 896),
    (27984672, 41655, 909), (28654788, 42109, 917), (29332202, 42568, 925), (30016992, 43031, 938),
    (30709240, 43500, 946), (31409026, 43973, 959), (32116431, 44452, 969), (32831540, 44936, 980),
)
_LG2_SHIFT, _LG2_BIAS = 12, 837
_LG2 = (
    (7, 47272, -1454), (1501082, 46545, -1410), (2979248, 45840, -1370), (4435178, 45156, -1330),
    (5869541, 44492, -1292), (7282962, 43847, -1254), (8676044, 43221, -1220), (10049363, 42612, -1184),
    (11403483, 42020, -1152), (12738917, 41444, -1118), (14056184, 40884, -1088), (15355769, 40339, -1060),
    (16638140, 39809, -1036), (17903743, 39292, -1008), (19153023, 38788, -982), (20386388, 38297, -958),
    (21604233, 37818, -932), (22806955, 37351, -910), (23994917, 36896, -890), (25168476, 36451, -866),
    (26327983, 36018, -850), (27473763, 35594, -828), (28606145, 35180, -808), (29725438, 34776, -792),
    (30831938, 34380, -770), (31925933, 33994, -754), (33007706, 33616, -736), (34077525, 33247, -722),
    (35135650, 32886, -708), (36182341, 32532, -692), (37217834, 32186, -678), (38242366, 31847, -662),
    (39256173, 31516, -652), (40259472, 31191, -638), (41252485, 30872, -622), (42235415, 30561, -614),
    (43208464, 30255, -600), (44171830, 29955, -586), (45125709, 29662, -578), (46070275, 29374, -566),
    (47005716, 29091, -552), (47932209, 28814, -542), (48849920, 28542, -532), (49759008, 28276, -524),
    (50659645, 28014, -514), (51551985, 27757, -506), (52436169, 27505, -498), (53312352, 27257, -488),
    (54180676, 27013, -476), (55041283, 26774, -468), (55894308, 26540, -464), (56739878, 26309, -454),
    (57578134, 26082, -446), (58409191, 25859, -438), (59233179, 25640, -432), (60050209, 25424, -422),
    (60860399, 25213, -418), (61663869, 25004, -408), (62460730, 24799, -402), (63251080, 24598, -398),
    (64035037, 24399, -390), (64812691, 24204, -384), (65584149, 24012, -378), (66349508, 23823, -372),
)


@cache
def _squares() -> NDArray[np.int64]:
    """The unit's square of every u < 2^17, in units of 2^19: partial products below that are not there."""
    u = np.arange(1 << 17, dtype=np.int64)
    square = np.zeros_like(u)
    for a in range(17):
        lowest = max(a + 1, 18 - a)  # of the bits b > a with 2·2^a·2^b >= 2^19
        products = (u >> lowest << lowest) << a + 1
        if 2 * a >= 19:
            products += 1 << 2 * a
        square += np.where(u >> a & 1, products, 0)
    return square >> 19


@cache
def _coefficients(table: Table, shift: int, bias: int) -> tuple[NDArray[np.int64], ...]:
    c0, c1, c2 = np.array(table, np.int64).T.copy()
    return (c0 << shift) + bias, c1, c2


def _interpolate(fraction: NDArray[np.int64], table: Table, shift: int, bias: int) -> NDArray[np.int64]:
    """The value for 23-bit fractions, in units of 2^-38."""
    c0, c1, c2 = _coefficients(table, shift, bias)
    segment, u = fraction >> 17, fraction & 0x1FFFF
    value = _squares()[u]
    value *= c2[segment]
    value += c1[segment] * u
    value += c0[segment]
    return value


# ---- functions

def ex2_mufu(x: ArrayLike, out: Array | None = None) -> Array:
    """2^x as `ex2.approx.f32`: monotone, exact at integers from −126 up, subnormal results kept.

    Error of a normal result in ulp: −1.4 to +1.4 for x > 0, −2.06 to +1.2 for x < 0; below −1 its mean is −0.62.

    Args:
        x: fp32.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_ex2_block, {"x": x}, out)


@cache
def _ex2_significands() -> NDArray[np.int32]:
    """The digits of 2^f for every 23-bit fraction f: 32 MiB, four times as fast as interpolating."""
    digits = np.empty(1 << 23, np.int32)
    for start in range(0, 1 << 23, 1 << 17):
        fraction = np.arange(start, start + (1 << 17), dtype=np.int64)
        digits[start:start + (1 << 17)] = _interpolate(fraction, _EX2, _EX2_SHIFT, _EX2_BIAS) >> 15
    digits.flags.writeable = False
    return digits


def _ex2_block(x: Array, out: Array) -> None:
    nan = np.isnan(x)
    # The unit flushes results below 2^-126, so the compiler takes half the argument there and squares.
    halved = x < np.float32(-126)
    t = np.fmin(np.fmax(x, np.float32(-256)), np.float32(128))
    np.multiply(t, np.float32(0.5), out=t, where=halved)
    # 23 fraction bits, cut; a negative number is the complement of all bits, unless it is an integer
    fixed = (np.abs(t) * np.float32(2.0**23)).astype(np.int32)
    sign = t.view(np.int32) >> 31
    whole = fixed & _FRACTION == 0
    fixed ^= sign
    fixed -= sign & -whole.astype(np.int32)
    digits = np.take(_ex2_significands(), fixed & _FRACTION, mode="wrap")
    bits = (fixed & ~_FRACTION) + digits
    bits += 127 << 23
    bits[bits < 1 << 23] = 0
    np.multiply(bits.view(np.float32), bits.view(np.float32), out=bits.view(np.float32), where=halved)
    out[...] = bits.view(np.float32)
    out[nan] = _NAN


def lg2_mufu(x: ArrayLike, out: Array | None = None) -> Array:
    """log₂ x as `lg2.approx.f32`, with an absolute error of up to 2^-22 even near x = 1.

    lg2(±0) = −Inf, NaN below zero, lg2(+Inf) = +Inf.

    Args:
        x: fp32, subnormals included.
        out: fp32 array of x's shape for the result; may be x.
    """
    return _apply(_lg2_block, {"x": x}, out)


def _lg2_block(x: Array, out: Array) -> None:
    subnormal = x < _MIN_NORMAL
    special = ~((x > 0) & (x < np.inf)) | (x == 1)
    at = x[special]
    limits = np.select([at == 1, at == 0, at > 0], [np.float32(0), -np.inf, np.inf], _NAN)
    bits = np.where(subnormal, x * np.float32(2.0**24), x).view(np.uint32).astype(np.int64)
    value = _interpolate(bits & _FRACTION, _LG2, _LG2_SHIFT, _LG2_BIAS) >> 2  # units of 2^-36
    value += (bits >> 23) - 127 << 36
    negative = value < 0
    value ^= value >> 63  # the magnitude of a negative number is the complement of all bits
    # cut to 24 bits: fp64 holds the value exactly, with 29 bits more than fp32
    cut = (value.astype(np.float64).view(np.int64) >> 29 << 29).view(np.float64)
    out[...] = np.ldexp(np.where(negative, -cut, cut), -36)
    np.subtract(out, np.float32(24), out=out, where=subnormal)
    out[special] = limits


def log_mufu(x: ArrayLike, out: Array | None = None) -> Array:
    """Natural logarithm as CUDA's `__logf`: lg2_mufu(x)·ln 2, rounded."""
    out = lg2_mufu(x, out)
    return np.multiply(out, LN2, out=out)
