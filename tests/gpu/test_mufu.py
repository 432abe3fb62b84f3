"""`cuflash.mufu` against the function unit itself, on all 2^32 arguments."""
import hashlib
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from cuflash import kernels, mufu

BINADE = 1 << 23
GRID, BLOCK = (1 << 12,), (256,)
RANGES = {"ex2": range(512), "lg2": range(256)}  # binades by sign and exponent; lg2 of a negative is NaN


def _table(name: str) -> np.ndarray:
    """What the kernel's model looks up: digits or values of every 23-bit fraction."""
    if name == "ex2":
        return mufu._ex2_significands()
    return mufu._interpolate(np.arange(BINADE), mufu._LG2, mufu._LG2_SHIFT, mufu._LG2_BIAS) >> 2


def _binade(name: str, index: int) -> np.ndarray:
    """The bits of f for the 2^23 arguments whose sign and exponent are `index`."""
    cupy = kernels.import_cupy()
    y = cupy.empty(BINADE, np.uint32)
    kernels.kernel("hardware", f"{name}_range")(GRID, BLOCK, (np.uint32(index << 23), np.uint32(BINADE), y))
    return y.get()


@pytest.mark.parametrize("name", ["ex2", "lg2"])
def test_every_argument(name):
    cupy = kernels.import_cupy()
    wrong, example = cupy.zeros(1, np.uint64), cupy.zeros(1, np.uint32)
    kernels.kernel("hardware", f"{name}_compare")(GRID, BLOCK, (cupy.asarray(_table(name)), wrong, example))
    assert int(wrong[0]) == 0, f"{int(wrong[0])} of 2^32 differ, among them {int(example[0]):#010x}"


@pytest.mark.parametrize("name", ["ex2", "lg2"])
def test_reference(name, seed):
    """The NumPy function itself, on drawn binades and on a few of every one."""
    rng = np.random.default_rng([seed, 1])
    print(f"seed {seed}")
    function = getattr(mufu, f"{name}_mufu")
    near = {"ex2": range(127 - 10, 127 + 8), "lg2": range(127 - 4, 127 + 4)}[name]
    for index in RANGES[name]:
        got = _binade(name, index)
        whole = index % 256 in near and rng.random() < 0.2
        at = np.arange(BINADE) if whole else np.r_[0, 1, BINADE - 1, rng.integers(0, BINADE, 1000)]
        x = (at.astype(np.uint32) + np.uint32(index << 23)).view(np.float32)
        np.testing.assert_array_equal(function(x).view(np.uint32), got[at], f"binade {index}, seed {seed}")


def test_record(record_folder):
    """A hash of every binade, for tests/test_mufu.py."""
    if record_folder is None:
        pytest.skip("CUFLASH_TEST_RECORD names no folder")
    cupy = kernels.import_cupy()
    device = cupy.cuda.Device()
    with h5py.File(record_folder / f"mufu_sm{device.compute_capability}.h5", "w") as file, \
            ThreadPoolExecutor(8) as pool:
        file.attrs["device"] = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        file.attrs["driver"] = cupy.cuda.runtime.driverGetVersion()
        for name, binades in RANGES.items():
            jobs = [pool.submit(binade_hash, _binade(name, index)) for index in binades]
            file[name] = np.array([job.result() for job in jobs], np.uint64)


def binade_hash(bits: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(bits.tobytes(), digest_size=8).digest(), "little")
