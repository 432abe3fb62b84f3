"""Arguments of attention: what is accepted, how it is laid out, and the sentences for what is not."""
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuflash.errors import unknown
from cuflash.fixes import Fix, as_fix
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.tiles import Shape

LAYOUTS = ("bhtd", "bthd")
DEFAULTS = {"float32": "fp32", "bfloat16": "bf16-fa2", "float16": "fp16-fa2", "float64": "fp64"}
INPUTS = (*DEFAULTS, "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4")
_DLPACK_CPU = 1  # kDLCPU of dlpack.h
GPU_INPUTS = ("float32", "bfloat16", "float16")


class Call(NamedTuple):
    """A validated call; q, k, v are views (batch, heads, T, D)."""

    q: Any
    k: Any
    v: Any
    shape: Shape
    scale: float
    precision: Precision
    fix: Fix
    layout: str
    key: Key

    @property
    def group(self) -> int:
        return max(self.q.shape[1] // max(self.k.shape[1], 1), 1)  # of no heads too


def validated(q: Any, k: Any, v: Any, causal: bool, scale: float | None, precision: Precision, fix: Fix | str,
          layout: str, key: Key | None) -> Call:
    check_inputs(q, k, v, layout)
    lead, (hq, tq, d) = _axes("q", q, layout)
    tk = _axes("k", k, layout)[1][1]
    if scale is None:
        scale = 1 / math.sqrt(d) if precision.is_fp64 else float(np.float32(1 / math.sqrt(d)))
    _check_scale(scale, precision)
    if key is not None and not isinstance(key, Key):
        raise TypeError(f"key must be a cuflash.Key, not {type(key).__name__}")
    if key is None and _needs_key(precision, 0, hq):
        raise ValueError("this precision rounds stochastically: pass key=cuflash.Key(seed)")
    batch = math.prod(lead)
    if key is not None and key.sample + batch > 1 << 32:
        raise ValueError(f"samples {key.sample} to {key.sample + batch - 1} do not all have a number below 2**32: "
                         "give key a smaller sample")
    views = (heads_first(x, layout) for x in (q, k, v))
    return Call(*views, Shape(tq, tk, bool(causal)), float(scale), precision, as_fix(fix), layout, key or Key(0))


def check_inputs(q: Any, k: Any, v: Any, layout: str) -> None:
    """Raises unless q, k and v are arrays of one kind and dtype whose shapes fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_type(name, x)
        check_kind(name, x, q)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}; cast them to one")
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    lead, (hq, _, d) = _axes("q", q, layout)
    k_lead, (hk, _, dk) = _axes("k", k, layout)
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape: {k.shape} and {v.shape}")
    if k_lead != lead or dk != d or k.ndim != q.ndim:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in every axis but heads and sequence "
                         f"(layout {layout})")
    if not 1 <= d <= 256:
        raise ValueError(f"head_dim is {d}; valid: 1 to 256")
    if hq != hk and (not hk or not hq or hq % hk):
        raise ValueError(f"{hq} query heads cannot share {hk} key/value heads: the second must divide the first")


def _check_scale(scale: Any, precision: Precision) -> None:
    """α is used in fp32 (fp64 under that precision); under `fa2` so are c = α·log₂e and ε/α."""
    if not isinstance(scale, (int, float, np.number)):
        raise TypeError(f"scale must be a number, not {scale!r}")
    fa2 = precision.order == "fa2"
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        used = (np.float64 if precision.is_fp64 else np.float32)(scale)
        fits = np.isfinite(used) and (not fa2 or used > 0 and np.isfinite([used * 2, 1 / used]).all())
    if not fits:
        raise ValueError(f"scale is {scale}; valid: a finite number of fp32"
                         + (", above 0 under order=fa2, and so that 1/scale is finite" if fa2 else ""))


@functools.lru_cache(maxsize=1024)
def _needs_key(precision: Precision, layer: int, heads: int) -> bool:
    tables = (precision.sites_for(d, layer, "", h) for d in ("fwd", "bwd") for h in range(max(heads, 1)))
    return any(r.rule.needs_key and r.format != "fp32" and site.startswith("attn.")
               for table in tables for site, r in table.items())


def default_precision(q: Any) -> Precision:
    """By the dtype of q, which is checked."""
    check_type("q", q)
    check_kind("q", q, q)
    name = q.dtype.name
    if name not in DEFAULTS:
        raise TypeError(f"no default precision for {name}: pass precision=, or use {', '.join(DEFAULTS)}")
    return Precision.named(DEFAULTS[name])


def _axes(name: str, x: Any, layout: str) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Leading shape and (heads, T, head_dim)."""
    if x.ndim < (2 if layout == "bhtd" else 3):
        needed = {"bhtd": "(..., heads, seq, head_dim) or (seq, head_dim)", "bthd": "(..., seq, heads, head_dim)"}
        raise ValueError(f"{name} has shape {x.shape}; layout {layout} needs {needed[layout]}")
    if x.ndim == 2:
        return (), (1, *x.shape)
    *lead, a, b, d = x.shape
    return tuple(lead), (a, b, d) if layout == "bhtd" else (b, a, d)


def heads_first(x: Any, layout: str) -> Any:
    """x as (batch, heads, T, D); a view where the leading axes allow it."""
    if layout == "bthd":
        x = x.swapaxes(-3, -2)
    heads = x.shape[-3] if x.ndim > 2 else 1
    batch = math.prod(x.shape[:-3])
    return x.reshape(batch, heads, *x.shape[-2:])


def row_shape(q: Any, layout: str) -> tuple[int, ...]:
    """Shape of lse: (..., heads, Tq)."""
    lead, (heads, tq, _) = _axes("q", q, layout)
    return (*lead, heads, tq) if q.ndim > 2 else (tq,)


def on_gpu(x: Any) -> bool:
    """Whether x is a CuPy array. CuPy is not imported to find out."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def check_type(name: str, x: Any) -> None:
    """TypeError unless x is an array of NumPy or CuPy; how it becomes one."""
    if isinstance(x, np.ndarray) or on_gpu(x):
        return
    how = ""
    if isinstance(x, (list, tuple)):
        how = f"; pass np.asarray({name}, np.float32)"
    elif hasattr(x, "__dlpack_device__"):
        on_host = int(x.__dlpack_device__()[0]) == _DLPACK_CPU
        how = f"; pass {'np' if on_host else 'cupy'}.from_dlpack({name}), which copies nothing"
    kind = type(x)
    raise TypeError(f"{name} must be an array of NumPy or CuPy, not {kind.__module__}.{kind.__qualname__}".replace(
        "builtins.", "") + how)


def check_kind(name: str, x: Any, q: Any) -> None:
    """Raises unless x is an array like q, NumPy's or CuPy's, on the same device, of a dtype that runs there."""
    gpu = on_gpu(x)
    if gpu != on_gpu(q):
        raise TypeError(f"{name} is a {type(x).__module__} array and q a {type(q).__module__} array: pass both alike")
    if gpu and x.device != q.device:
        raise ValueError(f"{name} lies on {x.device}, q on {q.device}: move them to one device")
    valid = GPU_INPUTS if gpu else INPUTS
    if x.dtype.name not in valid:
        cast = "; on a GPU cast it, as by .astype('float32')" if gpu else "; cast it, as by .astype('float32')"
        raise TypeError(f"{name} has dtype {x.dtype}; valid: {', '.join(valid)}{cast}")


def check_array(name: str, x: Any, shape: tuple[int, ...], q: Any) -> None:
    check_type(name, x)
    if x.shape != tuple(shape):
        raise ValueError(f"{name} has shape {x.shape}; it must be {tuple(shape)}")
    check_kind(name, x, q)


def check_out(name: str, out: Any, like: Any, dtype: np.dtype) -> None:
    """Raises unless `out` can take a result of this dtype and of like's shape without rounding it."""
    if not (isinstance(out, np.ndarray) or on_gpu(out)) or on_gpu(out) != on_gpu(like) or out.shape != like.shape:
        raise ValueError(f"{name} must be an array of shape {like.shape}, not {getattr(out, 'shape', type(out).__name__)}")
    check_kind(name, out, like)
    if not _holds(out.dtype, dtype):
        raise ValueError(f"{name} has dtype {out.dtype}, but the result is {dtype}: narrowing would be a rounding outside "
                         f"every site; pass one of {dtype} or wider, or let the result's site round to its format")
    if any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.strides)):
        raise ValueError(f"{name} has several elements at one address (strides {out.strides}); pass an array of its own")


def check_apart(read: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Raises if an array that is written shares memory with another: kernels read and write in any order."""
    seen: list[tuple[str, Any, int, int]] = []
    for name, x in (*read.items(), *written.items()):
        if x is None or not x.size:
            continue
        first, end = _extent(x)
        for other, y, from_, to in seen if name in written else ():
            # Rows of arrays packed together interleave: exactly then.
            if first < to and from_ < end and np.shares_memory(_addresses(x), _addresses(y)):
                raise ValueError(f"{name} is {other}'s own memory, or part of it; pass another array")
        seen.append((name, x, first, end))


@functools.cache
def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether every number of one dtype is one of another."""
    w, n = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    range_ = float(w.max) >= float(n.max) and float(w.smallest_subnormal) <= float(n.smallest_subnormal)
    return bool(range_ and w.nmant >= n.nmant)


def _extent(x: Any) -> tuple[int, int]:
    """Addresses of the first byte and of what follows the last."""
    first = end = x.data.ptr if on_gpu(x) else x.__array_interface__["data"][0]
    for n, stride in zip(x.shape, x.strides):
        if stride > 0:
            end += (n - 1) * stride
        else:
            first += (n - 1) * stride
    return first, end + x.itemsize


class _Addresses:
    """Where a CuPy array lies, as NumPy is told; nothing reads there."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = {"version": 3, "typestr": f"|V{x.itemsize}", "shape": x.shape,
                                    "strides": x.strides, "data": (x.data.ptr, True)}


def _addresses(x: Any) -> np.ndarray:
    """An array for `np.shares_memory` alone."""
    return np.asarray(_Addresses(x)) if on_gpu(x) else x
