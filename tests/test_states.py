"""Saved states: what a layer took, and its gradient of W_Q, against the model's own pass."""
import numpy as np
import pytest

from cuflash.model.passes import one_pass
from cuflash.model.states import layer_states, states_before


def test_dw_q_is_the_model_s(saved_run):
    states = layer_states(saved_run.path, 12, [0, 1])
    p = one_pass(saved_run.path, step=12)
    _, grads = p.run()
    for state in states:
        mine = state.dw_q(state.capture.run(state.precision))
        model = grads[f"h.{state.layer}.attn.c_attn.weight"][:16]
        # the model's is rounded to bf16 once more, at linear.dw: half a unit in its eighth digit
        assert np.abs(mine - model).max() <= 2.0**-8 * np.abs(model).max()
        u, sigma, v = state.leading()
        assert sigma == pytest.approx(np.linalg.norm(state.w_q.astype(float), 2))
        assert u @ state.w_q @ v == pytest.approx(sigma)


def test_pk_is_what_delta_s_error_is_multiplied_by(saved_run):
    """dQ with δ + ε is dQ − α ε PK (equation 1)."""
    state, = layer_states(saved_run.path, 12, [1], [1])
    q, k, v, do = (getattr(state.capture, n).astype(np.float64)[0, 0] for n in ("q", "k", "v", "do"))
    s = np.where(np.tri(len(q), dtype=bool), q @ k.T * state.capture.scale, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    epsilon = np.linspace(-1, 1, len(q))
    dp = do @ v.T
    delta = (p * dp).sum(axis=1)
    dq, shifted = (state.capture.scale * (p * (dp - d[:, None])) @ k for d in (delta, delta + epsilon))
    assert shifted - dq == pytest.approx(-state.capture.scale * epsilon[:, None] * state.pk(0)[0], abs=1e-12)
    assert state.capture.golden.dq[0, 0] == pytest.approx(dq, abs=1e-12)


def test_states_before(saved_run):
    # the pass after 12 is step 13
    assert states_before(saved_run, 13, 2) == [4, 8] and states_before(saved_run, 14, 2) == [8, 12]
    with pytest.raises(ValueError, match="no checkpoint from before step 4"):
        states_before(saved_run, 4, 2)
