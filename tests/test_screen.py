"""Screening of single sites, against passes of attention put together by hand."""
import numpy as np
import pytest

from cuflash.model.screen import ALL, WAYS, ranking, screen
from cuflash.model.states import layer_states
from cuflash.model.study_arms import short_sites


def test_screening_adds_up_what_each_site_does(saved_run):
    rows = screen(saved_run.path, 12, [0, 1])
    sites = short_sites(saved_run.config["train"]["precision"])
    assert [(r.site, r.way) for r in rows if r.layer == 1] == [(s, w) for s in (ALL, *sites) for w in WAYS]
    assert rows == screen(saved_run.path, 12, [0, 1])  # deterministic
    state, = layer_states(saved_run.path, 12, [0, 1], [1])
    u, _, v = state.leading()
    low, high = (state.capture.run(p) for p in (state.precision, state.precision.round("attn=fp32")))
    one = state.capture.run(state.precision.round("attn.o=fp32"))
    found = {(r.site, r.way): r for r in rows if r.layer == 1}
    size = np.linalg.norm(state.dw_q(high))
    for (site, way), (more, less) in (((ALL, WAYS[0]), (low, high)), (("attn.o", WAYS[0]), (low, one))):
        row = found[site, way]
        assert row.growth == pytest.approx(-(u @ (state.dw_q(more) - state.dw_q(less)) @ v) / size, rel=1e-9)
        assert row.delta == pytest.approx((more.delta - less.delta).sum(), rel=1e-9)
    assert found["attn.o", WAYS[0]].growth != 0 and found["attn.dq", WAYS[0]].delta == 0  # δ does not see dQ's rounding


def test_growth_is_that_of_the_largest_singular_value(saved_run):
    """What a step of descent along either gradient makes of W_Q, by its singular values."""
    row = next(r for r in screen(saved_run.path, 12, [0, 1], [1]) if (r.site, r.way) == (ALL, WAYS[0]))
    state, = layer_states(saved_run.path, 12, [0, 1], [1])
    low, high = (state.dw_q(state.capture.run(p)) for p in (state.precision, state.precision.round("attn=fp32")))
    size = np.linalg.norm(high)
    rate = 1e-7 * np.linalg.norm(state.w_q) / size
    after = [np.linalg.svd(state.w_q.astype(float) - rate * dw, compute_uv=False)[0] for dw in (low, high)]
    assert row.growth == pytest.approx((after[0] - after[1]) / (rate * size), rel=1e-3) and row.growth != 0


def test_ranking_takes_the_worst_layer(saved_run):
    rows = screen(saved_run.path, 12, [0]) + screen(saved_run.path, 16, [0])
    ranked = ranking(rows)
    assert [r.growth for r in ranked] == sorted((r.growth for r in ranked), reverse=True)
    for r in ranked:
        means = {layer: np.mean([x.growth for x in rows if (x.site, x.layer) == (r.site, layer)]) for layer in (0, 1)}
        assert r.growth == pytest.approx(max(means.values())) and means[r.layer] == pytest.approx(r.growth)
        assert 0 <= r.agree <= 1
