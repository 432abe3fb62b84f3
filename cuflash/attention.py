"""Flash attention in which every rounding is a switch: the public functions.

NumPy arrays run the reference (attention_forward.py, attention_backward.py), CuPy arrays the CUDA
kernels; both give the same bits under an accumulator and exp other than `library`.

Supported: causal masks (bottom-right aligned), grouped and multi-query heads, Tq ≠ Tk, head dims 1
to 256. Not supported: dropout, bias, ALiBi, windows, softcap, variable-length batches, paged KV.
"""
import functools
import sys
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from cuflash import attention_backward, attention_forward
from cuflash.attention_arguments import (
    GPU_INPUTS,
    Call,
    check_apart,
    check_array,
    check_inputs,
    check_out,
    default_precision,
    heads_first,
    on_gpu,
    row_shape,
    validated,
)
from cuflash.fixes import Fix, as_fix
from cuflash.formats import storage_dtype
from cuflash.philox import Key
from cuflash.precision import Precision, as_precision
from cuflash.site_table import SITES
from cuflash.sites import Rounder, Watch
from cuflash.taps import launches
from cuflash.watching import watched

STATS = ("ties", "changed", "capped")  # what saved.stats counts, in rows


@dataclass(frozen=True, eq=False)
class Saved:
    """What backward needs of a forward; also built by hand from another kernel's O and LSE.

    Attributes:
        q, k, v: the inputs as given, unrounded and not copied.
        o: the output, laid out like q.
        lse: L = m + log l, fp32, (..., heads, Tq) in every layout.
        m, l: row maximum and row sum, shaped like lse; needed by p_bwd_from='m_l'.
        o_unrounded: O before its rounding, fp32, laid out like q; needed by delta_from='o_unrounded'.
        stats: (3,) int64 counts of rows: with ties, changed by the fix, limited by its cap.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    _: KW_ONLY
    m: Any = None
    l: Any = None
    o_unrounded: Any = None
    precision: Precision | str
    fix: Fix | str = "off"
    causal: bool = False
    scale: float | None = None
    layout: str = "bhtd"
    key: Key | None = None
    stats: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", as_precision(self.precision))
        object.__setattr__(self, "fix", as_fix(self.fix))
        check_inputs(self.q, self.k, self.v, self.layout)
        check_array("o", self.o, self.q.shape, self.q)
        rows = row_shape(self.q, self.layout)
        for name in ("lse", "m", "l"):
            if name == "lse" or getattr(self, name) is not None:
                check_array(name, getattr(self, name), rows, self.q)
        if self.o_unrounded is not None:
            check_array("o_unrounded", self.o_unrounded, self.q.shape, self.q)

    def __repr__(self) -> str:
        how = [self.precision.name, f"fix {self.fix}", *["causal"] * self.causal]
        how += [f"layout {self.layout}"] if self.layout != "bhtd" else []
        text = f"<Saved: q {self.q.shape}, k {self.k.shape}, {self.q.dtype}; {', '.join(how)}"
        if self.stats is not None:
            ties, changed, capped = self.stats.tolist()
            text += f"; of {self.lse.size:,} rows {ties:,} tied, {changed:,} changed, {capped:,} capped"
        return text + ">"


def flash_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                    precision: Precision | str | None = None, fix: Fix | str = "off", layout: str = "bhtd",
                    out: Any = None, key: Key | None = None, watch: Watch | None = None) -> Any:
    """softmax(α·QKᵀ)·V by FlashAttention-2's algorithm, rounded as `precision` says.

    Args:
        q: (..., heads, Tq, head_dim), any leading axes; 2-D is one head. fp32, bf16, fp16, fp8 or fp64; of CuPy
            the first three.
        k, v: (..., kv_heads, Tk, head_dim) of q's dtype; kv_heads divides heads (GQA, MQA).
        causal: query i sees keys j ≤ i + Tk − Tq.
        scale: α, default fl32(1/√head_dim).
        precision: a name, a TOML file or a `cuflash.Precision`; default by dtype: fp32 → fp32,
            bf16 → bf16-fa2, fp16 → fp16-fa2, fp64 → fp64 (NumPy only).
        fix: `off`, `on`, `qiu-b2`, `qiu-b7`, `capped`, with parameters `capped:cap=60`, or a `cuflash.Fix`.
        layout: `bhtd`, or `bthd` for (..., T, heads, head_dim).
        out: array of q's shape for the result, of its dtype or a wider one; not the memory of q, k or v.
        key: a `cuflash.Key`; needed where a site rounds stochastically.
        watch: called as watch(rounder, site, x, rounded) at each rounding.

    Returns:
        O, q's shape, in the format of site attn.o.

    Raises:
        ValueError, TypeError: for an argument that is not valid; the message says what is.

    Source: arXiv 2307.08691, algorithm 1; numerics.md section 7.
    """
    return _forward(q, k, v, causal, scale, precision, fix, layout, out, key, watch, counts=False)[0]


def flash_attention_forward(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                            precision: Precision | str | None = None, fix: Fix | str = "off", layout: str = "bhtd",
                            out: Any = None, key: Key | None = None, watch: Watch | None = None) -> tuple[Any, Saved]:
    """`flash_attention`, which also gives what backward needs.

    Args: those of `flash_attention`, all of them: q, k, v, causal, scale, precision, fix, layout (`bhtd`, or `bthd` for
    (..., T, heads, head_dim)), out, key, watch.

    Returns:
        o: as of `flash_attention`.
        saved: a `Saved`, which `flash_attention_backward` takes; `saved.lse`, and `saved.stats`, counts of rows.

    Raises:
        ValueError, TypeError: as `flash_attention`.
    """
    return _forward(q, k, v, causal, scale, precision, fix, layout, out, key, watch)


def flash_attention_backward(do: Any, saved: Saved, *, precision: Precision | str | None = None,
                             out: tuple[Any, Any, Any] | None = None,
                             watch: Watch | None = None) -> tuple[Any, Any, Any]:
    """Gradients of `flash_attention`.

    Args:
        do: gradient of O, O's shape, any dtype that q may have.
        saved: from `flash_attention_forward`, or built by hand. It says causal, scale, layout, fix and key, too:
            backward takes the forward's.
        precision: another precision for backward, taken whole; default the forward's.
        out: arrays of the shapes of q, k, v for the results, of their dtypes or wider ones; not the memory of
            do, of saved's arrays or of each other.
        watch: as in `flash_attention`.

    Returns:
        dq, dk, dv: shaped like q, k, v, in the formats of sites attn.dq, attn.dk, attn.dv.

    Raises:
        ValueError: where `saved` lacks m, l or o_unrounded that the precision needs, naming it.
        ValueError, TypeError: for another argument that is not valid.

    Source: arXiv 2307.08691, algorithm 2; numerics.md section 7.
    """
    if not isinstance(saved, Saved):
        raise TypeError(f"saved must be a cuflash.attention.Saved, not {type(saved).__name__}")
    p = saved.precision if precision is None else as_precision(precision)
    call = validated(saved.q, saved.k, saved.v, saved.causal, saved.scale, p, saved.fix, saved.layout, saved.key)
    check_array("do", do, saved.q.shape, saved.q)
    needed = {"m_l": ("m", "l")}.get(p.p_bwd_from, ()) + {"o_unrounded": ("o_unrounded",)}.get(p.delta_from, ())
    for name in needed:
        if getattr(saved, name) is None:
            raise ValueError(f"saved.{name} is missing: p_bwd_from={p.p_bwd_from}, delta_from={p.delta_from} need it; "
                             f"run the forward under this precision, or pass {name}= to Saved")
    watch = watched(watch)
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 3 or len({*map(id, out)}) != 3):
        raise ValueError("out must be three different arrays: for dq, dk and dv")
    if out is not None:
        written = dict(zip(("out for dq", "out for dk", "out for dv"), out))
        for (name, x), like in zip(written.items(), (saved.q, saved.k, saved.v)):
            check_out(name, x, like, _result_dtype(call, "bwd", f"attn.{name[-2:]}"))
        check_apart({"do": do} | {name: getattr(saved, name) for name in _READ}, written)
    if on_gpu(saved.q):
        return _backward_cuda(call, do, saved, out, watch)
    return _backward_numpy(call, do, saved, out, watch)


def plain_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                    precision: Precision | str | None = None, fix: Fix | str = "off", layout: str = "bhtd",
                    out: Any = None, key: Key | None = None, watch: Watch | None = None) -> Any:
    """`flash_attention` with algorithm = plain: softmax materialised, under the same sites; the same arguments."""
    p = default_precision(q) if precision is None else as_precision(precision)
    return _forward(q, k, v, causal, scale, p.replace(algorithm="plain"), fix, layout, out, key, watch, counts=False)[0]


_READ = ("q", "k", "v", "o", "lse", "m", "l", "o_unrounded")  # of Saved, by backward
Index = tuple[np.ndarray, np.ndarray]  # samples, heads


# ---- NumPy --------------------------------------------------------------------------------------

def _forward(q: Any, k: Any, v: Any, causal: bool, scale: float | None, precision: Precision | str | None,
             fix: Fix | str, layout: str, out: Any, key: Key | None, watch: Watch | None,
             counts: bool = True) -> tuple[Any, Saved]:
    watch = watched(watch)
    p = default_precision(q) if precision is None else as_precision(precision)
    call = validated(q, k, v, causal, scale, p, fix, layout, key)
    if on_gpu(q):
        return _forward_cuda(call, q, k, v, out, key, watch, counts)
    dtype = _result_dtype(call, "fwd", "attn.o")
    if out is not None:
        check_out("out", out, q, dtype)
        check_apart({"q": q, "k": k, "v": v}, {"out": out})
    b, hq, tq, d = call.q.shape
    real = np.float64 if p.is_fp64 else np.float32
    full = attention_forward.Forward.empty((b, hq), tq, d, real)
    for rnd, g, kv in _parts(call, "fwd", watch):
        part = attention_forward.forward(*_operands(call, g, kv, real), rnd, call.shape, call.scale, call.fix)
        for name in attention_forward.Forward.__dataclass_fields__:
            getattr(full, name)[g] = getattr(part, name)
    o = _restore(full.o, call, q.shape, dtype, out)
    rows = row_shape(q, layout)
    lse, m, l = (x.reshape(rows) for x in (full.lse, full.m, full.l))
    m, l = (m, l) if p.p_bwd_from == "m_l" else (None, None)
    unrounded = _restore(full.o_unrounded, call, q.shape, np.dtype(real)) if p.delta_from == "o_unrounded" else None
    saved = Saved(q, k, v, o, lse, precision=p, fix=call.fix, causal=bool(causal), scale=call.scale, layout=layout,
                  key=key, m=m, l=l, o_unrounded=unrounded,
                  stats=np.array([np.count_nonzero(x) for x in (full.tied, full.changed, full.capped)]))
    return o, saved


def _backward_numpy(call: Call, do: Any, saved: Saved, out: tuple[Any, Any, Any] | None,
                    watch: Watch | None) -> tuple[Any, Any, Any]:
    p = call.precision
    b, hq, tq, d = call.q.shape
    hk, tk = call.k.shape[1:3]
    real = np.float64 if p.is_fp64 else np.float32
    do = heads_first(do, call.layout)
    o = heads_first(saved.o_unrounded if p.delta_from == "o_unrounded" else saved.o, call.layout)
    rows = [None if x is None else x.reshape(b, hq, tq).astype(real, copy=False) for x in (saved.lse, saved.m, saved.l)]
    dq = np.empty((b, hq, tq, d), real)
    dk_head, dv_head = (np.empty((b, hq, tk, d), real) for _ in range(2))
    for rnd, g, kv in _parts(call, "bwd", watch):
        q, k, v = _operands(call, g, kv, real)
        lse, m, l = (x if x is None else x[g] for x in rows)
        o_g = _recomputed_o(call, q, k, v, rnd) if p.delta_from == "o_fp32" else _as_real(o[g], real)
        part = attention_backward.backward(_as_real(do[g], real), q, k, v, o_g, lse, m, l, rnd, call.shape, call.scale)
        dq[g], dk_head[g], dv_head[g] = part.dq, part.dk_head, part.dv_head
    dk, dv = (_sum_heads(x, call, site, watch) for x, site in ((dk_head, "attn.dk"), (dv_head, "attn.dv")))
    return tuple(_restore(x, call, like.shape, _result_dtype(call, "bwd", site), to) for x, like, site, to in zip(
        (dq, dk, dv), (saved.q, saved.k, saved.v), ("attn.dq", "attn.dk", "attn.dv"), out or (None,) * 3))


def _parts(call: Call, direction: str, watch: Watch | None) -> Iterator[tuple[Rounder, Index, Index]]:
    """Blocks of (sample, head) pairs that round alike: a Rounder, their index into (batch, heads), that of k and v."""
    b, hq, tq, _ = call.q.shape
    layer, p = call.key.layer, call.precision
    per_block = max(1, attention_forward.BLOCK // max(1, min(tq, 1024) * min(call.shape.tk, 1024)))
    for heads in _alike(p, layer, tuple(range(hq))):
        pairs = np.array([(s, h) for s in range(b) for h in heads], int).reshape(-1, 2)
        for i in range(0, len(pairs), per_block):
            samples, hs = pairs[i:i + per_block].T
            rnd = Rounder(p, direction, layer, key=call.key, watch=watch, heads=hs, samples=call.key.sample + samples)
            rnd.causal, rnd.group = call.shape.causal, call.group
            yield rnd, (samples, hs), (samples, hs // call.group)


@functools.lru_cache(maxsize=1024)
def _alike(precision: Precision, layer: int, heads: tuple[int, ...]) -> list[list[int]]:
    """Heads that round alike, forward and backward."""
    alike: dict[tuple, list[int]] = {}
    for head in heads:
        tables = (tuple(precision.sites_for(d, layer, "", head).items()) for d in ("fwd", "bwd"))
        alike.setdefault(tuple(tables), []).append(head)
    return list(alike.values())


def _operands(call: Call, g: Index, kv: Index, real: type) -> tuple[np.ndarray, ...]:
    """q, k, v of a block as (G, T, D), widened without rounding; fp64 inputs stay fp64 until their site."""
    return tuple(_as_real(x[i], real) for x, i in ((call.q, g), (call.k, kv), (call.v, kv)))


def _as_real(x: np.ndarray, real: type) -> np.ndarray:
    return x if x.dtype == np.float64 else x.astype(real, copy=False)


def _recomputed_o(call: Call, q: np.ndarray, k: np.ndarray, v: np.ndarray, rnd: Rounder) -> np.ndarray:
    """O with every forward site but the inputs in fp32: delta_from = o_fp32."""
    again = Rounder(_all_fp32(call.precision), "fwd", rnd.layer, key=rnd.key, heads=rnd.heads, samples=rnd.samples)
    return attention_forward.forward(q, k, v, again, call.shape, call.scale, call.fix).o


@functools.lru_cache(maxsize=256)
def _all_fp32(p: Precision) -> Precision:
    """p with every forward site but the inputs in fp32."""
    kept = ("attn.q", "attn.k", "attn.v")
    wide = [s for s, row in SITES.items()
            if s.startswith("attn.") and row.direction != "bwd" and s not in (*kept, *p.merged)]
    return p.round(*(f"{s}=fp32" for s in wide))


def _sum_heads(heads: np.ndarray, call: Call, site: str, watch: Watch | None) -> np.ndarray:
    """dK or dV (B, Hk, Tk, D) from each query head's share, heads ascending; scopes go by the first head of a group."""
    b, hq, tk, d = heads.shape
    total = heads[:, ::call.group].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(1, call.group):
            total += heads[:, i::call.group]
    for first in _alike(call.precision, call.key.layer, tuple(range(0, hq, call.group))):
        chosen = slice(None) if len(first) == total.shape[1] else np.array(first) // call.group
        part = total[:, chosen]
        rnd = Rounder(call.precision, "bwd", call.key.layer, key=call.key, watch=watch, heads=np.tile(first, b),
                      samples=call.key.sample + np.repeat(np.arange(b), len(first)))
        rnd.causal, rnd.group = call.shape.causal, call.group
        total[:, chosen] = rnd(site, part.reshape(b * len(first), tk, d)).reshape(part.shape)
    return total


def _result_dtype(call: Call, direction: str, site: str) -> np.dtype:
    """The dtype of a result; on a GPU fp32 stands for those that CuPy does not have."""
    dtype = _stored(call.precision, direction, call.key.layer, call.q.shape[1], site)
    return dtype if not on_gpu(call.q) or dtype.name in GPU_INPUTS else np.dtype(np.float32)


@functools.lru_cache(maxsize=1024)
def _stored(precision: Precision, direction: str, layer: int, heads: int, site: str) -> np.dtype:
    """The dtype of a result: that of its format, fp32 where heads differ or the format has none."""
    if precision.is_fp64:
        return np.dtype(np.float64)
    formats = {precision.sites_for(direction, layer, "", h)[site].format for h in range(max(heads, 1))}
    return (storage_dtype(formats.pop()) if len(formats) == 1 else None) or np.dtype(np.float32)


def _restore(x: np.ndarray, call: Call, shape: tuple[int, ...], dtype: np.dtype, out: Any = None) -> np.ndarray:
    """Rows (batch, heads, T, D) back in the caller's layout and shape."""
    result = np.empty(shape, dtype) if out is None else out
    view = result.swapaxes(-3, -2) if call.layout == "bthd" else result
    view[...] = x.reshape(view.shape)
    return result


# ---- CUDA ---------------------------------------------------------------------------------------

def _forward_cuda(call: Call, q: Any, k: Any, v: Any, out: Any, key: Key | None, watch: Watch | None,
                  counts: bool) -> tuple[Any, Saved]:
    cupy = sys.modules["cupy"]
    p = call.precision
    dtype = _result_dtype(call, "fwd", "attn.o")
    if out is not None:
        check_out("out", out, q, dtype)
        check_apart({"q": q, "k": k, "v": v}, {"out": out})
    with q.device:
        rows = row_shape(q, call.layout)
        # Written in place where the array's dtype and layout let a kernel do so.
        direct = out is not None and out.dtype == dtype and _in_place(out, call.layout)
        o = out if direct else cupy.empty(q.shape, dtype)
        lse = cupy.empty(rows, np.float32)
        m, l = (cupy.empty(rows, np.float32) if p.p_bwd_from == "m_l" else None for _ in range(2))
        o_unrounded = cupy.empty(q.shape, np.float32) if p.delta_from == "o_unrounded" else None
        stats = cupy.zeros(3, np.int64) if counts else None
        arrays = [_rows_contiguous(x) for x in (call.q, call.k, call.v)]
        arrays += [heads_first(o, call.layout), *(_by_head(x, call) for x in (lse, m, l)),
                   None if o_unrounded is None else heads_first(o_unrounded, call.layout)]
        for some, now, taps in launches(call, "fwd", watch, arrays) if o.size else ():
            attention_forward.launch(*some, stats, p, call.fix, call.shape, call.scale, now, taps)
        if out is not None and not direct:
            out[...] = o
            o = out
    return o, Saved(q, k, v, o, lse, precision=p, fix=call.fix, causal=call.shape.causal, scale=call.scale,
                    layout=call.layout, key=key, m=m, l=l, o_unrounded=o_unrounded, stats=stats)


def _by_head(rows: Any, call: Call) -> Any:
    """(batch, heads, Tq) of a value for each row, None of None."""
    return rows if rows is None else rows.reshape(call.q.shape[:3])


def _rows_contiguous(x: Any) -> Any:
    return x if x.shape[-1] == 1 or x.strides[-1] == x.itemsize else sys.modules["cupy"].ascontiguousarray(x)


def _backward_cuda(call: Call, do: Any, saved: Saved, out: tuple[Any, Any, Any] | None,
                   watch: Watch | None) -> tuple[Any, Any, Any]:
    cupy = sys.modules["cupy"]
    p = call.precision
    with saved.q.device:
        dtypes = [_result_dtype(call, "bwd", site) for site in ("attn.dq", "attn.dk", "attn.dv")]
        wanted = out or (None,) * 3
        results = tuple(x if x is not None and x.dtype == dtype and _in_place(x, call.layout)
                        else cupy.empty(like.shape, dtype)
                        for x, like, dtype in zip(wanted, (saved.q, saved.k, saved.v), dtypes))
        inputs = [_rows_contiguous(x) for x in (heads_first(do, call.layout), call.q, call.k, call.v)]
        if p.delta_from == "o_fp32":
            o = _recomputed_o_cuda(call, *inputs[1:])
        else:
            o = heads_first(saved.o_unrounded if p.delta_from == "o_unrounded" else saved.o, call.layout)
        rows = [_by_head(x if x is None else cupy.ascontiguousarray(x, np.float32), call)
                for x in (saved.lse, saved.m, saved.l)]
        arrays = [*inputs, _rows_contiguous(o), *rows, *(heads_first(x, call.layout) for x in results)]
        for some, now, taps in launches(call, "bwd", watch, arrays):
            attention_backward.launch_backward(*some, p, call.shape, call.scale, now, taps)
        for x, result in zip(wanted, results):
            if x is not None and x is not result:
                x[...] = result
    return out or results


def _recomputed_o_cuda(call: Call, q: Any, k: Any, v: Any) -> Any:
    cupy = sys.modules["cupy"]
    o, lse = cupy.empty(q.shape, np.float32), cupy.empty(q.shape[:3], np.float32)
    if o.size:
        attention_forward.launch(q, k, v, o, lse, None, None, None, None, _all_fp32(call.precision), call.fix,
                                 call.shape, call.scale, call.key)
    return o


def _in_place(out: Any, layout: str) -> bool:
    """Whether a kernel can write to `out` as it lies: (batch, heads, T, D) is a view, its last axis contiguous."""
    view = heads_first(out, layout)
    return view.data.ptr == out.data.ptr and (out.shape[-1] == 1 or view.strides[-1] == out.itemsize)
