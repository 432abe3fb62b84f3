"""Matrix products under a named accumulator (numerics §5), on NumPy arrays.

`sequential`, `hopper`, `ampere` and `exact` are defined to the bit; `library` is BLAS. Work goes in
blocks of the result and chunks of k, so memory beside operands and result is fixed. Within a block
everything is whole-array arithmetic with k outermost: one pass per operation and k.
"""
from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from cuflash.errors import unknown
from cuflash.formats import Format, as_format, format_named, is_representable, storage_dtype
from cuflash.dot_panels import ELEMENTS, INNER, canonical, exact_panel, sequential_panel
from cuflash.tensor_core import TENSOR_CORES, tensor_core_panel

ACCUMULATORS = ("sequential", "hopper", "ampere", "library", "exact")

Panel = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]], None]

_DTYPES = {storage_dtype(f): f for f in map(format_named, ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"))}


def dot(a: NDArray, b: NDArray, c: NDArray | None = None, *, accumulator: str = "sequential",
        format: str | Format | None = None) -> NDArray[np.float32]:
    """a·b + c in fp32, with products exact and sums as the accumulator does them (numerics §5).

    Args:
        a: (…, M, K), already in its format: float32, float16, or bfloat16, float8_e4m3fn, float8_e5m2
            of ml_dtypes.
        b: (…, K, N), likewise; leading axes broadcast against those of a.
        c: start value, broadcastable to (…, M, N), of the same dtypes; None: +0.
        accumulator: sequential (fma in fp32, k ascending), hopper or ampere (their tensor cores),
            library (BLAS, not defined to the bit) or exact (rounded once).
        format: the format that float32 operands hold, for those without a dtype (tf32, eXmY).

    Returns:
        (…, M, N) float32. A zero is +0, a NaN 0x7FFFFFFF, whatever the accumulator.

    Raises:
        TypeError: an argument is no array, or its dtype is none of these.
        ValueError: unknown accumulator or format; shapes do not match; a value is not one of `format`;
            a tensor core is asked for operands that none of bf16, fp16 and tf32 holds both of.
    """
    if accumulator not in ACCUMULATORS:
        raise unknown("accumulator", accumulator, ACCUMULATORS)
    given = None if format is None else as_format(format)
    a, format_a = _operand("a", a, given)
    b, format_b = _operand("b", b, given)
    if given is not None and given not in (format_a, format_b):
        raise ValueError(f"dot: format says what float32 operands hold, but a is {format_a.name} and "
                         f"b {format_b.name} by their dtypes: drop format={given.name!r} or pass float32")
    shapes = f"a {a.shape}, b {b.shape}"
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"dot: a must be (…, M, K) and b (…, K, N) with equal K, got {shapes}")
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"dot: leading axes must broadcast, got {shapes}") from None
    shape = *batch, a.shape[-2], b.shape[-1]
    if c is not None:
        c, _ = _operand("c", c, None)
        try:
            c = np.broadcast_to(c, shape)
        except ValueError:
            raise ValueError(f"dot: c must broadcast to {shape}, got {c.shape}") from None
    return dot_fp32(a, b, c, accumulator, format_a, format_b)


def _operand(name: str, x: NDArray, given: Format | None) -> tuple[NDArray[np.float32], Format]:
    """An argument of `dot` as fp32 values and its format."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"dot: {name} must be a NumPy array, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        valid = ", ".join(map(str, _DTYPES))
        raise TypeError(f"dot: {name} must have one of the dtypes {valid}, got {x.dtype}: "
                        f"round it first, for example cuflash.round_to({name}, 'bf16').astype(np.float32)")
    if x.dtype != np.float32:
        return x.astype(np.float32), _DTYPES[x.dtype]
    if given is None:
        return x, _DTYPES[x.dtype]
    held = is_representable(x, given)
    if not held.all():
        at = np.unravel_index(np.argmin(held), x.shape)
        raise ValueError(f"dot: {name}[{', '.join(map(str, at))}] = {x[at]!s} is not a value of "
                         f"{given.name} ({np.count_nonzero(~held)} of {x.size} are not): round it first")
    return x, given


@cache
def common_format(format_a: str | Format, format_b: str | Format) -> Format | None:
    """The format a tensor core takes both operands in: the first of bf16, fp16, tf32 that holds both
    exactly; None if none does."""
    a, b = as_format(format_a), as_format(format_b)
    exponent_bits = max(a.exponent_bits, b.exponent_bits)
    mantissa_bits = max(a.mantissa_bits, b.mantissa_bits)
    for common in map(format_named, ("bf16", "fp16", "tf32")):
        if exponent_bits <= common.exponent_bits and mantissa_bits <= common.mantissa_bits:
            return common
    return None


def dot_fp32(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32] | None, accumulator: str,
             format_a: str | Format, format_b: str | Format) -> NDArray[np.float32]:
    """`dot` of fp32 arrays that are known to hold values of the formats; nothing is checked.

    Large results are fastest: a block has up to 64 × 1024 of one matrix, or several small matrices.

    Args:
        a: (…, M, K); b: (…, K, N); c: broadcastable to the result, or None. Any strides.

    Raises:
        ValueError: unknown accumulator, or a tensor core for operands that it cannot take.
    """
    panel = _panel(accumulator, as_format(format_a), as_format(format_b))
    if panel is None:
        with np.errstate(over="ignore", invalid="ignore"):
            out = np.matmul(a, b)
            if c is not None:
                out += c
        return canonical(out)
    shape = *np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]
    out = np.zeros(shape, np.float32)
    if c is not None:
        out[...] = c
    # Both operands with k first, and the longer axis of the result last: NumPy's inner loops run along it.
    x = np.broadcast_to(a, (*shape[:-1], a.shape[-1])).swapaxes(-1, -2)
    y = np.broadcast_to(b, (*shape[:-2], *b.shape[-2:]))
    result = out
    if shape[-2] > shape[-1]:
        x, y, result = y, x, out.swapaxes(-1, -2)
    if result.ndim == 2:
        x, y, result = x[None], y[None], result[None]
    count, rows, cols = result.shape[-3:]
    together = max(1, ELEMENTS // max(1, rows * cols))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if min(cols, INNER) >= 256:
            np.setbufsize(16)  # else NumPy copies a broadcast operand to its buffers; errstate restores it
        for lead in np.ndindex(result.shape[:-3]):
            for n in range(0, count, together):
                for j in range(0, cols, INNER):
                    some = *lead, slice(n, n + together)
                    panel(x[some], y[some][:, :, j:j + INNER], result[some][:, :, j:j + INNER])
    return canonical(out)


def _panel(accumulator: str, format_a: Format, format_b: Format) -> Panel | None:
    """What adds x·y to a panel of the result; None for the library."""
    if accumulator == "library":
        return None
    if accumulator == "exact":
        return exact_panel
    if accumulator == "sequential":
        return sequential_panel
    if accumulator not in TENSOR_CORES:
        raise unknown("accumulator", accumulator, ACCUMULATORS)
    common = common_format(format_a, format_b)
    if common is None:
        raise ValueError(f"accumulator {accumulator!r}: none of a tensor core's formats (bf16, fp16, tf32) "
                         f"holds both {format_a.name} and {format_b.name}: use accumulator='sequential'")
    return partial(tensor_core_panel, core=TENSOR_CORES[accumulator], format=common)
