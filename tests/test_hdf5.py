"""Formats that HDF5 and h5py do not know, kept in their bits and read at the speed of integers."""
import time

import h5py
import ml_dtypes
import numpy as np

from cuflash import hdf5

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_all_bits_survive(tmp_path):
    for dtype, bits in ((BF16, np.uint16), (ml_dtypes.float8_e5m2, np.uint8),
                        (ml_dtypes.float8_e4m3fn, np.uint8), (np.float16, np.uint16)):
        every = np.arange(np.iinfo(bits).max + 1).astype(bits).reshape(16, -1)
        with h5py.File(tmp_path / "x.h5", "w") as f:
            dataset = hdf5.create_dataset(f, "a/b", np.dtype(dtype), every.shape, (4, every.shape[1]))
            if dtype is ml_dtypes.float8_e4m3fn:
                dataset.attrs["format"] = "fp8_e4m3"
            for i in range(0, 16, 4):
                dataset.id.write_direct_chunk((i, 0), hdf5._deflated(every[i:i + 4].view(dtype)))
            assert hdf5.dtype_of(dataset) == dtype
            assert np.array_equal(hdf5.read_array(dataset).view(bits), every)
            part = hdf5.read_array(dataset, (slice(3, 9), slice(2, 7)))
            assert np.array_equal(part.view(bits), every[3:9, 2:7])


def test_blocks():
    for shape in ((), (7,), (3, 4, 5), (2, 3, 100), (0, 4), (4, 0)):
        seen = np.zeros(shape, int)
        for where in hdf5.blocks(shape, 20):
            assert seen[where].size <= 20 or seen[where].shape[:-1] == (1,) * (seen.ndim - 1)
            seen[where] += 1
        assert (seen == 1).all()


def test_bf16_reads_at_the_speed_of_uint16(tmp_path):
    rng = np.random.default_rng(15)
    values = rng.standard_normal(1 << 22).astype(BF16)
    with h5py.File(tmp_path / "x.h5", "w") as f:
        bf16 = hdf5.create_dataset(f, "bf16", values.dtype, values.shape, (1 << 17,))
        uint16 = f.create_dataset("uint16", values.shape, np.uint16, chunks=(1 << 17, ), shuffle=True,
                                  compression=1)
        for i in range(0, len(values), 1 << 17):
            for dataset in (bf16, uint16):
                dataset.id.write_direct_chunk((i,), hdf5._deflated(values[i:i + (1 << 17)]))
    seconds = {}
    for name, get in (("bf16", lambda f: hdf5.read_array(f["bf16"])), ("uint16", lambda f: f["uint16"][...])):
        times = []
        for _ in range(3):
            with h5py.File(tmp_path / "x.h5") as f:  # anew, with no chunk in HDF5's cache
                begun = time.perf_counter()
                found = get(f)
                times.append(time.perf_counter() - begun)
            assert np.array_equal(found.view(np.uint16), values.view(np.uint16))
        seconds[name] = min(times)
    # Converting would take 50 times as long; twice allows for a busy machine.
    assert seconds["bf16"] < 2 * seconds["uint16"], seconds
