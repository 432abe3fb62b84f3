"""Which single rounding of attention turns the gradient: each site alone, on saved states, without any training.

    found = screen(run, step=900, samples=range(2))
    ranking(found)[0].site

Each site alone is switched to fp32 in the run's precision, and alone to its format in fp32 attention. What
the site does to Σδ, and to the growth of W_Q along its leading direction, is the difference: deterministic,
seconds a state.
"""
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuflash.audit import Pass
from cuflash.model.states import LayerState, layer_states
from cuflash.model.study_arms import short_sites
from cuflash.precision import Precision

WAYS = ("fp32 alone", "low alone")
ALL = "attn"  # all sites at once, for scale


@dataclass(frozen=True)
class Screened:
    """What the rounding at a site adds in one layer, as a row of screen.csv.

    Attributes:
        way: `fp32 alone`: low precision less the same with this site in fp32. `low alone`: fp32 attention
            with this site low less all fp32.
        delta: of Σδ over the rows.
        growth: of −uᵀ·dW_Q·v, with which W_Q's largest singular value grows under a step of descent,
            by the norm of dW_Q of all fp32. Both are infinite where a value is not finite.
    """

    site: str
    way: str
    step: int
    layer: int
    delta: float
    growth: float


@dataclass(frozen=True)
class Ranked:
    """A site over all states, both ways: the layer where its mean growth is largest, and what it is there.

    `agree`: the share of the (state, way) in which growth has the sign of its mean.
    """

    site: str
    layer: int
    growth: float
    delta: float
    agree: float


def screen(run: pathlib.Path, step: int, samples: Sequence[int],
           layers: Sequence[int] | None = None) -> list[Screened]:
    """Every short site of attention at one saved state of a run."""
    return [row for state in layer_states(run, step, samples, layers) for row in screen_layer(state)]


def screen_layer(state: LayerState) -> list[Screened]:
    low, fix = state.precision, state.fix
    high = low.round("attn=fp32")
    table = low.table()
    u, _, v = state.leading()

    def measured(precision: Precision) -> tuple[Pass, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            found = state.capture.run(precision, fix)
            return found, state.dw_q(found)

    def sum_of(found: Pass) -> float:
        assert found.delta is not None
        return float(found.delta.sum())

    begin = {name: measured(p) for name, p in (("low", low), ("high", high))}
    size = float(np.linalg.norm(begin["high"][1])) or 1.0

    def row(site: str, way: str, more: tuple[Pass, np.ndarray], less: tuple[Pass, np.ndarray]) -> Screened:
        with np.errstate(invalid="ignore"):
            growth = -float(u @ (more[1] - less[1]) @ v) / size
            delta = sum_of(more[0]) - sum_of(less[0])
        return Screened(site, way, state.step, state.layer, *(x if math.isfinite(x) else math.inf
                                                              for x in (delta, growth)))

    rows = [row(ALL, way, begin["low"], begin["high"]) for way in WAYS]
    for site in short_sites(low):
        rows.append(row(site, WAYS[0], begin["low"], measured(low.round(f"{site}=fp32"))))
        rows.append(row(site, WAYS[1], measured(high.round(f"{site}={table[site]}")), begin["high"]))
    return rows


def ranking(rows: Sequence[Screened]) -> list[Ranked]:
    """Sites by what they add to the growth of W_Q, the most harmful first; `attn`, all at once, among them."""
    found = []
    for site in dict.fromkeys(r.site for r in rows):
        best: Ranked | None = None
        for layer in sorted({r.layer for r in rows}):
            mine = [r for r in rows if (r.site, r.layer) == (site, layer)]
            growth = float(np.mean([r.growth for r in mine]))
            if best is None or growth > best.growth:
                agree = float(np.mean([np.sign(r.growth) == np.sign(growth) for r in mine]))
                best = Ranked(site, layer, growth, float(np.mean([r.delta for r in mine])), agree)
        assert best is not None
        found.append(best)
    return sorted(found, key=lambda r: -r.growth)
