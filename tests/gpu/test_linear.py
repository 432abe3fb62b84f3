import numpy as np
import pytest

from cuflash import kernels
from cuflash.kernel_header import device_accumulator
from cuflash.linear import linear_backward, linear_forward
from cuflash.precision import Precision

from .network import PRECISIONS, assert_same, put, rounder, values

SHAPES = [(2, 20, 48, 70), (1, 70, 65, 33), (2, 64, 128, 192)]  # samples, rows, in, out


def run(p, shape, bias, seed, on_gpu):
    rng = np.random.default_rng(seed)
    B, T, I, O = shape  # noqa: E741
    x, w, b, dy = values(rng, (B, T, I)), values(rng, (O, I)), values(rng, O), values(rng, (B, T, O))
    fwd, bwd = (rounder(p, d, samples=B) for d in ("fwd", "bwd"))
    if on_gpu:
        x, w, b, dy = map(put, (x, w, b, dy))
    y, saved = linear_forward(x, w, b if bias else None, fwd)
    return dict(zip(("y", "dx", "dw", "db"), (y, *linear_backward(dy, saved, w, bwd, bias=bias))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulator", ["tensor core", "sequential"])
@pytest.mark.parametrize("bias", [True, False])
def test_bit_defined(precision, accumulator, shape, bias, seed):
    p = PRECISIONS[precision]
    if accumulator == "tensor core":
        accumulator = device_accumulator(p, kernels.capability(0))
    p = p.replace(accumulator=accumulator)
    got = run(p, shape, bias, seed, True)
    for name, expected in run(p, shape, bias, seed, False).items():
        if expected is not None:
            assert_same(got[name], expected, f"{name}, seed {seed}")


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("bf16", "fp16"), ("tf32", "bf16"), ("fp32", "bf16"),
                                     ("fp8_e5m2", "fp8_e4m3")])
def test_operands_of_two_formats(formats, seed):
    p = Precision.named("fp32").round(f"linear.x={formats[0]}", f"linear.w={formats[1]}",
                                      f"linear.dy={formats[0]}")
    p = p.replace(accumulator=device_accumulator(p, kernels.capability(0)))
    got = run(p, SHAPES[0], True, seed, True)
    for name, expected in run(p, SHAPES[0], True, seed, False).items():
        assert_same(got[name], expected, f"{name}, seed {seed}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_library(precision, shape, bias, seed):
    """cuBLAS against fp64, by the bound of a sum of K terms in fp32 (1.06 for the term γ_K's denominator),
    and one rounding of the result; what is rounded before is the same to the bit."""
    p = PRECISIONS[precision]
    rng = np.random.default_rng(seed)
    B, T, I, O = shape  # noqa: E741
    x, w, b = values(rng, (B, T, I)), values(rng, (O, I)), values(rng, O)
    fwd = rounder(p, samples=B)
    y, saved = linear_forward(put(x), put(w), put(b) if bias else None, fwd)
    assert_same(saved[0], fwd("linear.x", x), "x")
    x64, w64 = fwd("linear.x", x).astype(np.float64), linear_operand(fwd, w).astype(np.float64)
    b64 = linear_operand(fwd, b).astype(np.float64) if bias else 0
    exact, size = x64 @ w64.T + b64, np.abs(x64) @ np.abs(w64).T + np.abs(b64)
    unit = {"fp32": 0.0, "bf16": 2.0 ** -8, "fp16": 2.0 ** -11}[fwd.format("linear.y")]
    unit *= 2 if precision == "odd" else 1  # a directed or stochastic mode errs by up to a whole ulp
    bound = 1.06 * (I + 1) * 2.0 ** -24 * size
    if fwd.format("linear.x") == "fp32":
        bound = bound + 0
    assert (np.abs(y.get().astype(np.float64) - exact) <= bound + unit * (np.abs(exact) + bound)
            + 2.0 ** -24).all()


def linear_operand(rnd, w):
    from cuflash.linear import round_weight
    return round_weight(rnd, "linear.w", w)
