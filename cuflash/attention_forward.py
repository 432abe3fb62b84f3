"""Forward of attention: the NumPy reference of cuda/attention_forward.cu.

    S = α·QKᵀ    P̄ = exp(S − m)    O = P̄V / l    L = m + log l

over numeric tiles of keys with a running maximum m and row sum l (FlashAttention-2's algorithm 1).
`order` picks one of two bundles (numerics.md section 3): `eager`, each torch operation rounded by
itself, and `fa2`, FlashAttention-2 as torch builds it. Every rounding is a call of rnd.
"""
from dataclasses import dataclass

import numpy as np

from cuflash.arithmetic import LOG2E, Arithmetic, add_columns, join_columns, row_sum
from cuflash.fixes import Fix
from cuflash.formats import round_to
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
    fix = fix.for_format(rnd.format("attn.p"))
    rnd.at()
    q, k, v = rnd("attn.q", q), rnd("attn.k", k), rnd("attn.v", v)
    out = Forward.empty((len(q),), shape.tq, q.shape[-1], rnd.dtype)
    br = tile[0] or max(shape.tq, 1)
    rows = br * max(1, BLOCK // (len(q) * br * max(1, min(tile[1] or shape.tk, shape.tk))))
    body = _plain_rows if precision.algorithm == "plain" else _flash_rows
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        for r0 in range(0, shape.tq, rows):
            r1 = min(r0 + rows, shape.tq)
            body(q[:, r0:r1], k, v, rnd, shape, rnd.dtype(scale), fix, r0, out.rows(r0, r1))
    return out


def scores(q: np.ndarray, k: np.ndarray, rnd: Rounder, math: Arithmetic, scale: np.floating, visible: np.ndarray | None) -> np.ndarray:
    """S of a block, scaled under `eager`, −Inf where masked; rnd stands at the block. Used by backward too."""
    s = rnd("attn.s", math.dot(q, "attn.q", k.swapaxes(-1, -2), "attn.k"))
    if rnd.precision.order == "eager":
        s = rnd("attn.s_scaled", s * scale)
    return s if visible is None else np.where(visible, s, rnd.dtype(-np.inf))


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
        if visible is not None:
            x = np.where(visible, x, rnd.dtype(-np.inf))
        unrounded = math.exp2(x) if fa2 else math.exp(x, "attn.x")
        p = rnd("attn.p", unrounded)
        summed = p if precision.l_from == "rounded" else unrounded

        dm = rnd("attn.dm", st.m - np.where(m == -np.inf, rnd.dtype(0), m))
        alpha = rnd("attn.alpha", math.exp2(dm * base2_scale(scale, rnd)) if fa2 else math.exp(dm, "attn.dm"))
        st.m[...] = m
        if fa2:
            st.l[...] = rnd("attn.l_scaled", alpha[..., None] * st.l)
            add_columns(st.l, summed)
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
    if visible is not None:
        x = np.where(visible, x, rnd.dtype(-np.inf))
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
        wanted = fix.rule(given, ties[tied]).astype(rnd.dtype)
        new = wanted != given
        out.changed[tied] |= new
        out.capped[tied] |= fix.limited(given, ties[tied])
        m_tile = r_m.copy()
        m_tile[tied] = np.where(new, wanted / scaled, r_m[tied])
    return rnd("attn.m", np.maximum(st.m, rnd("attn.m", m_tile)))


def _ties(s: np.ndarray, r_m: np.ndarray, epsilon: np.floating, fix: Fix, rnd: Rounder) -> np.ndarray:
    """Entries of each row within ε of its maximum; masked ones are −Inf and never count beside a finite maximum."""
    if fix.rounded_threshold and epsilon:
        site = "attn.s_scaled" if rnd.precision.order == "eager" else "attn.s"
        threshold = r_m - epsilon
        if rnd.format(site) not in ("fp32", "fp64"):
            threshold = round_to(threshold, rnd.format(site))
        close = s >= threshold[..., None]
    else:
        close = r_m[..., None] - s <= epsilon if epsilon else s == r_m[..., None]
    return np.count_nonzero(close, axis=-1)


def _finish(o: np.ndarray, m: np.ndarray, l: np.ndarray, raw: np.ndarray, rnd: Rounder, math: Arithmetic,
            scale: np.floating, out: Forward) -> None:
    """O and L of finished rows. Empty rows give O = 0, L = −Inf; any other l = 0 gives NaN."""
    empty = (l == 0) & (raw == -np.inf)
    o = np.where(empty[..., None], rnd.dtype(0), o)
    log_l = math.log(np.where(l == 0, rnd.dtype(np.nan), l))
    m_scaled = m if rnd.precision.order == "eager" else m * scale
    lse = np.where(empty, rnd.dtype(-np.inf), m_scaled + log_l)
    out.o_unrounded[...] = o
    out.o[...] = rnd("attn.o", o)
    out.lse[...] = rnd("attn.lse", lse)
    out.m[...], out.l[...] = m, l
