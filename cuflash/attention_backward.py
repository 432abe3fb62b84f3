"""Backward of attention: the NumPy reference of cuda/attention_backward.cu.

    δ = rowsum(dO∘O)    P = exp(S − L)    dV = PᵀdO    dP = dO·Vᵀ    dS = P∘(dP − δ)    dQ = α·dS·K    dK = α·dSᵀQ

S and P are recomputed (FlashAttention-2's algorithm 2). dK and dV sum over query tiles, dQ over key
tiles, ascending under `eager`, descending under `fa2`. Every rounding is a call of rnd.
"""
from dataclasses import dataclass
from math import lcm

import numpy as np

from cuflash.arithmetic import Arithmetic, add_columns, delta_sum, join_columns
from cuflash.attention_forward import base2_scale, exponent, scores
from cuflash.sites import Rounder
from cuflash.tiles import Shape


@dataclass
class Gradients:
    """dq (G, Tq, D) rounded at attn.dq; dk and dv (G, Tk, D) of each query head, rounded at attn.dk_head, attn.dv_head."""

    dq: np.ndarray
    dk_head: np.ndarray
    dv_head: np.ndarray


def backward(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, lse: np.ndarray,
             m: np.ndarray | None, l: np.ndarray | None, rnd: Rounder, shape: Shape, scale: float) -> Gradients:
    """Gradients of G heads: do, q, o (G, Tq, D), k and v (G, Tk, D).

    `o` is the O that `delta_from` asks for; m and l are used under p_bwd_from = m_l. Results fp32
    (fp64 under precision fp64).
    """
    precision, math, real = rnd.precision, Arithmetic(rnd), rnd.dtype
    scale = real(scale)
    fa2 = precision.order == "fa2"
    tiles = precision.tiles(q.shape[-1])
    rnd.at()
    q, k, v, do = rnd("attn.q", q), rnd("attn.k", k), rnd("attn.v", v), rnd("attn.do", do)
    out = Gradients(*(np.zeros(a.shape, real) for a in (q, k, v)))
    chunk = lcm(tiles.dkdv[0] or max(shape.tq, 1), tiles.dq[0] or max(shape.tq, 1))  # rows at a time
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        if precision.delta_from != "p_dp":
            delta = rnd("attn.delta", delta_sum(rnd("attn.delta_prod", do * o)))
        for _, r0, r1 in shape.query_tiles(chunk, descending=fa2):
            end = max(shape.key_end(r1, tiles.dkdv[1]), shape.key_end(r1, tiles.dq[1]))
            if end == 0:
                continue
            visible = shape.visible(r0, r1, 0, end)
            shown = _shown(visible, lse[:, r0:r1])
            rnd.at(q=r0, visible=shown)
            s = scores(q[:, r0:r1], k[:, :end], rnd, math, scale, visible)
            m_rows, l_rows = (x if x is None else x[:, r0:r1] for x in (m, l))
            p = _probabilities(s, lse[:, r0:r1], m_rows, l_rows, rnd, math, scale, shown)
            p_bwd, p_ds = rnd("attn.p_bwd", p), rnd("attn.p_ds", p)
            dp = rnd("attn.dp", math.dot(do[:, r0:r1], "attn.do", v[:, :end].swapaxes(-1, -2), "attn.v"))
            if precision.delta_from == "p_dp":
                delta_rows = _delta_from_p(_mask(rnd("attn.delta_prod", p_ds * dp), shown), shape, tiles.dq, r0, fa2)
                delta_rows = rnd("attn.delta", delta_rows)
            else:
                delta_rows = delta[:, r0:r1]
            dpd = rnd("attn.dpd", dp - delta_rows[..., None])
            ds = _mask(rnd("attn.ds", p_ds * dpd if fa2 else (p_ds * scale) * dpd), shown)
            _add_dkdv(out, p_bwd, ds, q, do, rnd, math, shape, tiles.dkdv, r0, r1)
            _add_dq(out, ds, k, rnd, math, shape, tiles.dq, r0, r1)
        rnd.at()
        out.dq = rnd("attn.dq", out.dq * scale if fa2 else out.dq)
        out.dk_head = rnd("attn.dk_head", out.dk_head * scale if fa2 else out.dk_head)
        out.dv_head = rnd("attn.dv_head", out.dv_head)
    return out


def _probabilities(s: np.ndarray, lse: np.ndarray, m: np.ndarray | None, l: np.ndarray | None, rnd: Rounder,
                   math: Arithmetic, scale: np.floating, shown: np.ndarray | None) -> np.ndarray:
    """P of a block before its rounding, 0 where masked and in empty rows."""
    fa2, m_l = rnd.precision.order == "fa2", rnd.precision.p_bwd_from == "m_l"
    if m_l:
        x = exponent(s, m, rnd, scale)
    elif fa2:
        x = s * base2_scale(scale, rnd) - (lse * math.log2e)[..., None]
    else:
        x = s - lse[..., None]
    x = rnd("attn.x_bwd", x if shown is None else np.where(shown, x, rnd.dtype(-np.inf)))
    p = math.exp2(x) if fa2 else math.exp(x, "attn.x_bwd")
    return _mask(p * (1 / l)[..., None], shown) if m_l else p  # 1/l of an empty row is Inf


def _shown(visible: np.ndarray | None, lse: np.ndarray) -> np.ndarray | None:
    """Entries that are neither masked nor in an empty row (L = −Inf); None if all are shown."""
    empty = lse == -np.inf
    if not empty.any():
        return visible
    return ~empty[..., None] & (True if visible is None else visible)


def _mask(x: np.ndarray, shown: np.ndarray | None) -> np.ndarray:
    return x if shown is None else np.where(shown, x, x.dtype.type(0))


def _delta_from_p(products: np.ndarray, shape: Shape, tile: tuple[int | None, int | None], r0: int, fa2: bool) -> np.ndarray:
    """δ = rowsum(P∘dP): the four sums of section 7 carried over dQ's key tiles, joined at the end."""
    sums = np.zeros((*products.shape[:2], 4), products.dtype)
    for _, q0, q1 in shape.query_tiles(tile[0], False, r0, r0 + products.shape[1]):
        rows = slice(q0 - r0, q1 - r0)
        for _, k0, k1 in shape.key_tiles(tile[1], descending=fa2):
            if k0 < shape.key_end(q1, tile[1]):
                add_columns(sums[:, rows], products[:, rows, k0:k1])
    return join_columns(sums)


def _add_dkdv(out: Gradients, p: np.ndarray, ds: np.ndarray, q: np.ndarray, do: np.ndarray, rnd: Rounder, math: Arithmetic,
              shape: Shape, tile: tuple[int | None, int | None], r0: int, r1: int) -> None:
    """Adds the query tiles of rows r0 to r1 to dK and dV of every key tile that they visit."""
    fa2 = rnd.precision.order == "fa2"
    for i, q0, q1 in shape.query_tiles(tile[0], fa2, r0, r1):
        end = shape.key_end(q1, tile[1])
        rows, keys = slice(q0 - r0, q1 - r0), slice(0, end)
        rnd.at(q=q0, tile=i)
        dv, dk = out.dv_head[:, keys], out.dk_head[:, keys]
        p_t, ds_t = p[:, rows, keys].swapaxes(-1, -2), ds[:, rows, keys].swapaxes(-1, -2)
        if fa2:
            dv[...] = rnd("attn.dv_acc", math.dot(p_t, "attn.p_bwd", do[:, q0:q1], "attn.do", dv))
            dk[...] = rnd("attn.dk_acc", math.dot(ds_t, "attn.ds", q[:, q0:q1], "attn.q", dk))
        else:
            dv_tile = rnd("attn.dv_tile", math.dot(p_t, "attn.p_bwd", do[:, q0:q1], "attn.do"))
            dv[...] = rnd("attn.dv_acc", dv + dv_tile)
            dk_tile = rnd("attn.dk_tile", math.dot(ds_t, "attn.ds", q[:, q0:q1], "attn.q"))
            dk[...] = rnd("attn.dk_acc", dk + dk_tile)


def _add_dq(out: Gradients, ds: np.ndarray, k: np.ndarray, rnd: Rounder, math: Arithmetic, shape: Shape,
            tile: tuple[int | None, int | None], r0: int, r1: int) -> None:
    """dQ of rows r0 to r1: the sum of dS·K over the key tiles that they visit."""
    fa2 = rnd.precision.order == "fa2"
    for _, q0, q1 in shape.query_tiles(tile[0], False, r0, r1):
        for j, k0, k1 in shape.key_tiles(tile[1], descending=fa2):
            if k0 < shape.key_end(q1, tile[1]):
                rnd.at(q=q0, k=k0, tile=j)
                dq = out.dq[:, q0:q1]
                dq_tile = rnd("attn.dq_tile", math.dot(ds[:, q0 - r0:q1 - r0, k0:k1], "attn.ds", k[:, k0:k1], "attn.k"))
                dq[...] = rnd("attn.dq_acc", dq + dq_tile)
