"""Sums outside attention, in a stated order (numerics.md section 7): the order of the CUDA kernels.

Only + is used, so the bits are the same on every machine. Partial sums start from +0, so a sum is
never −0 and zero padding changes no bits.
"""
import numpy as np

LANES = 32        # a warp
CHUNK_ROWS = 16   # rows that one thread walks in column_sum
BLOCK = 256       # threads of a block in total_sum,
STRIDES = 32      # and elements that each of them walks


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, as a warp does one row: (…, n) -> (…).

    Lane i adds elements i, i+32, i+64, … ascending; then lanes join (i, i+16), (i, i+8), …, (i, i+1).
    """
    x = _padded(x, LANES, axis=-1)
    columns = x.reshape(-1, x.shape[-1] // LANES, LANES)
    lanes = np.ascontiguousarray(_ascending(columns).T)
    return _butterfly(lanes).reshape(x.shape[:-1])


def column_sum(x: np.ndarray) -> np.ndarray:
    """Sums over all axes but the last: (…, c) -> (c).

    Rows in chunks of 16, ascending within a chunk; the chunks' sums are summed likewise, until one is left.
    """
    x = x.reshape(-1, x.shape[-1])
    while len(x) > 1:
        x = _padded(x, min(CHUNK_ROWS, len(x)), axis=0)
        x = _ascending(x.reshape(-1, min(CHUNK_ROWS, len(x)), x.shape[-1]))
    return x[0] + 0


def total_sum(x: np.ndarray) -> np.floating:
    """Sums everything, as blocks of 256 threads do, in C order: a scalar.

    Blocks of 8192 elements; thread i adds elements i, i+256, … ascending, then threads join (i, i+128),
    …, (i, i+1). The blocks' sums are summed likewise, until one is left.
    """
    x = x.reshape(-1)
    while True:
        x = _padded(x, BLOCK * STRIDES, axis=0).reshape(-1, STRIDES, BLOCK)
        x = _butterfly(np.ascontiguousarray(_ascending(x).T))
        if len(x) == 1:
            return x[0]


def _ascending(x: np.ndarray) -> np.ndarray:
    """(n, k, m) -> (n, m), k ascending."""
    total = x[:, 0] + 0
    for i in range(1, x.shape[1]):
        total += x[:, i]
    return total


def _butterfly(lanes: np.ndarray) -> np.ndarray:
    """(a power of two, n) -> (n): the two halves are added until one row is left."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def _padded(x: np.ndarray, multiple: int, axis: int) -> np.ndarray:
    """x with zeros after it, to a multiple (at least one) along the axis."""
    short = multiple - x.shape[axis] if x.shape[axis] < multiple else -x.shape[axis] % multiple
    if not short:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, short)
    return np.pad(x, pad)
