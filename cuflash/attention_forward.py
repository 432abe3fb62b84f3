"""Forward of attention: the NumPy reference of cuda/attention_forward.cu.

    S = α·QKᵀ    P̄ = exp(S − m)    O = P̄V / l    L = m + log l

over numeric tiles of keys with a running maximum m and row sum l (FlashAttention-2's algorithm 1).
`order` picks one of two bundles (numerics.md section 3): `eager`, each torch operation rounded by
itself, and `fa2`, FlashAttention-2 as torch builds it. Every rounding is a call of rnd.
"""
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from cuflash import kernels
from cuflash.arithmetic import LOG2E, Arithmetic, add_columns, fma, join_columns, row_sum
from cuflash.fixes import Fix
from cuflash.formats import is_representable, round_to
from cuflash.kernel_header import (
    PRODUCTS,
    SHARED_MEMORY,
    TAPPED,
    device_accumulator,
    precision_header,
    product_operand,
)
from cuflash.philox import Key
from cuflash.precision import Precision, Rounding
from cuflash.site_table import SITES
from cuflash.sites import Rounder
from cuflash.tiles import Shape

BLOCK = 1 << 17  # elements of S at a time: half a megabyte, which stays in a core's cache


@dataclass
class Forward:
    """What forward leaves, all (G, Tq) but o and o_unrounded (G, Tq, D); the last three are flags."""

    o: np.ndarray
    o_unrounded: np.ndarray
    lse: np.ndarray
    m: np.ndarray
    l: np.ndarray
    tied: np.ndarray
    changed: np.ndarray
    capped: np.ndarray

    @classmethod
    def empty(cls, heads: tuple[int, ...], tq: int, d: int, real: type) -> "Forward":
        wide = (np.empty((*heads, tq, d), real) for _ in range(2))
        rows = (np.empty((*heads, tq), real) for _ in range(3))
        return cls(*wide, *rows, *(np.zeros((*heads, tq), bool) for _ in range(3)))

    def rows(self, r0: int, r1: int) -> "Forward":
        """Views of rows r0 to r1."""
        return Forward(*(getattr(self, f)[:, r0:r1] for f in self.__dataclass_fields__))


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, rnd: Rounder, shape: Shape, scale: float, fix: Fix) -> Forward:
    """Attention of G heads: q (G, Tq, D), k and v (G, Tk, D), any float dtype; results fp32 (fp64 under fp64)."""
    precision, tile = rnd.precision, rnd.precision.tiles(q.shape[-1]).forward
    fix = fix.for_formats(rnd.format)
    rnd.at()
    q, k, v = rnd("attn.q", q), rnd("attn.k", k), rnd("attn.v", v)
    out = Forward.empty((len(q),), shape.tq, q.shape[-1], rnd.dtype)
    br = tile[0] or 1  # without query tiles, any rows go together
    rows = br * max(1, BLOCK // (max(len(q), 1) * br * max(1, min(tile[1] or shape.tk, shape.tk))))
    body = _plain_rows if precision.algorithm == "plain" else _flash_rows
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        for r0 in range(0, shape.tq, rows):
            r1 = min(r0 + rows, shape.tq)
            body(q[:, r0:r1], k, v, rnd, shape, rnd.dtype(scale), fix, r0, out.rows(r0, r1))
    return out


def scores(q: np.ndarray, k: np.ndarray, rnd: Rounder, math: Arithmetic, scale: np.floating,
           visible: np.ndarray | None) -> np.ndarray:
    """S of a block, scaled under `eager`, −Inf where masked; rnd stands at the block. Used by backward too."""
    s = rnd("attn.s", math.dot(q, "attn.q", k.swapaxes(-1, -2), "attn.k"))
    if rnd.precision.order == "eager":
        s = rnd("attn.s_scaled", s * scale)
    return masked(s, visible, -np.inf)


def masked(x: np.ndarray, visible: np.ndarray | None, value: float) -> np.ndarray:
    """x where visible (None: all of it is), elsewhere the value."""
    if visible is None:
        return x
    if x.dtype != np.float32:
        return np.where(visible, x, x.dtype.type(value))
    # By the bits: with a mask that is broadcast, np.where takes several times as long.
    bits = np.negative(visible.astype(np.int32)) & x.view(np.int32)
    if value:
        bits |= np.where(visible, np.int32(0), np.float32(value).view(np.int32))
    return bits.view(np.float32)


def exponent(s: np.ndarray, m: np.ndarray, rnd: Rounder, scale: np.floating) -> np.ndarray:
    """S − m before its rounding, in base e (`eager`) or 2 (`fa2`); m (…, rows), −Inf counts as 0."""
    m = np.where(m == -np.inf, rnd.dtype(0), m)[..., None]
    if rnd.precision.order == "eager":
        return s - m
    c = base2_scale(scale, rnd)
    return s * c - m * c


def base2_scale(scale: np.floating, rnd: Rounder) -> np.floating:
    """c = fl(α·log₂e) of order `fa2`."""
    return rnd.dtype(float(scale) * LOG2E)


class _Rows:
    """The running state of a block of rows: maximum, row sum, output."""

    def __init__(self, g: int, rows: int, d: int, fa2: bool, real: type) -> None:
        self.m, self.raw = (np.full((g, rows), -np.inf, real) for _ in range(2))
        self.ties = np.zeros((g, rows), np.int64)  # of the running maximum, for fixes that want it
        self.l = np.zeros((g, rows, 4) if fa2 else (g, rows), real)
        self.o = np.zeros((g, rows, d), real)

    def since(self, a: int) -> "_Rows":
        """Views of the rows from a on."""
        view = object.__new__(_Rows)
        view.__dict__ = {name: array[:, a:] for name, array in self.__dict__.items()}
        return view


def _flash_rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, rnd: Rounder, shape: Shape, scale: np.floating,
                fix: Fix, r0: int, out: Forward) -> None:
    precision, math = rnd.precision, Arithmetic(rnd)
    fa2 = precision.order == "fa2"
    br, bc = precision.tiles(q.shape[-1]).forward
    state = _Rows(len(q), q.shape[1], q.shape[-1], fa2, rnd.dtype)
    for j, k0, k1 in shape.key_tiles(bc, descending=fa2):
        a = max(shape.first_row(k0, br) - r0, 0)
        if a >= q.shape[1]:
            continue
        st, visible = state.since(a), shape.visible(r0 + a, r0 + q.shape[1], k0, k1)
        rnd.at(q=r0 + a, k=k0, tile=j, visible=visible)

        s = scores(q[:, a:], k[:, k0:k1], rnd, math, scale, visible)
        m = row_maximum(s, st, rnd, scale, fix, out.rows(a, q.shape[1]))
        x = rnd("attn.x", exponent(s, m, rnd, scale))
        x = masked(x, visible, -np.inf)
        unrounded = math.exp2(x) if fa2 else math.exp(x, "attn.x")
        p = rnd("attn.p", unrounded)
        summed = p if precision.l_from == "rounded" else unrounded

        dm = rnd("attn.dm", st.m - np.where(m == -np.inf, rnd.dtype(0), m))
        alpha = rnd("attn.alpha", math.exp2(dm * base2_scale(scale, rnd)) if fa2 else math.exp(dm, "attn.dm"))
        st.m[...] = m
        if fa2:
            add_columns(st.l, summed, alpha)
        else:
            l_tile = rnd("attn.l_tile", row_sum(summed))
            st.l[...] = rnd("attn.l", rnd("attn.l_scaled", alpha * st.l) + l_tile)

        o_scaled = rnd("attn.o_scaled", alpha[..., None] * st.o)
        if fa2:
            st.o[...] = rnd("attn.o_acc", math.dot(p, "attn.p", v[:, k0:k1], "attn.v", o_scaled))
        else:
            pv = rnd("attn.pv", math.dot(p, "attn.p", v[:, k0:k1], "attn.v"))
            st.o[...] = rnd("attn.o_acc", o_scaled + pv)
        st.o += 0  # a −0 is stored as +0, as the tensor core stores it

    rnd.at(q=r0)
    l = rnd("attn.l", join_columns(state.l)) if fa2 else state.l
    o = state.o * (1 / l)[..., None] if fa2 else state.o / l[..., None]
    _finish(o, state.m, l, state.raw, rnd, math, scale, out)


def _plain_rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, rnd: Rounder, shape: Shape, scale: np.floating,
                fix: Fix, r0: int, out: Forward) -> None:
    """Softmax materialised: P = exp(S − m)/l, then one product over all keys."""
    precision, math = rnd.precision, Arithmetic(rnd)
    fa2 = precision.order == "fa2"
    state = _Rows(len(q), q.shape[1], q.shape[-1], fa2, rnd.dtype)
    visible = shape.visible(r0, r0 + q.shape[1], 0, shape.tk)
    rnd.at(q=r0, visible=visible)
    s = scores(q, k, rnd, math, scale, visible)
    m = row_maximum(s, state, rnd, scale, fix, out)
    x = rnd("attn.x", exponent(s, m, rnd, scale))
    x = masked(x, visible, -np.inf)
    unrounded = math.exp2(x) if fa2 else math.exp(x, "attn.x")
    l = rnd("attn.l", row_sum(unrounded))
    p = unrounded * (1 / l)[..., None] if fa2 else unrounded / l[..., None]
    hidden = ((l == 0) & (state.raw == -np.inf))[..., None] | (False if visible is None else ~visible)
    p = rnd("attn.p", np.where(hidden, rnd.dtype(0), p))
    o = math.dot(p, "attn.p", v, "attn.v")
    _finish(o, m, l, state.raw, rnd, math, scale, out)


def row_maximum(s: np.ndarray, st: _Rows, rnd: Rounder, scale: np.floating, fix: Fix, out: Forward) -> np.ndarray:
    """The new running maximum after a tile's S, the fix applied; counts ties. −Inf while no finite S was seen."""
    r_m = np.maximum.reduce(s, axis=-1, initial=-np.inf)
    if np.isnan(r_m).any():
        r_m = np.fmax.reduce(s, axis=-1, initial=-np.inf)  # a NaN logit takes no part in the maximum
    r_m += 0  # −0 becomes +0
    scaled = rnd.dtype(1) if rnd.precision.order == "eager" else scale
    ties = _ties(s, r_m, rnd.dtype(fix.epsilon) / scaled, fix, rnd)
    if fix.running:
        ties = np.where(r_m > st.raw, ties, np.where(r_m == st.raw, st.ties + ties, st.ties))
        r_m = np.maximum(r_m, st.raw)
        st.ties[...] = ties
    st.raw[...] = np.maximum(r_m, st.raw)
    tied = (ties > 1) & np.isfinite(r_m)
    out.tied |= tied
    m_tile = r_m
    if tied.any() and type(fix) is not Fix:
        given = r_m[tied] * scaled
        wanted = fix.new_maximum(given, ties[tied])
        new = np.where(wanted != given, wanted / scaled, r_m[tied])
        if fix.rounds_down and rnd.dtype is np.float32:
            new = np.maximum(r_m[tied], round_to(new, rnd.format("attn.m"), "rd"))
        out.changed[tied] |= new != r_m[tied]
        out.capped[tied] |= fix.limited(given, ties[tied])
        m_tile = r_m.copy()
        m_tile[tied] = new
    m_tile = rnd("attn.m", m_tile)
    m = np.maximum(st.m, m_tile)
    return rnd("attn.m", np.where((st.m == 0) & (m_tile == 0), st.m + m_tile, m))  # of +0 and −0, +0


def _ties(s: np.ndarray, r_m: np.ndarray, epsilon: np.floating, fix: Fix, rnd: Rounder) -> np.ndarray:
    """Entries of each row within ε of its maximum; −Inf, which masked ones are, never counts."""
    if fix.rounded_threshold and epsilon:
        site = "attn.s_scaled" if rnd.precision.order == "eager" else "attn.s"
        threshold = r_m - epsilon
        if rnd.format(site) not in ("fp32", "fp64"):
            threshold = round_to(threshold, rnd.format(site))
        close = s >= threshold[..., None]
    else:
        close = r_m[..., None] - s <= epsilon if epsilon else s == r_m[..., None]
    return np.count_nonzero(close & (s > -np.inf) if epsilon else close, axis=-1)  # ε = 0: a finite maximum is above


def _finish(o: np.ndarray, m: np.ndarray, l: np.ndarray, raw: np.ndarray, rnd: Rounder, math: Arithmetic,
            scale: np.floating, out: Forward) -> None:
    """O and L of finished rows. Empty rows give O = 0, L = −Inf; any other l = 0 gives NaN."""
    empty = (l == 0) & (raw == -np.inf)
    o = np.where(empty[..., None], rnd.dtype(0), o)
    log_l = math.log(np.where(l == 0, rnd.dtype(np.nan), l))
    lse = m + log_l if rnd.precision.order == "eager" else fma(m, scale, log_l)
    lse = np.where(empty, rnd.dtype(-np.inf), lse)
    out.o_unrounded[...] = o
    out.o[...] = rnd("attn.o", o)
    out.lse[...] = rnd("attn.lse", lse)
    out.m[...], out.l[...] = m, l


# ---- CUDA ---------------------------------------------------------------------------------------

# struct Parameters of cuda/attention_forward.cu: q, k, v, o, o_unrounded; lse, m, l, stats; lengths; key; scales.
_PARAMETERS = Struct("@" + 5 * "Pqqq" + 4 * "P" + 8 * "q" + "Q" + 3 * "q" + 2 * "f")
_CHEAP = (Rounding("bf16"), Rounding("fp16"))  # one instruction
_DTYPES = {"float32": ("fp32", "float"), "bfloat16": ("bf16", "bf16"), "float16": ("fp16", "fp16")}  # format, CUDA


class Geometry(NamedTuple):
    """What a block executes at once: macros of cuda/attention_forward.cu. It changes no bits."""

    warpgroup: bool
    rows: int  # of a warp
    warps: int
    keys: int
    stages: int  # of shared memory
    blocks: int  # of an SM, at least
    split: int  # blocks that share the columns of O
    shared: int  # bytes


class Launch(NamedTuple):
    """A kernel for `heads` query heads from `first_head` on, which all round alike."""

    kernel: Any
    geometry: Geometry
    first_head: int
    heads: int


def geometry(precision: Precision, head_dim: int, halves: Sequence[bool], capability: int,
             extra: int = 0) -> Geometry:
    """How a block works on the precision's tiles.

    Args:
        halves: whether the operands of QKᵀ, of P̄V have 16 bits.
        capability: of the device, 90 for 9.0; says how much shared memory there is.
        extra: registers of a thread that go to a fix and to costly roundings.
    """
    br, bc = precision.tiles(head_dim).forward
    columns = -(-head_dim // 16) * 16
    k_bytes, v_bytes = (2 if half else 4 for half in halves)
    limit = SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))
    at_once = bc is not None and bc <= 128
    split = 1 if columns <= 128 or at_once and all(halves) and precision.order == "fa2" else 2

    # A thread's registers hold S (keys / 2 for each 16 rows of the warp), O (columns / 2) and a product that starts
    # from zero (columns / 2): 96 of 128, 128 of 168 and 192 of 255 can, for 4, 3 and 2 warpgroups on an SM.
    half, shapes = all(halves), []
    if half and capability == 90 and columns % 64 == 0 and (br is None or br % 64 == 0):
        if not at_once:
            shapes.append((True, 16, 4, 64, 1, 2))
        elif bc in (64, 128):
            registers = (bc + columns * (1 if precision.order == "fa2" else 2)) // 2 + extra
            if registers <= 96:
                shapes += [(True, 16, 8, bc, 2, 2), (True, 16, 4, bc, 1, 4)]
            if registers <= (136 if columns <= 128 else 128):  # under `eager` the softmax takes so long that other blocks hide what one loads
                stages = (1, 2) if precision.order == "eager" else (2, 1)
                shapes += [(True, 16, 4, bc, n, 3) for n in stages]
            shapes += [(True, 16, 8, bc, 2, 1), (True, 16, 4, bc, 1, 2), (True, 16, 8, bc, 1, 1)]
    if half and at_once:
        if bc <= 64 and (bc + columns) // 2 + extra <= 80 and (br is None or br % 32 == 0):
            shapes.append((False, 32, 4, bc, 2, 1))
        shapes.append((False, 16, 8, bc, 2, 1))
    if at_once:
        shapes += [(False, 16, 8, bc, 1, 1), (False, 16, 4, bc, 1, 1)]
    shapes += [(False, 16, 4, keys, 1, 1) for keys in (64, 32, 16) if bc is None or keys < bc]
    for warpgroup, rows, warps, keys, stages, blocks in shapes:
        unit, padding = (64, 0) if warpgroup else (16, 16)
        k_row, v_row = columns * k_bytes + padding, -(-columns // unit // split) * unit * v_bytes + padding
        size = rows * warps * k_row + stages * keys * (k_row + v_row)
        if size * blocks <= limit:
            return Geometry(warpgroup, rows, warps, keys, stages, blocks, split, size)
    raise ValueError(f"head_dim {head_dim} needs {size} bytes of shared memory here, the device has {limit}")


def compile_arguments(precision: Precision, fix: Fix, head_dim: int, layer: int, head: int, dtype: str, out: str,
                      aligned: bool, count: bool, accumulator: str, capability: int,
                      in_bf16: bool) -> tuple[Geometry, dict[str, object], str]:
    """Geometry, macros and precision.cuh of the kernel for one head.

    Args:
        dtype, out: NumPy's names of the dtypes of q, k, v and of O.
        aligned: whether rows of q, k and v lie at multiples of 16 bytes.
        count: whether ties are counted where no fix asks for it.
        in_bf16: whether α is a bf16 number.
    """
    table = precision.sites_for("fwd", layer, "", head)
    operands = [product_operand(table, sites, accumulator) for sites in PRODUCTS["fwd"].values()]
    halves = [operand in ("bf16", "fp16") for operand in operands]
    format, c_type = _DTYPES[dtype]
    # Copied as they lie: the site keeps the dtype's values, and they are the operand (of 16 bits, or fp32).
    lies = [operand if half else "fp32" for half, operand in zip(halves, operands)]
    direct = aligned and {format} == {table[f"attn.{x}"].format for x in "qkv"} | set(lies)
    costly = any(rounding.format != "fp32" and rounding not in _CHEAP for name, rounding in table.items()
                 if name.startswith("attn.") and SITES[name].direction != "bwd")
    g = geometry(precision, head_dim, halves, capability, 8 * (type(fix) is not Fix) + 64 * costly)
    defines = {"HEAD_DIM": head_dim, "ROWS": g.rows, "WARPS": g.warps, "KEYS": g.keys, "STAGES": g.stages,
               "BLOCKS": g.blocks, "WARPGROUP": g.warpgroup, "SPLIT": g.split, "IN": c_type, "OUT": _DTYPES[out][1],
               "DIRECT": direct, "COUNT": count, "SCALE_IN_BF16": in_bf16 and precision.order == "eager"}
    return g, defines, precision_header(precision, head_dim, "fwd", accumulator, fix, layer, head)


@functools.lru_cache(maxsize=256)
def scale_in_bf16(scale: float) -> bool:
    """Whether fp32's α is a bf16 number."""
    return bool(is_representable(np.float32(scale), "bf16"))


_plans: dict[tuple, list[Launch]] = {}


def _plan(precision: Precision, fix: Fix, head_dim: int, heads: int, layer: int, dtype: str, out: str, aligned: bool,
          count: bool, device: int, in_bf16: bool, tapped: bool) -> list[Launch]:
    """The kernels of a call: one for each run of heads that round alike."""
    # A fix is all that it holds: `capped` has cap = 80 as `capped:cap=80` has, and yet takes less under fp16.
    key = (precision, type(fix), fix.cuda_rule, fix.cuda_limited, str(vars(fix)), head_dim, heads, layer,
           dtype, out, aligned, count, device, in_bf16, tapped)
    found = _plans.get(key)
    if found is not None:
        return found
    capability = kernels.capability(device)
    accumulator = device_accumulator(precision, capability)
    tables = [precision.sites_for("fwd", layer, "", head) for head in range(heads)]
    starts = [h for h in range(heads) if h == 0 or tables[h] != tables[h - 1]]
    found = []
    for first, end in zip(starts, [*starts[1:], heads]):
        g, defines, header = compile_arguments(precision, fix, head_dim, layer, first, dtype, out, aligned, count,
                                               accumulator, capability, in_bf16)
        if tapped:
            defines |= TAPPED
        kernel = kernels.kernel("attention_forward", "attention_forward", defines, {"precision.cuh": header},
                                shared=g.shared)
        found.append(Launch(kernel, g, first, end - first))
    if len(_plans) > 1000:
        _plans.clear()
    _plans[key] = found
    return found


def launch(q: Any, k: Any, v: Any, o: Any, lse: Any, m: Any, l: Any, o_unrounded: Any, stats: Any,
           precision: Precision, fix: Fix, shape: Shape, scale: float, key: Key,
           taps: Iterable[Any] | None = None) -> None:
    """Queues the kernels on CuPy's current stream.

    Args:
        q, o, o_unrounded: (batch, heads, Tq, D), CuPy arrays with a contiguous last axis.
        k, v: (batch, kv_heads, Tk, D), likewise.
        lse, m, l: (batch, heads, Tq) fp32, contiguous. m, l, o_unrounded (fp32) and stats ((3,) 64-bit integers,
            added to) may be None.
        taps: of a watched sample (taps.Sample); None: nothing is watched.

    Raises:
        ValueError: this device cannot run the accumulator, or a user's mode or fix has no CUDA expression.
    """
    batch, heads, tq, d = q.shape
    arrays = [(x.data.ptr, *(stride // x.itemsize for stride in x.strides[:3])) for x in (q, k, v, o)]
    arrays.append((0, 0, 0, 0) if o_unrounded is None
                  else (o_unrounded.data.ptr, *(stride // 4 for stride in o_unrounded.strides[:3])))
    aligned = d % 8 == 0 and taps is None and all((x.data.ptr | x.strides[0] | x.strides[1] | x.strides[2]) % 16 == 0
                                 for x in (q, k, v))
    pairs = (o.data.ptr | o.strides[0] | o.strides[1] | o.strides[2]) % (2 * o.itemsize) == 0
    scale = float(np.float32(scale))
    plan = _plan(precision, fix, d, heads, key.layer, q.dtype.name, o.dtype.name, aligned, stats is not None,
                 q.device.id, scale_in_bf16(scale), taps is not None)
    for tap in (None,) if taps is None else taps:
        for run in plan:
            some = range(run.first_head, run.first_head + run.heads)
            if tap is not None:
                some = range(max(some.start, tap.heads.start), min(some.stop, tap.heads.stop))
                if not some:
                    continue
                tap.fill(run.kernel)
            g = run.geometry
            parameters = _PARAMETERS.pack(
                *itertools.chain(*arrays), *(0 if x is None else x.data.ptr for x in (lse, m, l, stats)),
                heads, some.start, len(some), heads // max(k.shape[1], 1), tq, shape.tk, shape.causal, pairs,
                key.seed, key.step, key.layer, key.sample, scale, float(np.float32(scale * LOG2E)))
            blocks = -(-tq // (g.rows * g.warps)) * g.split * batch * len(some)
            argument = np.frombuffer(parameters, f"V{len(parameters)}")  # of size 1, so CuPy passes it by value
            run.kernel((blocks,), (32 * g.warps,), (argument,), shared_mem=g.shared)
