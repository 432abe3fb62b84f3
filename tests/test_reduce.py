"""The order of sums: against loops over scalars, written from the words of numerics.md."""
import numpy as np
import pytest

from cuflash.reduce import column_sum, row_sum, total_sum


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


def strided(values: list[np.float32], threads: int) -> np.float32:
    lanes = [np.float32(0)] * threads
    for i, value in enumerate(values):
        lanes[i % threads] = lanes[i % threads] + value
    return joined(lanes)


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 64, 100, 768])
def test_a_row_is_summed_as_a_warp_does(n):
    x = wide(3 * n, seed=n).reshape(3, n)
    assert [row_sum(x)[i] for i in range(3)] == [strided(list(row), 32) for row in x]


@pytest.mark.parametrize("n", [1, 3, 255, 8192, 8193, 20000])
def test_everything_is_summed_as_blocks_of_256_threads_do(n):
    x = wide(n, seed=n)
    values = list(x)
    while True:
        values = [strided(values[i:i + 8192], 256) for i in range(0, len(values), 8192)]
        if len(values) == 1:
            break
    assert total_sum(x) == values[0]


@pytest.mark.parametrize("n", [1, 2, 16, 17, 40, 300])
def test_columns_are_summed_by_chunks_of_16_rows(n):
    x = wide(n * 3, seed=n).reshape(n, 3)
    for column, got in zip(x.T, column_sum(x)):
        values = list(column)
        while len(values) > 1:
            chunks = [values[i:i + 16] for i in range(0, len(values), 16)]
            values = [sum(chunk[1:], chunk[0]) for chunk in chunks]
        assert got == values[0]


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
