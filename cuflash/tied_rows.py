"""Where the paper's mechanism acts: rows with two or more keys at P̄ = 1 (arXiv 2510.04212, section 3.3).

Such a row adds values of V unchanged. Where these have one sign, their sum often lies exactly midway
between two numbers of a short format; the small rest of the row, if it has the same sign, turns every
such tie away from zero, and the error no longer averages out.
"""
from dataclasses import dataclass

import numpy as np

from cuflash.formats import format_named, ulp
from cuflash.sites import Rounder

_CHAIN = ("attn.pv", "attn.o_acc", "attn.o")  # where Ō may first lose bits


@dataclass(frozen=True)
class Turned:
    """One value of Ō (of O, where Ō is kept in fp32) that the rest of its row turned away from zero.

    `tied` is what the keys at P̄ = 1 alone give, exactly; `exact` what came to the site, `rounded` what
    left it.
    """

    site: str
    format: str
    sample: int
    head: int
    row: int
    feature: int
    keys: tuple[int, ...]
    v: tuple[float, ...]
    tied: float
    exact: float
    rounded: float
    ulp: float

    @property
    def place(self) -> tuple[int, ...]:
        return self.sample, self.head, self.row, self.feature


class TiedRows:
    """A watch of the forward.

    Attributes:
        rows: rows with two or more keys at P̄ = 1.
        values: features of these rows (each tile's, at attn.pv) whose tied V have one sign.
        ties: of these, where the tied V alone lie exactly midway, and the rest of the row is less than half
            an ulp.
        away, toward: of the ties, those rounded away from zero and toward it. Without a rest they are
            equally frequent; the paper's bias is an excess of `away`.
        first: the first tie that a rest turned away, by sample, head, row; None if there is none.
    """

    def __init__(self) -> None:
        self.rows = self.values = self.ties = self.away = self.toward = 0
        self.first: Turned | None = None
        self._rounder: Rounder | None = None

    def __call__(self, rnd: Rounder, site: str, x: np.ndarray, y: np.ndarray) -> None:
        if rnd.direction != "fwd" or rnd.precision.is_fp64:
            return
        if rnd is not self._rounder:
            self._rounder = rnd
            rounding = [s for s in _CHAIN if s not in rnd.precision.merged and rnd.format(s) != "fp32"]
            self._site = rounding[0] if rounding else None
        if self._site is None:
            return
        if site == "attn.q":
            self._count = np.zeros(x.shape[:2], np.int64)  # keys at P̄ = 1 of each row so far
            self._tied = np.zeros(x.shape[:2], bool)
            self._sum, self._magnitude = np.zeros((2, *x.shape))  # of their V
            self._masks: list[tuple[int, int, np.ndarray]] = []  # (first row, first key, P̄ = 1) of tiles
        elif site == "attn.v":
            self._v = y.astype(np.float64)
        elif site == "attn.p":
            self._tile(rnd, (y == 1) if rnd.visible is None else (y == 1) & rnd.visible)
        elif site == "attn.alpha":
            self._rescale(rnd, y == 1)
        if site == self._site:
            part = slice(rnd.q, rnd.q + y.shape[1])
            if site == "attn.pv":
                self._check(rnd, x, y, *self._new, self._masks[-1:])
            else:
                so_far = (total[:, part] for total in (self._count, self._sum, self._magnitude))
                self._check(rnd, x, y, *so_far, self._masks)
        if site == "attn.lse":
            self._masks = []
            self.rows += int(np.count_nonzero(self._tied[:, rnd.q:rnd.q + y.shape[1]]))

    def _tile(self, rnd: Rounder, ones: np.ndarray) -> None:
        """The keys at P̄ = 1 of a tile, and the sums of their V."""
        self._masks.append((rnd.q, rnd.k, ones))
        count = np.count_nonzero(ones, axis=-1)
        v = self._v[:, rnd.k:rnd.k + ones.shape[-1]]
        if np.count_nonzero(ones) > 4 * count.size:
            wide = ones.astype(np.float64)
            self._new = count, wide @ v, wide @ np.abs(v)
        else:  # few in a row, as usual
            sums = np.zeros((2, *count.shape, v.shape[-1]))
            g, r, k = np.nonzero(ones)
            starts = np.flatnonzero(np.diff(g * count.shape[1] + r, prepend=-1))
            if len(starts):
                terms = v[g, k]
                for total, x in zip(sums, (terms, np.abs(terms))):
                    total[g[starts], r[starts]] = np.add.reduceat(x, starts)
            self._new = count, *sums
        if "attn.alpha" in rnd.precision.merged:  # plain: one tile, nothing to rescale
            self._rescale(rnd, np.zeros(count.shape, bool))

    def _rescale(self, rnd: Rounder, same: np.ndarray) -> None:
        """Adds the new tile; a row keeps what it had only if its maximum stayed the `same`."""
        part = slice(rnd.q, rnd.q + same.shape[1])
        self._count[:, part] = self._count[:, part] * same + self._new[0]
        for total, new in ((self._sum, self._new[1]), (self._magnitude, self._new[2])):
            total[:, part] = total[:, part] * same[..., None] + new
        for q0, _, ones in self._masks[:-1]:
            first = max(q0, rnd.q)
            ones[:, first - q0:] &= same[:, first - rnd.q:, None]

    def _check(self, rnd: Rounder, x: np.ndarray, y: np.ndarray, count: np.ndarray, sum: np.ndarray,
               magnitude: np.ndarray, masks: list[tuple[int, int, np.ndarray]]) -> None:
        tied = count > 1
        if not tied.any():
            return
        self._tied[:, rnd.q:rnd.q + y.shape[1]] |= tied
        g, r = np.nonzero(tied)
        x, y = x[g, r].astype(np.float64), y[g, r].astype(np.float64)
        alone = sum[g, r] / (count[g, r][:, None] if self._site == "attn.o" else 1)
        one_sign = (np.abs(sum[g, r]) == magnitude[g, r]) & (alone != 0)
        format = format_named(rnd.format(self._site))
        spacing = ulp(alone, format)
        midway = np.abs(np.remainder(alone / spacing, 1)) == 0.5
        ties = one_sign & midway & (np.abs(x - alone) < spacing / 2)
        away, toward = (ties & compare(np.abs(y), np.abs(x)) for compare in (np.greater, np.less))
        turned = away & (np.abs(x) > np.abs(alone))
        self.values += int(np.count_nonzero(one_sign))
        self.ties += int(np.count_nonzero(ties))
        self.away += int(np.count_nonzero(away))
        self.toward += int(np.count_nonzero(toward))
        for i in np.flatnonzero(turned.any(axis=1)):
            feature = int(np.argmax(turned[i]))
            at = int(rnd.samples[g[i]]), int(rnd.heads[g[i]]), rnd.q + int(r[i]), feature
            if self.first is not None and self.first.place <= at:
                continue
            keys = [k0 + int(k) for q0, k0, ones in masks if 0 <= at[2] - q0 < ones.shape[1]
                    for k in np.flatnonzero(ones[g[i], at[2] - q0])]
            values = (alone[i, feature], x[i, feature], y[i, feature], ulp(x[i, feature], format))
            v = tuple(float(self._v[g[i], k, feature]) for k in sorted(keys))
            self.first = Turned(self._site, format.name, *at, tuple(sorted(keys)), v, *map(float, values))
