import numpy as np

from cuflash.residual import residual_backward, residual_forward

from .finite import rounder

rng = np.random.default_rng(5)


def test_both_are_sums_at_their_sites():
    a, b = rng.standard_normal((2, 3, 4)).astype(np.float32)
    for function, site, direction in (
        (residual_forward, "residual.y", "fwd"),
        (residual_backward, "residual.dx", "bwd"),
    ):
        assert np.array_equal(function(a, b, rounder("bf16", direction)), a + b)  # the stream stays fp32
        stream = rounder("bf16-stream", direction)
        assert np.array_equal(function(a, b, stream), stream(site, a + b))
        assert not np.array_equal(function(a, b, stream), a + b)


def test_the_inputs_are_left_alone():
    a, b = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)
    residual_forward(a, b, rounder("fp32"))
    assert (a == 1).all() and (b == 1).all()
