"""Sums outside attention, in a stated order (numerics.md section 7): the order of cuda/reduce.cuh.

Only + is used, so the bits are the same on every machine. Partial sums start from +0, so a sum is
never −0 and zero padding changes no bits.

Threads take four neighbours at a time, as they load them.
"""
import numpy as np

WARP = 32         # threads that join by themselves
FOUR = 4          # neighbours that a thread loads at once
EACH = 32         # elements of a row that a thread takes, up to
MOST = 1024       # threads
CHUNK_ROWS = 16   # rows that one thread walks in column_sum
CHUNKS = 32       # sums of chunks that then run side by side
BLOCK = 8192      # elements of a block in total_sum


def row_threads(n: int) -> int:
    """Threads that sum a row of n elements: a power of two from 32 on, so that each takes at most 32, but at most 1024."""
    threads = WARP
    while threads < MOST and threads * EACH < n:
        threads *= 2
    return threads


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, as a block of `row_threads` threads does one row: (…, n) -> (…).

    Element i is added to sum i mod 4·threads, ascending. Thread t has the sums 4t … 4t+3 and joins them as
    (s0 + s1) + (s2 + s3); the threads of a warp then join (i, i+16), (i, i+8), …, (i, i+1), and the
    warps likewise, half against half.
    """
    threads = row_threads(x.shape[-1])
    width = FOUR * threads
    y = _padded(x, width, axis=-1)
    sums = np.ascontiguousarray(_ascending(y.reshape(-1, y.shape[-1] // width, width)).T)
    s0, s1, s2, s3 = sums.reshape(threads, FOUR, -1).swapaxes(0, 1)
    warps = ((s0 + s1) + (s2 + s3)).reshape(threads // WARP, WARP, -1).swapaxes(0, 1)
    return _joined(_joined(warps)).reshape(x.shape[:-1])


def column_sum(x: np.ndarray) -> np.ndarray:
    """Sums over all axes but the last: (…, c) -> (c).

    Rows in chunks of 16, ascending within a chunk. Chunk j is added to sum j mod 32, ascending; these
    join (i, i+16), …, (i, i+1).
    """
    x = _padded(x.reshape(-1, x.shape[-1]), CHUNK_ROWS, axis=0)
    chunks = _padded(_ascending(x.reshape(-1, CHUNK_ROWS, x.shape[-1])), CHUNKS, axis=0)
    return _joined(_ascending(chunks.reshape(-1, CHUNKS, x.shape[-1]).swapaxes(0, 1)))


def block_sums(x: np.ndarray) -> np.ndarray:
    """Sums of each 8192 elements in C order, the last ones with zeros after them, by `row_sum`: one-dimensional."""
    return row_sum(_padded(x.reshape(-1), BLOCK, axis=0).reshape(-1, BLOCK))


def total_sum(x: np.ndarray) -> np.floating:
    """Sums everything: the `row_sum` of the `block_sums`. A scalar."""
    return row_sum(block_sums(x))[()]


def _ascending(x: np.ndarray) -> np.ndarray:
    """(n, k, m) -> (n, m), k ascending."""
    total = x[:, 0] + 0
    for i in range(1, x.shape[1]):
        total += x[:, i]
    return total


def _joined(x: np.ndarray) -> np.ndarray:
    """(a power of two, …) -> (…): the two halves are added until one is left."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]


def _padded(x: np.ndarray, multiple: int, axis: int) -> np.ndarray:
    """x with zeros after it, to a multiple (at least one) along the axis."""
    short = multiple - x.shape[axis] if x.shape[axis] < multiple else -x.shape[axis] % multiple
    if not short:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, short)
    return np.pad(x, pad)
