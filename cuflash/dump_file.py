"""Reading a dump: arrays in their own formats, and where in the network each lies."""
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import hdf5
from cuflash.errors import ranges, unknown
from cuflash.tiles import Shape

if TYPE_CHECKING:
    import h5py

STEP = re.compile(r"/?step_(\d+)/")


@dataclass(frozen=True)
class Entry:
    """A dataset of a dump.

    Attributes:
        name: where it lies, `fwd/L01/attn.p`, `bwd/L01/c_fc/linear.dy`.
        dataset: its path in the file.
        axes: their names, as sample, head, of, tile, query, key, feature, token, out, in.
        order: its place in the order of execution.
        format, mode: of the rounding; several, with commas between, where heads differ.
        samples, heads, rows: the numbers along these axes; rows is None where all are there.
        tile: (Br, Bc), None where the site has no tiles, or a tile spans the axis (None in its place).
        lengths: (Tq, Tk) of attention, else None.
    """

    name: str
    dataset: str
    shape: tuple[int, ...]
    site: str
    axes: tuple[str, ...] = ()
    order: int = 0
    format: str = ""
    mode: str = "rne"
    samples: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = None
    tile: tuple[int | None, int | None] | None = None
    tile_order: str = "ascending"
    lengths: tuple[int, int] | None = None
    causal: bool = False
    attributes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, dataset: "h5py.Dataset") -> "Entry":
        """From a dataset; of a file that is no dump only name and shape."""
        path = dataset.name.lstrip("/")
        if not is_dump(dataset.file):
            return cls(STEP.sub("", path, count=1), path, dataset.shape, path.rpartition("/")[2])
        a = {
            k: v.tolist() if isinstance(v, (np.ndarray, np.generic)) else v
            for k, v in dataset.attrs.items()
        }
        return cls(
            STEP.sub("", path, count=1), path, dataset.shape, a.get("site", path.rpartition("/")[2]),
            tuple(a.get("axes", ())), a.get("order", 0), a.get("format", ""), a.get("mode", "rne"),
            tuple(a.get("samples", ())), tuple(a.get("heads", ())), tuple(a["rows"]) if "rows" in a else None,
            tuple(n or None for n in a["tile"]) if "tile" in a else None, a.get("tile_order", "ascending"),
            (a["Tq"], a["Tk"]) if "Tq" in a else None, a.get("causal", False), a)

    @property
    def direction(self) -> str:
        return self.name.partition("/")[0]

    @property
    def layer(self) -> int | None:
        """None outside the blocks."""
        found = re.search(r"/L(\d+)/", self.name)
        return int(found[1]) if found else None

    @property
    def module(self) -> str:
        parts = [p for p in self.name.split("/")[1:-1] if not re.fullmatch(r"L\d+", p)]
        return parts[0] if parts else ""

    def visible(self, where: tuple[slice, ...] = ()) -> np.ndarray | None:
        """Which entries exist, of the part that `where` cuts out: a mask that broadcasts to it; None: all.

        Not there are the keys that causal attention hides from a query, and the tiles that it does not visit.
        """
        if not self.causal or self.lengths is None:
            return None
        tq, tk = self.lengths
        index = {}
        for k, (axis, n) in enumerate(zip(self.axes, self.shape)):
            numbers = np.asarray(self.rows) if axis == "query" and self.rows is not None else np.arange(n)
            along = [1] * len(self.axes)
            along[k] = -1
            index[axis] = numbers[where[k] if k < len(where) else slice(None)].reshape(along)
        if "query" in index and "key" in index:
            return index["key"] <= index["query"] + (tk - tq)
        if self.tile is None or "tile" not in index:
            return None
        (br, bc), shape = self.tile, Shape(tq, tk, True)
        if "query" in index:  # key tiles
            first = [shape.first_row(j * (bc or tk), br) for j in index["tile"].reshape(-1).tolist()]
            return index["query"] >= np.reshape(first, index["tile"].shape)
        ends = [shape.key_end(min((i + 1) * (br or tq), tq), bc) for i in index["tile"].reshape(-1).tolist()]
        return index["key"] < np.reshape(ends, index["tile"].shape)


class Dump:
    """A dump on disk. Nothing is kept open; arrays are read when they are asked for.

    Attributes:
        path: the file.
        attributes: of the file: precision (TOML), seed, step, device, versions.
        entries: its datasets, in the order of execution.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import h5py
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise ValueError(f"dump {self.path}: no such file")
        try:
            with h5py.File(self.path, "r") as f:
                self.attributes: dict[str, Any] = dict(f.attrs)
                if not is_dump(f):
                    raise ValueError(f"{self.path} is an HDF5 file, but not a dump of cuflash")
                self.entries = sorted((Entry.of(d) for d in datasets(f)), key=lambda e: e.order)
        except OSError as e:
            raise ValueError(f"dump {self.path}: damaged, cut short or not HDF5 ({e})") from e

    def __repr__(self) -> str:
        return f"<Dump {self.path}: step {self.attributes.get('step')}, {len(self.entries)} datasets>"

    def __iter__(self) -> Iterator[str]:
        return (e.name for e in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> np.ndarray:
        """The array at `fwd/L01/attn.p`, in the dtype of its format (bf16 and fp8 as ml_dtypes')."""
        found = next((e for e in self.entries if e.name == name), None)
        if found is None:
            raise unknown(f"name in {self.path}", name, list(self))
        return self._array(found, ())

    def entry(self, site: str, *, layer: int | None = None, direction: str | None = None,
              module: str | None = None) -> Entry:
        """Where a site is: `attn.p`, or with what lies before it, `L01/attn.p`, `fwd/L01/attn.p`. An argument that
        is None may be anything, if that leaves one place, and the first direction is taken.

        Raises:
            ValueError: it is not in the file, or in several places; the message lists them.
        """
        there = [e for e in self.entries if f"/{e.dataset}".endswith(f"/{site}")]
        if not there:
            valid = list(self) if "/" in site else dict.fromkeys(n.rpartition("/")[2] for n in self)
            raise unknown(f"site in {self.path}", site, valid)
        found = [e for e in there if layer in (None, e.layer) and direction in (None, e.direction)
                 and module in (None, e.module)]
        if not found:
            asked = {"layer": layer, "direction": direction, "module": module}
            at = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
            raise ValueError(
                f"{site} is not in {self.path} at {at}; it has {', '.join(e.name for e in there)}")
        found = [e for e in found if e.direction == found[0].direction]
        if len(found) > 1:
            raise ValueError(f"{site} is in several places of {self.path}, name one by layer= or module=: "
                             f"{', '.join(e.name for e in found)}")
        return found[0]

    def read(self, site: str, *, layer: int | None = None, direction: str | None = None,
             module: str | None = None, sample: int | None = None, head: int | None = None) -> np.ndarray:
        """A site's array, in the dtype of its format; `sample` and `head` pick one and drop the axis.

        Raises:
            ValueError: as `entry`; no such sample or head.
        """
        e = self.entry(site, layer=layer, direction=direction, module=module)
        where, drop = [slice(None)] * len(e.axes), []
        for axis, number, numbers in (("sample", sample, e.samples), ("head", head, e.heads)):
            if number is not None:
                if number not in numbers:
                    raise ValueError(f"{axis} {number} is not in {e.name} of {self.path}; it has "
                                     f"{ranges(numbers)}")
                at = numbers.index(number)
                where[e.axes.index(axis)] = slice(at, at + 1)
                drop.append(e.axes.index(axis))
        return self._array(e, tuple(where)).squeeze(tuple(drop)) if drop else self._array(e, ())

    def _array(self, entry: Entry, where: tuple[slice, ...]) -> np.ndarray:
        import h5py
        try:
            with h5py.File(self.path, "r") as f:
                return hdf5.read_array(f[entry.dataset], where)
        except (OSError, KeyError) as e:
            raise ValueError(f"dump {self.path}: {entry.name} is damaged ({e})") from e


def read(path: str | os.PathLike[str]) -> Dump:
    """A dump written by `recording`, `cuflash dump` or `cuflash train --dump-every`.

    Raises:
        ValueError: not a dump, or damaged.
    """
    return Dump(path)


def is_dump(file: "h5py.File") -> bool:
    return str(file.attrs.get("format", "")).startswith("cuflash dump")


def datasets(file: "h5py.Group") -> list["h5py.Dataset"]:
    """All datasets below a group."""
    import h5py
    found: list[h5py.Dataset] = []
    file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    return found
