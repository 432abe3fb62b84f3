"""Attention as docs/numerics.md states it, one row and one number at a time, in plain loops.

Slow on purpose and written apart from the vectorised reference, which must give the same bits. The
functions exp, exp2 and log and the tensor cores are the library's: they have tests of their own.
"""
import math
from types import SimpleNamespace

import numpy as np

from cuflash import accumulators, functions, mufu
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.fixes import as_fix
from cuflash.formats import format_named
from cuflash.philox import Key
from cuflash.site_table import SITE_ID
from cuflash.testing import equal
from tests.slow_numbers import INF, ZERO, F, dot, fma, random_word, round_one

LOG2E = 1.4426950408889634
INPUTS = ("attn.q", "attn.k", "attn.v")


def attention(q, k, v, do, precision, *, fix="off", causal=False, scale=None, key=None):
    """All that forward and backward give, by name: q, do (B, Hq, Tq, D), k, v (B, Hkv, Tk, D), fp32."""
    key = key or Key(0)
    scale = F(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    group = q.shape[1] // k.shape[1]
    rows = np.zeros(q.shape[:3], F)
    like = {"o": q, "o_unrounded": q, "lse": rows, "m": rows, "l": rows, "dq": q, "dk": k, "dv": k}
    out = {name: np.zeros(x.shape, F) for name, x in like.items()} | {"stats": np.zeros(3, np.int64)}
    with np.errstate(all="ignore"):
        for b, kv in np.ndindex(k.shape[:2]):
            heads = [Slow(q[b, h], k[b, kv], v[b, kv], precision, as_fix(fix), causal, scale, key, h, key.sample + b)
                     for h in range(kv * group, (kv + 1) * group)]
            shares = []
            for one in heads:
                one.forward()
                for name in ("o", "o_unrounded", "lse", "m", "l"):
                    out[name][b, one.head] = getattr(one, name)
                out["stats"] += one.stats
                out["dq"][b, one.head], *share = one.backward(do[b, one.head])
                shares.append(share)
            for n, name in enumerate(("dk", "dv")):
                total = shares[0][n]
                for share in shares[1:]:  # heads ascending
                    total = total + share[n]
                out[name][b, kv] = heads[0].rounded(f"attn.{name}", total)  # by the group's first head
    return out


def differing(q, k, v, do, precision, **options):
    """Names of the results in which the library differs from the plain loops."""
    o, saved = flash_attention_forward(q, k, v, precision=precision, **options)
    got = {"o": o, "lse": saved.lse, "stats": saved.stats}
    all_saved = precision.replace(p_bwd_from="m_l", delta_from="o_unrounded")
    _, more = flash_attention_forward(q, k, v, precision=all_saved, **options)
    got |= {"m": more.m, "l": more.l, "o_unrounded": more.o_unrounded}
    got |= zip(("dq", "dk", "dv"), flash_attention_backward(do, saved))
    want = attention(q, k, v, do, precision, **options)
    return [name for name in want if not equal(got[name], want[name])]


class Slow:
    """One query head of one sample: q (Tq, D), k and v (Tk, D), fp32 arrays."""

    def __init__(self, q, k, v, precision, fix, causal, scale, key, head, sample, wide=False):
        self.given = q, k, v, precision, fix, causal, scale, key, head, sample
        self.inputs, self.p, self.fix, self.causal, self.scale = (q, k, v), precision, fix, causal, scale
        self.key, self.head, self.sample = key, head, sample
        self.wide = wide  # every site but the inputs is fp32
        self.fa2, self.plain = precision.order == "fa2", precision.algorithm == "plain"
        self.c = F(float(scale) * LOG2E)
        self.tq, self.tk, self.d = len(q), len(k), q.shape[1]

    # ---- sites, operations ----------------------------------------------------------------------

    def start(self, direction):
        """Sites act as in this direction from here on."""
        self.table = self.p.sites_for(direction, self.key.layer, "", self.head)
        self.q, self.k, self.v = (self.rounded(site, x) for site, x in zip(INPUTS, self.inputs))

    def format(self, site):
        return "fp32" if self.wide and site not in INPUTS else self.table[site].format

    def rnd(self, site, x, row, column=0, tile=0):
        if self.format(site) == "fp32":
            return x
        format, mode = self.table[site].format, self.table[site].mode
        word = random_word(self.key, self.sample, self.head, SITE_ID[site], tile, row, column) if mode == "sr" else 0
        return round_one(x, format, mode, word)

    def rounded(self, site, x):
        """A whole matrix."""
        return np.array([[self.rnd(site, y, row, column) for column, y in enumerate(r)] for row, r in enumerate(x)],
                        F).reshape(x.shape)

    def dot(self, site_a, a, site_b, b, start=ZERO):
        if self.p.accumulator in ("hopper", "ampere"):
            formats = [format_named(self.format(site)) for site in (site_a, site_b)]
            for name in ("bf16", "fp16", "tf32"):
                common = format_named(name)
                if all(f.exponent_bits <= common.exponent_bits and f.mantissa_bits <= common.mantissa_bits
                       for f in formats):
                    a, b = np.array([a], F), np.array([b], F).T
                    return accumulators.dot_fp32(a, b, np.array([[start]], F), self.p.accumulator, name, name)[0, 0]
        return dot(a, b, start)

    def exp(self, values):
        """e^x, 2^x under `fa2`."""
        x = np.array(values, F)
        if self.p.exp == "mufu":
            return list(mufu.ex2_mufu(x if self.fa2 else x * F(LOG2E)))
        return list((functions.exp2 if self.fa2 else functions.exp)(x))

    def log(self, x):
        return (mufu.log_mufu if self.p.exp == "mufu" else functions.log)(np.array([x], F))[0]

    def sum4(self, values, sums=(ZERO,) * 4):
        """Four sums that take two columns of each eight, onto those given."""
        sums = list(sums)
        for n, x in enumerate(values):
            sums[n % 8 // 2] = sums[n % 8 // 2] + x
        return sums

    def joined4(self, sums):
        return (sums[0] + sums[2]) + (sums[1] + sums[3])

    # ---- which entries, which tiles -------------------------------------------------------------

    def sees(self, i, j):
        return j <= i + self.tk - self.tq if self.causal else True

    def tiles(self, length, size, descending):
        size = size or max(length, 1)
        tiles = [(t, range(t * size, min(t * size + size, length))) for t in range(-(-length // size))]
        return tiles[::-1] if descending else tiles

    def tile_of(self, n, size, length):
        return next(tile for _, tile in self.tiles(length, size, False) if n in tile)

    def visited(self, rows, keys):
        return self.sees(rows[-1], keys[0])  # no entry of the tile is visible if this one is not

    def key_tiles(self, i, tile):
        """Tiles of keys that the tile of row i visits, in the order of the sum."""
        rows = self.tile_of(i, tile[0], self.tq)
        return [(t, keys) for t, keys in self.tiles(self.tk, tile[1], self.fa2) if self.visited(rows, keys)]

    # ---- S and the maximum ----------------------------------------------------------------------

    def s(self, i, j):
        s = self.rnd("attn.s", self.dot("attn.q", self.q[i], "attn.k", self.k[j]), i, j)
        return s if self.fa2 else self.rnd("attn.s_scaled", s * self.scale, i, j)

    def x(self, s, m):
        """The argument of exp."""
        m = ZERO if m == -INF else m
        return s * self.c - m * self.c if self.fa2 else s - m

    def maximum(self, s, i, tile, row):
        """The new running maximum of row i after the visible S of a tile."""
        unit = self.scale if self.fa2 else F(1)
        r_m = F(max((x for x in s if not np.isnan(x)), default=-INF)) + ZERO  # NaN is ignored, −0 is +0
        epsilon = F(self.fix.values.get("epsilon", 0)) / unit
        if self.fix.name == "qiu-b2" and epsilon:
            format = self.format("attn.s" if self.fa2 else "attn.s_scaled")
            threshold = round_one(r_m - epsilon, format, "rne")  # may be −Inf
            ties = sum(x >= threshold and x > -INF for x in s)
        else:
            ties = sum(r_m - x <= epsilon for x in s)
        if self.fix.name == "capped":  # over all tiles so far
            ties = ties if r_m > row.raw else row.ties + ties if r_m == row.raw else row.ties
            r_m = max(r_m, row.raw)
        row.raw, row.ties, m = max(row.raw, r_m), ties, r_m
        if ties > 1 and np.isfinite(r_m):
            given = r_m * unit
            new, limited = self.rule(given)
            if new != given:
                m = new / unit
            if self.fix.name == "capped":  # rounding adds nothing to the shift
                m = max(r_m, round_one(m, self.format("attn.m"), "rd"))
            row.flags = row.flags | np.array([True, m != r_m, limited])
        m = self.rnd("attn.m", m, i, 0, tile)
        m = row.m + m if row.m == m == 0 else max(row.m, m)  # of −0 and +0 it is +0
        return self.rnd("attn.m", m, i, 0, tile)

    def rule(self, r_m):
        """The fix's maximum for r_m, in scaled units, and whether a cap limited it."""
        name, beta = self.fix.name, F(self.fix.values.get("beta", 1))
        if name.startswith("qiu"):
            return beta * r_m if r_m > 0 else ZERO if r_m < 0 else r_m, False
        if name == "capped":
            wanted = (beta - F(1)) * r_m if r_m > 0 else abs(r_m)
            cap = F(self.cap())
            return r_m + min(max(wanted, F(0.01)), cap), wanted > cap
        return r_m, False

    def cap(self):
        """80 by default, less where a format on the way of P̄ would lose exp(−cap)."""
        if self.fix.values["cap"] != 80:
            return self.fix.values["cap"]
        through = ("p", "l_tile", "l_scaled", "l", "pv", "o_scaled", "o_acc")
        emin = max(format_named(self.format(f"attn.{s}")).emin for s in through)
        return min(80, math.floor(0.93 * math.log(2) * -emin))

    # ---- forward --------------------------------------------------------------------------------

    def forward(self):
        self.start("fwd")
        self.o, self.o_unrounded = np.zeros((self.tq, self.d), F), np.zeros((self.tq, self.d), F)
        self.lse, self.m, self.l = np.zeros(self.tq, F), np.zeros(self.tq, F), np.zeros(self.tq, F)
        self.stats = np.zeros(3, np.int64)
        for i in range(self.tq):
            row = SimpleNamespace(m=F(-INF), raw=F(-INF), ties=0, flags=np.zeros(3, bool))
            o, l = self.plain_row(i, row) if self.plain else self.flash_row(i, row)
            empty = l == 0 and row.raw == -INF
            self.o_unrounded[i] = 0 if empty else o
            self.o[i] = [self.rnd("attn.o", x, i, c) for c, x in enumerate(self.o_unrounded[i])]
            if empty:
                lse = F(-INF)
            else:
                log_l = F(np.nan) if l == 0 else self.log(l)
                lse = fma(row.m, self.scale, log_l) if self.fa2 else row.m + log_l
            self.lse[i], self.m[i], self.l[i] = self.rnd("attn.lse", lse, i), row.m, l
            self.stats += row.flags

    def p_unrounded(self, i, keys, s, m):
        """exp of a row's tile, 0 where masked."""
        p = dict(zip(s, self.exp([self.rnd("attn.x", self.x(s[j], m), i, j) for j in s])))
        return [p.get(j, ZERO) for j in keys]

    def flash_row(self, i, row):
        """(O before its site, l) of query i."""
        o, l, sums = [ZERO] * self.d, ZERO, [ZERO] * 4
        for tile, keys in self.key_tiles(i, self.p.tiles(self.d).forward):
            s = {j: self.s(i, j) for j in keys if self.sees(i, j)}
            m = self.maximum(s.values(), i, tile, row)
            unrounded = self.p_unrounded(i, keys, s, m)
            p = [self.rnd("attn.p", x, i, j) for j, x in zip(keys, unrounded)]
            summed = p if self.p.l_from == "rounded" else unrounded
            dm = self.rnd("attn.dm", row.m - (ZERO if m == -INF else m), i, 0, tile)
            alpha = self.rnd("attn.alpha", self.exp([dm * self.c if self.fa2 else dm])[0], i, 0, tile)
            row.m = m
            if self.fa2:
                firsts = {2 * t: summed[2 * t] for t in range(4) if 2 * t < len(keys)}
                sums = [fma(x, alpha, firsts.get(2 * t, ZERO)) for t, x in enumerate(sums)]
                sums = self.sum4([ZERO if n in firsts else x for n, x in enumerate(summed)], sums)
            else:
                l_tile = self.rnd("attn.l_tile", self.joined4(self.sum4(summed)), i, 0, tile)
                l = self.rnd("attn.l", self.rnd("attn.l_scaled", alpha * l, i, 0, tile) + l_tile, i, 0, tile)
            for c in range(self.d):
                scaled = self.rnd("attn.o_scaled", alpha * o[c], i, c, tile)
                v = [self.v[j, c] for j in keys]
                if self.fa2:
                    total = self.dot("attn.p", p, "attn.v", v, scaled)
                else:
                    total = scaled + self.rnd("attn.pv", self.dot("attn.p", p, "attn.v", v), i, c, tile)
                o[c] = self.rnd("attn.o_acc", total, i, c, tile) + ZERO  # −0 is stored as +0
        if self.fa2:
            l = self.rnd("attn.l", self.joined4(sums), i)
            return [x * (F(1) / l) for x in o], l
        return [x / l for x in o], l

    def plain_row(self, i, row):
        keys = range(self.tk)
        s = {j: self.s(i, j) for j in keys if self.sees(i, j)}
        row.m = self.maximum(s.values(), i, 0, row)
        unrounded = self.p_unrounded(i, keys, s, row.m)
        l = self.rnd("attn.l", self.joined4(self.sum4(unrounded)), i)
        p = [x * (F(1) / l) if self.fa2 else x / l for x in unrounded]
        p = [self.rnd("attn.p", x, i, j) if j in s else ZERO for j, x in zip(keys, p)]
        return [self.dot("attn.p", p, "attn.v", self.v[:, c]) for c in range(self.d)], l

    # ---- backward -------------------------------------------------------------------------------

    def backward(self, do):
        """dQ, and this head's shares of dK and dV."""
        self.start("bwd")
        do, tiles = self.rounded("attn.do", do), self.p.tiles(self.d)
        p, ds = np.zeros((self.tq, self.tk), F), np.zeros((self.tq, self.tk), F)
        o = self.o_unrounded if self.p.delta_from == "o_unrounded" else self.o
        if self.p.delta_from == "o_fp32":
            wide = Slow(*self.given, wide=True)
            wide.forward()
            o = wide.o
        for i in range(self.tq):
            shown = [j for j in range(self.tk) if self.sees(i, j) and self.lse[i] != -INF]
            unrounded = dict(zip(shown, self.probabilities(i, shown)))
            p_ds = {j: self.rnd("attn.p_ds", x, i, j) for j, x in unrounded.items()}
            dp = {j: self.rnd("attn.dp", self.dot("attn.do", do[i], "attn.v", self.v[j]), i, j) for j in shown}
            if self.p.delta_from == "p_dp":
                product = {j: self.rnd("attn.delta_prod", p_ds[j] * dp[j], i, j) for j in shown}
                sums = [ZERO] * 4
                for _, keys in self.key_tiles(i, tiles.dq):
                    sums = self.sum4([product.get(j, ZERO) for j in keys], sums)
                delta = self.joined4(sums)
            else:
                delta = self.delta_sum([self.rnd("attn.delta_prod", do[i, c] * o[i, c], i, c) for c in range(self.d)])
            delta = self.rnd("attn.delta", delta, i)
            for j in shown:
                p[i, j] = self.rnd("attn.p_bwd", unrounded[j], i, j)
                dpd = self.rnd("attn.dpd", dp[j] - delta, i, j)
                ds[i, j] = self.rnd("attn.ds", (p_ds[j] if self.fa2 else p_ds[j] * self.scale) * dpd, i, j)
        dq, dk, dv = (np.zeros((n, self.d), F) for n in (self.tq, self.tk, self.tk))
        for i, c in np.ndindex(dq.shape):
            for tile, keys in self.key_tiles(i, tiles.dq):
                part = self.dot("attn.ds", ds[i, keys], "attn.k", self.k[keys, c])
                part = self.rnd("attn.dq_tile", part, i, c, tile)
                dq[i, c] = self.rnd("attn.dq_acc", dq[i, c] + part, i, c, tile)
        br, bc = tiles.dkdv
        for j, c in np.ndindex(dk.shape):
            for tile, rows in self.tiles(self.tq, br, self.fa2):
                if self.visited(rows, self.tile_of(j, bc, self.tk)):
                    dv[j, c] = self.add(dv[j, c], "dv", j, c, tile, "attn.p_bwd", p[rows, j], "attn.do", do[rows, c])
                    dk[j, c] = self.add(dk[j, c], "dk", j, c, tile, "attn.ds", ds[rows, j], "attn.q", self.q[rows, c])
        if self.fa2:
            dq, dk = dq * self.scale, dk * self.scale
        return self.rounded("attn.dq", dq), self.rounded("attn.dk_head", dk), self.rounded("attn.dv_head", dv)

    def probabilities(self, i, shown):
        """P of row i before its sites."""
        if self.p.p_bwd_from == "m_l":
            x = [self.x(self.s(i, j), self.m[i]) for j in shown]
        elif self.fa2:
            x = [self.s(i, j) * self.c - self.lse[i] * F(LOG2E) for j in shown]
        else:
            x = [self.s(i, j) - self.lse[i] for j in shown]
        p = self.exp([self.rnd("attn.x_bwd", y, i, j) for y, j in zip(x, shown)])
        return [y * (F(1) / self.l[i]) for y in p] if self.p.p_bwd_from == "m_l" else p

    def delta_sum(self, products):
        """Sums of eight elements of each 64 (32 at head dims from 65 to 96), joined."""
        n = 4 if len(products) in range(65, 97) else 8
        sums = [ZERO] * n
        for c, x in enumerate(products):
            sums[c // 8 % n] = sums[c // 8 % n] + x
        for step in (4, 2, 1)[-2 if n == 4 else 0:]:
            sums = [sums[t] + sums[t + step] for t in range(step)]
        return sums[0]

    def add(self, total, name, j, c, tile, site_a, a, site_b, b):
        """The running dK or dV after a tile of queries."""
        if self.fa2:
            total = self.dot(site_a, a, site_b, b, total)
        else:
            total = total + self.rnd(f"attn.{name}_tile", self.dot(site_a, a, site_b, b), j, c, tile)
        return self.rnd(f"attn.{name}_acc", total, j, c, tile)
