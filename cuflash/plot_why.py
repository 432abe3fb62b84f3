"""Figures of study 1 (arXiv 2510.04212) and beyond, from the rows of its tables.

A run is a mapping of columns of metrics.csv to arrays, `step` and `loss` among them.
"""
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.plot import COLOURS, WIDTH, _figure, _letter, _line, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = Mapping[str, np.ndarray]
MARKERS = "os^Dv<>p"  # eight beside the seven colours, so that no two of 56 lines are alike
VERDICT_COLOURS = {"fails": COLOURS[1], "trains": COLOURS[0], "undecided": "0.6"}
COLUMNS = (4, 5, 3)


def curves(arms: Mapping[str, Sequence[Run]], failures: Mapping[str, Sequence[bool]]) -> "Figure":
    """Loss of every run over the steps, a panel for each arm; a run that failed is dashed (figures 2 and 7).

    Losses are cut off above the largest that a run has reached in the first tenth of the steps: one that explodes
    would flatten all others.
    """
    every = [run["loss"] for runs in arms.values() for run in runs if np.isfinite(run["loss"]).any()]
    # Of a few numbers of columns that which leaves the fewest places empty.
    columns = min(len(arms), min(COLUMNS, key=lambda n: -len(arms) % n))
    lines = -(-len(arms) // columns)
    with _style():
        fig = _figure(WIDTH, 1.5 * lines + 0.4)
        axes = np.ravel(fig.subplots(lines, columns, squeeze=False, sharex=True, sharey=True))
        for ax in axes[len(arms):]:
            ax.set_visible(False)
        for k, (ax, (name, runs)) in enumerate(zip(axes, arms.items())):
            for run, failed in zip(runs, failures[name], strict=True):
                ax.plot(run["step"], run["loss"], color=VERDICT_COLOURS["fails" if failed else "trains"],
                        linestyle="--" if failed else "-", linewidth=0.8)
            ax.set_title(name, fontsize=7)
            if k % columns == 0:
                ax.set_ylabel("loss, nats")
            if k >= len(arms) - columns:  # nothing stands below
                ax.set_xlabel("step")
                ax.tick_params(labelbottom=True)
        if every:
            tenth = max(map(len, every)) // 10
            bottom, top = (f(values) for f, values in ((min, map(np.nanmin, every)),
                                                       (max, (np.nanmin(loss[:tenth + 1]) for loss in every))))
            if top > bottom:
                axes[0].set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
        return fig


def rates(rows: Sequence[Any]) -> "Figure":
    """Failure rate of each arm with its 95 % interval, coloured by the verdict; on the right failures of runs."""
    with _style():
        fig = _figure(WIDTH, max(1.6, 0.2 * len(rows) + 0.7))
        ax = fig.subplots()
        y = np.arange(len(rows))
        for verdict, colour in VERDICT_COLOURS.items():
            mine = [i for i, r in enumerate(rows) if r.verdict == verdict and r.runs]
            if mine:
                rate = np.array([rows[i].rate for i in mine])
                low, high = (np.array([getattr(rows[i], n) for i in mine]) for n in ("low", "high"))
                ax.errorbar(100 * rate, y[mine], xerr=100 * np.abs([rate - low, high - rate]), fmt="o", markersize=4,
                            color=colour, elinewidth=1, label=verdict)
        for i, r in enumerate(rows):
            ax.text(103, i, f"{r.failures}/{r.runs}", va="center", fontsize=7)
        ax.set_yticks(y, [r.arm for r in rows])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(-3, 112)
        ax.set_xlabel("% of the runs that fail")
        ax.grid(axis="x", color="0.9", linewidth=0.5)
        ax.set_axisbelow(True)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return fig


def survival(curves: Mapping[str, Sequence[tuple[int, float]]], last: int) -> "Figure":
    """Share of the runs that have not failed, over the steps (Kaplan and Meier); (step, share) by arm."""
    with _style():
        fig = _figure(WIDTH, 2.4)
        ax = fig.subplots()
        for i, (name, points) in enumerate(curves.items()):
            steps, shares = [0, *(s for s, _ in points), last], [1.0, *(share for _, share in points)]
            marks = {"marker": MARKERS[i // len(COLOURS)], "markersize": 3.5} if i >= len(COLOURS) else {}
            ax.step(steps, [*shares, shares[-1]], where="post", label=name, **_line(i), **marks)
        ax.set(xlabel="step", ylabel="share that trains", ylim=(-0.03, 1.03))
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + len(curves) // 14)
        return fig


def touched(runs: Mapping[str, Run]) -> "Figure":
    """Loss, and the share of attention's rows that have ties and that the fix changes (figure 13)."""
    with _style():
        fig = _figure(WIDTH, 2.2 + 0.15 * -(-len(runs) // 3))
        loss, ties, changed = fig.subplots(1, 3, sharex=True)
        for i, (name, run) in enumerate(runs.items()):
            loss.plot(run["step"], run["loss"], label=name, **_line(i))
            ties.plot(run["step"], 100 * run["ties"] / run["rows"], **_line(i))
            changed.plot(run["step"], 100 * run["changed"] / run["rows"], **_line(i))
        for k, (ax, title, unit) in enumerate(((loss, "Loss", "nats a token"), (ties, "Rows with ties", "% of rows"),
                                               (changed, "Rows the fix changes", "% of rows"))):
            _letter(ax, k, title)
            ax.set(xlabel="step", ylabel=unit)
        fig.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return fig


def delta_sums(rows: Sequence[Any]) -> "Figure":
    """Σ(δ_lp − δ_hp) by layer over the saved states, summed up, and what it adds to W_Q's growth (figure 5a)."""
    layers = sorted({r.layer for r in rows})
    with _style():
        fig = _figure(WIDTH, 2.3)
        total, growth, sigma = fig.subplots(1, 3, sharex=True)
        for i, layer in enumerate(layers):
            mine = sorted((r for r in rows if r.layer == layer and r.head < 0), key=lambda r: r.step)
            steps = [r.step for r in mine]
            style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markersize": 2.5} | _line(i)
            total.plot(steps, np.cumsum([r.sum for r in mine]), label=f"L{layer}", **style)
            growth.plot(steps, [r.growth for r in mine], **style)
            sigma.plot(steps, [r.sigma for r in mine], **style)
        for ax in (total, growth):
            ax.axhline(0, color="0.6", linewidth=0.6)
        _letter(total, 0, r"$\Sigma(\delta_\mathrm{lp} - \delta_\mathrm{hp})$, states summed up")
        _letter(growth, 1, r"its share of $-u^\top dW_Q\,v\,/\,\|dW_Q\|$")
        _letter(sigma, 2, "$W_Q$'s largest singular value")
        for ax in (total, growth, sigma):
            ax.set_xlabel("step")
        total.legend(ncols=1 + len(layers) // 7)
        return fig


def terms(found: Sequence[Any]) -> "Figure":
    """PK, X and (PK)[T]ᵀX[T] of two tokens, a line for each (figure 4)."""
    with _style():
        fig = _figure(WIDTH, 1.9 * len(found))
        axes = fig.subplots(len(found), 3, squeeze=False)
        for i, term in enumerate(found):
            for j, (values, title, x, y) in enumerate((
                    (term.pk, f"PK, step {term.step}", "feature of the head", "token"),
                    (term.x, "X", "input feature", "token"),
                    (term.outer, f"(PK)[{term.token}]ᵀ X[{term.token}]", "input feature", "feature of the head"))):
                ax = axes[i, j]
                reach = float(np.abs(values).max()) or 1.0
                mesh = ax.imshow(values, aspect="auto", cmap="PuOr", vmin=-reach, vmax=reach, interpolation="nearest")
                if j < 2:
                    ax.axhline(term.token, color="black", linewidth=0.4)
                _letter(ax, 3 * i + j, title)
                ax.set(xlabel=x, ylabel=y)
                fig.colorbar(mesh, ax=ax)
        return fig


def screening(ranked: Sequence[Any]) -> "Figure":
    """What each site alone adds to the growth of W_Q and to Σδ, in the layer where it adds most."""
    with _style():
        fig = _figure(WIDTH, max(2.0, 0.16 * len(ranked) + 0.8))
        axes: tuple[Axes, Axes] = fig.subplots(1, 2, sharey=True)
        y = np.arange(len(ranked))
        for ax, name, label in zip(axes, ("growth", "delta"), (r"$-u^\top \Delta dW_Q\,v\,/\,\|dW_Q\|$",
                                                               r"$\Sigma\,\Delta\delta$")):
            ax.axvline(0, color="0.4", linewidth=0.6)
            values = np.array([getattr(r, name) for r in ranked])
            beyond = ~np.isfinite(values)
            values[beyond] = 1.2 * np.abs(values[~beyond]).max(initial=0) or 1.0
            bars = ax.barh(y, values, color=[COLOURS[1] if r.agree == 1 else COLOURS[4] for r in ranked])
            for i in np.flatnonzero(beyond):
                bars[i].set(hatch="///", facecolor="none", edgecolor="0.6")
                ax.text(0, i, " not finite", va="center", fontsize=7)
            ax.set_xlabel(label)
            ax.locator_params(axis="x", nbins=4)
            ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
        axes[0].set_yticks(y, [f"{r.site}, L{r.layer}" for r in ranked])
        axes[0].set_ylim(len(ranked) - 0.5, -0.5)
        _letter(axes[0], 0, "Growth of $W_Q$; orange: one sign in all states")
        _letter(axes[1], 1, "Sum of δ")
        return fig
