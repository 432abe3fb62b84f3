"""Figures of study 1: what is drawn where. Their looks are seen in docs."""
import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the extra plot is not installed")
from cuflash.plot_why import curves  # noqa: E402


@pytest.mark.parametrize("arms, columns", [(1, 1), (2, 2), (4, 4), (5, 5), (6, 3), (8, 4), (14, 5), (15, 5), (20, 4)])
def test_panels_of_arms_fill_their_grid(arms, columns):
    run = {"step": np.arange(3), "loss": np.arange(3.0)}
    fig = curves({f"arm {i}": [run] for i in range(arms)}, {f"arm {i}": [False] for i in range(arms)})
    drawn = [ax for ax in fig.axes if ax.get_visible()]
    assert len(drawn) == arms and len({round(ax.get_subplotspec().colspan.start) for ax in drawn}) == columns
    assert all(ax.get_xlabel() == "step" for ax in drawn[-columns:])
