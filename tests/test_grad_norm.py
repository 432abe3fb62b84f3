import numpy as np
import pytest

from cuflash.grad_norm import clip_factor, grad_norm
from cuflash.reduce import block_sums, row_sum

rng = np.random.default_rng(8)


def test_norm_of_all_arrays_in_their_order():
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((300, 70), (5,), (40, 3))]
    sums = np.concatenate([block_sums(a * a) for a in arrays])
    assert len(sums) == 3 + 1 + 1  # an array starts a block of its own
    assert grad_norm(arrays) == float(np.sqrt(row_sum(sums)))
    exact = np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in arrays))
    assert abs(grad_norm(arrays) / exact - 1) < 1e-6  # a thread adds 8 squares at most, in fp32


def test_no_gradients():
    with pytest.raises(ValueError, match="gradients: needs at least one array"):
        grad_norm([])


@pytest.mark.parametrize("norm,limit,factor", [(0.5, 1.0, 1.0), (4.0, 1.0, 1 / 4.000001), (4.0, 0.0, 1.0)])
def test_clip_factor(norm, limit, factor):
    assert clip_factor(norm, limit) == factor
