"""Figures of study 1: what is drawn where. Their looks are seen in docs."""
import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the extra plot is not installed")
from cuflash.plot_why import curves, delta_sums, screening, survival, touched  # noqa: E402


@pytest.mark.parametrize("arms, columns", [(1, 1), (2, 2), (4, 4), (5, 5), (6, 3), (8, 4), (14, 5), (15, 5), (20, 4)])
def test_panels_of_arms_fill_their_grid(arms, columns):
    run = {"step": np.arange(3), "loss": np.arange(3.0)}
    fig = curves({f"arm {i}": [run] for i in range(arms)}, {f"arm {i}": [False] for i in range(arms)})
    drawn = [ax for ax in fig.axes if ax.get_visible()]
    assert len(drawn) == arms and len({round(ax.get_subplotspec().colspan.start) for ax in drawn}) == columns
    assert all(ax.get_xlabel() == "step" for ax in drawn[-columns:])


def looks(line):
    return line.get_color(), str(line.get_linestyle()), line.get_marker(), str(line._unscaled_dash_pattern)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_no_two_lines_look_alike(count):
    axes = survival({f"arm {i}": [(100, 0.5)] for i in range(count)}, 1000).axes[0]
    assert len({looks(line) for line in axes.lines}) == count
    rows = [SimpleNamespace(layer=i, head=-1, step=s, sum=1.0, growth=1.0, sigma=1.0)
            for i in range(count) for s in (1, 2)]
    axes = delta_sums(rows).axes[2]
    assert len({looks(line) for line in axes.lines}) == count


def test_names_of_arms_stand_below_the_panels():
    run = {name: np.arange(1.0, 4.0) for name in ("step", "loss", "ties", "changed", "rows")}
    fig = touched({f"arm {i} with a long name": run for i in range(5)})
    fig.draw_without_rendering()
    legend = fig.legends[0].get_window_extent()
    assert all(legend.y1 <= ax.get_tightbbox().y0 + 1 for ax in fig.axes) and legend.x0 >= 0
    assert legend.x1 <= fig.bbox.x1


@pytest.mark.parametrize("growth", [[math.inf], [math.inf, 2e-3, -1e-3]])
def test_a_site_that_is_not_finite_is_said_to_be(growth):
    ranked = [SimpleNamespace(site=f"attn.s{i}", layer=0, growth=g, delta=g, agree=1.0) for i, g in enumerate(growth)]
    for ax in screening(ranked).axes:
        widths = [bar.get_width() for bar in ax.patches]
        assert [t.get_text() for t in ax.texts] == [" not finite"] and ax.patches[0].get_hatch()
        assert widths[0] == max(map(abs, widths)) and (len(growth) > 1 or widths == [1.0])


def test_a_loss_that_explodes_does_not_flatten_the_others():
    steps = np.arange(40)
    calm = {"step": steps, "loss": 5.0 - 0.1 * steps}
    wild = {"step": steps, "loss": np.where(steps < 30, calm["loss"], 1e6)}
    fig = curves({"calm": [calm], "wild": [wild, {"step": steps[:2], "loss": np.array([5.0, np.nan])}]},
                 {"calm": [False], "wild": [True, True]})
    low, high = fig.axes[0].get_ylim()
    assert low < 1.1 and 5 <= high < 5.3  # the short run has fallen to 5 alone


@pytest.mark.parametrize("losses", [[], [[1.0]], [[np.nan]], [[np.inf, np.nan]], [[2.0] * 20]])
def test_panels_of_arms_with_nothing_to_show(losses):
    runs = [{"step": np.arange(len(x)), "loss": np.array(x)} for x in losses]
    assert len(curves({"a": runs, "b": []}, {"a": [True] * len(runs), "b": []}).axes) == 2
