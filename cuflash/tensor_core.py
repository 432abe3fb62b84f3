"""The tensor core's dot product, bit for bit (numerics §5), on NumPy arrays.

One group is L products and the accumulator, cut to a common grid and summed. Per product the dense
path makes six passes over the block: two in int8 for the largest exponent (max-plus), two in fp32 for
a·b·2^shift, where truncation to int32 is the cut, and one sum. It relies on three facts:

- operands are scaled by the largest exponent of their group of L (row or column), so products lie below 4;
- an operand 2^62 below that is set to 0: where the group's largest product exponent is at least -36
  (in the same scale) it would be cut to 0 anyway;
- elsewhere (rare: large elements of a row meet only tiny ones of a column) the elements are redone one
  by one in fp64.
"""
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuflash.dot_panels import CHUNK, NAN, blocks
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

_LEAST = -36     # smallest product exponent, in operands' scale, that the dense path takes
_FLUSH = -62     # smallest operand exponent that it keeps: -63 + 2 <= _LEAST - F
_PART = 8        # products whose cut sum fits int32: 8 · 4 · 2^F <= 2^30


def tensor_core_panel(x: NDArray, y: NDArray, out: NDArray, *, core: TensorCore, format: Format) -> None:
    """Adds x·y to out in groups of ascending k; a panel as in dot_panels.py, operands in `format`."""
    length = core.products // 2 if format.name == "tf32" else core.products
    for k in range(0, x.shape[1], CHUNK):
        yk = _Operand(y[:, k:k + CHUNK], length, format.emin)
        for i in blocks(out):
            xk = _Operand(x[:, k:k + CHUNK, i], length, format.emin)
            acc = np.array(out[:, i], order="C")
            for group in range(xk.groups):
                _add_group(xk, yk, group, acc, core)
            out[:, i] = acc


class _Operand:
    """A chunk of an operand, cut into groups along k.

    raw (n, groups, L, m) fp64; exponent likewise int16, of zeros -1000; top (n, groups, m) int16, the largest
    exponent of a group; scaled = raw / 2^top in fp32 and relative = exponent - top in int8, both flushed.
    """

    def __init__(self, x: NDArray[np.float32], length: int, emin: int) -> None:
        n, depth, m = x.shape
        self.groups = -(-depth // length)
        raw = np.zeros((n, self.groups * length, m), np.float32)
        raw[:, :depth] = x
        raw = raw.reshape(n, self.groups, length, m)
        self.raw = raw
        self.finite = bool(np.isfinite(raw).all())
        if not self.finite:
            raw = np.where(np.isfinite(raw), raw, np.float32(0))
        exponent = np.maximum(_exponent_field(raw) - np.int16(127), np.int16(emin))
        exponent[raw == 0] = -1000
        top = exponent.max(axis=2, keepdims=True)
        relative = exponent - top  # 0 throughout a group of zeros
        self.exponent, self.top = exponent, top[:, :, 0]
        # top is -1000 or within fp32's range: 2^-top as fp64
        self.scaled = (raw * np.ldexp(1.0, -top.astype(np.int32))).astype(np.float32)
        self.scaled[relative < _FLUSH] = 0
        self.relative = np.maximum(relative, np.int16(_FLUSH - 1)).astype(np.int8)
        self.values = raw


def _exponent_field(x: NDArray[np.float32]) -> NDArray[np.int16]:
    return (x.view(np.int32) >> 23 & 255).astype(np.int16)


def _add_group(x: _Operand, y: _Operand, g: int, acc: NDArray[np.float32], core: TensorCore) -> None:
    """acc (n, rows, cols) becomes the result of group g."""
    special = None
    if not (x.finite and y.finite and np.isfinite(acc).all()):
        special = _special(x, y, g, acc)
        acc[~np.isfinite(acc)] = 0

    top = _largest_product(x, y, g, acc.shape)
    scale = x.top[:, g, :, None] + y.top[:, g, None, :]
    acc_exponent = _acc_exponent(acc, core)
    shift = np.maximum(top, acc_exponent - scale)
    repair = np.flatnonzero(shift < _LEAST)
    factor = np.clip(shift, _LEAST, core.fraction_bits + 40)
    factor = ((core.fraction_bits + 127 - factor.astype(np.int32)) << 23).view(np.float32)
    e_max = shift + scale
    total = _cut_acc(acc, e_max, core)
    total += _cut_products(x, y, g, factor)
    result = _pack(total, e_max, core)

    if len(repair):
        n, i, j = np.unravel_index(repair, acc.shape)
        for s in range(0, len(repair), 1 << 12):
            part = slice(s, s + (1 << 12))
            result.reshape(-1)[repair[part]] = _one_by_one(x, y, g, n[part], i[part], j[part],
                                                           acc.reshape(-1)[repair[part]], core)
    if special is not None:
        at = ~np.isfinite(special)
        result[at] = special[at]
        result.view(np.int32)[np.isnan(result)] = NAN
    acc[...] = result


def _largest_product(x: _Operand, y: _Operand, g: int, shape: tuple[int, ...]) -> NDArray[np.int16]:
    """max over the group of the product's exponent, in the operands' scale; right where it is >= _LEAST."""
    top, e = np.empty((2, *shape), np.int8)
    a, b = x.relative[:, g], y.relative[:, g]
    for k in range(a.shape[1]):
        if k == 0:
            np.add(a[:, k, :, None], b[:, k, None, :], out=top)
        else:
            np.add(a[:, k, :, None], b[:, k, None, :], out=e)
            np.maximum(top, e, out=top)
    return top.astype(np.int16)


def _acc_exponent(acc: NDArray[np.float32], core: TensorCore) -> NDArray[np.int16]:
    e = np.maximum(_exponent_field(acc), np.int16(1)) - np.int16(127)
    e[acc == 0] = core.zero_exponent
    return e


def _power(exponent: NDArray) -> NDArray[np.float64]:
    """2^exponent, -1022 <= exponent <= 1023."""
    return (exponent.astype(np.int64) + 1023 << 52).view(np.float64)


def _cut_acc(acc: NDArray[np.float32], e_max: NDArray[np.int16], core: TensorCore) -> NDArray[np.float64]:
    """The accumulator in units of the grid, cut."""
    total = acc * _power(core.fraction_bits - e_max)
    return np.trunc(total, out=total)


def _cut_products(x: _Operand, y: _Operand, g: int, factor: NDArray[np.float32]) -> NDArray[np.float64]:
    """The sum of the products in units of the grid, each cut."""
    a, b = x.scaled[:, g], y.scaled[:, g]
    p, cut, part = np.empty_like(factor), np.empty(factor.shape, np.int32), np.zeros(factor.shape, np.int32)
    total = np.zeros(factor.shape)
    for k in range(a.shape[1]):
        np.multiply(a[:, k, :, None], b[:, k, None, :], out=p)
        np.multiply(p, factor, out=p)
        np.copyto(cut, p, casting="unsafe")
        np.add(part, cut, out=part)
        if (k + 1) % _PART == 0 or k + 1 == a.shape[1]:
            np.add(total, part, out=total)
            part[...] = 0
    return total


def _pack(total: NDArray[np.float64], e_max: NDArray[np.int16], core: TensorCore) -> NDArray[np.float32]:
    """The group's sum in units of the grid, cut to fp32."""
    total.view(np.int64)[...] &= -1 << 29
    total *= _power(e_max - core.fraction_bits)
    if e_max.min(initial=0) < core.fraction_bits - 149:
        total *= 2.0**149
        np.trunc(total, out=total)
        total *= 2.0**-149
    return total.astype(np.float32)


def _one_by_one(x: _Operand, y: _Operand, g: int, n: NDArray, i: NDArray, j: NDArray,
                acc: NDArray[np.float32], core: TensorCore) -> NDArray[np.float32]:
    """The group's result for single elements, without scaling."""
    a, b = x.values[n, g, :, i].astype(np.float64), y.values[n, g, :, j].astype(np.float64)
    e = np.where(a * b == 0, core.zero_exponent, x.exponent[n, g, :, i] + y.exponent[n, g, :, j])
    e_max = np.maximum(e.max(axis=1), _acc_exponent(acc, core))
    total = _cut_acc(acc, e_max, core)
    unit = _power(core.fraction_bits - e_max)
    for k in range(a.shape[1]):
        total += np.trunc(a[:, k] * b[:, k] * unit)
    return _pack(total, e_max, core)


def _special(x: _Operand, y: _Operand, g: int, acc: NDArray[np.float32]) -> NDArray[np.float64]:
    """Inf or NaN where a term is: in fp64 nothing else can be, for finite terms stay below 2^261."""
    s = acc.astype(np.float64)
    a, b = x.raw[:, g].astype(np.float64), y.raw[:, g].astype(np.float64)
    for k in range(a.shape[1]):
        s += a[:, k, :, None] * b[:, k, None, :]
    return s
