import numpy as np

from cuflash.embedding import embedding_backward, embedding_forward

from .finite import assert_gradient, rounder

rng = np.random.default_rng(1)


def test_gradients_by_finite_differences():
    idx, weight = rng.integers(0, 5, (3, 4)), rng.standard_normal((3, 4, 6))
    wte, wpe = rng.standard_normal((5, 6)), rng.standard_normal((7, 6))

    def loss() -> float:
        return float((weight * embedding_forward(idx, wte, wpe, rounder())).sum())

    dwte, dwpe = embedding_backward(weight, idx, 5, 7)
    assert_gradient(loss, wte, dwte)
    assert_gradient(loss, wpe, dwpe)
    assert not dwpe[4:].any()  # positions past T


def test_a_tokens_gradients_are_summed_samples_and_positions_ascending():
    """Against a loop, on values whose sum depends on the order."""
    idx = rng.integers(0, 3, (4, 50))
    dy = (rng.standard_normal((4, 50, 5)) * 2.0 ** rng.integers(-12, 12, (4, 50, 5))).astype(np.float32)
    dwte, dwpe = embedding_backward(dy, idx, 3, 50)
    tokens, positions = np.zeros((3, 5), np.float32), np.zeros((50, 5), np.float32)
    for b in range(4):
        of_sample = np.zeros((3, 5), np.float32)
        for t in range(50):
            of_sample[idx[b, t]] = of_sample[idx[b, t]] + dy[b, t]
            positions[t] = positions[t] + dy[b, t]
        tokens = tokens + of_sample
    assert np.array_equal(dwte, tokens) and np.array_equal(dwpe, positions)
    turned, _ = embedding_backward(dy[::-1], idx[::-1], 3, 50)
    assert not np.array_equal(dwte, turned)


def test_site():
    wte, wpe = rng.standard_normal((2, 9, 4)).astype(np.float32)
    idx = rng.integers(0, 9, (2, 3))
    plain = embedding_forward(idx, wte, wpe, rounder("bf16"))
    stream = embedding_forward(idx, wte, wpe, rounder("bf16-stream"))
    assert np.array_equal(plain, wte[idx] + wpe[:3])
    assert np.array_equal(stream, rounder("bf16-stream")("embed", plain)) and not np.array_equal(stream, plain)
