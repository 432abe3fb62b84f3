"""Token and position embedding: y[b, t] = wte[idx[b, t]] + wpe[t]."""
import numpy as np

from cuflash.sites import Rounder


def embedding_forward(idx: np.ndarray, wte: np.ndarray, wpe: np.ndarray, rnd: Rounder) -> np.ndarray:
    """Sum of the token's and the position's vector.

    Args:
        idx: tokens, integers, (B, T).
        wte: token embedding, (vocab_size, C).
        wpe: position embedding, (block_size, C), block_size ≥ T.
        rnd: site `embed`.

    Returns:
        (B, T, C).
    """
    return rnd("embed", wte[idx] + wpe[:idx.shape[1]])


def embedding_backward(dy: np.ndarray, idx: np.ndarray, vocab_size: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of both embeddings: dwte (vocab_size, C), dwpe (block_size, C).

    Order: each row of dwte sums its tokens' dy from +0 within a sample, positions ascending, then these sums
    from +0, samples ascending; each row of dwpe sums samples ascending.
    """
    B, T, C = dy.shape
    dwte = np.zeros((vocab_size, C), dy.dtype)
    for b in range(B):
        tokens, inverse = np.unique(idx[b], return_inverse=True)
        sums = np.zeros(len(tokens) * C, dy.dtype)
        elements = inverse.reshape(-1, 1) * C + np.arange(C)
        np.add.at(sums, elements.reshape(-1), dy[b].reshape(-1))  # unbuffered: adds in the order of its index
        dwte[tokens] += sums.reshape(-1, C)
    dwpe = np.zeros((block_size, C), dy.dtype)
    for b in range(B):
        dwpe[:T] += dy[b]
    return dwte, dwpe
