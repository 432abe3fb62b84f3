"""Every intermediate of attention and of the network around it, in one HDF5 file, in its true bits.

    with recording("x.h5", sites="attn"):
        o, saved = flash_attention_forward(q, k, v, precision="bf16")
        flash_attention_backward(do, saved)
    read("x.h5").read("attn.p")                     # ml_dtypes.bfloat16 (samples, heads, Tq, Tk)

One dataset a site, `/step_00000100/fwd/L01/attn.p`. A site shows its value as it is computed, in blocks of
(sample, head) pairs, rows and keys; the blocks go into the file's chunks, which are written as soon as they
are full. So nothing is computed for a dump, and little of it is ever in memory.
"""
import contextlib
import os
import pathlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import cuflash
from cuflash import hdf5, kernels
from cuflash.dump_file import Dump, read
from cuflash.errors import ranges, unknown
from cuflash.precision import Precision, Rounding, Tile, merged_message
from cuflash.site_table import MODULES, NO_LAYER, SITES
from cuflash.sites import Rounder
from cuflash.watching import watching
from cuflash.whole_file import beside, cannot_write, check_replaceable, publish

if TYPE_CHECKING:
    import h5py

__all__ = ["Dump", "Recorder", "Selection", "read", "recording"]

FORMAT = "cuflash dump 1"
CHUNK = 1 << 17  # elements

# Where a masked entry reads as −Inf; it is 0 everywhere else.
MINUS_INF = frozenset({"attn.s", "attn.s_scaled", "attn.x", "attn.x_bwd"})
_AXES = {"q": "query", "k": "key", "d": "feature", "t": "token", "c": "feature", "o": "out", "i": "in"}


class Selection:
    """Which sites: texts `[fwd/|bwd/][MODULE/]SITE`, a prefix that ends at a dot meaning all below it.

    Raises:
        ValueError: an unknown word; the message names the nearest valid ones.
    """

    def __init__(self, sites: str | Iterable[str]) -> None:
        texts = sites.split(",") if isinstance(sites, str) else list(sites)
        self.named: list[str] = []  # in full, so that their absence is an error
        self._wanted: list[tuple[str | None, str | None, frozenset[str]]] = []
        for text in texts:
            *scopes, site = text.strip().split("/")
            names = frozenset(SITES if site == "all" else
                              (s for s in SITES if s == site or s.startswith(site + ".")))
            if not names:
                raise unknown("site", site, ["all", "attn", "linear", *SITES])
            for scope in scopes:
                if scope not in ("fwd", "bwd", *MODULES):
                    raise unknown("scope of a site", scope, ["fwd", "bwd", *MODULES])
            direction = next((s for s in scopes if s in ("fwd", "bwd")), None)
            module = next((s for s in scopes if s in MODULES), None)
            self._wanted.append((direction, module, names))
            self.named += [site] if site in SITES else []
        if not self._wanted:
            raise ValueError("no sites: name some, as attn or attn.p,linear.y")

    def __contains__(self, place: tuple[str, str, str]) -> bool:
        """Whether (direction, module, site) is wanted."""
        direction, module, site = place
        return any(d in (None, direction) and m in (None, module) and site in names
                   for d, m, names in self._wanted)

    def check(self, precision: Precision) -> None:
        """ValueError where a site that was named does not exist under the precision."""
        for site in self.named:
            if site in precision.merged:
                raise ValueError(merged_message(site, precision))


@contextlib.contextmanager
def recording(path: str | os.PathLike[str], sites: str | Iterable[str] = "attn", *,
              layers: Iterable[int] | None = None, heads: Iterable[int] | None = None,
              batch: Iterable[int] | None = None, rows: Iterable[int] | None = None,
              attributes: Mapping[str, Any] | None = None) -> Iterator["Recorder"]:
    """Records the sites of attention calls and training steps inside the block into an HDF5 file.

    Args:
        path: the file, replaced if it exists. It appears when the block ends, and not if it fails.
        sites: names or prefixes, `attn`, `attn.p`, `fwd/attn.s`, `c_fc/linear.y`, `all`; several as a list or
            separated by commas.
        layers, heads, batch, rows: numbers to keep, default all: layers, query heads, samples, query rows
            (tokens outside attention). Sites that lie in no layer or have no heads are kept.
        attributes: more attributes of the file.

    Raises:
        ValueError: an argument is not valid; a site was named that the precision merges away, or was seen
            twice at one place (a recording takes one pass), or under another precision, shape or mask there;
            nothing was recorded.
        OSError: the file cannot be written; the files before it are whole.
    """
    recorder = Recorder(path, sites, layers=layers, heads=heads, batch=batch, rows=rows,
                        attributes=attributes)
    try:
        with watching(recorder):
            yield recorder
        recorder.finish()
    finally:
        recorder.close()


class Recorder:
    """The watch of `recording`: takes values from where a Rounder says that they lie, into the file."""

    def __init__(self, path: str | os.PathLike[str], sites: str | Iterable[str] = "attn", *,
                 layers: Iterable[int] | None = None, heads: Iterable[int] | None = None,
                 batch: Iterable[int] | None = None, rows: Iterable[int] | None = None,
                 attributes: Mapping[str, Any] | None = None) -> None:
        import h5py
        self.path, self.selection = pathlib.Path(path), Selection(sites)
        self.layers, self.heads, self.batch, self.rows = (
            None if numbers is None else _numbers(name, numbers)
            for name, numbers in (("layers", layers), ("heads", heads), ("batch", batch), ("rows", rows)))
        self._attributes = dict(attributes or {})
        self._precision: Precision | None = None
        self._step: int | None = None
        self._rounder: Rounder | None = None
        self._lengths = {"q": 0, "k": 0, "d": 0}  # of the attention that is running
        self._sites: dict[str, _Site] = {}
        self._seen: dict[str, set[int]] = {"layers": set(), "heads": set(), "batch": set()}
        check_replaceable(self.path)
        try:
            self._sink = hdf5.Sink(beside(self.path))
        except OSError as e:
            raise cannot_write(self.path, e) from e
        self._writer = hdf5.ChunkWriter(self._sink)
        self._file = h5py.File(self._sink, "w")

    def wants(self, direction: str, layer: int, module: str, site: str, sample: int) -> bool:
        """Whether a value is recorded or, as q and k, says how long others are."""
        if self.batch is not None and sample not in self.batch:
            return False
        if self.layers is not None and layer != NO_LAYER and layer not in self.layers:
            return False
        return (direction, module, site) in self.selection or site in ("attn.q", "attn.k")

    def __call__(self, rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
        """One value, or a part of one: (G, rows, columns) or (G, rows) where attention's site has heads."""
        if self._rounder is None:
            self.selection.check(rnd.precision)
        if rnd is not self._rounder:
            self._flush()
            self._rounder = rnd
            self._see(rnd, site)
        if site == "attn.q":
            self._lengths |= {"q": rounded.shape[1], "d": rounded.shape[2]}
        elif site == "attn.k":
            self._lengths["k"] = rounded.shape[1]
            if before := self._sites.get(place_name(rnd.direction, rnd.layer, "", "attn.q")):
                before.attributes["Tk"] = rounded.shape[1]
        if (rnd.direction, rnd.module, site) not in self.selection:
            return
        if self.layers is not None and rnd.layer != NO_LAYER and rnd.layer not in self.layers:
            return
        self._start(rnd)
        try:
            if not site.startswith("attn."):
                self._network(rnd, site, rounded)
            else:
                self._attention(rnd, site, rounded)
            self._writer.check()
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def finish(self) -> None:
        """Writes what is left and gives the file its name."""
        self._flush()
        self._check_seen()
        if not self._sites:
            raise ValueError(
                f"nothing was recorded for {self.path}: no value of the chosen sites, layers, heads, "
                "batch and rows was computed inside the block")
        try:
            self._writer.finish()
            self._describe()
            self._file.close()
            self._writer.check()
            self._sink.close()
            publish(self.path)
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def close(self) -> None:
        """Leaves nothing behind of a file that was not finished."""
        self._writer.close()
        if self._file:
            self._sink.error = self._sink.error or OSError(0, "given up")
            self._file.close()
        self._sink.close()
        beside(self.path).unlink(missing_ok=True)

    # ---- where values go

    def _start(self, rnd: Rounder) -> None:
        step = rnd.key.step if rnd.key else 0
        if self._precision is None:
            self._precision, self._step = rnd.precision, step
            self._device = kernels.device_name() if rnd.device == "gpu" else "cpu"
            self._attributes.setdefault("seed", np.uint64(rnd.key.seed if rnd.key else 0))
        if step != self._step:
            raise ValueError(
                f"a recording takes one step; {self.path} has step {self._step}, now came step {step}")

    def _attention(self, rnd: Rounder, site: str, values: np.ndarray) -> None:
        name = place_name(rnd.direction, rnd.layer, "", site)
        here = self._sites.get(name)
        if here is None:
            here = self._sites[name] = self._attention_site(rnd, site, name)
        keys = 0 if site == "attn.q" else self._lengths["k"]  # not known yet
        here.check(rnd.precision, (self._lengths["q"], keys, self._lengths["d"], rnd.causal, rnd.group))
        if rnd.visible is not None and here.masked:
            values = np.where(rnd.visible, values, values.dtype.type(here.fill))
        lead: tuple[int, ...] = (rnd.tile,) if "tile" in here.axes else ()
        if site == "attn.m":
            lead = (here.occurrence((id(rnd), rnd.q, rnd.tile)), *lead)
        values, start = self._narrowed(here, values,
                                       [{"q": rnd.q, "k": rnd.k, "d": 0}[a] for a in here.inner])
        if values.size:
            values = values.astype(here.dtype, copy=False)
            # dK and dV have a head for each group, called by its first query head.
            group = rnd.group if site in ("attn.dk", "attn.dv") else 1
            chosen = None if self.heads is None else sorted({h // group for h in self.heads})
            for sample, head, value in zip(rnd.samples, rnd.heads, values):
                place = int(head) // group
                if (self.batch is None or sample in self.batch) and (chosen is None or place in chosen):
                    index = here.sample(int(sample)), place if chosen is None else chosen.index(place)
                    here.numbers["head"][int(head)] = index[1]
                    here.put((*index, *lead), start, value, self._writer)

    def _attention_site(self, rnd: Rounder, site: str, name: str) -> "_Site":
        p, lengths = rnd.precision, self._lengths
        inner = p.axes_of(site)
        axes, shape = ["sample", "head"], [0, 0]
        if site == "attn.m":
            axes, shape = [*axes, "of"], [*shape, 2]  # the tile's maximum, the running one
        tile = p.tile_of(site, lengths["d"])
        if tile is not None:
            along, size = (lengths["q"], tile[0]) if site[5:7] in ("dk", "dv") else (lengths["k"], tile[1])
            axes, shape = [*axes, "tile"], [*shape, -(-along // (size or max(along, 1)))]
        here = self._site(rnd, site, name, axes, shape, inner, [lengths[a] for a in inner])
        here.tile, here.masked = tile, inner == "qk"
        here.attributes |= {"Tq": lengths["q"], "Tk": lengths["k"], "causal": rnd.causal}
        return here

    def _network(self, rnd: Rounder, site: str, values: np.ndarray) -> None:
        """(samples, T, C) of a site with tokens, (1, out, in) of a weight, (1, 1, n) of a bias."""
        inner, parameter = SITES[site].axes, SITES[site].axes == "oi"
        name = place_name(rnd.direction, rnd.layer, rnd.module, site)
        is_norm = rnd.module.rpartition(".")[2].startswith("ln_")  # its weight is a vector, too, and comes first
        bias = parameter and values.shape[-2] == 1 and (not is_norm or name in self._sites)
        if bias:
            name += ".bias"
        each = not parameter or site == "linear.dw"  # has a value for each sample, or micro-batch
        values = values.reshape(-1, *values.shape[-2:]) if values.ndim > 2 else values[None]
        if parameter and values.shape[-2] == 1:  # a vector
            values, inner = values[:, 0], "i" if is_norm else "o"
        here = self._sites.get(name)
        if here is None:
            axes, shape = (["micro_batch" if parameter else "sample"], [0]) if each else ([], [])
            here = self._sites[name] = self._site(rnd, site, name, axes, shape, inner, values.shape[1:])
        elif site == "linear.w":
            return  # the same weight again, in another micro-batch
        here.check(rnd.precision, values.shape[1:])
        values, start = self._narrowed(here, values, [0] * len(inner))
        values = values.astype(here.dtype, copy=False)
        for sample, value in zip(rnd.samples if each else (0,), values):
            if not each or parameter or self.batch is None or sample in self.batch:
                lead = (here.sample(int(sample)),) if each else ()
                here.put(lead, start, value, self._writer)

    def _site(self, rnd: Rounder, site: str, name: str, axes: list[str], shape: list[int], inner: str,
              lengths: Sequence[int]) -> "_Site":
        lengths, rows = list(lengths), None
        if self.rows is not None and inner[0] in "qt":
            if self.rows[-1] >= lengths[0]:
                raise ValueError(f"rows {self.rows[-1]}: {name} has rows 0 to {lengths[0] - 1}")
            rows, lengths[0] = self.rows, len(self.rows)
        roundings = self._roundings(rnd, site)
        formats = list(dict.fromkeys(r.format for r in roundings))
        one = "fp64" if rnd.precision.is_fp64 else formats[0]
        dtype = hdf5.stored_dtype(one if len(formats) == 1 else "fp32")
        lowest = -448.0 if dtype == hdf5.stored_dtype("fp8_e4m3") else -np.inf  # that format has no Inf
        fill = lowest if site in MINUS_INF else 0.0
        here = _Site(self._file, f"step_{self._step:08d}/{name}", len(self._sites), dtype,
                     fill, [*axes, *(_AXES[a] for a in inner)], [*shape, *lengths], inner)
        here.rows = rows
        here.attributes = {"site": site, "format": "fp64" if rnd.precision.is_fp64 else ",".join(formats),
                           "mode": ",".join(dict.fromkeys(r.mode for r in roundings))}
        if rnd.precision != self._precision:
            here.attributes["precision"] = rnd.precision.to_toml()
        return here

    def _roundings(self, rnd: Rounder, site: str) -> list[Rounding]:
        """What the site does, over all heads that may come: those that scopes name, and another."""
        scoped = {h for o in rnd.precision.overrides if o.heads for h in o.heads}
        heads = self.heads or sorted({*scoped, max(scoped, default=-1) + 1})
        if not site.startswith("attn."):
            heads = [0]
        tables = (rnd.precision.sites_for(rnd.direction, rnd.layer, rnd.module, int(h)) for h in heads)
        return list(dict.fromkeys(table[site] for table in tables))

    def _narrowed(self, here: "_Site", values: np.ndarray, start: list[int]) -> tuple[np.ndarray, list[int]]:
        """The chosen rows of a piece that begins at `start`, and where they go."""
        if here.rows is None:
            return values, start
        first, end = np.searchsorted(here.rows, (start[0], start[0] + values.shape[1]))
        chosen = np.asarray(here.rows[first:end], int) - start[0]
        return values[:, chosen], [int(first), *start[1:]]

    def _flush(self) -> None:
        for here in self._sites.values():
            here.flush(self._writer)

    # ---- the end

    def _see(self, rnd: Rounder, site: str) -> None:
        self._seen["layers"] |= {rnd.layer} - {NO_LAYER}
        if site.startswith("attn."):
            self._seen["heads"].update(map(int, rnd.heads))
        if SITES[site].axes != "oi":
            self._seen["batch"].update(map(int, rnd.samples))

    def _check_seen(self) -> None:
        """ValueError where a number was asked for that never came."""
        for name, seen in self._seen.items():
            missing = [n for n in getattr(self, name) or () if n not in seen]
            if missing and seen:
                raise ValueError(f"{name} {ranges(missing)}: there is no such one; "
                                 f"seen: {ranges(seen)}")

    def _describe(self) -> None:
        """The attributes of file and datasets."""
        import h5py
        assert self._precision is not None
        p = self._precision
        self._file.attrs.update({
            "format": FORMAT, "precision": p.to_toml(), "precision_name": p.name, "step": self._step,
            "device": self._device, "numerics_version": cuflash.NUMERICS_VERSION, "cuflash": cuflash.__version__,
            "numpy": np.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version,
            "python": platform.python_version(), "tile": str(p.tile) if p.tile else "by head dim"
        } | self._attributes)
        for here in self._sites.values():
            here.describe(p)


class _Site:
    """A dataset that is being filled: its open chunks, and which sample and head each index is."""

    def __init__(self, file: "h5py.File", name: str, order: int, dtype: np.dtype, fill: float,
                 axes: list[str], shape: list[int], inner: str) -> None:
        self.name, self.order, self.dtype, self.fill = name, order, dtype, fill
        self.axes, self.shape, self.inner = axes, shape, inner
        self.growing = sum(n == 0 and a in ("sample", "head", "micro_batch") for n, a in zip(shape, axes))
        lead = len(shape) - len(inner)
        columns = min(shape[-1], 1024 if len(inner) == 2 else 4096)
        middle = [1 if len(inner) == 2 else n for n in shape[self.growing:lead]]
        inside = [min(shape[-2], max(1, CHUNK // max(columns, 1))), columns] if len(inner) == 2 else [columns]
        self.chunk = [max(1, n) for n in (*[1] * self.growing, *middle, *inside)]
        self.dataset = hdf5.create_dataset(
            file, name, dtype, [max(1, n) if i < self.growing else n for i, n in enumerate(shape)],
            self.chunk, self.growing, fill)
        self.numbers: dict[str, dict[int, int]] = {a: {} for a in axes[:self.growing]}
        self.rows: Sequence[int] | None = None
        self.tile: Tile | None = None
        self.masked = False
        self.made: tuple[Precision, tuple[int, ...]] | None = None
        self.attributes: dict[str, Any] = {}
        self._open: dict[tuple[int, ...], list[Any]] = {}  # chunk -> [array, elements that are not there yet]
        self._done: set[tuple[int, ...]] = set()
        self._last: Any = None

    def sample(self, number: int) -> int:
        """The index of a sample (or micro-batch), as they come."""
        numbers = self.numbers[self.axes[0]]
        return numbers.setdefault(number, len(numbers))

    def check(self, precision: Precision, like: tuple[int, ...]) -> None:
        """ValueError where a value comes that was not made like the first one: its precision, lengths and mask."""
        if self.made is None:
            self.made = precision, like
        elif self.made[1] != like or self.made[0] is not precision and self.made[0] != precision:
            what = "of another precision" if self.made[1] == like else "of other lengths, heads or mask"
            raise ValueError(f"{self.name} came {what} than before: give such calls a cuflash.Key with another "
                             "layer, or record them in a file of their own")

    def occurrence(self, place: Any) -> int:
        """0 when a place is seen for the first time in succession, 1 for the second."""
        again = place == self._last
        self._last = None if again else place
        return int(again)

    def put(self, lead: tuple[int, ...], start: Sequence[int], values: np.ndarray,
            writer: hdf5.ChunkWriter) -> None:
        """Puts values (of the inner axes) at index `lead` of the outer ones."""
        for axis in range(self.growing):
            self.shape[axis] = max(self.shape[axis], lead[axis] + 1)
        outer, inner = self.chunk[:len(lead)], self.chunk[len(lead):]
        ends = [s + n for s, n in zip(start, values.shape)]
        ranges = [range(s // c, -(-e // c)) for s, e, c in zip(start, ends, inner)]
        for place in np.ndindex(*map(len, ranges)):
            chunk = (*(i // c for i, c in zip(lead, outer)), *(r[p] for r, p in zip(ranges, place)))
            begins = [i * c for i, c in zip(chunk[len(lead):], inner)]
            low = [max(s, b) for s, b in zip(start, begins)]
            high = [min(e, b + c) for e, b, c in zip(ends, begins, inner)]
            source = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start))
            target = (*(i % c for i, c in zip(lead, outer)), *(slice(a - b, e - b)
                                                               for a, e, b in zip(low, high, begins)))
            entry = self._chunk(chunk)
            entry[0][target] = values[source]
            entry[1] -= values[source].size
            if entry[1] == 0:
                self._write(chunk, writer)

    def _chunk(self, chunk: tuple[int, ...]) -> list[Any]:
        if chunk not in self._open:
            if chunk in self._done:
                raise ValueError(
                    f"{self.name} came twice: a recording takes one pass; give further calls a "
                    "cuflash.Key with another layer or sample, or record them in a file of their own")
            fixed = [1] * self.growing + self.shape[self.growing:]
            size = [min(c, n - i * c) if k >= self.growing else 1
                    for k, (i, c, n) in enumerate(zip(chunk, self.chunk, fixed))]
            self._open[chunk] = [np.full(self.chunk, self.fill, self.dtype), int(np.prod(size))]
        return self._open[chunk]

    def _write(self, chunk: tuple[int, ...], writer: hdf5.ChunkWriter) -> None:
        if any(n > have for n, have in zip(self.shape, self.dataset.shape)):
            self.dataset.resize(tuple(self.shape))
        self._done.add(chunk)
        writer.write(self.dataset, [i * c for i, c in zip(chunk, self.chunk)], self._open.pop(chunk)[0])

    def flush(self, writer: hdf5.ChunkWriter) -> None:
        """Writes the open chunks, which no further part will come for."""
        for chunk in list(self._open):
            self._write(chunk, writer)

    def describe(self, precision: Precision) -> None:
        attributes = self.attributes | {"axes": self.axes, "order": self.order}
        attributes |= {f"{axis}s" if axis != "micro_batch" else "micro_batches": sorted(n, key=n.__getitem__)
                       for axis, n in self.numbers.items()}
        if self.rows is not None:
            attributes["rows"] = np.array(self.rows)
        if self.tile is not None:
            attributes |= {"tile": [n or 0 for n in self.tile],
                           "tile_order": "descending" if precision.order == "fa2" else "ascending"}
        if "of" in self.axes:
            attributes["of"] = ["tile", "running"]
        for key, value in attributes.items():
            self.dataset.attrs[key] = value
        for dimension, axis in zip(self.dataset.dims, self.axes):
            dimension.label = axis


def place_name(direction: str, layer: int, module: str, site: str) -> str:
    """Where a site lies in a dump: `fwd/L01/attn.p`, `bwd/L01/c_fc/linear.dy`, `fwd/lm_head/logits`."""
    parts = [
        direction, f"L{layer:02d}" if layer != NO_LAYER else "", "" if site.startswith("attn.") else module,
        site
    ]
    return "/".join(p for p in parts if p)


def _numbers(name: str, numbers: Iterable[int]) -> list[int]:
    found = sorted({int(n) for n in numbers})
    if not found or found[0] < 0:
        raise ValueError(f"{name} {found}: give numbers from 0 on")
    return found
