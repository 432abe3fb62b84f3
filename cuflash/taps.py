"""What attention's kernels made of their sites' values, shown to a watch: the twin of cuda/taps.cuh.

A kernel compiled with TAPS also writes each value at a site, and what it was rounded to, to memory: the same
kernel, so the same bits. The watch sees them in the order of attention_forward.py and attention_backward.py, tile by
tile, all rows at once. One sample's heads at a time, as many as BUDGET holds.
"""
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any

import numpy as np

from cuflash import kernels
from cuflash.attention_arguments import Call
from cuflash.attention_backward import shown_entries
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.site_table import SITE_ID, SITES
from cuflash.sites import Rounder, Watch
from cuflash.tiles import Shape
from cuflash.watching import wants

BUDGET = 4 << 30  # bytes of the taps of a launch, unless one head needs more

_TAP = Struct("@2P8I")  # struct Tap of cuda/taps.cuh


class Taps:
    """The values of some sites of attention, for heads of one sample that round alike.

    Attributes:
        heads: the query heads; of dK and dV the first ones of groups that share keys.
        planes: per site two fp32 arrays (heads, times, tiles, rows, columns): what was rounded, and the result;
            until they are shown.
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
            _TAP.pack_into(table, _TAP.size * SITE_ID[site], x.data.ptr, rounded.data.ptr,
                           self.rnd.samples[0], self.heads.start, self.heads.step, heads, times,
                           tiles if is_tiled else 0, rows, cols)
        kernels.upload(kernel, "taps", bytes(table))

    def show(self, watch: Watch, lse: np.ndarray | None = None) -> None:
        """Shows all values, as NumPy arrays, and lets go of them. lse (heads, Tq) hides empty rows in backward."""
        sites = [s for s in order(self.rnd.precision, self.rnd.direction) if s in self.planes]
        for _, together in itertools.groupby(sites, self._loop):
            some = {site: self.planes.pop(site) for site in together}
            for where, piece in self._pieces(next(iter(some)), lse):
                self.rnd.at(**where)
                for site, planes in some.items():
                    for time in range(_times(site)):
                        x, rounded = (_on_host(plane[self._index(site, time, piece)]) for plane in planes)
                        watch(self.rnd, site, x, rounded)

    def _loop(self, site: str) -> str:
        """Alike for sites whose values come in one loop over numeric tiles, tile by tile; of others the site."""
        p, axes = self.rnd.precision, self.rnd.precision.axes_of(site)
        if p.tile_of(site, self.head_dim) is None and not (axes == "qk" and self._in_key_tiles):
            return site
        return axes[0] if axes[0] == "k" else "q"

    @property
    def _in_key_tiles(self) -> bool:
        """Whether S and P come by key tiles; else all keys of a row come at once."""
        return self.rnd.direction == "fwd" and self.rnd.precision.algorithm == "flash"

    def _pieces(self, site: str, lse: np.ndarray | None) -> Iterator[tuple[dict[str, Any], tuple[int, slice, slice]]]:
        """Where the values of a site's loop lie: for Rounder.at, and as (tile, rows, keys)."""
        p, shape, every = self.rnd.precision, self.shape, slice(None)
        loop = self._loop(site)
        if loop == site:
            visible = shape.visible(0, shape.tq, 0, shape.tk) if p.axes_of(site) == "qk" else None
            if p.axes_of(site) == "qk" and lse is not None:
                visible = shown_entries(visible, lse)
            yield {"visible": visible}, (0, every, every)
            return
        tiles = p.tiles(self.head_dim)
        if loop == "k":  # sums over query tiles
            br, bc = tiles.dkdv
            for i, q0, q1 in shape.query_tiles(br, p.order == "fa2"):
                yield {"q": q0, "tile": i}, (i, slice(q0, q1), slice(shape.key_end(q1, bc)))
            return
        br, bc = tiles.forward if self.rnd.direction == "fwd" else tiles.dq
        for j, k0, k1 in shape.key_tiles(bc, p.order == "fa2"):
            first = shape.first_row(k0, br)
            if first < shape.tq:
                visible = shape.visible(first, shape.tq, k0, k1) if self._in_key_tiles else None
                yield {"q": first, "k": k0, "tile": j, "visible": visible}, (j, slice(first, None), slice(k0, k1))

    def _index(self, site: str, time: int, piece: tuple[int, slice, slice]) -> tuple[Any, ...]:
        """A piece as an index into the planes of a site."""
        p, (tile, rows, keys) = self.rnd.precision, piece
        along = {"q": rows, "k": keys, "d": slice(None)}
        inner = [along[a] for a in p.axes_of(site)]
        return (slice(None), time, tile if p.tile_of(site, self.head_dim) is not None else 0,
                *(inner if len(inner) == 2 else (*inner, 0)))


def _on_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def lengths(p: Precision, site: str, shape: Shape, head_dim: int) -> tuple[int, int, int, int]:
    """Times, tiles, rows and columns of a site's values."""
    axes, tile, tiles = p.axes_of(site), p.tile_of(site, head_dim), 1
    length = {"q": shape.tq, "k": shape.tk, "d": head_dim}
    if tile is not None:
        along, size = (shape.tq, tile[0]) if axes[0] == "k" else (shape.tk, tile[1])
        tiles = -(-along // (size or max(along, 1)))
    return _times(site), tiles, length[axes[0]], length[axes[1]] if len(axes) == 2 else 1


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
        rnd.device, rnd.causal, rnd.group = "gpu", call.shape.causal, call.group
        return Taps(rnd, heads, call.shape, call.q.shape[-1], sites, kernels.import_cupy().zeros)


def launches(call: Call, direction: str, watch: Watch | None, arrays: list[Any]
             ) -> Iterator[tuple[list[Any], Key, Sample | None]]:
    """What is launched together: arrays with the samples' part of each, their key, and the sample if it is a
    watched one. `arrays` has None or (batch, …) each; of backward, `lse` (batch, heads, Tq) is the sixth.
    """
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
