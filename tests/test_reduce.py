"""The order of sums: against loops over scalars, written from the words of numerics.md."""
import numpy as np
import pytest

from cuflash.reduce import block_sums, column_sum, row_sum, row_threads, total_sum


def wide(n: int, seed: int, dtype: type = np.float32) -> np.ndarray:
    """Values whose sum depends on its order."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * 2.0 ** rng.integers(-12, 12, n)).astype(dtype)


def joined(lanes: list[np.float32]) -> np.float32:
    half = len(lanes) // 2
    while half:
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        half //= 2
    return lanes[0]


def by_threads(values: list[np.float32], threads: int) -> np.float32:
    sums = [np.float32(0)] * (4 * threads)
    for i, value in enumerate(values):
        sums[i % len(sums)] = sums[i % len(sums)] + value
    lanes = [(sums[i] + sums[i + 1]) + (sums[i + 2] + sums[i + 3]) for i in range(0, len(sums), 4)]
    return joined([joined(lanes[i:i + 32]) for i in range(0, threads, 32)])


@pytest.mark.parametrize("n,threads", [(1, 32), (5, 32), (127, 32), (129, 32), (1024, 32), (1025, 64), (5000, 256),
                                       (8192, 256), (32769, 1024), (50257, 1024)])
def test_a_row_is_summed_as_a_block_does(n, threads):
    x = wide(2 * n, seed=n).reshape(2, n)
    assert row_threads(n) == threads
    assert [row_sum(x)[i] for i in range(2)] == [by_threads(list(row), threads) for row in x]


@pytest.mark.parametrize("n", [1, 3, 255, 8192, 8193, 20000])
def test_everything_is_summed_by_blocks(n):
    x = wide(n, seed=n)
    blocks = [by_threads(list(x[i:i + 8192]), 256) for i in range(0, n, 8192)]
    assert list(block_sums(x)) == blocks
    assert total_sum(x) == by_threads(blocks, 32)


@pytest.mark.parametrize("n", [1, 2, 16, 17, 40, 600])
def test_columns_are_summed_by_chunks_of_16_rows(n):
    x = wide(n * 3, seed=n).reshape(n, 3)
    for column, got in zip(x.T, column_sum(x)):
        chunks = [sum(column[i + 1:i + 16], column[i]) for i in range(0, n, 16)]
        sums = [np.float32(0)] * 32
        for j, chunk in enumerate(chunks):
            sums[j % 32] = sums[j % 32] + chunk
        assert got == joined(sums)


def test_the_order_matters_on_these_values():
    x = wide(4096, seed=0)
    turned = x[::-1].copy()
    assert row_sum(x) != row_sum(turned) and total_sum(x) != row_sum(x)
    assert (column_sum(x.reshape(-1, 4)) != column_sum(turned.reshape(-1, 4))[::-1]).any()


@pytest.mark.parametrize("function", [row_sum, column_sum, total_sum])
def test_no_sum_is_minus_zero(function):
    assert not np.signbit(function(np.full((2, 3), -0.0, np.float32))).any()


@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 5)])
def test_shapes(shape):
    x = np.ones(shape, np.float32)
    assert row_sum(x).shape == shape[:-1] and column_sum(x).shape == shape[-1:] and total_sum(x) == x.size
