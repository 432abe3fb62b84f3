import numpy as np
import pytest

from cuflash.embedding import embedding_backward, embedding_forward

from .network import PRECISIONS, assert_same, put, rounder, values


@pytest.mark.parametrize("samples,length,vocab_size,width", [
    (4, 100, 50, 64), (33, 1024, 300, 128), (2, 5000, 40, 70), (1, 1, 3, 4), (40, 60, 20000, 768), (2, 200,
                                                                                                    1, 32)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_embedding(precision, samples, length, vocab_size, width, seed):
    import cupy
    rng, p = np.random.default_rng(seed), PRECISIONS[precision]
    fwd, bwd = (rounder(p, d, samples=samples) for d in ("fwd", "bwd"))
    # Many repeats of few tokens, as in text.
    idx = np.minimum(rng.geometric(0.01, (samples, length)) - 1,
                     vocab_size - 1) if vocab_size > 1 else np.zeros((samples, length), int)
    wte, wpe = values(rng, (vocab_size, width)), values(rng, (length + 3, width))
    format = bwd.format("residual.dx")
    dy = values(rng, (samples, length, width), format, wide=True)
    assert_same(embedding_forward(cupy.asarray(idx), put(wte), put(wpe), fwd),
                embedding_forward(idx, wte, wpe, fwd),
                f"y, seed {seed}")
    got = embedding_backward(put(dy, format), cupy.asarray(idx), vocab_size, length + 3)
    for a, b, what in zip(got, embedding_backward(dy, idx, vocab_size, length + 3), ("dwte", "dwpe")):
        assert_same(a, b, f"{what}, seed {seed}")
