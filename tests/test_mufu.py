"""The function unit's exp2 and log2, against bits recorded on a GPU and against mathematics."""
import hashlib
import secrets
from pathlib import Path

import h5py
import numpy as np
import pytest

from cuflash import mufu

RECORD = Path(__file__).parent / "record" / "mufu_sm90.h5"
BINADE = 1 << 23


def _binade(index: int) -> np.ndarray:
    """The 2^23 numbers whose sign and exponent are `index`."""
    return (np.arange(BINADE, dtype=np.uint32) + np.uint32(index << 23)).view(np.float32)


@pytest.mark.parametrize("name", ["ex2", "lg2"])
def test_recorded_bits(name):
    """Whole binades against the hash of what an H200 gave: the widest ones always, others drawn."""
    function = getattr(mufu, f"{name}_mufu")
    with h5py.File(RECORD) as file:
        hashes = file[name][:]
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    always = {"ex2": [256 + 126, 256 + 132], "lg2": [126]}[name]  # (−1, −½], (−64, −32]; [½, 1)
    for index in [*always, *rng.choice(len(hashes), 2), 127 + rng.integers(-9, 8)]:
        got = hashlib.blake2b(function(_binade(int(index))).tobytes(), digest_size=8).digest()
        assert int.from_bytes(got, "little") == int(hashes[index]), f"binade {index}, seed {seed}"


def test_ex2_error_and_monotony():
    x = np.sort(np.concatenate([_binade(index)[::8] for index in (126, 127, 256 + 126, 256 + 127)]))
    y = mufu.ex2_mufu(x)
    assert (np.diff(y) >= 0).all()
    error = (y - np.exp2(x.astype(np.float64))) / np.spacing(np.exp2(x.astype(np.float64)).astype(np.float32))
    # the docstring's figures; the mean is what biases a row sum
    assert error[x > 0].min() > -1.4 and error[x > 0].max() < 1.4
    assert error[x < 0].min() > -2.06 and error[x < 0].max() < 1.2
    assert -0.63 < error[x < -1].mean() < -0.61


def test_ex2_special_values():
    n = np.arange(-126, 128, dtype=np.float32)
    np.testing.assert_array_equal(mufu.ex2_mufu(n), np.ldexp(np.float32(1), n.astype(int)))
    x = np.array([0, -0.0, 2.0**-149, -(2.0**-24), np.inf, -np.inf, np.nan, 128, 3e38, -150, -3e38, -149],
                 np.float32)
    y = mufu.ex2_mufu(x)
    np.testing.assert_array_equal(y[:6], np.array([1, 1, 1, 1, np.inf, 0], np.float32))
    assert y.view(np.uint32)[6] == 0x7FFFFFFF
    np.testing.assert_array_equal(y[7:11], np.array([np.inf, np.inf, 0, 0], np.float32))
    assert 0 < y[11] < 2.0**-147  # nothing is flushed


def test_lg2_error_and_special_values():
    for index in (100, 126, 127, 128, 200):
        x = _binade(index)[::16]
        error = mufu.lg2_mufu(x) - np.log2(x.astype(np.float64))
        # a result is cut, not rounded: one ulp of it, or a unit and a half of 2^-23 where that is more
        assert np.abs(error).max() < 1.5 * 2.0**-23 + np.spacing(np.float32(abs(index - 127) + 1))
    x = np.array([1, 0, -0.0, np.inf, -1, -np.inf, np.nan, -(2.0**-149), 2.0**-149], np.float32)
    y = mufu.lg2_mufu(x)
    np.testing.assert_array_equal(y, np.array([0, -np.inf, -np.inf, np.inf, *[np.nan] * 4, -149], np.float32))
    assert not np.signbit(y[0]) and (y[4:8].view(np.uint32) == 0x7FFFFFFF).all()


def test_log_is_lg2_times_ln2():
    x = np.geomspace(1e-40, 1e38, 1000).astype(np.float32)
    np.testing.assert_array_equal(mufu.log_mufu(x), mufu.lg2_mufu(x) * np.float32(np.log(2)))
    np.testing.assert_allclose(mufu.log_mufu(x), np.log(x.astype(np.float64)), rtol=1e-6, atol=2.0**-22)


@pytest.mark.parametrize("function", [mufu.ex2_mufu, mufu.lg2_mufu, mufu.log_mufu], ids=lambda f: f.__name__)
def test_shapes_and_out(function):
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((3, 40001)) * 100).astype(np.float32)
    x[1, :7] = [0, 1, np.inf, -np.inf, np.nan, 2.0**-140, -130]
    y = function(x)
    assert y.shape == x.shape and y.dtype == np.float32
    np.testing.assert_array_equal(function(x[:, ::3]), y[:, ::3])
    with pytest.raises(TypeError, match="float64"):
        function(x.astype(np.float64))
    same = x.copy()
    assert function(same, out=same) is same
    np.testing.assert_array_equal(same, y)
