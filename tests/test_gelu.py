import math

import ml_dtypes
import numpy as np
import pytest

from cuflash.gelu import gelu_backward, gelu_forward

from .finite import Watcher, assert_gradient, rounder

rng = np.random.default_rng(4)


def test_value_and_gradient_in_fp64():
    x, dy = rng.standard_normal((2, 3, 7))
    y = gelu_forward(x, rounder())
    exact = np.array([[v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in row] for row in x])
    assert (np.abs(y - exact) < 4 * np.spacing(np.abs(x))).all()  # Φ ≤ 1 carries three roundings
    assert_gradient(
        lambda: float((dy * gelu_forward(x, rounder())).sum()),
        x,
        gelu_backward(dy, x, rounder(direction="bwd")),
    )


@pytest.mark.parametrize("format,dtype", [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_the_table_has_the_bits_of_the_sequence(format, dtype):
    """All finite values of the format. A NaN is any NaN."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    x = x[np.isfinite(x)]
    dy = np.ones_like(x)
    for table, sequence in (
        (gelu_forward(x, rounder("fp32"), x_format=format), gelu_forward(x, rounder("fp32"))),
        (
            gelu_backward(dy, x, rounder("fp32", "bwd"), x_format=format),
            gelu_backward(dy, x, rounder("fp32", "bwd")),
        ),
    ):
        assert np.array_equal(table, sequence, equal_nan=True)


def test_fp32_agrees_with_fp64():
    """erf and exp are within 2 ulp and Φ ≤ 1, so y = x·Φ is within a few ulp of x (not of y)."""
    x = np.linspace(-12, 12, 20001, dtype=np.float32)
    exact = gelu_forward(x.astype(np.float64), rounder())
    assert (np.abs(gelu_forward(x, rounder("fp32")) - exact) <= 4 * np.spacing(np.abs(x)) + 1e-38).all()
    exact = gelu_backward(np.ones(len(x)), x.astype(np.float64), rounder(direction="bwd"))
    slope = gelu_backward(np.ones_like(x), x, rounder("fp32", "bwd"))
    assert np.abs(slope - exact).max() < 1e-6  # values up to 1.13, six operations


def test_far_values():
    x = np.array([-1e30, -40, 0, 40, 1e30, np.inf], np.float32)
    assert np.array_equal(gelu_forward(x, rounder("fp32")), np.maximum(x, 0))
    assert np.isnan(gelu_forward(np.array([np.nan], np.float32), rounder("fp32"))).all()


def test_sites():
    seen = Watcher()
    x = rng.standard_normal((3, 4)).astype(np.float32)
    gelu_forward(x, rounder("bf16", watch=seen))
    gelu_backward(x, x, rounder("bf16", "bwd", watch=seen))
    assert seen.sites == ["gelu.y", "gelu.dx"]
