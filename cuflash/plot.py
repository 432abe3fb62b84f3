"""Figures of runs, dumps, differences and audits, for print: each function gives a matplotlib Figure.

Colours are Okabe and Ito's, which the colour-blind tell apart, and lines differ in dashes too; maps are
cividis, or PuOr where sign matters, with 0 white. Nothing is drawn on a screen: `save` writes files.
"""
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.audit_map import ErrorMap
from cuflash.diff import Diff, told_apart, ulp_errors
from cuflash.dump_file import Dump, Entry
from cuflash.errors import install
from cuflash.formats import as_format, round_to
from cuflash.monte_carlo import Bias
from cuflash.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 2)),
                           (0, (3, 1, 1, 1, 1, 1)), (0, (2, 2)))
SUFFIXES = (".png", ".svg", ".pdf")
_DELTA = r"$\delta_\mathrm{lp} - \delta_\mathrm{hp}$"
_O = r"$O_\mathrm{lp} - O_\mathrm{hp}$"
WIDTH = 6.9  # inches: two columns of a paper
_STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.1, "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "cuflash", "axes.titlelocation": "left",
}


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as e:
        raise ValueError(f"plots need matplotlib: {install('plot')}") from e
    with matplotlib.rc_context(_STYLE):
        yield


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: str | os.PathLike[str], dpi: int = 200) -> None:
    """Writes a figure whole; the name's suffix says how.

    Raises:
        ValueError: the suffix is none of .png, .svg, .pdf.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: a plot is written as one of {', '.join(SUFFIXES)}")
    metadata = {"Date": None} if suffix == ".svg" else {"CreationDate": None} if suffix == ".pdf" else {}
    with _style(), whole_file(path) as partial:
        figure.savefig(partial, format=suffix[1:], dpi=dpi, metadata=metadata)


def _line(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}


def _letter(ax: "Axes", number: int, title: str) -> None:
    ax.set_title(f"({'abcdefghijkl'[number]}) {title}")


def _notes(figure: "Figure", notes: Sequence[str]) -> None:
    if notes:
        figure.suptitle("\n".join(notes), x=0.01, horizontalalignment="left", fontsize=8)


# ---- runs ---------------------------------------------------------------------------------------

def runs(metrics: Mapping[str, Sequence[Mapping[str, float]]]) -> "Figure":
    """Loss, gradient norm and share of rows with ties over the steps, for one run or several.

    Args:
        metrics: for each run's label the rows of its metrics.csv.
    """
    with _style():
        fig = _figure(WIDTH, 2.3)
        loss, norm, ties = fig.subplots(1, 3)
        validated = False
        for i, (label, rows) in enumerate(metrics.items()):
            def column(name: str, rows: Sequence[Mapping[str, float]] = rows) -> np.ndarray:
                return np.array([row[name] for row in rows])
            steps = column("step")
            loss.plot(steps, column("loss"), label=label, **_line(i))
            measured = ~np.isnan(column("val_loss"))
            if measured.any():
                validation = column("val_loss")[measured]
                loss.plot(steps[measured], validation, "o", markersize=3, color=COLOURS[i % 7],
                          markerfacecolor="white")
                validated = True
            norm.plot(steps, column("norm"), **_line(i))
            ties.plot(steps, 100 * column("ties") / column("rows"), **_line(i))
        norm.set_yscale("log")
        top = max(1.0, ties.get_ylim()[1])  # runs without ties have a line at 0, no scale of its own
        ties.set_ylim(-0.04 * top, top)  # and it does not lie on the axis
        for k, (ax, title, unit) in enumerate(
            ((loss, "Loss", "nats a token"), (norm, "Gradient norm", "‖g‖₂, before clipping"),
             (ties, "Rows with tied maxima", "% of attention's rows"))):
            _letter(ax, k, title)
            ax.set_xlabel("step")
            ax.set_ylabel(unit)
        if validated:
            loss.plot([], [], "o", markersize=3, color="black", markerfacecolor="white", label="validation")
        loss.legend()
        return fig


def spectral(steps: np.ndarray, norms: Mapping[str, np.ndarray]) -> "Figure":
    """Spectral norm of each weight by layer over the steps, of W_Q by head at the last one.

    Source: arXiv 2510.04212, figures 11 and 3.

    Args:
        norms: `spectral/L01/q` (n,), …, `spectral/L01/q_heads` (n, heads), as a run's layers.h5 has them.
    """
    names = [n for n in sorted(norms) if n.startswith("spectral/") and not n.endswith("q_heads")]
    heads = {n.split("/")[1]: norms[n] for n in sorted(norms) if n.endswith("q_heads")}
    if not names:
        raise ValueError("no spectral norms: the run has logged none yet")
    measured = ~np.isnan(norms[names[0]])  # other steps have what sites measured
    if not measured.any():
        raise ValueError("no spectral norms: all that the run has logged are NaN")
    steps, heads = steps[measured], {layer: found[measured][-1] for layer, found in heads.items()}
    order = ("q", "k", "v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names.sort(key=lambda n: (n.split("/")[1], order.index(n.split("/")[2])))
    with _style():
        fig = _figure(WIDTH, max(2.4, 0.11 * len(names) + 0.8))
        left, right = fig.subplots(1, 2, width_ratios=(3, 2))
        values = np.array([norms[n][measured] for n in names])
        mesh = left.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest",
                           extent=(-0.5, len(steps) - 0.5, len(names) - 0.5, -0.5))
        ticks = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
        left.set_xticks(ticks, [str(steps[t]) for t in ticks])
        labels = [" ".join(n.split("/")[1:]).replace("L0", "L") for n in names]
        every = max(1, len(names) // 36)
        left.set_yticks(range(0, len(names), every), labels[::every])
        left.set_xlabel("step")
        _letter(left, 0, "Spectral norm of each weight")
        fig.colorbar(mesh, ax=left, label="largest singular value")
        for i, (layer, value) in enumerate(heads.items()):
            style = _line(i)
            right.plot(range(len(value)), value, marker="os^Dv<>"[i % 7], markersize=3,
                       label=layer.replace("L0", "L"), **style)
        right.set_xlabel("head")
        right.set_ylabel("largest singular value")
        right.xaxis.get_major_locator().set_params(integer=True)
        _letter(right, 1, f"$W_Q$ by head, step {steps[-1]}")
        right.legend(title="layer", ncols=1 + len(heads) // 7)
        return fig


# ---- a dump -------------------------------------------------------------------------------------

def heat_maps(dump: Dump, *, sites: Sequence[str] = ("attn.s", "attn.p"), layer: int | None = None,
              sample: int | None = None, head: int | None = None) -> "Figure":
    """Maps of T × T sites of one head: queries down, keys across. What causal attention hides is left grey.

    Raises:
        ValueError: a site is not in the dump, or has no map.
    """
    with _style():
        fig = _figure(WIDTH if len(sites) > 1 else WIDTH / 2, 3.1)
        for k, (ax, site) in enumerate(zip(np.ravel(fig.subplots(1, len(sites))), sites)):
            e = dump.entry(site, layer=layer)
            if e.axes[-2:] != ("query", "key"):
                raise ValueError(f"{site} has axes {', '.join(e.axes)}; a heat map is of one with query and "
                                 "key, as attn.s")
            s, h = _chosen(e, sample, head)
            values = dump.read(site, layer=layer, sample=s, head=h).astype(np.float64)
            visible = e.visible()
            if visible is not None:
                values = np.where(visible[0, 0], values, np.nan)
            finite = values[np.isfinite(values)]
            signed = finite.size > 0 and finite.min() < 0
            largest = float(np.abs(finite).max(initial=0)) or 1.0
            low, colours = (-largest, "PuOr") if signed else (0.0, "cividis")
            rows = e.rows or range(e.shape[-2])
            together = rows[-1] - rows[0] == len(rows) - 1
            top, bottom = (rows[0], rows[-1]) if together else (0, len(rows) - 1)
            ax.set_facecolor("0.85")
            ax.spines[:].set_visible(False)
            mesh = ax.imshow(values, aspect="auto", interpolation="nearest",
                             extent=(-0.5, values.shape[1] - 0.5, bottom + 0.5, top - 0.5),
                             vmin=low, vmax=largest, cmap=colours)
            if not together:
                shown = range(0, len(rows), math.ceil(len(rows) / 16))
                ax.set_yticks(shown, [str(rows[i]) for i in shown])
            ax.set_xlabel("key")
            ax.set_ylabel("query")
            place = f"layer {e.layer}, head {h}, sample {s}" if e.layer is not None else f"head {h}"
            _letter(ax, k, f"{site} in {e.format}, {place}")
            fig.colorbar(mesh, ax=ax, label=site)
        return fig


def row(dump: Dump, *, query: int, feature: int, layer: int | None = None, sample: int | None = None,
        head: int | None = None) -> "Figure":
    """One row of P̄ beside one column of V, and the error of rounding Ō if the sum ended at each key.

    P̄ is rescaled to the row's final maximum. The dump must hold attn.p, attn.v and, with several tiles,
    attn.alpha. Source: arXiv 2510.04212, figure 6.

    Raises:
        ValueError: it does not, or the row or feature is not there.
    """
    e = dump.entry("attn.p", layer=layer, direction="fwd")
    s, h = _chosen(e, sample, head)
    where: dict[str, Any] = {"layer": layer, "direction": "fwd", "sample": s, "head": h}
    rows = list(e.rows) if e.rows else list(range(e.shape[-2]))
    v = dump.read("attn.v", **where).astype(np.float64)
    if query not in rows or not 0 <= feature < v.shape[1]:
        raise ValueError(f"query {query}, feature {feature}: the dump has queries {rows[0]} to {rows[-1]} "
                         f"and features 0 to {v.shape[1] - 1}")
    p = _final_p(dump, e, rows.index(query), where)
    keys = np.flatnonzero(_visible_keys(e, rows.index(query), len(p)))
    p, v = p[keys], v[keys, feature]
    sites = (_entry(dump, name, layer) for name in ("attn.pv", "attn.o_acc", "attn.o"))
    rounding = next((x for x in sites if x and x.format != "fp32"), None)
    format = as_format(rounding.format if rounding else "bf16")
    exact = np.cumsum(p * v)
    error = round_to(exact, format) - exact
    with _style():
        fig = _figure(WIDTH, 3.6)
        top, bottom = fig.subplots(2, 1, sharex=True)
        top.vlines(keys, 0, p, color=COLOURS[0], linewidth=0.8)
        top.plot(keys, p, "o", markersize=2.5, color=COLOURS[0])
        top.set_ylabel("P̄", color=COLOURS[0])
        top.set_ylim(0, 1.08)
        right = top.twinx()
        right.spines["right"].set_visible(True)
        right.plot(keys, v, color=COLOURS[1], linestyle=DASHES[1], linewidth=0.8)
        right.set_ylabel(f"V[:, {feature}] (dashed)", color=COLOURS[1])
        at = f"layer {e.layer}, head {h}, sample {s}, query {query}"
        _letter(top, 0, f"P̄ of a row and a column of V: {at}")
        bottom.axhline(0, color="0.6", linewidth=0.6)
        bottom.step(keys, error, where="post", color="black")
        ones = p == 1
        bottom.plot(keys[ones], error[ones], "o", markersize=4, markerfacecolor="white", color=COLOURS[1],
                    label="P̄ = 1")
        bottom.set_xlabel("key")
        bottom.set_ylabel(f"error in {format.name}")
        _letter(bottom, 1, "Error of Ō, were the sum rounded after this key")
        if ones.any():
            bottom.legend()
        return fig


def _final_p(dump: Dump, e: Entry, index: int, where: Mapping[str, Any]) -> np.ndarray:
    """P̄ of a row, each tile's scaled by the alphas of the tiles after it."""
    p = dump.read("attn.p", **where)[index].astype(np.float64)
    m = _entry(dump, "attn.m", where["layer"])
    tiles = _entry(dump, "attn.alpha", where["layer"])
    if tiles is None:
        if m is not None and "tile" in m.axes and m.shape[m.axes.index("tile")] > 1:
            raise ValueError(
                f"{dump.path} has several tiles and no attn.alpha, which rescales P̄: dump attn.alpha, too")
        return p
    alpha = dump.read("attn.alpha", **where)[:, index].astype(np.float64)
    width = (tiles.tile or (None, None))[1] or len(p)
    visible = tiles.visible()
    visited = np.broadcast_to(True if visible is None else visible, tiles.shape)[0, 0, :, index]
    later = 1.0
    order = range(len(alpha)) if tiles.tile_order == "descending" else range(len(alpha) - 1, -1, -1)
    for j in order:  # the last tile first
        if visited[j]:
            p[j * width:(j + 1) * width] *= later
            later *= alpha[j]
    return p


def _visible_keys(e: Entry, index: int, count: int) -> np.ndarray:
    visible = e.visible()
    return np.ones(count, bool) if visible is None else np.broadcast_to(visible, e.shape)[0, 0, index]


def _entry(dump: Dump, site: str, layer: int | None) -> Entry | None:
    return dump.entry(site, layer=layer, direction="fwd") if site in _sites(dump) else None


def _sites(dump: Dump) -> set[str]:
    return {e.site for e in dump.entries}


def _chosen(e: Entry, sample: int | None, head: int | None) -> tuple[int, int]:
    return e.samples[0] if sample is None else sample, e.heads[0] if head is None else head


# ---- differences --------------------------------------------------------------------------------

def histograms(a: Dump, b: Dump, sites: Sequence[str], *, layer: int | None = None) -> "Figure":
    """How (A − B)/ulp is distributed at each site, as `cuflash diff` measures it.

    The triangle is the mean, which the title gives too. The outermost bars hold what lies beyond them, 2 %
    of the values.

    Raises:
        ValueError: a site is not in both, or the shapes differ; there are no sites.
    """
    if not sites:
        raise ValueError(f"which sites? {a.path} and {b.path} share none of those drawn by default: name some by --sites")
    columns = min(4, len(sites))
    lines = math.ceil(len(sites) / columns)
    with _style():
        fig = _figure(WIDTH, 1.55 * lines + 0.25)
        axes = np.ravel(fig.subplots(lines, columns, squeeze=False))
        for ax in axes[len(sites):]:
            ax.set_visible(False)
        for k, (ax, site) in enumerate(zip(axes, sites)):
            errors = ulp_errors(a, b, site, layer=layer)
            reach = max(0.55, float(np.quantile(np.abs(errors), 0.98)) if errors.size else 0)
            ax.hist(np.clip(errors, -reach, reach), bins=41, range=(-reach, reach),
                    weights=np.full(errors.size, 100 / max(errors.size, 1)), color=COLOURS[4],
                    edgecolor=COLOURS[0], linewidth=0.3)
            mean = float(errors.mean()) if errors.size else 0.0
            ax.plot(mean, 0, "^", color=COLOURS[1], markersize=5, clip_on=False, zorder=5)
            ax.axvline(0, color="0.4", linewidth=0.6)
            ax.set_title(f"{site}: {mean:+.3f}")
            if k >= len(sites) - columns:
                ax.set_xlabel("(A − B) / ulp")
            if k % columns == 0:
                ax.set_ylabel("% of values")
        _notes(fig, told_apart(a.path, a.attributes, b.path, b.attributes))
        return fig


def differences(found: Diff) -> "Figure":
    """Each site that differs, in the order of execution.

    Signed mean error with twice its standard error, mean size of the error, share of values that are not the
    same bits. What differs and has no error in ulp (other shapes, in one file alone) is only counted.
    """
    sites = [s for s in found.sites if s.differs and s.shapes is None and math.isfinite(s.signed_ulp)]
    other = [s.name for s in found.sites if s.differs and s not in sites] + found.only_a + found.only_b
    if not sites:
        rest = f" that has an error in ulp, but in {', '.join(other)}" if other else ""
        raise ValueError(f"{found.a} and {found.b} differ at no site{rest}: there is nothing to plot")
    with _style():
        fig = _figure(WIDTH, max(2.0, 0.15 * len(sites) + 0.8))
        signed, size, share = fig.subplots(1, 3, sharey=True, width_ratios=(3, 2, 2))
        y = np.arange(len(sites))
        mean, se = (np.array([getattr(s, n) for s in sites]) for n in ("signed_ulp", "se"))
        sure = np.abs(mean) >= 4 * se
        signed.axvline(0, color="0.4", linewidth=0.6)
        for chosen, fill, label in ((sure, COLOURS[1], "4 standard errors or more"),
                                    (~sure, "white", "less")):
            signed.errorbar(mean[chosen], y[chosen], xerr=2 * se[chosen], fmt="o", markersize=3.5,
                            color=COLOURS[1], markerfacecolor=fill, elinewidth=0.8, label=label)
        signed.set_xscale("symlog", linthresh=1.0, linscale=1.5)
        decades = [10.0**d for d in range(0, 12, 2) if d == 0 or 10.0**d <= 3 * np.abs(mean).max()]
        signed.set_xticks([*(-d for d in reversed(decades)), 0, *decades])
        signed.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0, handletextpad=0.2)
        size.barh(y, [s.mean_ulp for s in sites], color=COLOURS[4], edgecolor=COLOURS[0], linewidth=0.4)
        if max(s.mean_ulp for s in sites) > 20 * min(s.mean_ulp for s in sites):
            size.set_xscale("log")
        share.barh(y, [100 * (1 - s.equal) for s in sites], color="0.75", edgecolor="0.3", linewidth=0.4)
        share.set_xlim(0, 100)
        signed.set_yticks(y, [s.name for s in sites])
        signed.set_ylim(len(sites) - 0.4, -0.6)
        for ax, label in ((signed, "mean of (A − B) / ulp, ± 2 s.e."), (size, "mean of |A − B| / ulp"),
                          (share, "% not the same bits")):
            ax.set_xlabel(label)
            ax.grid(axis="y", color="0.9", linewidth=0.5)
            ax.set_axisbelow(True)
        if other:
            share.set_title(f"{len(other)} more without an error in ulp")
        _notes(fig, found.notes)
        return fig


# ---- audits -------------------------------------------------------------------------------------


def error_maps(m: ErrorMap, *, layer: int, sample: int | None = None, head: int | None = None,
               token: int | None = None) -> "Figure":
    """(δ_lp − δ_hp)[T] by token and head, its running sum, and at one token O_lp − O_hp and dO by feature.

    Source: arXiv 2510.04212, figures 5 and 12.

    Args:
        head, token: of the lower panels; default where |δ_lp − δ_hp| is largest.
    """
    b = m.batch.index(m.batch[0] if sample is None else _known("sample", sample, m.batch))
    if head is None:
        h = int(np.argmax(np.abs(m.delta[b]).max(axis=-1)))
    else:
        h = m.heads.index(_known("head", head, m.heads))
    tokens = range(m.delta.shape[-1])
    t = int(np.argmax(np.abs(m.delta[b, h]))) if token is None else _known("token", token, tokens)
    with _style():
        fig = _figure(WIDTH, 4.2)
        upper, lower = fig.subfigures(2, 1)
        (top, total), (o, features) = (half.subplots(1, 2, width_ratios=(3, 2)) for half in (upper, lower))
        largest = float(np.abs(m.delta[b]).max()) or 1.0
        mesh = top.imshow(m.delta[b], aspect="auto", cmap="PuOr", vmin=-largest, vmax=largest,
                          interpolation="nearest",
                          extent=(-0.5, m.delta.shape[-1] - 0.5, len(m.heads) - 0.5, -0.5))
        top.set_yticks(range(len(m.heads)), m.heads)
        upper.colorbar(mesh, ax=top, label=_DELTA)
        top.set(xlabel="token", ylabel="head")
        _letter(top, 0, f"{m.precision}, fix {m.fix}, layer {layer}, sample {m.batch[b]}")
        total.axhline(0, color="0.6", linewidth=0.6)
        for i, number in enumerate(m.heads):
            strong = i == h
            total.plot(np.cumsum(m.delta[b, i]), linewidth=1.4 if strong else 0.7,
                       color=COLOURS[1] if strong else "0.7", zorder=3 if strong else 2,
                       label=f"head {number}" if strong else None)
        total.set(xlabel="token", ylabel=f"Σ ({_DELTA})")
        total.legend()
        _letter(total, 1, "Running sum over the tokens")
        n = np.arange(m.o.shape[-1])
        o.axhline(0, color="0.6", linewidth=0.6)
        o.bar(n, m.o[b, h, t], color=COLOURS[0], width=0.8)
        o.set(xlabel="feature", ylabel=f"{_O} (bars)")
        right = o.twinx()
        right.spines["right"].set_visible(True)
        right.plot(n, m.do[b, h, t], color=COLOURS[1], linestyle="none", marker="o", markersize=2.5)
        right.set_ylabel("dO (dots)", color=COLOURS[1])
        for ax in (o, right):  # zero at one height
            reach = max(map(abs, ax.get_ylim()))
            ax.set_ylim(-reach, reach)
        _letter(o, 2, f"Head {m.heads[h]}, token {t}")
        features.axhline(0, color="0.6", linewidth=0.6)
        features.bar(n, m.by_feature[b, h, t], color=COLOURS[2], width=0.8)
        features.set(xlabel="feature", ylabel=f"dO·({_O})")
        _letter(features, 3, f"Product; sum {m.by_feature[b, h, t].sum():+.1e}")
        return fig


def _known(name: str, number: int, valid: Sequence[int]) -> int:
    if number not in valid:
        shown = f"{valid[0]} to {valid[-1]}" if isinstance(valid, range) else ", ".join(map(str, valid))
        raise ValueError(f"--{name} {number}: there is {shown}")
    return number


def bias(rows: Sequence[Bias]) -> "Figure":
    """The Monte Carlo of the bias: mean error of Ō and O against P̄ of the rest, for each number of ties."""
    precisions = list(dict.fromkeys(b.precision for b in rows))
    ties = sorted({b.ties for b in rows})
    rests = sorted({b.rest for b in rows})
    with _style():
        fig = _figure(WIDTH, 1.9 * len(precisions) + 0.3)
        axes = fig.subplots(len(precisions), 2, squeeze=False, sharex=True, sharey="row")
        for i, precision in enumerate(precisions):
            for j, (x, label) in enumerate((("o_bar", "Ō"), ("o", "O"))):
                ax = axes[i, j]
                ax.axhline(0, color="0.6", linewidth=0.6)
                for k, n in enumerate(ties):
                    found = {b.rest: b for b in rows if (b.precision, b.x, b.ties) == (precision, x, n)}
                    ax.errorbar(range(len(rests)), [found[r].mean for r in rests],
                                yerr=[2 * found[r].se for r in rests], marker="os^Dv<>"[k % 7], markersize=3,
                                label=str(n), elinewidth=0.7, **_line(k))
                ax.set_xticks(range(len(rests)), [f"{r:g}" for r in rests])
                _letter(ax, 2 * i + j, f"{label}, {precision}")
                if i == len(precisions) - 1:
                    ax.set_xlabel("P̄ of the rest of the row")
                if j == 0:
                    ax.set_ylabel(
                        f"mean error in ulp of {next(b.format for b in rows if b.precision == precision)}")
        axes[0, 1].legend(title="keys at P̄ = 1", ncols=2)
        return fig
