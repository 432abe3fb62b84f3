"""Philox4x32-10, the counter-based generator behind stochastic rounding.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
A word depends on nothing but the seed, the step, the sample, the layer, the head, the site, the
numeric tile, the row and the column (numerics §1), so neither micro-batches, blocks nor devices
change it. The CUDA twin is cuda/philox.cuh.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCK = 1 << 13  # counters at once: its six uint64 temporaries stay in cache

_KEY_BITS = {"seed": 64, "step": 32, "layer": 16, "sample": 32}


@dataclass(frozen=True)
class Key:
    """Names a stream of random words: one seed, and where in training it is drawn.

    Args:
        seed: 0 <= seed < 2**64.
        step: optimizer step, 0 <= step < 2**32.
        layer: 0 <= layer < 2**16.
        sample: global index of the (first) sample, 0 <= sample < 2**32.

    Raises:
        TypeError: a field is not an integer.
        ValueError: a field is out of range.
    """
    seed: int
    step: int = 0
    layer: int = 0
    sample: int = 0

    def __post_init__(self) -> None:
        for name, bits in _KEY_BITS.items():
            value = getattr(self, name)
            try:
                value = index(value)
            except TypeError:
                raise TypeError(f"Key: {name} must be an integer, got {value!r}") from None
            if not 0 <= value < 1 << bits:
                raise ValueError(f"Key: {name} must be in 0 … 2**{bits} - 1, got {value}")
            object.__setattr__(self, name, value)


def philox4x32(counter: Sequence[ArrayLike], key: Sequence[ArrayLike]) -> tuple[NDArray[np.uint32], ...]:
    """Philox4x32 with ten rounds.

    Args:
        counter: four arrays of integers below 2**32.
        key: two arrays of integers below 2**32. All six broadcast.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    even, odd = _philox(counter, key)
    return tuple(c.astype(np.uint32) for c in (even[0], odd[0], even[1], odd[1]))


def _philox(counter: Sequence[ArrayLike], key: Sequence[ArrayLike]) -> tuple[NDArray, NDArray]:
    """Words (0, 2) and words (1, 3), each as uint64 (2, …): the two halves of a round in one operation."""
    key = np.stack(np.broadcast_arrays(*key)).astype(np.uint64)
    c = np.broadcast_arrays(*counter, key[0])[:4]
    even, odd = np.array([c[0], c[2]], np.uint64), np.array([c[1], c[3]], np.uint64)
    column = (2,) + (1,) * (even.ndim - 1)
    key = key.reshape((2,) + (1,) * (even.ndim - key.ndim) + key.shape[1:])
    multipliers, weyl = _MULTIPLIERS.reshape(column), _WEYL.reshape(column)
    product = np.empty_like(even)
    crossed = product[::-1]
    for _ in range(10):
        np.multiply(even, multipliers, out=product)
        np.right_shift(crossed, _HALF, out=even)
        even ^= odd
        even ^= key
        np.bitwise_and(crossed, _MASK, out=odd)
        key = (key + weyl) & _MASK
    return even, odd


def subkey(key: Key, *, site: int, heads: ArrayLike, samples: ArrayLike | None = None) -> NDArray[np.uint32]:
    """The key of one site's words: Philox(seed; step, sample, layer and head, site), two words.

    Returns:
        uint32 (2, G), G the broadcast length of `heads` and `samples`.
    """
    heads = np.asarray(heads, np.uint64).reshape(-1)
    samples = np.asarray(key.sample if samples is None else samples, np.uint64).reshape(-1)
    counter = (key.step, samples, key.layer << 16 | heads, site)
    return np.stack(np.broadcast_arrays(*philox4x32(counter, (key.seed & 0xFFFFFFFF, key.seed >> 32))[:2]))


def random_words(key: Key, *, site: int, heads: ArrayLike, samples: ArrayLike | None = None, tile: int,
                 rows: ArrayLike, cols: ArrayLike) -> NDArray[np.uint32]:
    """Random words of a site, for stochastic rounding.

    One Philox block serves columns 2t, 2t+1, 2t+8, 2t+9 of each 16: a thread's share of an mma fragment.

    Args:
        key: seed, step, layer.
        site: number of the site, below 2**32.
        heads: (G,) head of each slice, below 2**16.
        samples: (G,) global sample of each slice, `key.sample` where None; broadcasts with heads.
        tile: number of the numeric tile, below 2**32.
        rows: (R,) below 2**32.
        cols: (C,) below 2**32.

    Returns:
        uint32 (G, R, C).
    """
    rows, cols = np.asarray(rows, np.uint64).reshape(-1), np.asarray(cols, np.int64).reshape(-1)
    keys = subkey(key, site=site, heads=heads, samples=samples)
    if not len(cols):
        return np.empty((keys.shape[1], len(rows), 0), np.uint32)
    if (np.diff(cols) == 1).all():
        groups = np.arange(cols[0] >> 4, (cols[-1] >> 4) + 1)
        where = slice(cols[0] & 15, (cols[0] & 15) + len(cols))
    else:
        groups, where = np.unique(cols >> 4, return_inverse=True)
        where = where * 16 + (cols & 15)
    blocks = (4 * groups[:, None] + np.arange(4)).astype(np.uint64).reshape(-1)

    # A line is one row of one slice.
    line_key = np.repeat(keys, len(rows), axis=1)[:, :, None]
    line_row = np.tile(rows, keys.shape[1])[:, None]
    out = np.empty((len(line_row), len(cols)), np.uint32)
    step = max(1, _BLOCK // len(blocks))
    for i in range(0, len(line_row), step):
        some = slice(i, i + step)
        even, odd = _philox((blocks, line_row[some], tile, 0), line_key[:, some])
        # even[h, :, 4g + t] belongs to column 16g + 8h + 2t, odd to the next: little-endian pairs
        odd <<= _HALF
        odd |= even
        pairs = odd.reshape(2, -1, len(groups), 4).transpose(1, 2, 0, 3)
        out[some] = np.ascontiguousarray(pairs, "<u8").view("<u4").reshape(odd.shape[1], -1)[:, where]
    return out.reshape(keys.shape[1], len(rows), len(cols))
