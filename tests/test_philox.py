"""Philox4x32-10 against its published vectors, and the layout of the words of stochastic rounding."""
import shutil
import subprocess

import numpy as np
import pytest

from cuflash import kernels
from cuflash.philox import Key, philox4x32, random_words

# Random123's kat_vectors: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KEY = Key(0x0123456789ABCDEF, step=7, layer=3, sample=11)


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter,key,result", KNOWN)
def test_known_answers(counter, key, result):
    assert [int(c) for c in philox4x32(words(counter), words(key))] == words(result)


def test_broadcasts():
    counter, key, result = KNOWN[2]
    (c0, *counter), (k0, k1) = words(counter), words(key)
    many = philox4x32([np.full((2, 1), c0), *counter], [k0, np.full(3, k1)])
    assert all(c.shape == (2, 3) and c.dtype == np.uint32 for c in many)
    assert [int(c[1, 2]) for c in many] == words(result)


def one_word(key, site, head, sample, tile, row, col):
    """The layout, spelled out for one element."""
    seed = key.seed & 0xFFFFFFFF, key.seed >> 32
    k = philox4x32((key.step, sample, key.layer << 16 | head, site), seed)[:2]
    block = philox4x32((4 * (col // 16) + col % 8 // 2, row, tile, 0), k)
    return int(block[col % 2 + 2 * (col % 16 // 8)])


def test_layout():
    rows, cols = [0, 5, 2**32 - 1], [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 100, 2**33 + 3]
    got = random_words(KEY, site=4, heads=[0, 9], samples=[11, 12], tile=6, rows=rows, cols=cols)
    want = [[[one_word(KEY, 4, h, s, 6, r, c) for c in cols] for r in rows] for h, s in ((0, 11), (9, 12))]
    assert got.dtype == np.uint32 and (got == np.array(want, np.uint32)).all()


@pytest.mark.parametrize("start,stop", [(0, 16), (0, 48), (3, 4), (5, 40), (16, 37), (100, 1000)])
def test_a_part_has_the_words_of_the_whole(start, stop):
    whole = random_words(KEY, site=1, heads=range(3), tile=0, rows=range(40), cols=range(1000))
    part = random_words(KEY, site=1, heads=2, tile=0, rows=range(7, 30), cols=range(start, stop))
    assert (part == whole[2:, 7:30, start:stop]).all()
    rows, cols = range(7, 30)[::-1], range(start, stop)[::-1]
    backwards = random_words(KEY, site=1, heads=2, tile=0, rows=rows, cols=cols)
    assert (backwards == part[:, ::-1, ::-1]).all()


def test_every_coordinate_counts():
    base = dict(site=1, heads=2, samples=3, tile=4, rows=[5], cols=range(64))
    streams = [random_words(KEY, **base)]
    streams += [random_words(KEY, **base | {name: 9})
                for name in ("site", "heads", "samples", "tile", "rows")]
    keys = [Key(1, 7, 3), Key(KEY.seed, 8, 3), Key(KEY.seed, 7, 4), Key(KEY.seed ^ 1 << 40, 7, 3)]
    streams += [random_words(key, **base) for key in keys]
    assert len({s.tobytes() for s in streams}) == len(streams)


def test_empty():
    assert random_words(KEY, site=0, heads=[1, 2], tile=0, rows=[], cols=range(3)).shape == (2, 0, 3)
    assert random_words(KEY, site=0, heads=[1, 2], tile=0, rows=range(3), cols=[]).shape == (2, 3, 0)


def test_sample_defaults_to_the_key():
    args = dict(site=0, heads=[1], tile=0, rows=[0], cols=range(16))
    assert (random_words(KEY, **args) == random_words(KEY, samples=11, **args)).all()


@pytest.mark.parametrize("seed", range(3))
def test_words_are_uniform(seed):
    n = 1 << 16
    drawn = random_words(Key(seed), site=0, heads=0, tile=0, rows=[0], cols=range(n))
    share = np.unpackbits(drawn.view(np.uint8)).reshape(n, 32).mean(axis=0)
    assert (abs(share - 0.5) < 6 * 0.5 / np.sqrt(n)).all()  # 6 standard deviations, 32 bits


@pytest.mark.parametrize("name,value", [("seed", -1), ("seed", 2**64), ("step", 2**32), ("layer", 2**16),
                                        ("sample", -1)])
def test_key_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"Key: {name} must be in 0 … 2\*\*"):
        Key(**{"seed": 0, name: value})


def test_key_takes_integers():
    with pytest.raises(TypeError, match="seed must be an integer, got 1.5"):
        Key(1.5)
    assert Key(np.int64(3)) == Key(3) and hash(Key(np.uint64(3))) == hash(Key(3))


# ---- CUDA ---------------------------------------------------------------------------------------

SOURCE = """#include "philox.cuh"
extern "C" __global__ void words(unsigned* word, uint4* block, unsigned seed_low, unsigned seed_high) {
    const uint2 key = subkey(make_uint2(seed_low, seed_high), 7, 11, 3, 9, 4);
    word[blockIdx.x * blockDim.x + threadIdx.x] = random_word(key, blockIdx.x, threadIdx.x, 6);
    block[blockIdx.x * blockDim.x + threadIdx.x] = random_block(key, blockIdx.x, threadIdx.x, 6);
}
"""


@pytest.mark.skipif(kernels.nvrtc_reason() is not None, reason=str(kernels.nvrtc_reason()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "newest"])
def test_cuda_compiles(arch, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "cache_dir", lambda: tmp_path)
    path = kernels.compile_cubin("philox_test", kernels.newest_architecture() if arch == "newest" else arch,
                                 headers={"philox_test.cu": SOURCE})
    assert path.read_bytes().startswith(b"\x7fELF")


@pytest.mark.skipif(kernels.gpu_reason() is not None, reason=str(kernels.gpu_reason()))
def test_cuda_on_the_gpu():
    cupy = kernels.import_cupy()
    word, block = cupy.empty((3, 48), np.uint32), cupy.empty((3, 48, 4), np.uint32)
    kernel = kernels.kernel("philox_test", "words", headers={"philox_test.cu": SOURCE})
    kernel((3,), (48,), (word, block, np.uint32(KEY.seed & 0xFFFFFFFF), np.uint32(KEY.seed >> 32)))
    want = random_words(KEY, site=4, heads=9, tile=6, rows=range(3), cols=range(48))[0]
    assert (word.get() == want).all()
    col = np.arange(48)
    served = (col // 16 * 16 + col % 8 // 2 * 2)[:, None] + [0, 1, 8, 9]
    assert (block.get() == want[:, served]).all()


HOST = """
#include <cstdio>
#define __device__
#define __forceinline__ inline
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
#include "philox.cuh"
int main() {
    const uint2 key = subkey(make_uint2(0x89ABCDEFu, 0x01234567u), 7, 11, 3, 9, 4);
    for (unsigned row = 0; row < 3; ++row)
        for (unsigned col = 0; col < 48; ++col) printf("%u\\n", random_word(key, row, col, 6));
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the CUDA header on the host")
def test_cuda_header_on_the_host(tmp_path):
    (tmp_path / "host.cpp").write_text(HOST)
    subprocess.run(["g++", "-std=c++17", "-Wno-unknown-pragmas", f"-I{kernels.source_dir()}", "-o",
                    tmp_path / "host", tmp_path / "host.cpp"], check=True)
    done = subprocess.run([tmp_path / "host"], stdout=subprocess.PIPE, check=True, text=True)
    want = random_words(KEY, site=4, heads=9, tile=6, rows=range(3), cols=range(48))
    assert [int(line) for line in done.stdout.split()] == want.reshape(-1).tolist()
