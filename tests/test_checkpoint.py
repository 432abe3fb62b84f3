import resource
import sys

import h5py
import numpy as np
import pytest

from cuflash.model import checkpoint
from cuflash.model.gpt import GPTConfig, init_params
from cuflash.precision import Precision

MODEL = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=11)
HEADER = checkpoint.Header(MODEL, Precision.named("bf16").to_toml(), "off", 1, "0" * 64, "bytes")


def state(step: int = 7) -> checkpoint.State:
    params = init_params(MODEL, 1)
    return checkpoint.State(
        step,
        params,
        {n: p + 1 for n, p in params.items()},
        {n: p + 2 for n, p in params.items()},
        [3.5, 0.1],
        [1.0],
    )


@pytest.fixture
def path(tmp_path):
    checkpoint.save(tmp_path / "c.h5", state(), HEADER)
    return tmp_path / "c.h5"


def test_it_reads_back_to_the_bit(path):
    got, header = checkpoint.load(path)
    assert header == HEADER and got.step == 7 and (got.losses, got.norms) == ([3.5, 0.1], [1.0])
    for group in ("params", "m", "v"):
        mine, theirs = getattr(state(), group), getattr(got, group)
        assert list(theirs) == list(mine)
        assert all(np.array_equal(theirs[n], a) and theirs[n].dtype == a.dtype for n, a in mine.items())
    assert not checkpoint.load(path, optimizer=False)[0].m


def test_only_whole_files_are_left(path):
    assert [f.name for f in path.parent.iterdir()] == ["c.h5"]


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
def test_a_file_cut_short(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[:int(len(data) * keep)])
    with pytest.raises(ValueError, match="damaged, cut short or not HDF5"):
        checkpoint.load(path)


def test_a_flipped_bit_in_a_weight(path):
    needle = state().params["wte"].tobytes()[:64]
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged, cut short or not HDF5"):
        checkpoint.load(path)


def edit(path, change) -> None:
    with h5py.File(path, "r+") as f:
        change(f)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda f: f.attrs.pop("format"), "an HDF5 file, but not 'cuflash checkpoint 1'"),
        (
            lambda f: f.attrs.__setitem__(
                "header", f.attrs["header"].replace('"numerics_version": 1', '"numerics_version": 99')
            ),
            "written under numerics version 99, this is 1",
        ),
        (
            lambda f: f.attrs.__setitem__("header", f.attrs["header"].replace('"n_embd": 8', '"n_embd": 16')),
            r"params/wte has shape \(11, 8\), its model says \(11, 16\)",
        ),
        (lambda f: f.attrs.__setitem__("header", "{}"), "checkpoint .*model"),
        (lambda f: f.pop("params/wpe"), "damaged, cut short or not HDF5 .*wpe"),
    ],
)
def test_a_foreign_file(path, change, message):
    edit(path, change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="nothing.h5: no such file"):
        checkpoint.load(tmp_path / "nothing.h5")


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on file sizes to stand for a full disk")
def test_a_full_disk_leaves_the_file_before(path):
    """A limit on file sizes fails a write as a full disk does."""
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match="cannot write .*c.h5"):
            checkpoint.save(path, state(8), HEADER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and checkpoint.load(path)[0].step == 7
    assert [f.name for f in path.parent.iterdir()] == ["c.h5"]
