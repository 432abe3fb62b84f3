"""δ's error, its direction and its cause on a saved state, against plain loops (figures 4, 5, 6 and 12)."""
import numpy as np
import pytest

from cuflash.audit_map import read_maps
from cuflash.dump import read
from cuflash.model.states import layer_states
from cuflash.model.why_measures import delta_rows, hottest, read_terms, record, term_cosine, terms, write_terms
from cuflash.plot import row


def test_delta_s_error_and_what_it_adds_to_w_q(saved_run):
    rows = delta_rows(saved_run.path, 12, [0, 1])
    state, = layer_states(saved_run.path, 12, [0, 1], [1])
    error = state.capture.run(state.precision).delta - state.capture.golden.delta
    mine = {r.head: r for r in rows if r.layer == 1}
    assert mine[-1].sum == pytest.approx(error.sum()) and mine[1].sum == pytest.approx(error[:, 1].sum())
    assert mine[-1].rows == error.size == 2 * 2 * 16
    # equation 2 by loops over samples, heads and tokens
    u, _, v = state.leading()
    total = 0.0
    for b in range(2):
        for h in range(2):
            for t in range(16):
                total += error[b, h, t] * (u[8 * h:8 * h + 8] @ state.pk(h)[b, t]) * (state.x[b, t] @ v)
    expected = state.capture.scale * total / np.linalg.norm(state.dw_q(state.capture.golden))
    assert mine[-1].growth == pytest.approx(expected, rel=1e-9)
    layer, head = hottest(rows)
    assert mine[-1].growth == max(r.growth for r in rows if r.head < 0) or layer == 0
    assert head in (0, 1)


def test_terms_against_their_matrices(saved_run):
    state, = layer_states(saved_run.path, 12, [0, 1], [1])
    found, term = terms(state, 1)
    error = (state.capture.run(state.precision).delta - state.capture.golden.delta)[:, 1]
    order = sorted(np.ndindex(error.shape), key=lambda i: -abs(error[i]))[:found.tokens]
    outers = np.array([np.outer(state.pk(1)[i], state.x[i].astype(float)).ravel() for i in order])
    outers /= np.linalg.norm(outers, axis=1, keepdims=True)
    cosines = np.abs(outers @ outers.T)[~np.eye(len(order), dtype=bool)]
    assert found.cosine == pytest.approx(cosines.mean()) and (term.sample, term.token) == order[0]
    share = np.linalg.svd(outers, compute_uv=False)**2 / len(order)
    share = share[share > 1e-15]
    assert found.rank == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-6)  # of eigenvalues near 0
    assert term_cosine(term, term) == pytest.approx(1) and term.outer.shape == (8, 16)


def test_terms_are_read_as_they_were_written(saved_run, tmp_path):
    found = [terms(layer_states(saved_run.path, step, [0, 1], [1])[0], 1)[1] for step in (12, 16)]
    write_terms(tmp_path / "terms.h5", found)
    for one, two in zip(found, read_terms(tmp_path / "terms.h5"), strict=True):
        np.testing.assert_equal(vars(two), vars(one))
    (tmp_path / "terms.h5").write_bytes((tmp_path / "terms.h5").read_bytes()[:1000])
    with pytest.raises(ValueError, match="terms.h5: damaged, cut short or not HDF5"):
        read_terms(tmp_path / "terms.h5")


def test_the_most_wrong_row_is_recorded(saved_run, tmp_path):
    state, = layer_states(saved_run.path, 12, [0, 1], [1])
    place = record(saved_run.path, 12, state, 0, tmp_path / "maps.h5", tmp_path / "row.h5")
    m = read_maps(tmp_path / "maps.h5")[0][1][0]
    assert np.abs(m.delta[:, 0]).max() == abs(m.delta[place.sample, 0, place.query])
    assert np.abs(m.by_feature[place.sample, 0, place.query]).argmax() == place.feature
    row(read(tmp_path / "row.h5"), query=place.query, feature=place.feature, layer=1, sample=place.sample, head=0)
