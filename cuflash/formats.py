"""Number formats and rounding modes (numerics §1): the one place where a value loses bits.

`round_to` maps fp32 or fp64 to the values of a format by one rounding from the source's own
precision, on the bits, so that cuda/formats.cuh can do the same steps:

    |x|  =  kept . fraction rest      in units of the format's last place at x
    |y|  =  kept + (1 if the mode says up)
"""
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuflash.errors import unknown
from cuflash.philox import Key, random_words

_BLOCK = 1 << 14  # elements at once: the temporaries of a block stay in cache
_WHOLE = 1 << 17  # elements at once of what has one temporary


# ---- formats ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals; IEEE layout unless it saturates.

    Args:
        name: its canonical name.
        exponent_bits: 2 to 8.
        mantissa_bits: stored bits of the significand, 1 to 23.
        saturates: fp8_e4m3 alone: no Inf, the largest exponent holds numbers, overflow gives ±max.

    Raises:
        ValueError: bits out of range.
    """
    name: str
    exponent_bits: int
    mantissa_bits: int
    saturates: bool = False

    def __post_init__(self) -> None:
        bits = self.exponent_bits, self.mantissa_bits
        if not (2 <= bits[0] <= 8 and 1 <= bits[1] <= 23) or self.saturates and bits != (4, 3):
            raise ValueError(f"Format: 2 to 8 exponent bits and 1 to 23 mantissa bits (saturating: 4 and 3), "
                             f"got {bits}")

    @property
    def bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias + self.saturates

    @property
    def max(self) -> float:
        """Largest finite number."""
        last = 2 if self.saturates else 1  # of fp8_e4m3 the all-ones pattern is NaN
        return (2.0 - last * 2.0**-self.mantissa_bits) * 2.0**self.emax

    @property
    def min(self) -> float:
        """Smallest positive normal number."""
        return 2.0**self.emin

    @property
    def smallest(self) -> float:
        """Smallest positive subnormal number."""
        return 2.0**(self.emin - self.mantissa_bits)

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


_NAMED = {f.name: f for f in (Format("fp32", 8, 23), Format("tf32", 8, 10), Format("bf16", 8, 7),
                              Format("fp16", 5, 10), Format("fp8_e4m3", 4, 3, saturates=True),
                              Format("fp8_e5m2", 5, 2))}
_IEEE = {(f.exponent_bits, f.mantissa_bits): f for f in _NAMED.values() if not f.saturates}

_STORAGE = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16,
            "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
            "e4m3": ml_dtypes.float8_e4m3, "e3m4": ml_dtypes.float8_e3m4}


@cache
def format_named(name: str) -> Format:
    """The format of a name: fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2, or eXmY (2 <= X <= 8, 1 <= Y <= 23).

    One set of values has one format: e8m7 is bf16, e5m2 is fp8_e5m2; but e4m3 (IEEE) is not fp8_e4m3.

    Raises:
        ValueError: no such format.
    """
    if name in _NAMED:
        return _NAMED[name]
    match = re.fullmatch(r"e([2-8])m([1-9]|1[0-9]|2[0-3])", str(name), re.ASCII)
    if not match:
        raise unknown("format", name, [*_NAMED, "eXmY (X 2 to 8, Y 1 to 23)"])
    bits = int(match[1]), int(match[2])
    return _IEEE.get(bits) or Format(name, *bits)


def as_format(format: str | Format) -> Format:
    """`format_named` of a name; a Format as it is."""
    return format if isinstance(format, Format) else format_named(format)


def storage_dtype(format: str | Format) -> np.dtype | None:
    """The NumPy or ml_dtypes dtype whose values are those of the format, None where there is none."""
    dtype = _STORAGE.get(as_format(format).name)
    return None if dtype is None else np.dtype(dtype)


# ---- modes --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Mode:
    """A rounding mode: which inexact values go away from zero.

    Args:
        name: an identifier.
        up: `up(fraction, rest, odd, negative, word)` -> bool array, True away from zero. All arguments
            are arrays: fraction uint32, the top 32 bits of the discarded part; rest bool, whether a lower
            bit is set; odd bool, the last kept bit; negative bool; word uint32, random if `needs_key`.
            Asked only about inexact values. Beyond the format's range its neighbours are max and Inf
            and it sees fraction 0xFFFFFFFF, rest and odd True; a mode with `needs_key` overflows as rz.
        cuda: the same as a CUDA expression over the same names; None: the GPU refuses the mode.
        needs_key: whether it draws random words.

    Raises:
        ValueError: the name is not an identifier.
    """
    name: str
    up: Callable[..., Any]
    cuda: str | None = None
    needs_key: bool = False

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier()):
            raise ValueError(f"Mode: name must be an identifier, got {self.name!r}")

    @property
    def cuda_source(self) -> str:
        """The struct `mode_<name>` for cuda/formats.cuh.

        Raises:
            ValueError: the mode has no CUDA expression.
        """
        if self.cuda is None:
            raise ValueError(f"mode {self.name!r} has no cuda expression, so only NumPy arrays can use it")
        return f"DEFINE_MODE({self.name}, {str(self.needs_key).lower()}, {self.cuda})"


_TIE = 0x80000000

MODES: dict[str, Mode] = {mode.name: mode for mode in (
    Mode("rne", lambda fraction, rest, odd, negative, word:
         (fraction > _TIE) | (fraction == _TIE) & (rest | odd),
         "fraction > 0x80000000u || (fraction == 0x80000000u && (rest || odd))"),
    Mode("rz", lambda fraction, rest, odd, negative, word: np.zeros_like(rest), "false"),
    Mode("rna", lambda fraction, rest, odd, negative, word: fraction >= _TIE, "fraction >= 0x80000000u"),
    Mode("rd", lambda fraction, rest, odd, negative, word: negative, "negative"),
    Mode("ru", lambda fraction, rest, odd, negative, word: ~negative, "!negative"),
    Mode("sr", lambda fraction, rest, odd, negative, word: word < fraction, "word < fraction",
         needs_key=True),
)}


def as_mode(mode: str | Mode) -> Mode:
    """The built-in mode of a name; a Mode as it is.

    Raises:
        ValueError: no such mode, or a Mode that takes a built-in's name.
    """
    if isinstance(mode, Mode):
        if MODES.get(mode.name, mode) != mode:
            raise ValueError(f"mode {mode.name!r}: the name belongs to a built-in mode, choose another")
        return mode
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    return MODES[mode]


def cuda_name(format: str | Format, mode: str | Mode) -> str:
    """The rounding as cuda/formats.cuh spells it, for example `round_to<5, 10, mode_rne>`.

    Raises:
        ValueError: unknown format or mode, or the mode has no CUDA expression.
    """
    format, mode = as_format(format), as_mode(mode)
    mode.cuda_source  # refuses a mode without one
    saturates = ", true" if format.saturates else ""
    return f"round_to<{format.exponent_bits}, {format.mantissa_bits}, mode_{mode.name}{saturates}>"


# ---- rounding -----------------------------------------------------------------------------------

def round_to(x: ArrayLike, format: str | Format, mode: str | Mode = "rne", key: Key | None = None) -> NDArray:
    """Round to the values of a format, once, from x's own precision.

    Subnormals are kept. Overflow is IEEE's for the mode, but fp8_e4m3 saturates at ±448, Inf included.
    NaN stays NaN; a zero result has the sign of x.

    Args:
        x: float32 or float64, any shape.
        format: a format or its name.
        mode: a mode or its name: rne rz rna rd ru sr.
        key: random stream of a mode that needs one (sr): row is the flattened leading index,
            column the last axis; site, head and tile are 0.

    Returns:
        A new array of x's shape and dtype.

    Raises:
        TypeError: x has another dtype, or key is not a Key.
        ValueError: unknown format or mode, or a mode that needs a key has none.
    """
    x, format, mode = _as_float(x), as_format(format), as_mode(mode)
    if key is not None and not isinstance(key, Key):
        raise TypeError(f"round_to: key must be a cuflash.Key, got {type(key).__name__}")
    if not mode.needs_key:
        return round_with(x, format, mode)
    if key is None:
        raise ValueError(f"round_to: mode {mode.name!r} needs a key, for example key=cuflash.Key(seed=0)")
    out = np.array(x, order="C")
    if out.size == 0:
        return out
    grid = out.reshape(-1, out.shape[-1] if out.ndim else 1)
    if len(grid) > 1 << 32:
        raise ValueError(f"round_to: mode {mode.name!r} takes at most 2**32 rows, got {len(grid)}")
    rows, cols = max(1, 4 * _BLOCK // grid.shape[1]), min(4 * _BLOCK, grid.shape[1])
    for i in range(0, grid.shape[0], rows):
        for j in range(0, grid.shape[1], cols):
            part = grid[i:i + rows, j:j + cols]
            word = random_words(key, site=0, heads=0, tile=0, rows=np.arange(i, i + part.shape[0]),
                                cols=np.arange(j, j + part.shape[1]))[0]
            part[...] = round_with(part, format, mode, word)
    return out


def round_with(x: NDArray, format: Format, mode: Mode, word: NDArray[np.uint32] | None = None) -> NDArray:
    """`round_to` with the random words already drawn (x's shape); unvalidated, for the sites."""
    return rounder(format, mode, x.dtype)(x, word)


@cache
def rounder(format: Format, mode: Mode, dtype: np.dtype) -> Callable[..., NDArray]:
    """`round_with` of one format, mode and dtype: a function of x and word."""
    block = _rounder(format, mode, dtype)
    if format.name == "bf16" and mode == MODES["rne"] and dtype == np.float32:
        def to_bf16(x: NDArray, word: None = None) -> NDArray:
            whole = x.ndim and 0 < x.size <= _WHOLE and x.flags.c_contiguous
            if whole and not np.isnan(np.maximum.reduce(x, axis=None)):
                return _upper_half(x)
            return _by_blocks(x, block, word)
        return to_bf16
    return lambda x, word=None: _by_blocks(x, block, word)


def in_bf16(x: NDArray[np.float32]) -> bool:
    """Whether all of a contiguous x is in bf16; a look at some of it tells most others at once."""
    if not x.flags.c_contiguous:
        return False  # not looked into
    bits, low = x.reshape(-1).view(np.uint32), 0xFFFF
    return not (np.bitwise_or.reduce(bits[::1 + bits.size // 32]) & low or np.bitwise_or.reduce(bits) & low)


def _upper_half(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x, free of NaN, to bf16 by rne: faster than two casts."""
    bits = x.view(np.uint32)
    y = bits >> np.uint32(16)
    y &= np.uint32(1)
    y += np.uint32(0x7FFF)
    y += bits
    y &= np.uint32(0xFFFF0000)
    return y.view(np.float32)


def _by_blocks(x: NDArray, rounder: Callable[..., NDArray], word: NDArray[np.uint32] | None) -> NDArray:
    out = np.empty(x.shape, x.dtype)
    if not x.flags.c_contiguous:
        out[...] = x
        x = out
    x, flat, words = x.reshape(-1), out.reshape(-1), None if word is None else word.reshape(-1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # overflow and NaN are results here
        for i in range(0, flat.size, _BLOCK):
            some = slice(i, i + _BLOCK)
            flat[some] = rounder(x[some], None if words is None else words[some])
    return out


def _as_float(x: ArrayLike) -> NDArray:
    if not isinstance(x, np.ndarray):
        x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64):
        raise TypeError(f"x must be float32 or float64, got {x.dtype}: cast it, as by x.astype(np.float32)")
    return x


@dataclass(frozen=True)
class _Source:
    """The source dtype's bits, and the format's landmarks among them (bits of positive numbers)."""
    uint: type
    mantissa_bits: int
    bias: int
    drop: int       # mantissa bits that a normal number loses
    tiny: int       # the format's smallest normal number; 0 where its subnormals are the source's own
    top: int        # its largest finite number
    huge: int       # the power of two beyond it
    infinity: int

    @property
    def sign(self) -> int:
        return self.infinity + (1 << self.mantissa_bits)


@cache
def _source(format: Format, dtype: np.dtype) -> _Source:
    uint, mantissa_bits, bias = (np.uint32, 23, 127) if dtype == np.float32 else (np.uint64, 52, 1023)

    def bits(value: float) -> int:
        return int(np.asarray(value, dtype).view(uint))

    power = format.emin + bias
    return _Source(uint, mantissa_bits, bias, mantissa_bits - format.mantissa_bits,
                   tiny=power << mantissa_bits if power > 1 else 0, top=bits(format.max),
                   huge=(format.emax + 1 + bias) << mantissa_bits, infinity=2 * bias + 1 << mantissa_bits)


def _split(sig: NDArray, shift: Any) -> tuple[NDArray, NDArray, NDArray]:
    """sig / 2**shift as integer part (kept), top 32 bits of the fraction, and whether more is below."""
    shift = np.asarray(shift, sig.dtype)
    left, right = 32 - np.minimum(shift, 32), np.maximum(shift, 32) - 32  # one of them is 0
    kept = sig >> shift  # NumPy defines shifts past the width: 0
    low = sig - (kept << shift)
    fraction = (low << left) >> right
    rest = low & ((np.ones_like(shift) << right) - 1)
    return kept, fraction.astype(np.uint32), rest != 0


def _round_block(x: NDArray, format: Format, mode: Mode, word: NDArray | None = None) -> NDArray:
    """Any mode, by its rule."""
    src = _source(format, x.dtype)
    a = x.view(src.uint) & (src.sign - 1)
    negative = np.signbit(x)
    word = np.broadcast_to(np.uint32(0), x.shape) if word is None else word

    def rounded(kept, fraction, rest, some=slice(None)):
        odd = (kept & 1).astype(bool)
        up = np.asarray(mode.up(fraction, rest, odd, negative[some], word[some]))
        if up.dtype != bool:
            raise TypeError(f"mode {mode.name!r}: up must return booleans, got {up.dtype}")
        return kept + (up & ((fraction != 0) | rest))

    # Normal numbers: the exponent rides on the kept bits, so a carry moves into it.
    y = rounded(*_split(a, src.drop)) << src.drop

    # Below the format's normal range the last place stays where it is.
    small = np.flatnonzero(a < src.tiny) if src.tiny else ()
    if len(small):
        exponent = a[small] >> src.mantissa_bits
        implicit = (exponent > 0).astype(src.uint) << src.mantissa_bits
        sig = (a[small] & ((1 << src.mantissa_bits) - 1)) | implicit
        shift = src.drop + (src.tiny >> src.mantissa_bits) - np.maximum(exponent, 1)
        kept = rounded(*_split(sig, shift), small)
        y[small] = (kept.astype(x.dtype) * x.dtype.type(format.smallest)).view(src.uint)

    over = np.flatnonzero(y > src.top)
    if len(over):
        if format.saturates or mode.needs_key:
            y[over] = src.top
        else:
            ones = np.ones(len(over), bool)
            up = mode.up(np.full(len(over), 0xFFFFFFFF, np.uint32), ones, ones, negative[over], word[over])
            y[over] = np.where(up | (a[over] < src.huge), src.uint(src.infinity), src.uint(src.top))
        special = a >= src.infinity
        if special.any():
            keep = a > src.infinity if format.saturates else special
            y = np.where(keep, a, y)
    return (y | (x.view(src.uint) & src.sign)).view(x.dtype)


def _round_block_rne(x: NDArray, format: Format) -> NDArray:
    """Nearest-even by adding half a last place less one, plus the last kept bit; the bits of _round_block."""
    src = _source(format, x.dtype)
    a = x.view(src.uint) & (src.sign - 1)
    y = a.copy()
    if src.drop:
        y >>= src.drop
        y &= 1
        y += (1 << src.drop - 1) - 1
        y += a
        y &= src.sign - (1 << src.drop)
    small = a < src.tiny
    if small.any():  # the last place of |x| + c is the format's smallest number
        c = x.dtype.type(format.smallest * 2.0**src.mantissa_bits)
        on_grid = np.abs(x)
        on_grid += c
        on_grid -= c
        y = np.where(small, on_grid.view(src.uint), y)
    if a.max() > src.top:  # not y.max(): the sum of a NaN of all ones wraps
        np.copyto(y, src.uint(src.top if format.saturates else src.infinity), where=y > src.top)
        np.copyto(y, a, where=a > src.infinity)
    y |= x.view(src.uint) & src.sign
    return y.view(x.dtype)


@cache
def _rounder(format: Format, mode: Mode, dtype: np.dtype) -> Callable[[NDArray, NDArray | None], NDArray]:
    """The fastest way to round a block; the caller's assignment widens a narrower result."""
    if format.name == "fp32" and dtype == np.float32:
        return lambda x, word: x
    if mode == MODES["rne"]:
        # A cast where one is faster. Not fp64 to bf16: ml_dtypes goes by way of fp32, two roundings.
        if (format.name, dtype) in (("bf16", np.float32), ("fp32", np.float64)):
            storage = storage_dtype(format)
            return lambda x, word: x.astype(storage)
        return lambda x, word: _round_block_rne(x, format)
    return lambda x, word: _round_block(x, format, mode, word)


# ---- measures -----------------------------------------------------------------------------------

def is_representable(x: ArrayLike, format: str | Format) -> NDArray[np.bool_]:
    """Where x (float32 or float64) is a value of the format; NaN is one of every format.

    Raises:
        TypeError: x has another dtype.
        ValueError: unknown format.
    """
    x = _as_float(x)
    return (round_with(x, as_format(format), MODES["rz"]) == x) | np.isnan(x)


def ulp(x: ArrayLike, format: str | Format) -> NDArray[np.float64]:
    """Spacing of the format at x: 2**(e - mantissa_bits), e the exponent of x within [emin, emax].

    Args:
        x: float32 or float64, any shape.

    Returns:
        float64 of x's shape; NaN where x is not finite.

    Raises:
        TypeError: x has another dtype.
        ValueError: unknown format.
    """
    x, format = _as_float(x), as_format(format)
    src = _source(format, x.dtype)
    power = (x.view(src.uint) & src.uint(src.infinity)).view(x.dtype)
    spacing = np.clip(power, x.dtype.type(format.min), x.dtype.type(2.0**format.emax)).astype(np.float64)
    spacing *= 2.0**-format.mantissa_bits
    return np.where(np.isfinite(x), spacing, np.nan)
