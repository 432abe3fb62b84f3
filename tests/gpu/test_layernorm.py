import numpy as np
import pytest

from cuflash.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)

from .network import PRECISIONS, assert_same, put, rounder, values

SHAPES = [(2, 17, 768), (1, 40, 70), (3, 5, 128), (1, 9, 1600), (2, 3, 2051), (1, 2, 33000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm(precision, shape, bias, seed):
    rng, p = np.random.default_rng(seed), PRECISIONS[precision]
    fwd, bwd = (rounder(p, d, samples=shape[0]) for d in ("fwd", "bwd"))
    x = values(rng, shape, fwd.format("residual.y")) * np.float32(3)
    w, b = values(rng, shape[-1]), values(rng, shape[-1]) if bias else None
    dy = values(rng, shape, fwd.format("linear.dx"))
    y, saved = layernorm_forward(x, w, b, fwd)
    dx, dw, db = layernorm_backward(dy, saved, bwd, bias=bias)
    got_y, got_saved = layernorm_forward(put(x), put(w), put(b) if bias else None, fwd)
    got_dx, got_dw, got_db = layernorm_backward(put(dy, fwd.format("linear.dx")), got_saved, bwd, bias=bias)
    for got, expected, what in ((got_y, y, "y"), (got_dx, dx, "dx"), (got_dw, dw, "dw"), (got_db, db, "db")):
        if expected is not None:
            assert_same(got, expected, f"{what}, seed {seed}")


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_with_residual_and_operand(precision, shape, bias, seed):
    rng, p = np.random.default_rng(seed), PRECISIONS[precision]
    fwd, bwd, before, after, d_after = (rounder(p, d, samples=shape[0], module=m, layer=m)
                                        for m, d in enumerate(("fwd", "bwd", "fwd", "fwd", "bwd")))
    stream, branch = values(rng, shape, fwd.format("residual.y")), values(rng, shape, fwd.format("linear.y"))
    w, b = values(rng, shape[-1]), values(rng, shape[-1]) if bias else None
    dy, dstream = values(rng, shape, fwd.format("linear.dx")), values(rng, shape, bwd.format("residual.dx"))
    x, y, saved = residual_layernorm_forward(stream, branch, w, b, before, fwd, operand=after)
    dx, operand, dw, db = residual_layernorm_backward(dstream, dy, saved, bwd, bias=bias, operand=d_after)
    got_x, got_y, got_saved = residual_layernorm_forward(
        put(stream, fwd.format("residual.y")), put(branch,
                                                   fwd.format("linear.y")), put(w), put(b) if bias else None, before, fwd,
        operand=after)
    got_dx, got_operand, got_dw, got_db = residual_layernorm_backward(
        put(dstream, bwd.format("residual.dx")), put(dy,
                                                     fwd.format("linear.dx")), got_saved, bwd, bias=bias, operand=d_after)
    for got, expected, what in ((got_x, x, "x"), (got_y, after("linear.x", y), "y"), (got_dx, dx, "dx"),
                                (got_operand, d_after("linear.dy", operand), "operand"), (got_dw, dw,
                                                                                          "dw"), (got_db, db,
                                                                                                  "db")):
        if expected is not None:
            assert_same(got, expected, f"{what}, seed {seed}")
