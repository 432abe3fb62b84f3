import numpy as np
import pytest

from cuflash.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_forward

from .network import PRECISIONS, assert_same, put, rounder, values


@pytest.mark.parametrize("vocab_size", [256, 65, 1001, 50257, 50304, 120_000])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_cross_entropy(precision, vocab_size, seed):
    import cupy
    rng, p = np.random.default_rng(seed), PRECISIONS[precision]
    fwd, bwd = (rounder(p, d, samples=2) for d in ("fwd", "bwd"))
    shape = (2, 9, vocab_size) if vocab_size < 50_000 else (2, 2, vocab_size)
    format = fwd.format("logits")
    z, targets = 4 * values(rng, shape, format), rng.integers(0, vocab_size, shape[:2])
    z[0, 0, 5], z[0, 1, :4] = (np.inf if seed % 2 else np.nan), -np.inf
    with np.errstate(invalid="ignore"):
        loss, saved = cross_entropy_forward(z.copy(), targets, fwd)
        dz = cross_entropy_backward(saved, shape, 1 / 18, bwd)
    for padded in (False, True):
        def logits():
            if not padded:
                return put(z, format)
            rows = cupy.full((*shape[:2], -(-vocab_size // 64) * 64), np.nan, put(z[:0], format).dtype)
            rows[..., :vocab_size] = put(z, format)
            return rows[..., :vocab_size]
        got_loss, got_saved = cross_entropy_forward(logits(), cupy.asarray(targets), fwd)
        got_dz = cross_entropy_backward(got_saved, shape, 1 / 18, bwd)
        fused_loss, fused_dz = cross_entropy(logits(), cupy.asarray(targets), 1 / 18, fwd, bwd)
        for got, expected, what in ((got_loss, loss, "loss"), (got_dz, dz, "dz"),
                                    (fused_loss, loss, "fused loss"),
                                    (fused_dz, dz, "fused dz")):
            assert_same(got, expected, f"{what}, padded {padded}, seed {seed}")
    finite = z[1:]
    assert_same(cross_entropy_forward(put(finite, format), cupy.asarray(targets[1:]), fwd)[0],
                cross_entropy_forward(finite, targets[1:], fwd)[0], f"finite loss, seed {seed}")
