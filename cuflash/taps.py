"""What attention's kernels made of their sites' values, shown to a watch: the twin of cuda/taps.cuh.

A kernel compiled with TAPS also writes each value at a site, and what it was rounded to, to memory: the same
kernel, so the same bits. The watch sees them in the order of attention_forward.py and attention_backward.py, in
larger pieces. One sample's heads at a time, as many as BUDGET holds.
"""
import dataclasses
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any

import numpy as np

from cuflash import kernels
from cuflash.attention_arguments import Call
from cuflash.attention_backward import shown_entries
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.site_table import SITES
from cuflash.sites import Rounder, Watch
from cuflash.tiles import Shape
from cuflash.watching import wants

BUDGET = 4 << 30  # bytes of the taps of a launch, unless one head needs more

_TAP = Struct("@2P8I")  # struct Tap of cuda/taps.cuh


class Taps:
    """The values of some sites of attention, for heads of one sample that round alike.

    Attributes:
        heads: the query heads; of dK and dV the first ones of groups that share keys.
        planes: per site two fp32 arrays (heads, times, tiles, rows, columns): what was rounded, and the result.
            times is 2 for attn.m, the tile's maximum and the running one; tiles is 1 for what is no tile's value.
    """

    def __init__(self, rnd: Rounder, heads: range, shape: Shape, head_dim: int, sites: list[str],
                 zeros: Callable[..., Any] = np.zeros) -> None:
        self.rnd, self.heads, self.shape, self.head_dim = rnd, heads, shape, head_dim
        self.planes = {site: tuple(zeros((len(heads), *lengths(rnd.precision, site, shape, head_dim)), np.float32)
                                   for _ in range(2)) for site in sites}

    def fill(self, kernel: Any) -> None:
        """Tells a kernel where its values go."""
        table = bytearray(_TAP.size * len(SITES))
        for site, (x, rounded) in self.planes.items():
            heads, times, tiles, rows, cols = x.shape
            is_tiled = self.rnd.precision.tile_of(site, self.head_dim) is not None
            _TAP.pack_into(table, _TAP.size * list(SITES).index(site), x.data.ptr, rounded.data.ptr,
                           self.rnd.samples[0], self.heads.start, self.heads.step, heads, times,
                           tiles if is_tiled else 0, rows, cols)
        kernels.upload(kernel, "taps", bytes(table))

    def show(self, watch: Watch, lse: np.ndarray | None = None) -> None:
        """Shows all values, as NumPy arrays. lse (heads, Tq) hides empty rows in backward."""
        for site in order(self.rnd.precision, self.rnd.direction):
            if site in self.planes:
                x, rounded = (plane if isinstance(plane, np.ndarray) else plane.get() for plane in self.planes[site])
                for where, piece in self._pieces(site, lse):
                    self.rnd.at(**where)
                    watch(self.rnd, site, x[piece], rounded[piece])

    def _pieces(self, site: str, lse: np.ndarray | None) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
        """Where the values of a site lie, and an index into its planes."""
        p, shape, every = self.rnd.precision, self.shape, slice(None)
        axes, tile = _axes(p, site), p.tile_of(site, self.head_dim)
        last = (every,) if len(axes) == 2 else (0,)
        times, fa2 = range(_times(site)), p.order == "fa2"
        if tile is None:
            visible = shape.visible(0, shape.tq, 0, shape.tk) if axes == "qk" else None
            if axes == "qk" and lse is not None:
                visible = shown_entries(visible, lse)
            for time in times:
                yield {"visible": visible}, (every, time, 0, every, *last)
        elif axes[0] == "k":  # sums over query tiles
            for i, q0, q1 in shape.query_tiles(tile[0], fa2):
                yield {"q": q0, "tile": i}, (every, 0, i, slice(shape.key_end(q1, tile[1])), *last)
        else:
            for j, k0, _ in shape.key_tiles(tile[1], fa2):
                first = shape.first_row(k0, tile[0])
                for time in times if first < shape.tq else ():
                    yield {"q": first, "k": k0, "tile": j}, (every, time, j, slice(first, None), *last)


def lengths(p: Precision, site: str, shape: Shape, head_dim: int) -> tuple[int, int, int, int]:
    """Times, tiles, rows and columns of a site's values."""
    axes, tile, tiles = _axes(p, site), p.tile_of(site, head_dim), 1
    length = {"q": shape.tq, "k": shape.tk, "d": head_dim}
    if tile is not None:
        along, size = (shape.tq, tile[0]) if axes[0] == "k" else (shape.tk, tile[1])
        tiles = -(-along // (size or max(along, 1)))
    return _times(site), tiles, length[axes[0]], length[axes[1]] if len(axes) == 2 else 1


def _axes(p: Precision, site: str) -> str:
    return "qk" if site == "attn.delta_prod" and p.delta_from == "p_dp" else SITES[site].axes


def _times(site: str) -> int:
    return 2 if site == "attn.m" else 1


def order(p: Precision, direction: str) -> list[str]:
    """A direction's sites of attention in the order of their first roundings."""
    if direction == "fwd":
        names = "q k v s s_scaled m x p dm alpha l_tile l_scaled l o_scaled pv o_acc o lse".split()
        if p.algorithm == "plain" or p.order == "fa2":  # before P is divided by it; after all tiles
            names.remove("l")
            names.insert(names.index("p" if p.algorithm == "plain" else "o"), "l")
    else:
        names = "q k v do s s_scaled x_bwd p_bwd p_ds dp dpd ds dv_tile dv_acc dk_tile dk_acc dq_tile dq_acc".split()
        names += "dq dk_head dv_head dk dv".split()
        at = names.index("dpd" if p.delta_from == "p_dp" else "s")
        names[at:at] = ["delta_prod", "delta"]
    return [f"attn.{name}" for name in names if f"attn.{name}" not in p.merged]


# ---- which samples and heads

@dataclasses.dataclass(frozen=True)
class Sample:
    """One watched sample of a call on the GPU. Iterating gives the taps of a few heads at a time, which are shown
    as the next ones are asked for: a launch belongs between."""

    call: Call
    direction: str
    watch: Watch
    number: int  # in the call
    lse: Any = None  # (heads, Tq); of backward

    def __iter__(self) -> Iterator[Taps]:
        sites = self.sites(sums=False)
        size = 8 * sum(int(np.prod(lengths(self.call.precision, s, self.call.shape, self.call.q.shape[-1])))
                       for s in sites)  # bytes of a head
        together = max(1, BUDGET // max(size, 1))
        for alike in self._runs(1):
            for i in range(0, len(alike), together):
                heads = alike[i:i + together]
                taps = self._taps(heads, sites)
                yield taps
                taps.show(self.watch, None if self.lse is None else self.lse[heads.start:heads.stop].get())

    def sums(self) -> Iterator[Taps]:
        """Those of dK and dV where query heads share keys."""
        sites = self.sites(sums=True)
        for heads in self._runs(self.call.group) if self.call.group > 1 else ():
            taps = self._taps(heads, sites)
            yield taps
            taps.show(self.watch)

    def sites(self, sums: bool) -> list[str]:
        """Those that the watch wants."""
        call, shared = self.call, ("attn.dk", "attn.dv") if self.call.group > 1 else ()
        return [s for s in order(call.precision, self.direction) if (s in shared) == sums
                and wants(self.watch, self.direction, call.key.layer, "", s, call.key.sample + self.number)]

    def _runs(self, step: int) -> Iterator[range]:
        """Neighbouring heads, of each `step` the first, that round alike."""
        call, first = self.call, 0
        heads = range(0, call.q.shape[1], step)
        tables = [call.precision.sites_for(self.direction, call.key.layer, "", h) for h in heads]
        for end in range(1, len(heads) + 1):
            if end == len(heads) or tables[end] != tables[first]:
                yield heads[first:end]
                first = end

    def _taps(self, heads: range, sites: list[str]) -> Taps:
        call = self.call
        rnd = Rounder(call.precision, self.direction, call.key.layer, key=call.key, heads=np.array(heads),
                      samples=np.full(len(heads), call.key.sample + self.number))
        rnd.device = "gpu"
        return Taps(rnd, heads, call.shape, call.q.shape[-1], sites, kernels.import_cupy().zeros)


def launches(call: Call, direction: str, watch: Watch | None, arrays: list[Any]
             ) -> Iterator[tuple[list[Any], Key, Sample | None]]:
    """What is launched together: arrays with the samples' part of each, their key, and the sample if it is a
    watched one. `arrays` has None or (batch, …) each; of backward, `lse` (batch, heads, Tq) is the sixth."""
    if watch is None:
        yield arrays, call.key, None
        return
    batch, start = call.q.shape[0], 0
    for i in range(batch + 1):
        sample = Sample(call, direction, watch, i) if i < batch else None
        if sample and not (sample.sites(sums=False) or sample.sites(sums=True)):
            continue
        ends = [(start, i, None)] * (start < i) + [(i, i + 1, sample)] * (i < batch)
        for a, b, watched in ends:
            part = [x if x is None else x[a:b] for x in arrays]
            if watched and direction == "bwd":
                watched = dataclasses.replace(watched, lse=part[5][0])
            yield part, dataclasses.replace(call.key, sample=call.key.sample + a), watched
        start = i + 1
