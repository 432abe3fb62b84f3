"""What each rounding site did to its values: a watch that measures, per site, layer and head.

    stats = Statistics()
    flash_attention(q, k, v, precision="bf16", watch=stats)
    stats.site("attn.pv").mean        # signed error in ulp

An error is (round(x) − x) / ulp(x), so it lies within ±½ for the nearest modes and ±1 for the others.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuflash.errors import unknown
from cuflash.formats import Format, format_named
from cuflash.site_table import SITES
from cuflash.sites import Rounder

_BLOCK = 1 << 15  # elements measured at once: the temporaries of a block stay in cache

# A bias counts as significant from this many standard errors on: with some 40 sites, two measures and
# a few precisions, chance alone brings one in a hundred audits there.
SIGNIFICANT = 4.0


@dataclass(frozen=True)
class SiteStatistics:
    """One site's roundings at one place of the network; `head` None: all heads together.

    Attributes:
        rounding: what the site does there, such as `bf16` or `bf16:sr`.
        count: values seen; masked entries of S and P are none.
        mean, se: mean of (round(x) − x)/ulp(x) and its standard error.
        away, away_se: the same of (|round(x)| − |x|)/ulp(x): positive away from zero.
        max: largest |error| in ulp.
        overflow: finite values that became ±Inf or, where the format or mode has no Inf for them, were
            cut to ±max from a whole ulp or more beyond. They are in no mean.
        underflow: values other than 0 that became 0.
        ties: values exactly midway between two of the format.
        changed: values that were not in the format already.
        nonfinite: Inf and NaN that came in. They are in no mean.

    Entries of one row, or of one column, may well err alike. The standard error is therefore the larger
    of two: rows taken as the independent draws, and columns.
    """

    site: str
    direction: str
    layer: int
    module: str
    head: int | None
    rounding: str
    count: int
    mean: float
    se: float
    away: float
    away_se: float
    max: float
    overflow: int
    underflow: int
    ties: int
    changed: int
    nonfinite: int

    @property
    def z(self) -> float:
        """mean in standard errors; 0 where nothing was changed, NaN where there is no standard error."""
        return _ratio(self.mean, self.se)

    @property
    def away_z(self) -> float:
        return _ratio(self.away, self.away_se)

    @property
    def bias(self) -> float:
        """The larger of |mean| and |away| of those that are significant, else 0."""
        measures = ((self.mean, self.z), (self.away, self.away_z))
        return max((abs(m) for m, z in measures if abs(z) >= SIGNIFICANT), default=0.0)


def _ratio(mean: float, se: float) -> float:
    return 0.0 if mean == 0 else math.copysign(math.inf, mean) if se == 0 else mean / se


# What is summed for each head. Of rows and of columns, as clusters with n values and error sums S (signed)
# and A (away from zero): the sums of S², S·n, A², A·n, n², and their number.
_CLUSTER_FIELDS = ("SS", "Sn", "AA", "An", "nn", "clusters")
_FIELDS = ("count", "error", "away", "overflow", "underflow", "ties", "changed", "nonfinite",
           *(f"{axis}_{sum}" for axis in ("rows", "cols") for sum in _CLUSTER_FIELDS))
_FIELD = {name: i for i, name in enumerate(_FIELDS)}


class _Sums:
    """Running sums of one site at one place, by head."""

    def __init__(self, rounding: str) -> None:
        self.rounding = rounding
        self.by_head = np.zeros((0, len(_FIELDS)))
        self.max = np.zeros(0)
        self.open: tuple[np.ndarray, np.ndarray] | None = None  # clusters (3, G, n) of rows and of columns

    def heads(self, heads: np.ndarray) -> None:
        """Room for these heads."""
        more = int(heads.max(initial=-1)) + 1 - len(self.max)
        if more > 0:
            self.by_head = np.pad(self.by_head, ((0, more), (0, 0)))
            self.max = np.pad(self.max, (0, more))

    def add(self, heads: np.ndarray, field: str, values: np.ndarray) -> None:
        np.add.at(self.by_head[:, _FIELD[field]], heads, values)

    def close(self, heads: np.ndarray) -> None:
        """Folds the open clusters into the sums."""
        if self.open is None:
            return
        for axis, (s, a, n) in zip(("rows", "cols"), self.open):
            for name, values in (("SS", s * s), ("Sn", s * n), ("AA", a * a), ("An", a * n), ("nn", n * n),
                                 ("clusters", n > 0)):
                self.add(heads, f"{axis}_{name}", values.sum(axis=1))
        self.open = None


class Statistics:
    """A `watch` that measures every site. Reading it is possible at any time; it goes on counting."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int, str, str], _Sums] = {}
        self._rounder: Rounder | None = None
        self._open: list[_Sums] = []

    def __call__(self, rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
        if rnd is not self._rounder:
            self._close()
            self._rounder = rnd
        heads, axes = np.asarray(rnd.heads, int), SITES[site].axes
        place = (rnd.direction, rnd.layer, rnd.module, site)
        sums = self._places.get(place)
        if sums is None:
            table = rnd.precision.sites_for(rnd.direction, rnd.layer, rnd.module, int(heads[0]))
            sums = self._places[place] = _Sums("fp64" if rnd.precision.is_fp64 else str(table[site]))
        sums.heads(heads)
        grid = len(axes) == 2
        if not site.startswith("attn."):
            shape = (1, -1, x.shape[-1])
        elif grid:
            shape = (len(heads), *x.shape[1:])
        else:
            shape = (len(heads), x.shape[1], -1)  # under order = fa2 a row has four partial sums
        x, y = x.reshape(shape), rounded.reshape(shape)
        # P∘dP, delta_prod under delta_from = p_dp, has S's mask too; elsewhere delta_prod comes without one.
        visible = rnd.visible if axes == "qk" or site == "attn.delta_prod" else None
        shown = None if visible is None else np.broadcast_to(visible, x.shape)
        sums.add(heads, "count", _entries(x, shown))
        if rnd.format(site) == "fp64" or rnd.format(site) == "fp32" and x.dtype == np.float32:
            return
        if sums.open is None:
            sums.open = np.zeros((3, len(heads), 0)), np.zeros((3, len(heads), 0))
            self._open.append(sums)
        start = {"q": rnd.q, "k": rnd.k}
        r0, c0 = start.get(axes[0], 0), start.get(axes[1], 0) if grid else 0
        rows = _wide(sums.open[0], r0 + x.shape[1])
        cols = _wide(sums.open[1], c0 + x.shape[2] if grid else 0)
        sums.open = rows, cols
        format = format_named(rnd.format(site))
        step = max(1, _BLOCK // max(1, x.shape[0] * x.shape[2]))
        for i in range(0, x.shape[1], step):
            part = slice(i, i + step)
            error, away, counted = _measure(sums, heads, x[:, part], y[:, part],
                                            None if shown is None else shown[:, part], format)
            at = slice(r0 + i, r0 + i + error.shape[1])
            for k, (field, values) in enumerate((("error", error), ("away", away))):
                by_row = values.sum(axis=2, dtype=np.float64)
                rows[k, :, at] += by_row
                sums.add(heads, field, by_row.sum(axis=1))
                if grid:
                    cols[k, :, c0:c0 + x.shape[2]] += values.sum(axis=1, dtype=np.float64)
            rows[2, :, at] += x.shape[2] if counted is None else np.count_nonzero(counted, axis=2)
            if grid:
                by_column = error.shape[1] if counted is None else np.count_nonzero(counted, axis=1)
                cols[2, :, c0:c0 + x.shape[2]] += by_column

    def _close(self) -> None:
        if self._rounder is not None:
            for sums in self._open:
                sums.close(np.asarray(self._rounder.heads, int))
        self._open = []

    def sites(self, by_head: bool = False) -> list[SiteStatistics]:
        """All sites seen, in the order of their first rounding; `by_head`: one for each head."""
        self._close()
        return [s for place, sums in self._places.items() for s in _results(place, sums, by_head)]

    def site(self, site: str, *, direction: str | None = None, layer: int = 0, module: str = "",
             head: int | None = None) -> SiteStatistics:
        """One site's statistics; `direction` None: the first in which it was seen.

        Raises:
            ValueError: the site was not seen there; the message says which were.
        """
        seen = self.sites(by_head=head is not None)
        for s in seen:
            if ((s.site, s.layer, s.module, s.head) == (site, layer, module, head)
                    and direction in (None, s.direction)):
                return s
        if all(s.site != site for s in seen):
            raise unknown("site", site, dict.fromkeys(s.site for s in seen))
        raise ValueError(f"site {site} was not seen at direction={direction}, layer={layer}, "
                         f"module={module!r}, head={head}")


def _wide(clusters: np.ndarray, end: int) -> np.ndarray:
    """Room for clusters up to `end`."""
    more = end - clusters.shape[2]
    return np.pad(clusters, ((0, 0), (0, 0), (0, more))) if more > 0 else clusters


def _entries(x: np.ndarray, shown: np.ndarray | None) -> np.ndarray:
    """Entries that count, of each head."""
    return np.full(len(x), x[0].size) if shown is None else np.count_nonzero(shown, axis=(1, 2))


def _measure(sums: _Sums, heads: np.ndarray, x: np.ndarray, y: np.ndarray, shown: np.ndarray | None,
             format: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Adds a block's counts; gives error, error away from zero (0 where not counted), what is counted.

    Both are exact in x's own precision: y − x has no more bits than x, and an ulp is a power of two.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        error = y - x
        error /= _spacing(x, format)
        counted = shown
        largest = np.abs(x).max(initial=0)
        beyond = format.max + 2.0**(format.emax - format.mantissa_bits)  # a whole ulp above max
        if not (largest < beyond and np.abs(y).max(initial=0) < np.inf):  # NaN included
            arrived = np.isfinite(x) if shown is None else np.isfinite(x) & shown
            overflow = arrived & (~np.isfinite(y) | (np.abs(x) >= beyond))
            counted = arrived & ~overflow
            sums.add(heads, "nonfinite", _entries(x, shown) - _entries(x, arrived))
            for field in ("overflow", "changed"):
                sums.add(heads, field, _entries(x, overflow))
        if counted is not None:
            error = np.where(counted, error, error.dtype.type(0))
        away = np.where(np.signbit(x), -error, error)
        inexact = error != 0
        sums.add(heads, "changed", np.count_nonzero(inexact, axis=(1, 2)))
        sums.add(heads, "underflow", np.count_nonzero(inexact & (y == 0), axis=(1, 2)))
        magnitude = np.abs(error)
        sums.add(heads, "ties", np.count_nonzero(magnitude == 0.5, axis=(1, 2)))
        np.maximum.at(sums.max, heads, magnitude.max(axis=(1, 2), initial=0))
    return error, away, counted


def _spacing(x: np.ndarray, format: Format) -> np.ndarray:
    """`ulp` in x's own dtype and without its checks; anything where x is not finite."""
    uint, exponent = (np.uint32, 0x7F800000) if x.dtype == np.float32 else (np.uint64, 0x7FF << 52)
    power = (x.view(uint) & uint(exponent)).view(x.dtype)
    np.clip(power, x.dtype.type(format.min), x.dtype.type(2.0**format.emax), out=power)
    power *= x.dtype.type(2.0**-format.mantissa_bits)
    return power


def _results(place: tuple[str, int, str, str], sums: _Sums, by_head: bool) -> Iterator[SiteStatistics]:
    direction, layer, module, site = place
    groups: list[tuple[int | None, np.ndarray, float]]
    if by_head:
        groups = [(h, row, sums.max[h]) for h, row in enumerate(sums.by_head) if row[0]]
    else:
        groups = [(None, sums.by_head.sum(axis=0), float(sums.max.max(initial=0.0)))]
    for head, row, largest in groups:
        of = dict(zip(_FIELDS, row.tolist()))
        n = of["count"] - of["overflow"] - of["nonfinite"]
        mean, away = (of[f] / n if n else 0.0 for f in ("error", "away"))
        yield SiteStatistics(
            site, direction, layer, module, head, sums.rounding, int(of["count"]),
            mean, _standard_error(of, "S", mean, n), away, _standard_error(of, "A", away, n), float(largest),
            *(int(of[f]) for f in ("overflow", "underflow", "ties", "changed", "nonfinite")))


def _standard_error(of: dict[str, float], sum: str, mean: float, n: float) -> float:
    """The larger one of the cluster estimates √(c/(c−1) · Σ(S − n·mean)²) / N over rows and over columns."""
    if not of["changed"]:
        return 0.0
    found = []
    for axis in ("rows", "cols"):
        clusters = of[f"{axis}_clusters"]
        if clusters > 1:
            squares = of[f"{axis}_{sum * 2}"] - 2 * mean * of[f"{axis}_{sum}n"]
            squares += mean * mean * of[f"{axis}_nn"]
            found.append(math.sqrt(max(squares, 0.0) * clusters / (clusters - 1)) / n)
    return max(found, default=math.nan)
