import numpy as np
import pytest

from cuflash.grad_norm import clip_factor, grad_norm
from cuflash.reduce import total_sum

rng = np.random.default_rng(8)


def test_norm_of_all_arrays_in_their_order():
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((300, 70), (5,), (40, 3))]
    squares = [total_sum(a * a) for a in arrays]
    assert grad_norm(arrays) == float(np.sqrt((squares[0] + squares[1]) + squares[2]))
    exact = np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in arrays))
    assert abs(grad_norm(arrays) / exact - 1) < 1e-6  # a thread adds 32 squares at most, in fp32


def test_no_gradients():
    with pytest.raises(ValueError, match="gradients: needs at least one array"):
        grad_norm([])


@pytest.mark.parametrize("norm,limit,factor", [(0.5, 1.0, 1.0), (4.0, 1.0, 1 / 4.000001), (4.0, 0.0, 1.0)])
def test_clip_factor(norm, limit, factor):
    assert clip_factor(norm, limit) == factor
