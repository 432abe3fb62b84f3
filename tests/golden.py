"""Golden attention: plain, in fp64, gradients by formula. Independent of the code under test."""
import numpy as np


def probabilities(q, k, causal, scale):
    """P (B, H, Tq, Tk) of q (B, H, Tq, D) and k (B, H, Tk, D); rows without keys are 0."""
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    tq, tk = s.shape[-2:]
    if causal:
        s = np.where(np.arange(tk) <= np.arange(tq)[:, None] + tk - tq, s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, 0, m))
    l = p.sum(axis=-1, keepdims=True)
    return p / np.where(l == 0, 1, l)


def widen(x, heads):
    """fp64, key/value heads repeated for their query heads."""
    x = np.asarray(x).astype(np.float64)
    return np.repeat(x, heads // x.shape[1], axis=1) if x.shape[1] else x


def attention(q, k, v, causal=False, scale=None):
    """O in fp64."""
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    return probabilities(widen(q, q.shape[1]), widen(k, q.shape[1]), causal, scale) @ widen(v, q.shape[1])


def gradients(do, q, k, v, causal=False, scale=None):
    """(dq, dk, dv) in fp64."""
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    heads, kv_heads = q.shape[1], k.shape[1]
    do, q, k, v = (widen(x, heads) for x in (do, q, k, v))
    p = probabilities(q, k, causal, scale)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    dk, dv = (x.reshape(x.shape[0], kv_heads, heads // kv_heads, *x.shape[2:]).sum(axis=2)
              for x in (ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do))
    return ds @ k, dk, dv
