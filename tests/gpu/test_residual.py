import numpy as np
import pytest

from cuflash.residual import residual_backward, residual_forward

from .network import PRECISIONS, assert_same, put, rounder, values


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(2, 33, 70), (3, 40, 256), (1, 1, 1)], ids=str)
def test_residual(precision, shape, seed):
    rng, p = np.random.default_rng(seed), PRECISIONS[precision]
    fwd, bwd = (rounder(p, d, samples=shape[0]) for d in ("fwd", "bwd"))
    formats = fwd.format("residual.y"), fwd.format("linear.y")
    x, branch = (values(rng, shape, f, wide=True) for f in formats)
    got = residual_forward(put(x, formats[0]), put(branch, formats[1]), fwd)
    assert got.dtype == put(x[:0], formats[0]).dtype
    assert_same(got, residual_forward(x, branch, fwd), f"y, seed {seed}")
    assert_same(residual_backward(put(x, formats[0]), put(branch, formats[1]), bwd),
                residual_backward(x, branch, bwd),
                f"dx, seed {seed}")
