"""The tensor core's dot product, bit for bit (numerics §5), on NumPy arrays.

One group is L products and the accumulator, cut to a common grid and summed. A product costs six
passes over the block: two in int8 for the largest exponent (sum, maximum), two in fp32 for a·b·2^(F - shift),
a conversion to int32, whose truncation is the cut, and the sum. This relies on three facts:

- operands are scaled by the largest exponent of their group of L (row or column), so products lie below 4;
- an operand 2^62 below that is set to 0: where the group's largest product exponent is at least -36
  (in the same scale) it would be cut to 0 anyway;
- elsewhere (rare: large elements of a row meet only tiny ones of a column) the elements are redone one
  by one in fp64.
"""
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuflash.dot_panels import CHUNK, blocks
from cuflash.formats import Format


@dataclass(frozen=True)
class TensorCore:
    """The numbers that tell one generation from another.

    Args:
        fraction_bits: F, terms are cut to multiples of 2^(e_max - F).
        zero_exponent: of a term that is 0.
        products: L, products of one group for 16-bit operands; half of it for tf32.
    """
    fraction_bits: int
    zero_exponent: int
    products: int


TENSOR_CORES = {"hopper": TensorCore(25, -133, 16), "ampere": TensorCore(24, -132, 8)}

_LEAST = -36       # smallest product exponent, in the operands' scale, that the dense path takes
_FLUSH = -62       # smallest operand exponent that it keeps: -63 + 2 <= _LEAST - F
_PART = 8          # products whose cut sum fits int32: 8 · 4 · 2^F <= 2^30, and the accumulator 2^(F + 1)
_NO_TERM = -1000   # exponent of an operand that is 0
_REPAIRS = 1 << 12  # elements redone at once


def tensor_core_panel(x: NDArray, y: NDArray, out: NDArray, *, core: TensorCore, format: Format) -> None:
    """Adds x·y to out in groups of ascending k; a panel as in dot_panels.py, operands in `format`."""
    length = core.products // 2 if format.name == "tf32" else core.products
    group = None
    for k in range(0, x.shape[1], CHUNK):
        yk = _Operand(y[:, k:k + CHUNK], length, format.emin)
        for i in blocks(out):
            xk = _Operand(x[:, k:k + CHUNK, i], length, format.emin)
            part = out[:, i]
            if group is None or group.acc.shape != part.shape:
                group = _Group(core, part.shape)
            np.copyto(group.acc, part)
            for g in range(xk.top.shape[1]):
                group.add(xk, yk, g)
            np.copyto(part, group.acc, casting="unsafe")


class _Operand:
    """A chunk (n, K, m) of an operand, cut into groups along k.

    values (n, groups, L, m) fp32; exponent likewise int16; top (n, groups, m) int16, a group's largest
    exponent; scaled = values / 2^top in fp32 and relative = exponent - top in int8, flushed.
    """

    def __init__(self, x: NDArray[np.float32], length: int, emin: int) -> None:
        n, depth, m = x.shape
        groups = -(-depth // length)
        values = np.zeros((n, groups * length, m), np.float32)
        values[:, :depth] = x
        self.values = values = values.reshape(n, groups, length, m)
        self.finite = bool(np.isfinite(values).all())

        exponent = (values.view(np.int32) >> 23 & 255).astype(np.int16)
        exponent -= np.int16(127)
        exponent[exponent < emin] = emin
        exponent[values == 0] = _NO_TERM
        top = exponent.max(axis=2, keepdims=True)
        self.exponent, self.top = exponent, top[:, :, 0]
        self.scaled = (values.astype(np.float64) * _power(-top)).astype(np.float32)
        relative = exponent - top  # 0 throughout a group of zeros
        flushed = relative < _FLUSH
        self.scaled[flushed] = 0
        relative[flushed] = _FLUSH - 1
        self.relative = relative.astype(np.int8)


def _power(exponent: NDArray) -> NDArray[np.float64]:
    """2^exponent, -1022 <= exponent <= 1023."""
    return (exponent.astype(np.int64) + 1023 << 52).view(np.float64)


class _Group:
    """Arrays of one block's shape, and the steps of one group on them.

    acc (fp64) holds the block's accumulators, fp32 numbers. No operation mixes dtypes: NumPy would buffer it.
    """

    def __init__(self, core: TensorCore, shape: tuple[int, ...]) -> None:
        self.core = core
        self.acc, self.total = np.empty((2, *shape))
        self.bits = np.empty(shape, np.int64)
        self.product = np.empty(shape, np.float32)
        self.factor, self.cut, self.part = np.empty((3, *shape), np.int32)
        self.shift, self.e_max = np.empty((2, *shape), np.int16)
        self.most = np.full(shape, core.fraction_bits + 127, np.int16)  # np.maximum is slow with a scalar
        self.top, self.exponent = np.empty((2, *shape), np.int8)

    def add(self, x: _Operand, y: _Operand, g: int) -> None:
        """acc becomes the result of group g of x and y with acc."""
        core, acc, total, e_max = self.core, self.acc, self.total, self.e_max
        fraction_bits = core.fraction_bits
        special = self._special(x, y, g)
        self._exponents(x, y, g)
        repair = np.flatnonzero(self.shift < _LEAST)
        if len(repair):
            redone = self._one_by_one(x, y, g, repair)
        tiny = e_max.min(initial=0) < fraction_bits - 149
        if tiny:  # exponents of fp32, not of its values in fp64
            np.copyto(e_max, np.maximum(e_max, np.where(acc == 0, core.zero_exponent, -126).astype(np.int16)))
            scale = x.top[:, g, :, None] + y.top[:, g, None, :]
            np.subtract(e_max, scale, out=self.shift)
        self._sum_of_cut_terms(x, y, g)
        np.bitwise_and(total.view(np.int64), np.int64(-1 << 29), out=acc.view(np.int64))  # 24 bits are left
        np.subtract(np.int64(2046 << 52), self.bits, out=self.bits)  # 2^-n of 2^n
        np.multiply(acc, self.bits.view(np.float64), out=acc)
        if tiny:
            acc *= 2.0**149
            np.trunc(acc, out=acc)
            acc *= 2.0**-149
        if e_max.max(initial=0) >= 122:  # L + 1 terms below 2^(e_max + 2)
            acc[acc >= 2.0**128], acc[acc <= -2.0**128] = np.inf, -np.inf
        if len(repair):
            acc.reshape(-1)[repair] = redone
        if special is not None:  # whatever the steps above made of Inf and NaN
            np.copyto(acc, special, where=~np.isfinite(special))

    def _exponents(self, x: _Operand, y: _Operand, g: int) -> None:
        """e_max, and shift: the same in the operands' scale; both right where shift >= _LEAST."""
        top, e, shift, e_max, bits = self.top, self.exponent, self.shift, self.e_max, self.bits
        a, b = x.relative[:, g, :, :, None], y.relative[:, g, :, None]
        np.add(a[:, 0], b[:, 0], out=top)
        for k in range(1, a.shape[1]):
            np.add(a[:, k], b[:, k], out=e)
            np.maximum(top, e, out=top)
        x_top, y_top = x.top[:, g, :, None], y.top[:, g, None]
        np.right_shift(self.acc.view(np.int64), 52, out=bits)
        np.copyto(e_max, bits, casting="unsafe")
        np.bitwise_and(e_max, np.int16(2047), out=e_max)
        np.subtract(e_max, x_top + np.int16(1023), out=e_max)
        np.subtract(e_max, y_top, out=e_max)
        np.copyto(shift, top)
        np.maximum(shift, e_max, out=shift)
        np.add(shift, x_top, out=e_max)
        np.add(e_max, y_top, out=e_max)

    def _sum_of_cut_terms(self, x: _Operand, y: _Operand, g: int) -> None:
        """total, in units of 2^(e_max - F); leaves 2^(F - e_max) in bits."""
        p, cut, part, total = self.product, self.cut, self.part, self.total
        bits, factor, fraction_bits = self.bits, self.factor, self.core.fraction_bits
        np.copyto(bits, self.e_max)
        np.subtract(np.int64(fraction_bits + 1023), bits, out=bits)
        np.left_shift(bits, 52, out=bits)
        np.multiply(self.acc, bits.view(np.float64), out=total)
        np.copyto(part, total, casting="unsafe")  # the cut

        np.minimum(self.shift, self.most, out=self.shift)
        np.subtract(self.most, self.shift, out=self.shift)
        np.copyto(factor, self.shift)
        np.left_shift(factor, 23, out=factor)
        scale = factor.view(np.float32)  # 2^(F - shift), 0 where all products are cut to 0
        a, b = x.scaled[:, g, :, :, None], y.scaled[:, g, :, None]
        for k in range(a.shape[1]):
            np.multiply(a[:, k], b[:, k], out=p)
            np.multiply(p, scale, out=p)
            if k == _PART:
                np.copyto(total, part)
                np.copyto(part, p, casting="unsafe")
            else:
                np.copyto(cut, p, casting="unsafe")
                np.add(part, cut, out=part)
        if a.shape[1] <= _PART:
            np.copyto(total, part)
        else:
            np.copyto(self.acc, part)
            np.add(total, self.acc, out=total)

    def _one_by_one(self, x: _Operand, y: _Operand, g: int, flat: NDArray[np.intp]) -> NDArray[np.float64]:
        """The results of single elements of the block, without scaling."""
        core, result = self.core, np.empty(len(flat))
        for start in range(0, len(flat), _REPAIRS):
            n, i, j = np.unravel_index(flat[start:start + _REPAIRS], self.acc.shape)
            acc = self.acc[n, i, j]
            a, b = x.values[n, g, :, i].astype(np.float64), y.values[n, g, :, j].astype(np.float64)
            terms = a * b
            e = np.where(terms == 0, core.zero_exponent, x.exponent[n, g, :, i] + y.exponent[n, g, :, j])
            acc_e = np.where(acc == 0, core.zero_exponent, np.maximum(np.frexp(acc)[1] - 1, -126))
            e_max = np.maximum(e.max(axis=1), acc_e)
            unit = _power(e_max - core.fraction_bits)
            total = np.trunc(acc / unit)
            for k in range(terms.shape[1]):
                total += np.trunc(terms[:, k] / unit)
            total.view(np.int64)[...] &= -1 << 29
            total = np.trunc(total * unit * 2.0**149) * 2.0**-149
            total[np.abs(total) >= 2.0**128] *= np.inf
            result[start:start + _REPAIRS] = total
        return result

    def _special(self, x: _Operand, y: _Operand, g: int) -> NDArray[np.float64] | None:
        """The result where a term is Inf or NaN; finite elsewhere, since other terms sum to below 2^261."""
        if x.finite and y.finite and np.isfinite(self.acc).all():
            return None
        total = self.acc.copy()
        a, b = x.values[:, g, :, :, None].astype(np.float64), y.values[:, g, :, None].astype(np.float64)
        for k in range(a.shape[1]):
            total += a[:, k] * b[:, k]
        return total
