"""Token and position embedding: y[b, t] = wte[idx[b, t]] + wpe[t]."""
from typing import Any

import numpy as np

from cuflash import launch
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
    if launch.on_gpu(wte):
        return _forward_cuda(idx, wte, wpe, rnd)
    return rnd("embed", wte[idx] + wpe[:idx.shape[1]])


def embedding_backward(dy: np.ndarray, idx: np.ndarray, vocab_size: int,
                       block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of both embeddings: dwte (vocab_size, C), dwpe (block_size, C).

    Order: each row of dwte sums its tokens' dy from +0 within a sample, positions ascending, then these sums
    from +0, samples ascending; each row of dwpe sums samples ascending.
    """
    if launch.on_gpu(dy):
        return _backward_cuda(dy, idx, vocab_size, block_size)
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


# ---- CUDA ---------------------------------------------------------------------------------------

def _forward_cuda(idx: Any, wte: Any, wpe: Any, rnd: Rounder) -> Any:
    idx = launch.indices(idx)
    shape = (*idx.shape, wte.shape[1])
    y = launch.result(shape, rnd, "embed")
    launch.run("embedding", "embedding_forward", idx.size, _threads(shape[2]),
               (idx, wte, wpe, y, launch.place(shape, rnd)),
               {"FORWARD": True, "Y_T": launch.c_type(y), **_defines(shape[2])},
               (("embed", launch.rounding(rnd, "embed")),))
    return launch.shown(rnd, "embed", y)


def _backward_cuda(dy: Any, idx: Any, vocab_size: int, block_size: int) -> tuple[Any, Any]:
    dy, idx = launch.flat(dy), launch.indices(idx)
    B, T, C = dy.shape
    defines = {"DY_T": launch.c_type(dy), **_defines(C)}
    next_ = launch.empty((B, T), np.int32)
    first = launch.empty((vocab_size, B), np.int32)
    first.data.memset_async(0xFF, first.nbytes)  # -1
    sums, dwte, dwpe = launch.empty((B * T, C)), launch.empty((vocab_size, C)), launch.empty((block_size, C))
    length, samples = np.int32(T), np.int32(B)
    launch.run("embedding", "embedding_links", B, 1024, (idx, next_, first, length), defines)
    launch.run("embedding", "embedding_sums", B * T, _threads(C),
               (idx, next_, first, dy, sums, length, samples), defines)
    launch.run("embedding", "embedding_tokens", -(-vocab_size // 8), 256,
               (first, sums, dwte, length, samples, np.int32(vocab_size)), defines)
    launch.run("embedding", "embedding_positions", block_size, _threads(C), (dy, dwpe, length, samples),
               defines)
    return dwte, dwpe


def _threads(C: int) -> int:
    return min(256, -(-C // 128) * 32)


def _defines(C: int) -> dict[str, object]:
    return {"WIDTH": C, "WHOLE": C % 4 == 0}
