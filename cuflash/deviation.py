"""How far flash attention is from plain attention of the same format, and both from fp64.

    rows = run(settings(Options()))

Two emulations of flash attention stand side by side. `per-tile` rounds every intermediate to the format for
each tile, plain attention's intermediates likewise (`all-FORMAT`). `fa2` has FlashAttention-2's roundings:
inputs, P̄ and O in the format, running maximum, row sum and Ō in fp32. Plain attention is the same for both,
and golden is plain attention in fp64 of the same inputs, which are rounded to the format before.

Source: arXiv 2405.02803, figures 3 to 6. Its distribution of inputs, lengths and tiles are not stated.
"""
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.attention import flash_attention, plain_attention
from cuflash.dump_file import Dump
from cuflash.errors import unknown
from cuflash.formats import format_named, round_to
from cuflash.precision import Precision, as_precision

EMULATIONS = ("per-tile", "fa2")
INPUTS = ("normal", "uniform", "heavy")
FORMATS = ("fp8_e5m2", "fp8_e4m3", "e8m5", "bf16", "tf32", "fp16", "e8m13", "e8m17", "fp32", "fp64")
LENGTH_FORMATS = ("bf16", "fp16")
TILE_FORMATS = ("bf16", "fp16", "fp32", "fp64")
SHAPES = {"square": (1, 1), "wide": (1, 4), "tall": (4, 1)}  # Br : Bc, of one area
# Sites whose rounding flash attention has and plain attention has not, alone and together.
GROUPS = {
    "none": (),
    "l": ("attn.l_tile", "attn.l_scaled", "attn.l"),
    "pv": ("attn.pv",),
    "o_scaled": ("attn.o_scaled",),
    "o_acc": ("attn.o_acc",),
    "alpha": ("attn.dm", "attn.alpha"),
    "o_scaled, o_acc": ("attn.o_scaled", "attn.o_acc"),
    "l, o_scaled, o_acc": ("attn.l_tile", "attn.l_scaled", "attn.l", "attn.o_scaled", "attn.o_acc"),
    "all running": ("attn.l_tile", "attn.l_scaled", "attn.l", "attn.dm", "attn.alpha", "attn.pv",
                    "attn.o_scaled", "attn.o_acc"),
}


@dataclass(frozen=True)
class Options:
    """What is varied, and what is held.

    Attributes:
        formats: of figures 3 and 4. inputs: of all figures; `heavy` is Student's t with 3 degrees of freedom
            scaled to variance 1, `uniform` is [0, 1).
        precisions: more precisions for figure 4, by name or TOML file.
        length, tile, head_dim: held where they are not varied. queries: rows of Q that are computed, the
            same number at each length, so that a maximum is one of as many numbers.
        lengths: of figure 5. tiles: square tiles of figure 6; each with two others of its area.
        draws: independent inputs for each number. accumulator: of the products but fp64's, which are NumPy's;
            `sequential` is bit-defined.
    """

    formats: tuple[str, ...] = FORMATS
    inputs: tuple[str, ...] = INPUTS
    precisions: tuple[str, ...] = ("bf16",)
    length: int = 1024
    queries: int = 256
    head_dim: int = 64
    tile: int = 16
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    tiles: tuple[int, ...] = (32, 64, 128, 256)
    draws: int = 4
    seed: int = 1
    accumulator: str = "sequential"

    def __post_init__(self) -> None:
        for name in self.inputs:
            if name not in INPUTS:
                raise unknown("input", name, INPUTS)
        for name in self.formats:
            if name != "fp64":
                format_named(name)
        for name, valid in (("length", 1), ("queries", 1), ("head_dim", 1), ("draws", 1), ("tile", 16)):
            if getattr(self, name) < valid:
                raise ValueError(f"{name} is {getattr(self, name)}; valid: {valid} or more")
        for tile in self.tiles:
            if tile < 32 or tile % 32:
                raise ValueError(
                    f"tiles has {tile}; valid: multiples of 32, as half of one is a tile's side, too")


@dataclass(frozen=True)
class Activations:
    """q (n, Tq, D), k and v (n, Tk, D), fp32, of n pairs of sample and head; where they are from."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool
    name: str
    sha256: str


def read_activations(path: str | os.PathLike[str],
                     *,
                     layer: int | None = None,
                     count: int = 4) -> Activations:
    """Sites attn.q, attn.k and attn.v of a dump.

    Args:
        layer: default the last one.
        count: pairs of sample and head, taken evenly from all.

    Raises:
        ValueError: not a dump, or without these sites.
    """
    dump = Dump(path)
    layer = max((e.layer for e in dump.entries if e.layer is not None), default=0) if layer is None else layer
    where: dict[str, Any] = {"layer": layer, "direction": "fwd"}
    entry = dump.entry("attn.q", **where)
    q, k, v = (dump.read(f"attn.{x}", **where).astype(np.float32) for x in "qkv")
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    chosen = np.unique(np.linspace(0, len(q) - 1, min(count, len(q))).astype(int))
    text = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    return Activations(q[chosen], k[chosen], v[chosen], entry.causal,
                       f"{pathlib.Path(path).name}, layer {layer}", text)


# ---- what is computed -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Setting:
    """One attention: of a figure, on an input, in a format.

    `emulation` is `per-tile`, `fa2`, or the name of a precision; `fp32` names the group of sites that is kept
    in fp32 (a key of GROUPS); `shape` is the tile's, of SHAPES.
    """

    figure: str
    input: str
    format: str
    emulation: str
    length: int
    tile: tuple[int, int]
    shape: str = "square"
    fp32: str = "none"

    def flash(self, accumulator: str) -> Precision:
        """The precision of flash attention."""
        p = emulation(self.emulation, self.format).replace(tile=self.tile)
        return p if p.is_fp64 else p.replace(dict.fromkeys(GROUPS[self.fp32], "fp32"),
                                             accumulator=accumulator)

    def plain(self, accumulator: str) -> Precision:
        """The precision of plain attention: every intermediate in the format."""
        p = emulation("per-tile", self.format).replace(algorithm="plain")
        return p if p.is_fp64 else p.replace(accumulator=accumulator)


@functools.cache
def emulation(name: str, format: str) -> Precision:
    """Flash attention of a format as `per-tile` or `fa2` rounds, or the precision of this name."""
    if name not in EMULATIONS:
        return as_precision(name)
    if format == "fp64":
        return Precision.named("fp64").replace(order="eager" if name == "per-tile" else "fa2")
    if name == "per-tile":
        return Precision.named(f"all-{format}")
    fa2 = Precision.named("bf16-fa2")
    return fa2.replace({site: format for site, r in fa2.table().items() if r.format == "bf16"})


def settings(o: Options, activations: Activations | None = None) -> list[Setting]:
    """All attentions of figures 3 to 6, and of the table of single sites (`sites`)."""
    base = (o.tile, o.tile)
    lengths = dict.fromkeys(o.inputs, o.length)
    if activations is not None:
        lengths["activations"] = activations.k.shape[1]
    found = [Setting("3-4", i, f, e, n, base) for i, n in lengths.items() for f in o.formats
             for e in EMULATIONS]
    for name in o.precisions:
        p = emulation(name, "")
        format = "fp64" if p.is_fp64 else p.table()["attn.p"].format
        found += [Setting("3-4", i, format, name, n, base) for i, n in lengths.items()]
    found += [Setting("5", i, f, e, n, base) for i in o.inputs for f in LENGTH_FORMATS for e in EMULATIONS
              for n in o.lengths]
    found += [Setting("6", i, f, e, o.length, _sides(t, shape), shape) for i in o.inputs for f in TILE_FORMATS
              for e in EMULATIONS for t in o.tiles for shape in SHAPES]
    return found + [Setting("sites", i, "bf16", "per-tile", n, base, fp32=group) for i, n in lengths.items()
                    for group in GROUPS]


def _sides(square: int, shape: str) -> tuple[int, int]:
    """The sides of a tile of this shape with the area of a square one."""
    rows, keys = SHAPES[shape]
    root = math.isqrt(rows * keys)
    return square * rows // root, square * keys // root


# ---- measures -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Row:
    """A line of deviation.csv: one setting, one draw.

    Each measure is of a difference of two outputs (queries × head_dim numbers): the largest magnitude, the
    mean magnitude, the standard deviation. `flash_plain` is flash − plain, `flash_golden` and `plain_golden`
    the error of each. `golden_std` is the standard deviation of the golden output itself.
    """

    figure: str
    input: str
    format: str
    mantissa_bits: int
    emulation: str
    fp32: str
    length: int
    queries: int
    head_dim: int
    causal: bool
    shape: str
    tile_rows: int
    tile_keys: int
    tiles: int
    draw: int
    flash_plain_max: float
    flash_plain_mean: float
    flash_plain_std: float
    flash_golden_max: float
    flash_golden_mean: float
    flash_golden_std: float
    plain_golden_max: float
    plain_golden_mean: float
    plain_golden_std: float
    golden_std: float

    @property
    def ratio(self) -> float:
        """Largest error of flash attention by that of plain attention; NaN where plain is golden."""
        return self.flash_golden_max / self.plain_golden_max if self.plain_golden_max else math.nan


def measures(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For each leading index of a − b: largest magnitude, mean magnitude, standard deviation; (n, 3)."""
    d = (a.astype(np.float64) - b).reshape(len(a), -1)
    with np.errstate(invalid="ignore"):
        return np.stack([np.abs(d).max(axis=1), np.abs(d).mean(axis=1), d.std(axis=1)], axis=1)


def inputs(kind: str, length: int, o: Options,
           activations: Activations | None = None) -> tuple[np.ndarray, ...]:
    """q (draws, queries, head_dim), k and v (draws, length, head_dim), fp32; the same for every format."""
    if kind == "activations":
        if activations is None:
            raise ValueError("input 'activations' needs a dump of them")
        return activations.q, activations.k, activations.v
    arrays: list[list[np.ndarray]] = [[], [], []]
    for draw in range(o.draws):
        rng = np.random.Generator(np.random.PCG64([o.seed, INPUTS.index(kind), length, draw]))
        for found, rows in zip(arrays, (min(o.queries, length), length, length)):
            shape = (rows, o.head_dim)
            found.append(rng.standard_normal(shape) if kind == "normal" else rng.random(shape)
                         if kind == "uniform" else rng.standard_t(3, shape) / math.sqrt(3))
    return tuple(np.array(x, np.float32) for x in arrays)


def run(chosen: Iterable[Setting], o: Options, activations: Activations | None = None, *,
        to_device: Any = None, jobs: int | None = None,
        progress: Callable[[int], object] = lambda done: None) -> list[Row]:
    """Rows of all settings, in their order.

    Args:
        to_device: takes a NumPy array to where attention is to run (`cupy.asarray`). fp64, which no kernel
            computes, and the golden value stay on the CPU.
        jobs: threads; default one for each core.
        progress: called with the number of settings that are done.
    """
    chosen = list(chosen)
    alike: dict[tuple[str, int, str], list[Setting]] = {}
    for s in chosen:
        alike.setdefault((s.input, s.length, s.format), []).append(s)
    done: dict[Setting, list[Row]] = {}

    def one(group: Sequence[Setting]) -> None:
        for setting, rows in _group(group, o, activations, to_device):
            done[setting] = rows
            progress(len(done))

    costly_first = sorted(alike.values(), key=lambda g: -len(g) * g[0].length)
    with ThreadPoolExecutor(jobs or _cores()) as pool:
        list(pool.map(one, costly_first))
    return [row for s in chosen for row in done[s]]


def _group(group: Sequence[Setting], o: Options, activations: Activations | None, to_device: Any) -> Any:
    """(setting, its rows) of settings that share inputs, plain attention and golden value."""
    first = group[0]
    causal = first.input == "activations" and activations is not None and activations.causal
    qkv = inputs(first.input, first.length, o, activations)
    if first.format != "fp64":
        qkv = tuple(round_to(x, first.format) for x in qkv)
    wide = tuple(x.astype(np.float64) for x in qkv)
    golden = plain_attention(*wide, causal=causal, precision="fp64")
    here = wide if first.format == "fp64" else qkv if to_device is None else tuple(map(to_device, qkv))
    plain = _numpy(plain_attention(*here, causal=causal, precision=first.plain(o.accumulator)))
    bits = 52 if first.format == "fp64" else format_named(first.format).mantissa_bits
    of_plain = [measures(plain, golden), golden.reshape(len(golden), -1).std(axis=1, keepdims=True)]
    for s in group:
        flash = _numpy(flash_attention(*here, causal=causal, precision=s.flash(o.accumulator)))
        both = np.concatenate([measures(flash, plain), measures(flash, golden), *of_plain], axis=1)
        yield s, [Row(s.figure, s.input, s.format, bits, s.emulation, s.fp32, s.length, *flash.shape[1:], causal,
                      s.shape, *s.tile, -(-s.length // s.tile[1]), draw, *map(float, values))
                  for draw, values in enumerate(both)]


def _numpy(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def precisions(chosen: Iterable[Setting], accumulator: str) -> dict[str, Precision]:
    """Every precision that settings use, but for the tile, by a name for the report."""
    found: dict[str, Precision] = {}
    for s in chosen:
        if s.fp32 == "none":
            name = s.emulation if s.emulation not in EMULATIONS else f"{s.emulation} {s.format}"
            found.setdefault(name, dataclasses.replace(s.flash(accumulator), tile=None))
            found.setdefault(f"plain {s.format}", s.plain(accumulator))
    return found
