import numpy as np
import pytest

from cuflash.gelu import gelu_backward, gelu_forward

from .network import PRECISIONS, assert_same, put, rounder, values


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1, 4099, 300_001])
def test_random(precision, size, seed):
    rng, p = np.random.default_rng(seed), PRECISIONS[precision]
    fwd, bwd = rounder(p), rounder(p, "bwd")
    format = fwd.format("linear.y")
    x, dy = values(rng, (1, 1, size), format, wide=True), values(rng, (1, 1, size), format, wide=True)
    assert_same(gelu_forward(put(x, format), fwd), gelu_forward(x, fwd, x_format=format), f"y, seed {seed}")
    assert_same(gelu_backward(put(dy, format), put(x, format), bwd),
                gelu_backward(dy, x, bwd, x_format=format),
                f"dx, seed {seed}")


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_every_16_bit_number(format):
    import ml_dtypes
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[format]
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32).reshape(1, 256, 256)
    fwd, bwd = rounder(PRECISIONS["fp32"]), rounder(PRECISIONS["fp32"], "bwd")
    assert_same(gelu_forward(put(x, format), fwd), gelu_forward(x, fwd, x_format=format), "y")
    one = np.ones_like(x)
    assert_same(gelu_backward(put(one), put(x, format), bwd), gelu_backward(one, x, bwd, x_format=format),
                "dx")
