import numpy as np
import pytest

from cuflash.accumulators import dot_fp32
from cuflash.formats import is_representable
from cuflash.linear import linear_backward, linear_forward
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.sites import Rounder

from .finite import Watcher, assert_gradient, rounder

rng = np.random.default_rng(3)


def arrays(dtype: type = np.float32) -> list[np.ndarray]:
    """x (2, 3, 8), w (5, 8), b (5), dy (2, 3, 5)."""
    return [rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, 8), (5, 8), (5,), (2, 3, 5))]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_by_finite_differences(bias):
    x, w, b, dy = arrays(np.float64)

    def loss() -> float:
        return float((dy * linear_forward(x, w, b if bias else None, rounder())[0]).sum())

    _, saved = linear_forward(x, w, b, rounder())
    dx, dw, db = linear_backward(dy, saved, w, rounder(direction="bwd"), bias=bias)
    assert_gradient(loss, x, dx)
    assert_gradient(loss, w, dw)
    if bias:
        assert_gradient(loss, b, db)
    else:
        assert db is None


def test_each_site_rounds_its_value_and_the_bias_comes_before_the_rounding():
    x, w, b, dy = arrays()
    fwd, bwd = rounder("bf16"), rounder("bf16", "bwd")
    y, saved = linear_forward(x, w, b, fwd)
    dx, dw, db = linear_backward(dy, saved, w, bwd)

    def bf16(a: np.ndarray) -> np.ndarray:
        return fwd("linear.y", a)  # any site of that format

    def dot(a: np.ndarray, c: np.ndarray) -> np.ndarray:
        return dot_fp32(a, c, None, "library", "bf16", "bf16")

    rows, dys = bf16(x).reshape(6, 8), bf16(dy).reshape(6, 5)
    assert np.array_equal(y.reshape(6, 5), bf16(dot(rows, bf16(w).T) + bf16(b)))
    assert np.array_equal(dx.reshape(6, 8), bf16(dot(dys, bf16(w))))
    assert np.array_equal(dw, bf16(dot(dys.T, rows)))
    assert all(is_representable(a, "bf16").all() for a in (y, dx, dw, db))


@pytest.mark.parametrize("accumulator", ["sequential", "hopper", "ampere", "exact"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_accumulator_is_the_precisions(accumulator, precision):
    """A tensor core that cannot hold fp32 operands gives way to `sequential` (numerics section 5)."""
    x, w, _, dy = arrays()
    p = Precision.named(precision).replace(accumulator=accumulator)
    fwd, bwd = Rounder(p, "fwd"), Rounder(p, "bwd")
    y, saved = linear_forward(x, w, None, fwd)
    _, dw, _ = linear_backward(dy, saved, w, bwd)
    format = fwd.format("linear.x")
    named = "sequential" if precision == "fp32" and accumulator in ("hopper", "ampere") else accumulator
    rows, dys = fwd("linear.x", x).reshape(6, 8), bwd("linear.dy", dy).reshape(6, 5)
    assert np.array_equal(
        y.reshape(6, 5), fwd("linear.y", dot_fp32(rows, fwd("linear.w", w).T, None, named, format, format))
    )
    assert np.array_equal(dw, bwd("linear.dw", dot_fp32(dys.T, rows, None, named, format, format)))


def test_the_saved_input_keeps_the_forwards_format():
    """A forward-only exception must not change what backward takes the operand to be."""
    x, w, _, dy = arrays()
    p = Precision.named("bf16").replace(accumulator="hopper").round("fwd/linear.x=fp32")
    _, saved = linear_forward(x, w, None, Rounder(p, "fwd"))
    assert saved[1] == "fp32" and np.array_equal(saved[0], x)
    _, dw, _ = linear_backward(dy, saved, w, Rounder(p, "bwd"))
    dys = Rounder(p, "bwd")("linear.dy", dy).reshape(6, 5)
    exact = dot_fp32(dys.T, x.reshape(6, 8), None, "sequential", "bf16", "fp32")
    assert np.array_equal(dw, Rounder(p, "bwd")("linear.dw", exact))


def test_stochastic_rounding_of_a_sample_does_not_depend_on_its_batch():
    x, w, b, _ = arrays()
    p = Precision.named("bf16").round("linear=bf16:sr").replace(accumulator="sequential")
    both, _ = linear_forward(x, w, b, Rounder(p, key=Key(7), samples=range(4, 6)))
    second, _ = linear_forward(x[1:], w, b, Rounder(p, key=Key(7), samples=range(5, 6)))
    other, _ = linear_forward(x[1:], w, b, Rounder(p, key=Key(8), samples=range(5, 6)))
    assert np.array_equal(both[1:], second) and not np.array_equal(second, other)


def test_sites():
    seen = Watcher()
    x, w, b, dy = arrays()
    _, saved = linear_forward(x, w, b, rounder("bf16", watch=seen))
    linear_backward(dy, saved, w, rounder("bf16", "bwd", watch=seen))
    assert set(seen.sites) == {"linear." + s for s in ("x", "w", "y", "dy", "dx", "dw")}
    linear_forward(x, w, None, rounder("bf16", watch=seen), y_site="logits")
    assert seen.sites[-1] == "logits"
