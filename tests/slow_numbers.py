"""fma, rounding and random words of one number at a time, in Python's floats and integers.

Written apart from cuflash.formats, cuflash.philox and cuflash.functions, for tests.slow_attention.
"""
import functools
import math
import struct

import numpy as np

from cuflash.formats import format_named

F = np.float32
INF, ZERO = math.inf, F(0)


def fma(a, b, c):
    """fl(a·b + c) of fp32 numbers.

    fp64 holds the product exactly. Where the sum is inexact its last bit is made odd (S. Boldo and
    G. Melquiond, 2008), so that rounding it to fp32 rounds once.
    """
    product, c = float(a) * float(b), float(c)
    total = product + c
    if math.isfinite(total):
        part = total - product
        error = (product - (total - part)) + (c - part)  # two-sum: total + error is exact
        if error and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
            total = math.nextafter(total, math.copysign(INF, error))
    return F(total)


def dot(a, b, start=ZERO):
    """The `sequential` dot product."""
    for x, y in zip(np.asarray(a, F).tolist(), np.asarray(b, F).tolist()):
        start = fma(x, y, start)
    return start + ZERO  # a zero result is +0


def round_one(x, name, mode, word=0):
    """x rounded to a format."""
    x, f = float(x), format_named(name)
    if math.isnan(x) or x == 0 or math.isinf(x) and not f.saturates:
        return F(x)
    size, negative = abs(x), x < 0
    if size > f.max and (f.saturates or mode == "sr"):
        return F(math.copysign(f.max, x))
    unit = math.ldexp(1, max(math.frexp(size)[1] - 1, f.emin) - f.mantissa_bits)
    below, rest = divmod(size / unit, 1)  # a power of two divides exactly
    up = rest > 0 and {"rne": rest > 0.5 or rest == 0.5 and below % 2, "rna": rest >= 0.5, "rz": False, "rd": negative,
                       "ru": not negative, "sr": word < int(rest * 2**32)}[mode]
    size = (below + bool(up)) * unit
    if size > f.max:
        away = mode in ("rne", "rna") or mode == ("rd" if negative else "ru")
        size = INF if away and not f.saturates else f.max
    return F(math.copysign(size, x))


@functools.lru_cache(maxsize=1 << 14)
def philox(counter, key):
    """The four words of Philox4x32-10."""
    c, k = counter, key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = (product1 >> 32 ^ c[1] ^ k[0], product1 & 0xFFFFFFFF, product0 >> 32 ^ c[3] ^ k[1], product0 & 0xFFFFFFFF)
        k = ((k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF)
    return c


def random_word(key, sample, head, site, tile, row, column):
    """The word of one element: numerics.md section 1."""
    place = philox((key.step, sample, (key.layer << 16) + head, site), (key.seed & 0xFFFFFFFF, key.seed >> 32))[:2]
    block = philox((4 * (column // 16) + column % 8 // 2, row, tile, 0), place)
    return block[column % 2 + 2 * (column % 16 // 8)]
