"""Figures 3 to 8 of arXiv 2405.02803, from the rows of `deviation` and of the study of trainings.

Points are means over draws (geometric ones of ratios), bars reach from the smallest to the largest draw.
"""
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.deviation import EMULATIONS, GROUPS, LENGTH_FORMATS, SHAPES, TILE_FORMATS, Row
from cuflash.deviation_report import inputs_of, ratio_of, where
from cuflash.plot import COLOURS, WIDTH, _figure, _letter, _line, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^Dv<>"
LABELS = {"per-tile": "flash, every value rounded per tile", "fa2": "flash, running values in fp32"}
_PLAIN = 2  # the style of plain attention


def _points(ax: "Axes", x: Sequence[float], draws: Sequence[Sequence[float]], number: int, label: str | None,
            geometric: bool = False) -> None:
    """A line through the means of the draws, with bars over their range; what is not positive is left out."""
    kept = [(a, np.asarray(d)) for a, d in zip(x, draws) if len(d) and np.isfinite(d).all() and min(d) > 0]
    if not kept:
        return
    middle = np.array([np.exp(np.log(d).mean()) if geometric else d.mean() for _, d in kept])
    low, high = (np.array([f(d) for _, d in kept]) for f in (np.min, np.max))
    ax.errorbar([a for a, _ in kept],
                middle,
                yerr=np.abs([middle - low, high - middle]),
                label=label,
                markersize=3.2,
                marker=MARKERS[number % 7],
                elinewidth=0.7,
                capsize=1.5,
                capthick=0.6,
                **_line(number))


def _columns(rows: Sequence[Row], lines: int, height: float) -> tuple["Figure", np.ndarray, list[str]]:
    """A column of panels for each input."""
    kinds = inputs_of(rows)
    fig = _figure(WIDTH, height)
    return fig, fig.subplots(lines, len(kinds), squeeze=False, sharex="col", sharey="row"), kinds


def _by_format(ax: "Axes",
               rows: Sequence[Row],
               series: Sequence[tuple[int, str, str]],
               measure: Callable[[Row], float],
               geometric: bool = False) -> None:
    """Formats by mantissa bits along x. series: (style, emulation, label)."""
    formats = [f for _, f in sorted({(r.mantissa_bits, r.format) for r in rows})]
    for number, e, label in series:
        _points(ax, range(len(formats)), [[measure(r) for r in where(rows, format=f, emulation=e)]
                                          for f in formats], number, label, geometric)
    bits = {r.format: r.mantissa_bits for r in rows}
    ax.set_xticks(range(len(formats)), [f"{f} ({bits[f]})" for f in formats], rotation=90)
    ax.set_yscale("log")
    ax.grid(axis="y", color="0.9", linewidth=0.5)


def figure_3(rows: Sequence[Row]) -> "Figure":
    """Largest difference of flash and plain attention of one format."""
    rows = [r for r in where(rows, figure="3-4") if r.emulation in EMULATIONS]
    with _style():
        fig, axes, kinds = _columns(rows, 1, 2.7)
        for j, (ax, kind) in enumerate(zip(axes[0], kinds)):
            _by_format(ax, where(rows, input=kind), [(i, e, LABELS[e]) for i, e in enumerate(EMULATIONS)],
                       lambda r: r.flash_plain_max)
            _letter(ax, j, _kind(rows, kind))
            ax.set_xlabel("format (mantissa bits)")
        axes[0, 0].set_ylabel("max |flash − plain|")
        _legend(fig, axes[0, 0])
        return fig


def figure_4(rows: Sequence[Row]) -> "Figure":
    """Largest error of each against fp64, and their ratio."""
    rows = [r for r in where(rows, figure="3-4") if r.emulation in EMULATIONS]
    with _style():
        fig, axes, kinds = _columns(rows, 2, 4.5)
        for j, kind in enumerate(kinds):
            mine, (top, bottom) = where(rows, input=kind), axes[:, j]
            _by_format(top, mine, [(i, e, LABELS[e]) for i, e in enumerate(EMULATIONS)],
                       lambda r: r.flash_golden_max)
            _by_format(top, where(mine, emulation="per-tile"), [(_PLAIN, "per-tile", "plain attention")],
                       lambda r: r.plain_golden_max)
            _by_format(bottom,
                       mine, [(i, e, "") for i, e in enumerate(EMULATIONS)],
                       lambda r: r.ratio,
                       geometric=True)
            _marks(bottom)
            _letter(top, j, _kind(rows, kind))
            bottom.set_xlabel("format (mantissa bits)")
        axes[0, 0].set_ylabel("max |error|")
        axes[1, 0].set_ylabel("flash / plain")
        _legend(fig, axes[0, 0])
        return fig


def figure_5(rows: Sequence[Row]) -> "Figure":
    """Over the sequence length, tiles held: maximum, mean, standard deviation; ratio of the errors."""
    rows = where(rows, figure="5")
    tile = rows[0].tile_keys
    measured: list[tuple[str, Callable[[Row], float], bool]] = [
        ("max |flash − plain|", lambda r: r.flash_plain_max, False),
        ("mean |flash − plain|", lambda r: r.flash_plain_mean, False),
        ("std of flash − plain", lambda r: r.flash_plain_std, False),
        ("flash / plain", lambda r: r.ratio, True)]
    with _style():
        fig, axes, kinds = _columns(rows, len(measured), 6.6)
        for j, kind in enumerate(kinds):
            for i, (label, measure, geometric) in enumerate(measured):
                ax = axes[i, j]
                for number, (f, e) in enumerate((f, e) for f in LENGTH_FORMATS for e in EMULATIONS):
                    mine = where(rows, input=kind, format=f, emulation=e)
                    lengths = sorted({r.length for r in mine})
                    _points(ax, lengths, [[measure(r) for r in where(mine, length=n)] for n in lengths],
                            number, f"{f}, {LABELS[e]}", geometric)
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
                ax.xaxis.set_major_formatter("{x:.0f}")
                ax.grid(axis="y", color="0.9", linewidth=0.5)
                if j == 0:
                    ax.set_ylabel(label)
            _marks(axes[-1, j])
            _letter(axes[0, j], j, kind)
            axes[-1, j].set_xlabel(f"keys, in tiles of {tile}")
        _legend(fig, axes[0, 0], 2)
        return fig


def figure_6(rows: Sequence[Row]) -> "Figure":
    """Over the tile's area, for square, wide and tall tiles."""
    rows = where(rows, figure="6")
    names = {"square": "square", "wide": "wide, 1 : 4 (query rows : keys)", "tall": "tall, 4 : 1: swapped"}
    kinds = inputs_of(rows)
    with _style():
        fig = _figure(WIDTH, 1.5 * len(kinds) + 0.9)
        axes = fig.subplots(len(kinds), len(TILE_FORMATS), squeeze=False, sharex=True)
        for i, kind in enumerate(kinds):
            for j, f in enumerate(TILE_FORMATS):
                ax = axes[i, j]
                for number, shape in enumerate(SHAPES):
                    mine = where(rows, input=kind, format=f, shape=shape, emulation="per-tile")
                    areas = sorted({r.tile_rows * r.tile_keys for r in mine})
                    _points(ax, areas, [[r.flash_plain_max for r in mine if r.tile_rows * r.tile_keys == a]
                                        for a in areas], number, f"per tile, {names[shape]}")
                mine = where(rows, input=kind, format=f, shape="square", emulation="fa2")
                areas = sorted({r.tile_rows * r.tile_keys for r in mine})
                _points(ax, areas, [[r.flash_plain_max for r in mine if r.tile_rows * r.tile_keys == a]
                                    for a in areas], 6, "running values in fp32, square")
                ax.set_xscale("log", base=2)
                ax.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
                ax.set_ylim(bottom=0)
                ax.yaxis.get_offset_text().set_fontsize(6)
                ax.set_title(f"{kind}, {f}", loc="right")
                if j == 0:
                    ax.set_ylabel("max |flash − plain|")
                if i == len(kinds) - 1:
                    ax.set_xlabel("tile area")
        _legend(fig, axes[0, 0], 2)
        return fig


def figure_sites(rows: Sequence[Row]) -> "Figure":
    """The ratio of the errors at bf16, rounded per tile, with single sites in fp32."""
    rows = where(rows, figure="sites")
    kinds, groups = inputs_of(rows), list(GROUPS)
    with _style():
        fig = _figure(WIDTH, 2.5)
        axes = fig.subplots(1, len(kinds), squeeze=False, sharey=True)
        for j, (ax, kind) in enumerate(zip(axes[0], kinds)):
            values = [ratio_of(where(rows, input=kind, fp32=g)) for g in groups]
            ax.barh(range(len(groups)), values, color=COLOURS[4], edgecolor=COLOURS[0], linewidth=0.4)
            ax.axvline(1, color="0.4", linewidth=0.6)
            ax.set_yticks(range(len(groups)), groups)
            _letter(ax, j, _kind(rows, kind))
            ax.set_xlabel("flash / plain")
        axes[0, 0].invert_yaxis()
        axes[0, 0].set_ylabel("sites (attn.) in fp32")
        return fig


def _kind(rows: Sequence[Row], kind: str) -> str:
    return f"{kind}, {where(rows, input=kind)[0].tiles} tiles"


def _marks(ax: "Axes") -> None:
    """Lines at 1 and at the paper's 10."""
    for y, dashes in ((1, "-"), (10, ":")):
        ax.axhline(y, color="0.4", linewidth=0.7, linestyle=dashes, zorder=1)


def _legend(fig: "Figure", ax: "Axes", columns: int = 3) -> None:
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


# ---- trainings ------------------------------------------------------------------------------------

def drifts(found: Sequence[Any], measures: Sequence[tuple[str, str]], across: bool = False) -> "Figure":
    """Distances of the weights of pairs over the steps, a column for each sort of pair.

    Args:
        found: drifts of one group of weights, as `all`.
        measures: (attribute, label of the axis) for each line of panels; with `across` for each column.
    """
    kinds, labels = (list(dict.fromkeys(getattr(d, name) for d in found)) for name in ("kind", "label"))
    with _style():
        shape = (1, len(measures)) if across else (len(measures), len(kinds))
        fig = _figure(WIDTH, 2.1 * shape[0] + 0.4)
        axes = fig.subplots(*shape, squeeze=False, sharex=True, sharey=False if across else "row")
        for (i, j), ax in np.ndenumerate(axes):
            (attribute, name), kind = measures[j if across else i], kinds[0 if across else j]
            mine = [d for d in found if d.kind == kind]
            for label, seed in dict.fromkeys((d.label, d.seed) for d in mine):
                line = [d for d in mine if (d.label, d.seed) == (label, seed)]
                values = np.array([getattr(d, attribute) for d in line])
                again = seed != min(d.seed for d in mine if d.label == label)
                style = _line(labels.index(label)) | {"linewidth": 0.6 if again else 1.3}
                ax.plot([d.step for d in line],
                        np.where(values > 0, values, math.nan),
                        label=None if again else label,
                        **style)
            ax.set_yscale("log")
            ax.grid(axis="y", color="0.9", linewidth=0.5)
            if across or j == 0:
                ax.set_ylabel(name)
            if i == 0:
                _letter(ax, j, kind)
            if i == shape[0] - 1:
                ax.set_xlabel("step")
        handles = {t: h for ax in axes.flat for h, t in zip(*ax.get_legend_handles_labels())}
        fig.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles))
        return fig
