"""Two checkpoints compared weight by weight, against direct computation."""
import math

import numpy as np
import pytest

from cuflash.model.gpt import GPTConfig, init_params
from cuflash.weight_diff import diff_weights, wasserstein
from tests.test_diff import save, wide, write


@pytest.mark.parametrize("na, nb", [(1000, 1000), (1000, 700), (1, 5), (3, 3)])
def test_wasserstein_is_exact(na, nb):
    rng = np.random.default_rng(na + nb)
    a = rng.standard_normal(na).astype(np.float32)
    b = np.concatenate([rng.standard_normal(nb - nb // 3) * 2, np.zeros(nb // 3)]).astype(np.float32)
    # ∫|F_a⁻¹ − F_b⁻¹| over the steps of both
    steps = np.unique(np.concatenate([np.arange(1, na + 1) * nb, np.arange(1, nb + 1) * na]))
    widths = np.diff(steps, prepend=0) / (na * nb)
    at = steps - 1
    expected = (np.abs(np.sort(wide(a))[at // nb] - np.sort(wide(b))[at // na]) * widths).sum()
    for limit in (10, 200, 1 << 20):
        found = wasserstein(lambda: np.array_split(a, 3), lambda: np.array_split(b, 2), limit)
        assert found == pytest.approx(expected, rel=1e-12)  # fp64 sums in another order
    if na == nb:
        assert expected == pytest.approx(np.abs(np.sort(wide(a)) - np.sort(wide(b))).mean(), rel=1e-12)


def test_wasserstein_of_a_shift_of_equals_and_of_no_numbers():
    x = np.linspace(-2, 3, 100)
    assert wasserstein(lambda: [x], lambda: [x[::-1] + 0.25]) == pytest.approx(0.25, rel=1e-12)
    assert wasserstein(lambda: [x], lambda: [x[::-1]]) == 0
    assert math.isnan(wasserstein(lambda: [x], lambda: [np.array([np.nan])]))
    assert math.isnan(wasserstein(lambda: [x], lambda: [x[:0]]))


def test_weights(tmp_path):
    noise = np.random.default_rng(37).standard_normal((64, 16)).astype(np.float32)
    a = save(tmp_path / "a.h5")
    b = save(tmp_path / "b.h5", {"h.0.mlp.c_fc.weight": noise, "ln_f.weight": np.float32(0.5)})
    found = {w.name: w for w in diff_weights(a, b)}
    params = init_params(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8), 1)
    assert list(found) == [*sorted(params), "h.0", "all"]
    layer = sum(p.size for n, p in params.items() if n.startswith("h.0."))
    assert found["h.0"].shape == (layer,) and found["h.0"].equal == pytest.approx(1 - noise.size / layer, abs=2 / layer)
    w = params["h.0.mlp.c_fc.weight"]
    d = np.abs(wide(w) - (w + noise))
    x = found["h.0.mlp.c_fc.weight"]
    assert x.max_abs == d.max() and x.mean_abs == pytest.approx(d.mean(), rel=1e-12)
    assert x.wasserstein == pytest.approx(
        np.abs(np.sort(wide(w), None) - np.sort(wide(w + noise), None)).mean(), rel=1e-12)
    assert found["ln_f.weight"].wasserstein == 0.5 and not found["wte"].differs and found[
        "wte"].wasserstein == 0
    total = sum(p.size for p in params.values())
    assert found["all"].shape == (total,) and found["all"].max_abs == x.max_abs
    assert found["all"].equal == pytest.approx(1 - (noise.size + 16) / total,
                                               abs=2 / total)  # one or two noises vanish
    with pytest.raises(ValueError, match="of different models: h.0.attn.c_attn.weight has shape"):
        diff_weights(a, save(tmp_path / "c.h5", n_embd=8))
    with pytest.raises(ValueError, match="is not a checkpoint: it has no group params"):
        diff_weights(a, write(tmp_path / "d.h5", x=np.zeros(1)))
