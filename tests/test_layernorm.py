import numpy as np
import pytest

from cuflash.functions import rsqrt
from cuflash.layernorm import layernorm_backward, layernorm_forward
from cuflash.reduce import column_sum, row_sum

from .finite import Watcher, assert_gradient, rounder

rng = np.random.default_rng(2)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_by_finite_differences(bias):
    x, weight = rng.standard_normal((2, 3, 10)), rng.standard_normal((2, 3, 10))
    w, b = rng.standard_normal(10), rng.standard_normal(10) if bias else None

    def loss() -> float:
        return float((weight * layernorm_forward(x, w, b, rounder())[0]).sum())

    _, saved = layernorm_forward(x, w, b, rounder())
    dx, dw, db = layernorm_backward(weight, saved, rounder(direction="bwd"), bias=bias)
    assert_gradient(loss, x, dx)
    assert_gradient(loss, w, dw)
    if bias:
        assert_gradient(loss, b, db)
    else:
        assert db is None


def test_the_bits_are_those_of_the_written_sequence():
    """One row at a time, scalars of the row in the order that the docstring gives."""
    x, dy = rng.standard_normal((2, 4, 70)).astype(np.float32) * np.float32(3)
    w, b = rng.standard_normal((2, 70)).astype(np.float32)
    y, saved = layernorm_forward(x, w, b, rounder("fp32"))
    dx, dw, db = layernorm_backward(dy, saved, rounder("fp32", "bwd"))
    C, eps = np.float32(70), np.float32(1e-5)
    products = []
    for row, g_row, got_y, got_dx in zip(x, dy, y, dx):
        d = row - row_sum(row) / C
        rstd = rsqrt(row_sum(d * d) / C + eps)
        xhat = d * rstd
        assert np.array_equal(got_y, xhat * w + b)
        g = g_row * w
        assert np.array_equal(got_dx, ((g - row_sum(g) / C) - xhat * (row_sum(g * xhat) / C)) * rstd)
        products.append(g_row * xhat)
    assert np.array_equal(dw, column_sum(np.array(products))) and np.array_equal(db, column_sum(dy))


def test_fp32_agrees_with_fp64():
    """Two sums of 768 terms and a few operations: below 1e-5 in values of order 1."""
    x = rng.standard_normal((5, 768)).astype(np.float32)
    w = np.ones(768, np.float32)
    y, _ = layernorm_forward(x, w, None, rounder("fp32"))
    exact, _ = layernorm_forward(x.astype(np.float64), w.astype(np.float64), None, rounder())
    assert np.abs(y - exact).max() < 1e-5


def test_a_constant_row_gives_the_bias():
    w, b = np.ones(8, np.float32), np.arange(8, dtype=np.float32)
    y, _ = layernorm_forward(np.full((1, 8), 3, np.float32), w, b, rounder("fp32"))
    assert np.array_equal(y, b[None])


def test_sites():
    seen = Watcher()
    x, w = rng.standard_normal((3, 8)).astype(np.float32), np.ones(8, np.float32)
    _, saved = layernorm_forward(x, w, None, rounder("bf16", watch=seen))
    layernorm_backward(x, saved, rounder("bf16", "bwd", watch=seen))
    assert seen.sites == ["ln.y", "ln.dx"]
