"""Sums outside attention, in a stated order (numerics.md section 7): the order of cuda/reduce.cuh.

Only + is used, so the bits are the same on every machine. Partial sums start from +0, so a sum is
never −0 and zero padding changes no bits.

Threads take four neighbours at a time, as they load them.
"""
from typing import Any

import numpy as np

from cuflash import launch
from cuflash.precision import Rounding

WARP = 32         # threads that join by themselves
FOUR = 4          # neighbours that a thread loads at once
EACH = 32         # elements of a row that a thread takes, up to
MOST = 1024       # threads
CHUNK_ROWS = 16   # rows that one thread walks in column_sum
CHUNKS = 32       # sums of chunks that then run side by side
BLOCK = 8192      # elements of a block in total_sum


def row_threads(n: int) -> int:
    """Threads that sum a row of n: the fewest of 32, 64, … 1024 that leave each at most 32 elements."""
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
    n = x.shape[-1]
    threads = row_threads(n)
    if n <= FOUR * WARP // 2:  # threads without an element have +0, which changes no bits: fewer do as well
        threads = max(1, 1 << (-(-n // FOUR) - 1).bit_length())
    width = FOUR * threads
    y = _padded(x, width, axis=-1)
    y = y.reshape(-1, y.shape[-1] // width, width)
    sums = y[:, 0] if y.shape[1] == 1 else _ascending(y)
    twos = sums[:, ::2] + sums[:, 1::2]
    fours = np.ascontiguousarray((twos[:, ::2] + twos[:, 1::2]).T)
    fours += 0  # as if every sum had started from +0
    if threads > WARP:
        fours = _joined(fours.reshape(threads // WARP, WARP, -1).swapaxes(0, 1))
    return _joined(fours).reshape(x.shape[:-1])


def column_sum(x: np.ndarray) -> np.ndarray:
    """Sums over all axes but the last: (…, c) -> (c).

    Rows in chunks of 16, ascending within a chunk. Chunk j is added to sum j mod 32, ascending; these
    join (i, i+16), …, (i, i+1).
    """
    x = _padded(x.reshape(-1, x.shape[-1]), CHUNK_ROWS, axis=0)
    chunks = _padded(_ascending(x.reshape(-1, CHUNK_ROWS, x.shape[-1])), CHUNKS, axis=0)
    return _joined(_ascending(chunks.reshape(-1, CHUNKS, x.shape[-1]).swapaxes(0, 1)))


def block_sums(x: np.ndarray) -> np.ndarray:
    """Sums of each 8192 elements in C order, by `row_sum`, zeros after the last ones: one-dimensional."""
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
    shape = list(x.shape)
    shape[axis] += short
    padded = np.zeros(shape, x.dtype)
    padded[(slice(None),) * (axis % x.ndim) + (slice(x.shape[axis]),)] = x
    return padded


# ---- CUDA ---------------------------------------------------------------------------------------

def block_sums_cuda(x: Any, *, squares: bool = False) -> Any:
    """`block_sums` of an fp32 CuPy array, or of its squares."""
    x = launch.flat(x)
    sums = launch.empty(max(1, -(-x.size // BLOCK)))
    launch.run("reduce", "block_sums", sums.size, 256, (x, sums, np.int64(x.size)),
               {"BLOCK_SUMS": True, "SQUARES": squares})
    return sums


def total_sum_cuda(x: Any, divisor: float = 1.0) -> Any:
    """`total_sum` of an fp32 CuPy array, divided: an array of no axes."""
    sums, total = block_sums_cuda(x), launch.empty(())
    threads = row_threads(sums.size)
    launch.run("reduce", "row_sum", 1, threads, (sums, total, np.int64(sums.size), np.float32(divisor)),
               {"ROW_SUM": True, "THREADS": threads})
    return total


def column_sum_cuda(x: Any, site: str = "", rounding: Rounding = Rounding(),
                    place: np.ndarray | None = None) -> Any:
    """`column_sum` of a CuPy array with a contiguous last axis, rounded at a site."""
    columns = x.shape[-1]
    x = x.reshape(-1, columns)
    if x.strides[1] != x.itemsize:
        x = launch.flat(x)
    chunks = max(1, -(-len(x) // CHUNK_ROWS))
    sums = launch.empty((chunks, columns))
    count, stride = chunks * -(-columns // 4), x.strides[0] // x.itemsize
    whole = columns % 4 == 0 and stride % 4 == 0 and x.data.ptr % 16 == 0
    launch.run("reduce", "column_chunks", -(-count // 256), 256,
               (x, sums, np.int64(len(x)), np.int64(stride), np.int32(columns), np.int64(count)),
               {"COLUMN_CHUNKS": True, "X_T": launch.c_type(x), "WHOLE": whole})
    return join_chunks_cuda(sums, site, rounding, place)


def join_chunks_cuda(sums: Any, site: str = "", rounding: Rounding = Rounding(),
                     place: np.ndarray | None = None) -> Any:
    """The second half of `column_sum`: (chunks, columns) fp32 -> (columns)."""
    chunks, columns = sums.shape
    y = launch.empty(columns, launch.storage(rounding.format))
    launch.run("reduce", "column_join", -(-columns // 32), 1024,
               (sums, y, np.int32(chunks), np.int32(columns), launch.NOWHERE if place is None else place),
               {"COLUMN_JOIN": True, "Y_T": launch.c_type(y),
                "ROUNDED": site.replace(".", "_") or "unrounded"},
               ((site, rounding),) if site else ())
    return y
