"""Which roundings of attention are biased on given inputs, what they do to δ and dQ, what removes it.

    capture = Capture.of(q, k, v, do, causal=True)
    result = audit(capture, "bf16")
    result.sites[0]                     # the most biased rounding
    result.cures[0]                     # the change that leaves least of the bias of δ

Everything is measured against golden, which is plain fp64. T × T values exist a block at a time; what
is kept is a few arrays of the inputs' size. Most of the time goes into the cures: each is a forward and
a backward.
"""
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cuflash.attention import flash_attention, flash_attention_backward, flash_attention_forward
from cuflash.attention_arguments import INPUTS, LAYOUTS
from cuflash.errors import ranges, unknown
from cuflash.fixes import Fix, as_fix
from cuflash.kernels import import_cupy
from cuflash.launch import on_gpu
from cuflash.philox import Key
from cuflash.precision import SWITCHES, Precision, as_precision
from cuflash.site_table import SITES
from cuflash.sites import Rounder, Watch
from cuflash.statistics import SIGNIFICANT, SiteStatistics, Statistics
from cuflash.tied_rows import TiedRows, Turned
from cuflash.watching import Only, wants

# progress(phase, done, total): called as work goes on, in query rows.
Progress = Callable[[str, int, int], None]

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Capture:
    """Inputs of one attention, (batch, heads, T, head_dim), and how it is called; make it by `Capture.of`.

    `heads` and `batch` are the numbers that heads and samples had before the capture was narrowed. `device` is
    where it is computed, `cpu` or `gpu`; golden always on the CPU.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray | None
    causal: bool
    scale: float
    layer: int
    heads: tuple[int, ...]
    batch: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, do: Any = None, *,
           causal: bool = False, scale: float | None = None, layout: str = "bhtd",
           heads: Sequence[int] | None = None, batch: Sequence[int] | None = None,
           layer: int = 0, device: str | None = None) -> "Capture":
        """A capture from arrays (B, H, T, D), (H, T, D) or (T, D); in layout `bthd`, (B, T, H, D), (T, H, D).

        Args:
            do: dO, q's shape; without it there are no δ, no gradients and no cures.
            scale: α, default fl32(1/√head_dim).
            heads, batch: the query heads and samples to look at; default all.
            layer: the layer that it is from, for roundings scoped to layers.
            device: `cpu` or `gpu`; default where q lies, of NumPy or CuPy.

        Raises:
            ValueError, TypeError: an argument is not valid, or an array holds NaN or Inf.
        """
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        if device not in (None, "cpu", "gpu"):
            raise unknown("device", device, ("cpu", "gpu"))
        device = device or ("gpu" if on_gpu(q) else "cpu")
        given = {"q": q, "k": k, "v": v, "do": do}
        arrays = {n: _four_axes(n, a, layout) for n, a in given.items() if a is not None}
        for n, a in arrays.items():
            if a.dtype.name not in INPUTS:
                raise TypeError(f"{n} has dtype {a.dtype}; valid: {', '.join(INPUTS)}")
        dtypes = {arrays[n].dtype for n in ("q", "k", "v")}
        if len(dtypes) > 1:  # widening is exact, and the first sites of attention round
            wide = np.float64 if np.dtype(np.float64) in dtypes else np.float32
            arrays |= {n: arrays[n].astype(wide) for n in ("q", "k", "v")}
        q, k, v = (arrays[n] for n in ("q", "k", "v"))
        if q.size == 0 or k.size == 0:
            raise ValueError(f"nothing to audit: q has shape {q.shape}, k {k.shape}")
        # Here and not by the call below, which sees arrays without their T.
        if k.shape != v.shape:
            raise ValueError(f"k and v differ in shape: {k.shape} and {v.shape} (batch, heads, T, head_dim)")
        if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
            raise ValueError(
                f"q {q.shape} and k {k.shape} must agree in batch and head_dim (batch, heads, T, head_dim)")
        if "do" in arrays and arrays["do"].shape != q.shape:
            raise ValueError(f"do has shape {arrays['do'].shape}; it must be q's, {q.shape}")
        scale = float(np.float32(1 / math.sqrt(q.shape[-1]))) if scale is None else float(scale)
        none = (x[:, :, :0] for x in (q, k, v))
        flash_attention(*none, causal=causal, scale=scale, precision="fp32")  # validates shapes and dtypes
        batch = _chosen("batch", batch, q.shape[0])
        heads = _chosen("heads", heads, q.shape[1])
        if heads != tuple(range(q.shape[1])):  # each chosen head brings its own keys and values
            group = q.shape[1] // k.shape[1]
            of_head = {n: list(heads) if n in ("q", "do") else [h // group for h in heads] for n in arrays}
            arrays = {n: a[:, of_head[n]] for n, a in arrays.items()}
        if batch != tuple(range(q.shape[0])):
            arrays = {n: a[list(batch)] for n, a in arrays.items()}
        for name, a in arrays.items():
            _check_finite(name, a)
        q, k, v, do = (arrays.get(n) for n in given)
        return cls(q, k, v, do, bool(causal), scale, int(layer), heads, batch, device)

    @property
    def rows(self) -> int:
        """Query rows of one pass."""
        return math.prod(self.q.shape[:3]) * (1 if self.do is None else 2)

    @cached_property
    def golden(self) -> "Pass":
        """O, δ and the gradients in fp64."""
        return self.run(Precision.named("fp64"))

    def run(self, precision: Precision, fix: Fix | str = "off", watch: Watch | None = None,
            tick: Callable[[int], None] = lambda rows: None) -> "Pass":
        """A forward, and with dO a backward; `tick(rows)` is called as rows are done."""
        precision = self._renumbered(precision)
        delta = np.zeros(self.q.shape[:3])
        results = []
        for first, end in self._together():
            part, number = slice(first, end), self.batch[first]

            def watch_all(rnd: Rounder, site: str, x: np.ndarray, y: np.ndarray) -> None:
                if site == "attn.delta":
                    at = np.asarray(rnd.samples) - number + first
                    delta[at, np.asarray(rnd.heads), rnd.q:rnd.q + y.shape[1]] = y
                if site in ("attn.lse", "attn.dq"):
                    tick(y.shape[0] * y.shape[1])
                if watch is not None:
                    watch(rnd, site, x, y)

            def wanted(direction: str, layer: int, module: str, site: str, sample: int) -> bool:
                return site in ("attn.delta", "attn.lse", "attn.dq") or (
                    watch is not None and wants(watch, direction, layer, module, site, sample))

            shown = Only(watch_all, wanted)
            q, k, v, do = (x if x is None else x[part] for x in (self.q, self.k, self.v, self.do))
            if precision.is_fp64:
                q, k, v, do = (x if x is None else x.astype(np.float64) for x in (q, k, v, do))
            elif self.device == "gpu":
                q, k, v, do = (x if x is None else import_cupy().asarray(x) for x in (q, k, v, do))
            o, saved = flash_attention_forward(
                q, k, v, causal=self.causal, scale=self.scale, precision=precision, fix=fix,
                key=Key(0, layer=self.layer, sample=number), watch=shown)
            results.append((o,) if do is None else (o, *flash_attention_backward(do, saved, watch=shown)))
        o, *gradients = (np.concatenate([y.get() if on_gpu(y) else y for y in x]) for x in zip(*results))
        return Pass(o, delta, *gradients) if gradients else Pass(o)

    def _together(self) -> Iterator[tuple[int, int]]:
        """Ranges of samples for one call: consecutive numbers, so many that a call's own cost is small."""
        most = max(1, (1 << 20) // max(self.q[0].size, self.k[0].size))
        first = 0
        for i in range(1, len(self.batch) + 1):
            if i == len(self.batch) or i - first == most or self.batch[i] != self.batch[i - 1] + 1:
                yield first, i
                first = i

    def _renumbered(self, precision: Precision) -> Precision:
        """Head scopes in terms of the heads that are left."""
        if not precision.overrides or self.heads == tuple(range(len(self.heads))):
            return precision
        moved = (o if o.heads is None else
                 dataclasses.replace(o, heads=tuple(i for i, h in enumerate(self.heads) if h in o.heads))
                 for o in precision.overrides)
        return dataclasses.replace(precision, overrides=tuple(moved))


@dataclass(frozen=True, eq=False)
class Pass:
    """O (B, H, Tq, D), δ (B, H, Tq), the gradients; None without dO."""

    o: np.ndarray
    delta: np.ndarray | None = None
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None


@dataclass(frozen=True)
class DeltaError:
    """δ − golden δ over the rows of one head or of all (None).

    mean with its standard error (rows as independent draws), sum, share above 0 (of those not 0), rms.
    """

    head: int | None
    rows: int
    mean: float
    se: float
    sum: float
    positive: float
    rms: float

    @classmethod
    def of(cls, error: np.ndarray, head: int | None = None) -> "DeltaError":
        error = error.reshape(-1)
        n = error.size
        se = float(error.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
        nonzero = np.count_nonzero(error)
        positive = int(np.count_nonzero(error > 0)) / int(nonzero) if nonzero else 0.5
        rms = float(np.sqrt(np.mean(error**2)))
        return cls(head, n, float(error.mean()), se, float(error.sum()), positive, rms)

    @property
    def z(self) -> float:
        """mean in standard errors."""
        if self.mean == 0:
            return 0.0
        return self.mean / self.se if self.se else math.copysign(math.inf, self.mean)

    @property
    def significant(self) -> bool:
        return abs(self.z) >= SIGNIFICANT


@dataclass(frozen=True)
class Cure:
    """One change of the precision or fix, and δ's error (over the rows that were judged) and dQ's under it.

    `left`: the share of the mean error that is left, in magnitude. `removes`: the mean is within the noise,
    now or before the change, and at most half of what it was, so that more noise alone is no cure.
    """

    change: str
    delta: DeltaError
    dq_error: float
    left: float
    removes: bool


@dataclass(frozen=True)
class Audit:
    """What `audit` found under one precision.

    Attributes:
        sites: every site that rounded anything, most biased first.
        sites_by_head: the same for each head, in the order of execution.
        exact: sites that have a short format but changed nothing.
        errors: ‖x − golden‖ / ‖golden‖ of o, dq, dk, dv; NaN where the golden one is 0.
        delta: δ's error over all rows; None without dO.
        delta_heads: δ's error of each head, largest |z| first.
        judged: what the cures are judged by: `delta`, or the first of `delta_heads` where only that is
            significant; None where none is.
        tied_rows: rows with two or more keys at P̄ = 1, and what became of their ties (see TiedRows).
        first: the first value turned away from zero.
        cures: changes that were tried, the one that leaves least bias first.
    """

    precision: Precision
    fix: str
    sites: list[SiteStatistics]
    sites_by_head: list[SiteStatistics]
    exact: list[str]
    errors: dict[str, float]
    delta: DeltaError | None
    delta_heads: list[DeltaError]
    judged: DeltaError | None
    tied_rows: dict[str, int]
    first: Turned | None
    cures: list[Cure]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data = {n: [_plain(x) for x in v] if isinstance(v, list) else _plain(v) for n, v in parts.items()}
        return data | {"precision": {"name": self.precision.name, "toml": self.precision.to_toml()}}


def audit(capture: Capture, precision: Precision | str = "bf16", *, fix: Fix | str = "off",
          cures: bool = True, progress: Progress | None = None) -> Audit:
    """Measures every rounding of one attention under a precision, and looks for what removes δ's bias.

    Args:
        capture: the inputs.
        precision: a name, a TOML file or a `cuflash.Precision`.
        fix: as in `flash_attention`.
        cures: whether to try changes of the precision and fix where δ is biased.
        progress: called as work goes on.

    Raises:
        ValueError, TypeError: precision or fix is not valid.
    """
    p, fix = as_precision(precision), as_fix(fix)
    if p.is_fp64:
        raise ValueError("precision fp64 is golden itself and rounds nowhere; audit another one")

    def ticker(phase: str, passes: int) -> Callable[[int], None]:
        done = 0

        def tick(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                progress(phase, done, passes * capture.rows)
        return tick

    if "golden" not in vars(capture):
        vars(capture)["golden"] = capture.run(Precision.named("fp64"), tick=ticker("golden", 1))
    golden = capture.golden
    statistics, tied = Statistics(), TiedRows()

    def watch(rnd: Rounder, site: str, x: np.ndarray, y: np.ndarray) -> None:
        # Backward rounds inputs and S again: the same values unless it does so in its own way.
        if rnd.direction == "bwd" and SITES[site].direction == "both" and _alike(rnd, site):
            return
        statistics(rnd, site, x, y)
        tied(rnd, site, x, y)

    found = capture.run(p, fix, watch, ticker(p.name, 1))
    errors = {n: _relative(getattr(found, n), getattr(golden, n)) for n in ("o", *GRADIENTS)
              if getattr(found, n) is not None}
    delta, delta_heads, judged, tried = None, [], None, []
    if found.delta is not None:
        error = found.delta - golden.delta
        delta = DeltaError.of(error)
        delta_heads = [DeltaError.of(error[:, i], h) for i, h in enumerate(capture.heads)]
        delta_heads.sort(key=lambda d: -abs(d.z))
        judged = next((d for d in (delta, delta_heads[0]) if d.significant), None)
        if judged is not None and cures:
            changes = list(_changes(p, fix))
            tick = ticker("what removes it", len(changes))
            tried = [_try(capture, golden, judged, *change, tick) for change in changes]
            tried.sort(key=lambda c: abs(c.delta.mean))
    sites = statistics.sites()
    rounding = [s for s in sites if s.changed]
    rounding.sort(key=lambda s: (-s.bias, -max(abs(s.z), abs(s.away_z))))
    return Audit(p, str(fix), rounding, [_numbered(s, capture) for s in statistics.sites(by_head=True)],
                 [s.site for s in sites if not s.changed and not s.rounding.startswith("fp32")],
                 errors, delta, delta_heads, judged,
                 {n: getattr(tied, n) for n in ("rows", "values", "ties", "away", "toward")},
                 _numbered(tied.first, capture), tried)


def _changes(p: Precision, fix: Fix) -> Iterator[tuple[str, Precision, Fix | str]]:
    """(options as typed, precision, fix) of everything worth trying against a bias of δ."""
    for name in ("on", "qiu-b2", "qiu-b7"):
        if str(as_fix(name)) != str(fix):
            yield f"--fix {name}", p, name
    switches = [("delta_from", s) for s in SWITCHES["delta_from"]]
    switches += [("order", "fa2"), ("algorithm", "plain")] + ([("l_from", s) for s in SWITCHES["l_from"]]
                                                              if p.algorithm == "flash" else [])
    for name, value in switches:
        if getattr(p, name) != value and not (value == "plain" and p.l_from == "rounded"):
            yield f"--set {name}={value}", p.replace(**{name: value}), fix
    tables = [p.sites_for(d, 0, "", 0) for d in ("fwd", "bwd")]
    short = [s for s, row in SITES.items() if s.startswith("attn.") and s not in p.merged
             and (any(t[s].format != "fp32" for t in tables) or any(s in o.names() for o in p.overrides))]
    # δ sees forward's sites and its own; under p_dp the ones of P and dP as well.
    own = {"attn.do", "attn.delta_prod", "attn.delta"}
    own |= {"attn.x_bwd", "attn.p_ds", "attn.dp"} if p.delta_from == "p_dp" else set()
    singles = [(s,) for s in short if SITES[s].direction != "bwd" or s in own]
    o_bar = tuple(s for s in ("attn.pv", "attn.o_scaled", "attn.o_acc") if s in short)
    groups = (o_bar, (*o_bar, "attn.l"), (*o_bar, "attn.o"))
    groups = [g for g in groups if len(g) > 1 and set(g) <= set(short)]
    for sites in [*singles, *groups, ("attn",)]:
        options = [f"{s}=fp32" for s in sites]
        yield " ".join(f"--round {o}" for o in options), p.round(*options), fix


def _try(capture: Capture, golden: Pass, judged: DeltaError, change: str, precision: Precision,
         fix: Fix | str, tick: Callable[[int], None]) -> Cure:
    found = capture.run(precision, fix, tick=tick)
    error = found.delta - golden.delta
    if judged.head is not None:
        error = error[:, capture.heads.index(judged.head)]
    delta = DeltaError.of(error, judged.head)
    left = abs(delta.mean / judged.mean)
    noise = SIGNIFICANT * max(delta.se, judged.se)
    return Cure(change, delta, _relative(found.dq, golden.dq), left, abs(delta.mean) < noise and left <= 0.5)


# ---- small things -------------------------------------------------------------------------------

def _four_axes(name: str, x: Any, layout: str) -> np.ndarray:
    if on_gpu(x):
        x = x.get()
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be an array of NumPy or CuPy, not {type(x).__name__}")
    if not 2 <= x.ndim <= 4:
        last = "(B, H, T, D), (H, T, D)" if layout == "bhtd" else "(B, T, H, D), (T, H, D)"
        raise ValueError(f"{name} has shape {x.shape}; layout {layout} needs {last} or (T, D)")
    if x.ndim == 2:
        return x[None, None]
    x = x if x.ndim == 4 else x[None]
    return x.swapaxes(1, 2) if layout == "bthd" else x


def _chosen(name: str, numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if numbers is None:
        return tuple(range(count))
    outside = [n for n in numbers if not 0 <= n < count]
    if outside or not len(numbers):
        raise ValueError(
            f"{name} {ranges(outside or numbers)}: valid: 0 to {count - 1}"
        )
    return tuple(dict.fromkeys(int(n) for n in numbers))


def _check_finite(name: str, x: np.ndarray) -> None:
    bad = ~np.isfinite(x)
    if bad.any():
        first = ", ".join(str(int(i)) for i in np.unravel_index(np.argmax(bad), x.shape))
        raise ValueError(
            f"{name} holds {np.count_nonzero(bad)} NaN or Inf, the first at [{first}] of "
            "(batch, heads, T, D): an audit needs finite values; narrow it to heads and samples that are")


def _alike(rnd: Rounder, site: str) -> bool:
    forward, backward = (
        rnd.precision.sites_for(d, rnd.layer, rnd.module, int(rnd.heads[0]))[site] for d in ("fwd", "bwd")
    )
    return forward == backward


def _relative(x: np.ndarray, golden: np.ndarray) -> float:
    size = float(np.linalg.norm(golden))
    return float(np.linalg.norm(x.astype(np.float64) - golden)) / size if size else math.nan


def _numbered(found: Any, capture: Capture) -> Any:
    """With the head's own number in place of its place in a narrowed capture."""
    if found is None or found.head is None:
        return found
    return dataclasses.replace(found, head=capture.heads[found.head])


def _plain(x: Any) -> Any:
    return dataclasses.asdict(x) if dataclasses.is_dataclass(x) and not isinstance(x, Precision) else x
