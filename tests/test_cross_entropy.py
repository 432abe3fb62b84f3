import math

import numpy as np
import pytest

from cuflash.cross_entropy import cross_entropy_backward, cross_entropy_forward
from cuflash.functions import exp, log
from cuflash.reduce import row_sum, total_sum

from .finite import Watcher, assert_gradient, rounder

rng = np.random.default_rng(6)


def test_gradient_by_finite_differences():
    logits, targets = 3 * rng.standard_normal((2, 3, 11)), rng.integers(0, 11, (2, 3))
    loss, saved = cross_entropy_forward(logits, targets, rounder())
    dlogits = cross_entropy_backward(saved, logits.shape, 1 / 6, rounder(direction="bwd"))
    assert_gradient(lambda: cross_entropy_forward(logits, targets, rounder())[0], logits, dlogits)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert math.isclose(loss, -np.log(np.take_along_axis(p, targets[..., None], -1)).mean(), rel_tol=1e-12)


def test_the_bits_are_those_of_the_written_sequence():
    z, targets = rng.standard_normal((5, 70)).astype(np.float32) * np.float32(4), rng.integers(0, 70, 5)
    loss, saved = cross_entropy_forward(z, targets, rounder("fp32"))
    dz = cross_entropy_backward(saved, z.shape, 0.25, rounder("fp32", "bwd"))
    losses = []
    for row, target, got in zip(z, targets, dz):
        x = row - row.max()
        l = row_sum(exp(x))  # noqa: E741
        losses.append(log(l) - x[target])
        expected = exp(x) * (np.float32(0.25) / l)
        expected[target] -= np.float32(0.25)
        assert np.array_equal(got, expected)
    assert loss == float(total_sum(np.array(losses)) / np.float32(5))


def test_uniform_logits_give_log_of_the_vocabulary():
    loss, _ = cross_entropy_forward(np.zeros((1, 4, 256), np.float32), np.zeros((1, 4), int), rounder("fp32"))
    assert loss == np.float32(math.log(256))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_makes_the_loss_nan(value):
    z = np.zeros((2, 8), np.float32)
    z[1, 3] = value
    with np.errstate(invalid="ignore"):
        loss, _ = cross_entropy_forward(z, np.zeros(2, int), rounder("fp32"))
    assert math.isnan(loss)


def test_large_logits_are_no_trouble():
    z = np.array([[1e30, 0, -1e30]], np.float32)
    loss, saved = cross_entropy_forward(z, np.array([1]), rounder("fp32"))
    assert loss == np.float32(1e30)
    assert np.array_equal(cross_entropy_backward(saved, z.shape, 1.0, rounder("fp32", "bwd")), [[1, -1, 0]])


def test_site():
    seen = Watcher()
    z = rng.standard_normal((2, 8)).astype(np.float32)
    _, saved = cross_entropy_forward(z, np.zeros(2, int), rounder("bf16", watch=seen))
    cross_entropy_backward(saved, z.shape, 1.0, rounder("bf16", "bwd", watch=seen))
    assert seen.sites == ["loss.dlogits"]
