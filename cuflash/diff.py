"""Two dumps, or any two HDF5 files, compared site by site.

    found = diff("bf16.h5", "fp32.h5")
    found.first                  # the first site, in the order of execution, whose values differ
    found.sites[0].signed_ulp    # mean of (A − B) / ulp

Files are read in blocks, so that memory does not grow with them.
"""
import dataclasses
import fnmatch
import functools
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import hdf5
from cuflash.dump_file import STEP, Dump, Entry, datasets, is_dump
from cuflash.errors import ranges, unknown
from cuflash.formats import format_named

if TYPE_CHECKING:
    import h5py

BLOCK = 1 << 19  # elements compared at a time
# Mantissa bits, smallest and largest exponent of the dtypes that formats are stored in.
_FP64 = (52, -1022, 1023)
_OF_DTYPE = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fn": "fp8_e4m3"
}


@dataclass(frozen=True)
class SiteDiff:
    """One dataset of A against the one of that name in B.

    An error is (A − B)/ulp, with the ulp of the coarser of the two formats at the value of the finer one
    (B's where they are alike), or at half the other value where that is larger: so a rounding is measured
    in ulp of what was rounded, and a value that is near 0 on one side alone does not count without bound.
    Entries that attention masks and tiles that it does not visit take no part.

    Attributes:
        name: `fwd/L01/attn.p`, or the dataset's path.
        formats: of A and B.
        values: entries compared; 0 where the shapes differ.
        equal: share of them with the same bits, once both are widened (all NaNs count as equal).
        max_abs, mean_abs: of |A − B|; max_ulp, mean_ulp: of |error|.
        signed_ulp, se: mean error and its standard error, the larger of two: rows as the independent draws,
            and columns.
        cosine: of A and B as vectors.
        nonfinite: entries that differ and are not finite on one side; they are in none of the measures above.
        first: index of the first entry that differs, None if none does; a, b: its values.
        shapes: both, where they differ, else None.
    """

    name: str
    site: str
    order: int
    formats: tuple[str, str]
    values: int
    equal: float
    max_abs: float = math.nan
    mean_abs: float = math.nan
    max_ulp: float = math.nan
    mean_ulp: float = math.nan
    signed_ulp: float = math.nan
    se: float = math.nan
    cosine: float = math.nan
    nonfinite: int = 0
    first: tuple[int, ...] | None = None
    a: float | None = None
    b: float | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def differs(self) -> bool:
        return self.first is not None or self.shapes is not None

    @property
    def z(self) -> float:
        """The mean error in standard errors; 0 where there is no error."""
        if self.signed_ulp == 0:
            return 0.0
        return self.signed_ulp / self.se if self.se else math.copysign(math.inf, self.signed_ulp)


@dataclass(frozen=True)
class Diff:
    """What `diff` found: datasets of both in the order of execution (A's), and those of one file alone.

    `notes` says what the dumps are of where that is not the same, as by `told_apart`.
    """

    a: str
    b: str
    sites: list[SiteDiff]
    only_a: list[str]
    only_b: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> SiteDiff | None:
        """The first site in the order of execution that differs."""
        return min((s for s in self.sites if s.differs), key=lambda s: s.order, default=None)

    @property
    def differs(self) -> bool:
        return bool(self.first or self.only_a or self.only_b)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Diff":
        """What `to_dict` gave, read back from JSON."""
        names = {f.name: f.type for f in dataclasses.fields(SiteDiff)}
        rows = [{k: math.nan if v is None and names[k] is float else v for k, v in row.items() if k in names}
                for row in data["sites"]]
        return cls(data["a"], data["b"], [SiteDiff(**row) for row in rows], data["only_a"], data["only_b"],
                   data.get("notes", []))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no NaN: None stands for it."""
        rows = [plain(dataclasses.asdict(s) | {"differs": s.differs, "z": s.z}) for s in self.sites]
        return {"a": self.a, "b": self.b, "notes": self.notes, "differs": self.differs,
                "first": self.first and self.first.name,
                "only_a": self.only_a, "only_b": self.only_b, "sites": rows}


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], names: Iterable[str] = ()) -> Diff:
    """Compares the datasets of the same names of two HDF5 files; in dumps, whatever their steps.

    Args:
        names: only these: a site (`attn.p`), a prefix (`attn`, `fwd/L01`), or a pattern (`*/L0[01]/attn.*`).

    Raises:
        ValueError: a file is not HDF5 or is damaged, no name is in both, or none is left by `names`; dumps
            are of different samples, heads or rows.
    """
    names = list(names)
    with opened(a) as file_a, opened(b) as file_b:
        try:
            in_a, in_b = _chosen(names, _entries(file_a), _entries(file_b), f"{a} and {b}")
            both = [n for n in in_a if n in in_b]
            if not both:
                chosen = f" of those chosen by {', '.join(names)}" if names else ""
                raise ValueError(
                    f"no dataset{chosen} has one name in {a} and {b}: {_some(in_a)} in the first, "
                    f"{_some(in_b)} in the second")
            sites = [_compare(file_a, file_b, in_a[n], in_b[n]) for n in both]
            notes = told_apart(a, file_a.attrs, b, file_b.attrs) if is_dump(file_a) and is_dump(file_b) else []
        except OSError as e:
            raise ValueError(f"{a} or {b} is damaged: {e}") from e
    sites.sort(key=lambda s: s.order)
    return Diff(str(a), str(b), sites, [n for n in in_a if n not in in_b], [n for n in in_b if n not in in_a], notes)


def told_apart(a: str | os.PathLike[str], of_a: Mapping[str, Any], b: str | os.PathLike[str],
               of_b: Mapping[str, Any]) -> list[str]:
    """A line where two dumps are of different steps, seeds, data or checkpoints, by their files' attributes."""
    words = {"step": "step", "seed": "seed", "data_sha256": "data", "checkpoint": "checkpoint"}
    other = [n for n in words if n in of_a and n in of_b and of_a[n] != of_b[n]]
    if "step" in other and "checkpoint" in other:  # the step after it
        other.remove("checkpoint")
    if not other:
        return []
    shown = (" and ".join(f"{words[n]} {str(of[n])[:8]}" for n in other) for of in (of_a, of_b))
    return [f"{a} is of {next(shown)}, {b} of {next(shown)}"]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row with None for what JSON has no number for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a dataset's name is one of these sites, lies below one of these prefixes, or fits a pattern."""
    site = name.rpartition("/")[2]
    return any(site == p or site.startswith(p + ".") or name.startswith(p + "/")
               or fnmatch.fnmatchcase(name, p) or name.endswith("/" + p) for p in patterns)


def opened(path: str | os.PathLike[str]) -> "h5py.File":
    import h5py
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path}: no such file or run folder")
    try:
        return h5py.File(path, "r")
    except OSError as e:
        raise ValueError(f"{path} is damaged, cut short or not an HDF5 file ({e})") from e


def _entries(file: "h5py.File") -> dict[str, Entry]:
    """Entries by name, in the order of execution; by their whole path where steps share names."""
    found = [Entry.of(d) for d in datasets(file) if d.shape is not None]
    if len({e.name for e in found}) < len(found):
        found = [dataclasses.replace(e, name=e.dataset) for e in found]
    return {e.name: e for e in sorted(found, key=lambda e: e.order)}


def _chosen(names: list[str], a: dict[str, Entry], b: dict[str, Entry],
            files: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """The entries that `names` chooses, all where it is empty; ValueError for one of them that fits nowhere."""
    if not names:
        return a, b
    there = {n: STEP.sub("", n, count=1) for n in (*a, *b)}
    for name in names:
        if not any(matches(n, [name]) for n in there.values()):
            short = [n if "/" in name else n.rpartition("/")[2] for n in there.values()]
            raise unknown(f"site in {files}", name, dict.fromkeys(short))
    chosen = {n for n, short in there.items() if matches(short, names)}
    return {n: e for n, e in a.items() if n in chosen}, {n: e for n, e in b.items() if n in chosen}


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "nothing"


# ---- one dataset --------------------------------------------------------------------------------

def _compare(file_a: "h5py.File", file_b: "h5py.File", a: Entry, b: Entry) -> SiteDiff:
    x, y = file_a[a.dataset], file_b[b.dataset]
    dtypes = hdf5.dtype_of(x).name, hdf5.dtype_of(y).name
    formats = a.format or _OF_DTYPE.get(dtypes[0], dtypes[0]), b.format or _OF_DTYPE.get(dtypes[1], dtypes[1])
    _check_numbers(a, b, file_a.filename, file_b.filename)
    if x.shape != y.shape:
        return SiteDiff(a.name, a.site, a.order, formats, 0, 0.0, shapes=(x.shape, y.shape))
    sums = _Sums(x.shape, _ulp_of(a, x), _ulp_of(b, y))
    for where in hdf5.blocks(x.shape, BLOCK):
        sums.add(hdf5.read_array(x, where), hdf5.read_array(y, where), a.visible(where), where)
    return SiteDiff(a.name, a.site, a.order, formats, **sums.results())


def _check_numbers(a: Entry, b: Entry, path_a: object, path_b: object) -> None:
    """ValueError where two entries have different samples, heads or rows."""
    for name in ("samples", "heads", "rows"):
        of_a, of_b = getattr(a, name), getattr(b, name)
        if name == "rows" and (of_a is None) != (of_b is None):
            of_a, of_b = _all_rows(a), _all_rows(b)
        if of_a and of_b and of_a != of_b:
            raise ValueError(f"{a.name}: {name} {ranges(of_a)} in {path_a}, {ranges(of_b)} in {path_b}: give two dumps "
                             f"of the same {name}")


def _all_rows(e: Entry) -> tuple[int, ...] | None:
    axis = next((i for i, name in enumerate(e.axes) if name in ("query", "token")), None)
    return e.rows if e.rows is not None or axis is None else tuple(range(e.shape[axis]))


def _ulp_of(entry: Entry, dataset: "h5py.Dataset") -> tuple[int, int, int] | None:
    """(mantissa bits, smallest exponent, largest) of a dataset's format; None where it holds no floats."""
    name = hdf5.dtype_of(dataset).name
    if name == "float64":
        return _FP64
    if name not in _OF_DTYPE:
        return None
    single = entry.format if entry.format and "," not in entry.format else _OF_DTYPE[name]
    f = format_named(single)
    return f.mantissa_bits, f.emin, f.emax


def ulp_errors(a: Dump, b: Dump, site: str, *, layer: int | None = None) -> np.ndarray:
    """The errors (A − B)/ulp that `SiteDiff` measures at a site of two dumps, of finite entries, as a vector.

    Raises:
        ValueError: the site is not in both, or the shapes differ.
    """
    in_a, in_b = a.entry(site, layer=layer), b.entry(site, layer=layer)
    _check_numbers(in_a, in_b, a.path, b.path)
    if in_a.shape != in_b.shape:
        raise ValueError(f"{in_a.name} has shape {in_a.shape} in {a.path}, {in_b.shape} in {b.path}")
    with opened(a.path) as file_a, opened(b.path) as file_b:
        x, y = file_a[in_a.dataset], file_b[in_b.dataset]
        sums = _Sums(x.shape, _ulp_of(in_a, x), _ulp_of(in_b, y))
        found = [
            sums.add(hdf5.read_array(x, w), hdf5.read_array(y, w), in_a.visible(w), w)
            for w in hdf5.blocks(x.shape, BLOCK)
        ]
    return np.concatenate([e for e in found if e is not None] or [np.zeros(0)])


class _Sums:
    """What is summed over the blocks of two datasets of one shape."""

    def __init__(self, shape: tuple[int, ...], a: tuple[int, int, int] | None,
                 b: tuple[int, int, int] | None) -> None:
        self.ulps = {a, b} if a and b else set()
        self.at_a = bool(a and b and a[0] > b[0])  # the finer one says where ulp are taken
        self.grid = len(shape) > 1
        self.columns = np.zeros((2, shape[-1] if self.grid else 0))  # errors and their number
        self.values = self.same = self.finite = self.nonfinite = 0
        self.abs = self.max_abs = self.error = self.magnitude = self.max_ulp = 0.0
        self.rows = np.zeros(4)  # Σ S², Σ S·n, Σ n², number of rows with n > 0
        self.xy = self.xx = self.yy = 0.0
        self.first: tuple[tuple[int, ...], float, float] | None = None

    def add(self, a: np.ndarray, b: np.ndarray, visible: np.ndarray | None,
            where: tuple[slice, ...]) -> np.ndarray | None:
        """Adds a block; gives the errors in ulp of its finite entries, None where there are no ulp."""
        if not (_is_real(a) and _is_real(b)):  # text, complex numbers and the like: the same or not
            same, x, y = _alike(a, b), np.full(a.shape, np.nan), np.full(a.shape, np.nan)
        else:
            x, y = a.astype(np.float64), b.astype(np.float64)
            same = _same_bits(x, y)
            if a.dtype.kind in "iu" and b.dtype.kind in "iu":
                same = np.asarray(a == b)  # beyond 2⁵³ too
        shown = np.ones(a.shape, bool) if visible is None else np.broadcast_to(visible, a.shape)
        self.values += int(np.count_nonzero(shown))
        self.same += int(np.count_nonzero(same & shown))
        if self.first is None and (wrong := ~same & shown).any():
            at = np.unravel_index(np.argmax(wrong), wrong.shape)
            start = [s.start for s in where] + [0] * (len(at) - len(where))
            self.first = tuple(int(i + s) for i, s in zip(at, start)), float(x[at]), float(y[at])
        finite = np.isfinite(x) & np.isfinite(y) & shown
        self.nonfinite += int(np.count_nonzero(~same & shown & ~finite))
        if not finite.all():
            x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        self.finite += int(np.count_nonzero(finite))
        self.xy += float((x * y).sum())
        self.xx += float((x * x).sum())
        self.yy += float((y * y).sum())
        d = x - y
        self.abs += float(np.abs(d).sum())
        self.max_abs = max(self.max_abs, float(np.abs(d).max(initial=0)))
        if not self.ulps:
            return None
        fine, coarse = (x, y) if self.at_a else (y, x)
        at = np.maximum(np.abs(fine), np.abs(coarse) / 2)
        error = d / functools.reduce(np.maximum, (_spacing(at, *ulp) for ulp in self.ulps))
        self._ulp(error, finite)
        return error[finite]

    def _ulp(self, error: np.ndarray, finite: np.ndarray) -> None:
        magnitude = np.abs(error)
        self.error += float(error.sum())
        self.magnitude += float(magnitude.sum())
        self.max_ulp = max(self.max_ulp, float(magnitude.max(initial=0)))
        flat = error.reshape(-1, error.shape[-1]) if self.grid else error.reshape(-1, 1)
        there = finite.reshape(flat.shape)
        s, n = flat.sum(axis=1), np.count_nonzero(there, axis=1)
        self.rows += (float(s @ s), float(s @ n), float(n @ n), float(np.count_nonzero(n)))
        if self.grid and flat.shape[1] == self.columns.shape[1]:  # else a row takes several blocks
            self.columns += flat.sum(axis=0), np.count_nonzero(there, axis=0)

    def results(self) -> dict[str, Any]:
        n = self.finite
        first, a, b = self.first or (None, None, None)
        found: dict[str, Any] = {
            "values": self.values, "equal": self.same / self.values if self.values else 1.0,
            "nonfinite": self.nonfinite, "first": first, "a": a, "b": b
        }
        if not n:
            return found
        found |= {
            "max_abs": self.max_abs, "mean_abs": self.abs / n,
            "cosine": self.xy / math.sqrt(self.xx) / math.sqrt(self.yy) if self.xx and self.yy else math.nan
        }
        if not self.ulps:
            return found
        mean = self.error / n
        s, k = self.columns
        clusters = (tuple(self.rows), (s @ s, s @ k, k @ k, np.count_nonzero(k)))
        errors = [math.sqrt(max(ss - 2 * mean * sn + mean * mean * nn, 0.0) * c / (c - 1)) / n
                  for ss, sn, nn, c in clusters if c > 1]
        return found | {"max_ulp": self.max_ulp, "mean_ulp": self.magnitude / n, "signed_ulp": mean,
                        "se": max(errors, default=math.nan)}


def _is_real(x: np.ndarray) -> bool:
    return x.dtype.kind in "biuf" or x.dtype.name in _OF_DTYPE


def _same_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x == y) & (np.signbit(x) == np.signbit(y)) | np.isnan(x) & np.isnan(y)


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which entries are the same, of arrays that do not both hold real numbers."""
    if "c" in (a.dtype.kind, b.dtype.kind) and {a.dtype.kind, b.dtype.kind} <= set("biufc"):
        return _same_bits(a.real, b.real) & _same_bits(a.imag, b.imag)
    return np.asarray(np.frompyfunc(lambda x, y: bool(np.array_equal(x, y)), 2, 1)(a, b), bool)


def _spacing(x: np.ndarray, mantissa_bits: int, emin: int, emax: int) -> np.ndarray:
    """The ulp of a format at finite fp64 values."""
    power = (x.view(np.uint64) & np.uint64(0x7FF << 52)).view(np.float64)
    return np.clip(power, 2.0**emin, 2.0**emax) * 2.0**-mantissa_bits
