"""Attention as docs/numerics.md states it, one row and one number at a time, in plain loops.

Slow on purpose and written apart from the vectorised reference, which must give the same bits. One
head, accumulator `sequential` by an exact fma over fractions.
"""
from fractions import Fraction

import numpy as np

from cuflash import functions
from cuflash.formats import round_to

F = np.float32


def fma(a, b, c):
    """a·b + c rounded once; finite arguments."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = F(float(exact))  # rounded twice: put right below
    low, high = np.nextafter(near, F(-np.inf)), np.nextafter(near, F(np.inf))
    best = min((low, near, high), key=lambda y: (abs(Fraction(float(y)) - exact), int(y.view(np.int32)) & 1))
    return F(0) if best == 0 else best


def dot(a, b, start=F(0)):
    acc = F(start)
    for x, y in zip(a, b):
        acc = fma(x, y, acc)
    return F(0) if acc == 0 else acc


class Slow:
    """One head: q (Tq, D), k and v (Tk, D), fp32 arrays."""

    def __init__(self, q, k, v, precision, causal, scale, fix):
        self.p, self.causal, self.scale, self.fix = precision, causal, F(scale), fix.for_format(
            precision.table()["attn.p"].format)
        self.fa2 = precision.order == "fa2"
        self.c = F(float(self.scale) * 1.4426950408889634)
        self.q, self.k, self.v = self.rnd("attn.q", q), self.rnd("attn.k", k), self.rnd("attn.v", v)
        self.tq, self.tk, self.d = len(q), len(k), q.shape[1]

    def rnd(self, site, x):
        r = self.p.table()[site]
        x = np.asarray(x, F)
        return x if r.format == "fp32" else round_to(x, r.format, r.mode)

    def sees(self, i, j):
        return j <= i + self.tk - self.tq if self.causal else True

    def exp(self, x):
        return (functions.exp2 if self.fa2 else functions.exp)(np.array([x], F))[0]

    def s(self, i, j):
        s = self.rnd("attn.s", dot(self.q[i], self.k[j]))
        return s if self.fa2 else self.rnd("attn.s_scaled", s * self.scale)

    def tiles(self, length, size, descending):
        count = -(-length // size)
        order = range(count - 1, -1, -1) if descending else range(count)
        return [(t, range(t * size, min(t * size + size, length))) for t in order]

    def visited(self, rows, keys):
        return any(self.sees(i, j) for i in rows for j in keys)

    def x(self, s, m):
        m = F(0) if m == -np.inf else m
        return F(s * self.c) - F(m * self.c) if self.fa2 else s - m

    def sum4(self, sums):
        return F(F(sums[0] + sums[2]) + F(sums[1] + sums[3]))

    def forward(self):
        o, lse = np.zeros((self.tq, self.d), F), np.zeros(self.tq, F)
        self.m, self.l, self.o_unrounded = np.zeros(self.tq, F), np.zeros(self.tq, F), np.zeros((self.tq, self.d), F)
        br, bc = self.p.tiles(self.d).forward
        for i in range(self.tq):
            block = range(i // br * br, min(i // br * br + br, self.tq))
            m, raw, ties, acc = F(-np.inf), F(-np.inf), 0, np.zeros(self.d, F)
            l, partial = F(0), np.zeros(4, F)
            for _, keys in self.tiles(self.tk, bc, self.fa2):
                if not self.visited(block, keys):
                    continue
                seen = [j for j in keys if self.sees(i, j)]
                s = {j: self.s(i, j) for j in seen}
                r_m = max(s.values(), default=F(-np.inf)) + F(0)
                m_tile, raw, ties = self.fixed(r_m, list(s.values()), raw, ties)
                m_new = self.rnd("attn.m", max(m, self.rnd("attn.m", m_tile)))
                x = {j: self.rnd("attn.x", self.x(s[j], m_new)) for j in seen}
                p32 = {j: self.exp(x[j]) if j in x else F(0) for j in keys}
                p = {j: self.rnd("attn.p", p32[j]) for j in keys}
                summed = p if self.p.l_from == "rounded" else p32
                dm = self.rnd("attn.dm", m - (F(0) if m_new == -np.inf else m_new))
                alpha = self.rnd("attn.alpha", self.exp(F(dm * self.c) if self.fa2 else dm))
                if self.fa2:
                    partial = [fma(t, alpha, F(0) if len(keys) <= 2 * i else summed[keys[2 * i]]) for i, t in enumerate(partial)]
                    for n, j in enumerate(keys):
                        if n >= 8 or n % 2:
                            partial[n % 8 // 2] += summed[j]
                else:
                    tile_sums = np.zeros(4, F)
                    for j in keys:
                        t = (j - keys[0]) % 8 // 2
                        tile_sums[t] = tile_sums[t] + summed[j]
                    l_tile = self.rnd("attn.l_tile", self.sum4(tile_sums))
                    l = self.rnd("attn.l", self.rnd("attn.l_scaled", alpha * l) + l_tile)
                for c in range(self.d):
                    scaled = self.rnd("attn.o_scaled", alpha * acc[c])
                    column, weights = [self.v[j, c] for j in keys], [p[j] for j in keys]
                    if self.fa2:
                        acc[c] = self.rnd("attn.o_acc", dot(weights, column, scaled))
                    else:
                        acc[c] = self.rnd("attn.o_acc", scaled + self.rnd("attn.pv", dot(weights, column)))
                m = m_new
            if self.fa2:
                l = self.rnd("attn.l", self.sum4(partial))
            empty = l == 0 and raw == -np.inf
            row = np.zeros(self.d, F) if empty else acc * (F(1) / l) if self.fa2 else acc / l
            self.o_unrounded[i], o[i] = row, self.rnd("attn.o", row)
            log_l = F(-np.inf) if empty else functions.log(np.array([l], F))[0]
            lse[i] = self.rnd("attn.lse", F(-np.inf) if empty else fma(m, self.scale, log_l) if self.fa2 else m + log_l)
            self.m[i], self.l[i] = m, l
        self.o, self.lse = o, lse
        return o, lse

    def fixed(self, r_m, row, raw, ties):
        """(the tile's maximum after the fix, raw maximum so far, its ties so far)."""
        unit = self.scale if self.fa2 else F(1)
        epsilon = F(F(self.fix.epsilon) / unit)
        if self.fix.rounded_threshold and epsilon:
            r = self.p.table()["attn.s" if self.fa2 else "attn.s_scaled"]
            threshold = r_m - epsilon if r.format == "fp32" else round_to(np.array([r_m - epsilon], F), r.format)[0]
            count = sum(s >= threshold for s in row)
        else:
            count = sum(F(r_m - s) <= epsilon if epsilon else s == r_m for s in row)
        if self.fix.running:
            count = count if r_m > raw else ties + count if r_m == raw else ties
            r_m = max(r_m, raw)
        m = r_m
        if count > 1 and np.isfinite(r_m):
            given = F(r_m * unit)
            wanted = F(self.fix.rule(np.array([given], F), np.array([count]))[0])
            m = F(wanted / unit) if wanted != given else r_m
        return m, max(raw, r_m), count

    def backward(self, do):
        p, fa2 = self.p, self.fa2
        do = self.rnd("attn.do", do)
        o = {"o": self.o, "o_unrounded": self.o_unrounded}.get(p.delta_from)
        shown = lambda i, j: self.sees(i, j) and self.lse[i] != -np.inf  # noqa: E731
        P, ds = np.zeros((self.tq, self.tk), F), np.zeros((self.tq, self.tk), F)
        tiles = p.tiles(self.d)
        for i in range(self.tq):
            p_ds, dp = np.zeros(self.tk, F), np.zeros(self.tk, F)
            for j in range(self.tk):
                if shown(i, j):
                    if p.p_bwd_from == "m_l":
                        x = self.x(self.s(i, j), self.m[i])
                    elif fa2:
                        x = F(self.s(i, j) * self.c) - F(self.lse[i] * F(1.4426950408889634))
                    else:
                        x = self.s(i, j) - self.lse[i]
                    p32 = self.exp(self.rnd("attn.x_bwd", x))
                    if p.p_bwd_from == "m_l":
                        p32 = p32 * (F(1) / self.l[i])
                    P[i, j], p_ds[j] = self.rnd("attn.p_bwd", p32), self.rnd("attn.p_ds", p32)
                    dp[j] = self.rnd("attn.dp", dot(do[i], self.v[j]))
            if p.delta_from == "p_dp":
                sums = np.zeros(4, F)
                br, bc = tiles.dq
                block = range(i // br * br, min(i // br * br + br, self.tq))
                for _, keys in self.tiles(self.tk, bc, fa2):
                    if self.visited(block, keys):
                        for j in keys:
                            t = (j - keys[0]) % 8 // 2
                            sums[t] = sums[t] + self.rnd("attn.delta_prod", p_ds[j] * dp[j])
                delta = self.sum4(sums)
            else:
                eight = np.zeros(8, F)
                for c in range(self.d):
                    t = c % 64 // 8
                    eight[t] = eight[t] + self.rnd("attn.delta_prod", do[i, c] * o[i, c])
                four = eight[:4] + eight[4:]
                delta = F(four[0] + four[2]) + F(four[1] + four[3])
            delta = self.rnd("attn.delta", delta)
            for j in range(self.tk):
                if shown(i, j):
                    dpd = self.rnd("attn.dpd", dp[j] - delta)
                    ds[i, j] = self.rnd("attn.ds", (p_ds[j] if fa2 else F(p_ds[j] * self.scale)) * dpd)
        dq, dk, dv = (np.zeros((n, self.d), F) for n in (self.tq, self.tk, self.tk))
        br, bc = tiles.dkdv
        for _, rows in self.tiles(self.tq, br, fa2):
            for j in range(self.tk):
                keys = range(j // bc * bc, min(j // bc * bc + bc, self.tk))
                if self.visited(rows, keys):
                    for c in range(self.d):
                        for name, acc, weights, other in (("dv", dv, P, do), ("dk", dk, ds, self.q)):
                            pairs = [weights[i, j] for i in rows], [other[i, c] for i in rows]
                            if fa2:
                                acc[j, c] = self.rnd(f"attn.{name}_acc", dot(*pairs, acc[j, c]))
                            else:
                                tile = self.rnd(f"attn.{name}_tile", dot(*pairs))
                                acc[j, c] = self.rnd(f"attn.{name}_acc", acc[j, c] + tile)
        br, bc = tiles.dq
        for i in range(self.tq):
            block = range(i // br * br, min(i // br * br + br, self.tq))
            for _, keys in self.tiles(self.tk, bc, fa2):
                if self.visited(block, keys):
                    for c in range(self.d):
                        tile = self.rnd("attn.dq_tile", dot([ds[i, j] for j in keys], [self.k[j, c] for j in keys]))
                        dq[i, c] = self.rnd("attn.dq_acc", dq[i, c] + tile)
        alpha = self.scale if fa2 else F(1)
        dk_head, dv_head = self.rnd("attn.dk_head", dk * alpha), self.rnd("attn.dv_head", dv)
        return self.rnd("attn.dq", dq * alpha), self.rnd("attn.dk", dk_head), self.rnd("attn.dv", dv_head)
