"""Every format and mode, against ml_dtypes where it covers them and against exact rationals elsewhere."""
import re
import shutil
import subprocess
import tracemalloc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from cuflash import formats, kernels
from cuflash.formats import (MODES, Format, Mode, as_mode, cuda_name, format_named, is_representable,
                             round_to, round_with, storage_dtype, ulp)
from cuflash.philox import Key, random_words

NAMES = ["fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]
VARIED = [*NAMES, "e4m3", "e3m2", "e2m1", "e2m23", "e7m23", "e8m1", "e8m20", "e6m22"]
DETERMINISTIC = [name for name, mode in MODES.items() if not mode.needs_key]
ALL = [f"e{e}m{m}" for e in range(2, 9) for m in range(1, 24)] + ["fp8_e4m3"]


def same(got, want):
    """Bit for bit, all NaNs equal."""
    assert got.dtype == want.dtype and got.shape == want.shape
    uint = f"u{got.dtype.itemsize}"
    bad = (got.view(uint) != want.view(uint)) & ~(np.isnan(got) & np.isnan(want))
    assert not bad.any(), f"{bad.sum()} of {bad.size}: {got[bad][:5]} for {want[bad][:5]}"


def exact(x, format, mode, word=0):
    """One value by the definition, in rationals; returns a float (exact: every format fits in fp64)."""
    negative = np.signbit(x)
    if np.isnan(x):
        return np.nan
    if np.isinf(x):
        y = Fraction(format.max) if format.saturates else None
    else:
        a = abs(Fraction(float(x)))
        e = a.numerator.bit_length() - a.denominator.bit_length() if a else 0
        e -= a < Fraction(2)**e
        last = Fraction(2)**(max(e, format.emin) - format.mantissa_bits)
        kept, fraction = divmod(a / last, 1)
        half = Fraction(1, 2)
        up = {"rne": fraction > half or fraction == half and kept % 2 == 1, "rz": False,
              "rna": fraction >= half, "rd": fraction > 0 and negative, "ru": fraction > 0 and not negative,
              "sr": word < int(fraction * 2**32)}[mode]
        y = (kept + up) * last
        if y > Fraction(format.max):
            to_inf = mode in ("rne", "rna", "rd" if negative else "ru") and not format.saturates
            y = None if to_inf else Fraction(format.max)
    y = np.inf if y is None else float(y)
    return -y if negative else y


def samples(format, dtype, seed, n=40):
    """Random bits, values all over the format's range, halfway points, subnormals, overflow edges."""
    rng = np.random.default_rng(seed)
    uint = np.uint32 if dtype == np.float32 else np.uint64
    wild = rng.integers(0, np.iinfo(uint).max, n, uint, endpoint=True).view(dtype)
    exponent = rng.uniform(format.emin - format.mantissa_bits - 3, format.emax + 2, 2 * n)
    near = rng.standard_normal(2 * n) * 2.0**exponent
    last = 2.0**(rng.integers(format.emin, format.emax, n, endpoint=True) - format.mantissa_bits)
    normal = (rng.integers(1 << format.mantissa_bits, 2 << format.mantissa_bits, n) + 0.5) * last
    subnormal = (rng.integers(0, 1 << format.mantissa_bits, n) + 0.5) * format.smallest
    edge = np.array([0, format.smallest / 2, format.smallest, format.min, format.max, 2.0**format.emax * 2,
                     format.max + 2.0**(format.emax - format.mantissa_bits - 1), np.finfo(dtype).max,
                     np.finfo(dtype).smallest_subnormal, np.inf, np.nan])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.concatenate([near, normal, subnormal, edge]).astype(dtype)
        x = np.concatenate([x, np.nextafter(x, dtype(np.inf)), np.nextafter(x, dtype(0))])
        if dtype == np.float64:  # an fp64 just off a halfway point that is one in fp32
            x = np.concatenate([x, normal * (1 + 2.0**-50), normal * (1 - 2.0**-50)])
    x = np.concatenate([x, wild])
    return np.concatenate([x, -x])


# ---- names --------------------------------------------------------------------------------------

def test_named_formats():
    assert format_named("e5m10") is format_named("fp16") and format_named("e8m7").name == "bf16"
    assert format_named("e4m3") != format_named("fp8_e4m3")
    assert (format_named("e4m3").max, format_named("fp8_e4m3").max) == (240, 448)
    assert format_named("e3m2") == Format("e3m2", 3, 2)
    for name in NAMES + ["e4m3", "e3m4"]:
        dtype = storage_dtype(name)
        if dtype is None:
            assert name == "tf32"
            continue
        info, f = ml_dtypes.finfo(dtype), format_named(name)
        assert (f.max, f.min, f.smallest, f.bits) == (float(info.max), float(info.smallest_normal),
                                                      float(info.smallest_subnormal), info.bits)
    assert storage_dtype("e3m2") is None
    for wrong in ((9, 3), (4, 24), (1, 1), (5, 2, True)):
        with pytest.raises(ValueError, match="2 to 8 exponent bits and 1 to 23 mantissa bits"):
            Format("wrong", *wrong)


@pytest.mark.parametrize("name", ["bf61", "e9m3", "e1m3", "e8m24", "e8m0", "e08m7", "E8M7", "", "e8m7\n", 16])
def test_unknown_format(name):
    with pytest.raises(ValueError, match="unknown format"):
        round_to(np.ones(1), name)


def test_nearest_words():
    with pytest.raises(ValueError, match="did you mean 'fp8_e4m3' or 'fp8_e5m2'"):
        format_named("fp8")
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        format_named("bf61")
    with pytest.raises(ValueError, match="unknown mode 'rnd'.*'rne'|unknown mode 'rnd'.*'rd'"):
        round_to(np.ones(1), "bf16", "rnd")


# ---- against ml_dtypes --------------------------------------------------------------------------

@pytest.mark.parametrize("name", [n for n in NAMES + ["e4m3", "e3m4"] if n not in ("tf32", "fp32")])
def test_every_value_and_the_points_between(name):
    dtype, format = storage_dtype(name), format_named(name)
    values = np.arange(1 << format.bits, dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    for mode in DETERMINISTIC:
        same(round_to(values, name, mode), np.clip(values, -448, 448) if format.saturates else values)
    finite = np.unique(values[np.isfinite(values)].astype(np.float64))
    half = np.concatenate([(finite[1:] + finite[:-1]) / 2, finite]).astype(np.float32)  # exact
    up, down = np.float32(np.inf), np.float32(-np.inf)
    x = np.concatenate([half, np.nextafter(half, up), np.nextafter(half, down)])
    with np.errstate(over="ignore", under="ignore"):
        want = x.astype(dtype).astype(np.float32)
    if format.saturates:
        assert np.abs(x).max() < 464  # from there on ml_dtypes gives NaN
    same(round_to(x, name), want)
    same(formats._round_block(x, format, MODES["rne"]), want)
    same(formats._round_block_rne(x, format), want)


# ---- against rationals --------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", VARIED)
def test_rationals(name, dtype):
    format, x = format_named(name), samples(format_named(name), dtype, seed=VARIED.index(name))
    word = np.random.default_rng(1).integers(0, 2**32, x.size, np.uint32)
    for mode in MODES:
        want = np.array([exact(v, format, mode, int(w)) for v, w in zip(x, word)]).astype(dtype)
        same(round_with(x, format, MODES[mode], word), want)
    same(formats._round_block(x, format, MODES["rne"]), round_to(x, format))


@pytest.mark.parametrize("name", ALL)
def test_every_format(name):
    format = format_named(name)
    for dtype in (np.float32, np.float64):
        x = samples(format, dtype, seed=7, n=4)
        for mode in ("rne", "rd"):
            same(round_to(x, name, mode), np.array([exact(v, format, mode) for v in x]).astype(dtype))


def test_fp8_e4m3_saturates():
    x = np.array([448, 460, 464, 480, 1e30, np.inf], np.float32)
    for mode in MODES:
        assert (round_to(np.array([x, -x]), "fp8_e4m3", mode, key=Key(0)) == [[448] * 6, [-448] * 6]).all()
    assert np.isnan(round_to(np.array([np.nan]), "fp8_e4m3", "rz")).all()


def test_one_rounding_from_fp64():
    just_above_half = np.array([1 + 2.0**-8 + 2.0**-40])  # by way of fp32 this ties to 1
    assert round_to(just_above_half, "bf16") == 1 + 2.0**-7


@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_signed_zero(mode):
    x = np.array([-0.0, 0.0, -1e-30, 1e-30], np.float32)
    y = round_to(x, "e3m2", mode)
    assert (np.signbit(y) == [True, False, True, False]).all()


# ---- properties ---------------------------------------------------------------------------------

any_fp32 = st.lists(st.floats(width=32), min_size=1, max_size=20).map(lambda v: np.array(v, np.float32))


@given(any_fp32, st.sampled_from(VARIED))
def test_directed_modes_mirror(x, name):
    same(round_to(-x, name, "rd"), -round_to(x, name, "ru"))
    rd, rz, ru, rne = (round_to(x, name, mode) for mode in ("rd", "rz", "ru", "rne"))
    ok = ~np.isnan(x) & ~(np.isinf(x) & format_named(name).saturates)
    saturated = (np.abs(x) > format_named(name).max) & format_named(name).saturates
    assert ((rd <= x) & (x <= ru) | saturated)[ok].all()
    assert (np.where(np.signbit(x), ru, rd) == rz)[ok].all()
    assert ((rne == rd) | (rne == ru))[ok].all()


@given(any_fp32, st.sampled_from(VARIED), st.sampled_from(DETERMINISTIC))
def test_idempotent_and_monotone(x, name, mode):
    y = round_to(x, name, mode)
    same(round_to(y, name, mode), y)
    assert is_representable(y, name).all()
    in_order = np.sort(x[~np.isnan(x)])
    y = round_to(in_order, name, mode)
    assert (y[1:] >= y[:-1]).all()


# ---- stochastic rounding ------------------------------------------------------------------------

def test_sr_needs_a_key():
    with pytest.raises(ValueError, match="'sr' needs a key"):
        round_to(np.ones(3), "bf16", "sr")
    with pytest.raises(TypeError, match="cuflash.Key, got int"):
        round_to(np.ones(3), "bf16", "sr", key=3)


@pytest.mark.parametrize("seed", range(3))
def test_sr_is_unbiased(seed):
    n = 1 << 18
    x = np.full(n, 1 + 0.3 * 2.0**-7, np.float32)
    p = (float(x[0]) - 1) * 2**7  # what fp32 made of 0.3
    up = round_to(x, "bf16", "sr", key=Key(seed)) > 1
    # n draws of a Bernoulli p: 5 standard deviations, exceeded once in 1.7 million seeds
    assert abs(up.mean() - p) < 5 * np.sqrt(p * (1 - p) / n)


def test_sr_draws_by_row_and_column(monkeypatch):
    key = Key(5, step=3, layer=2, sample=9)
    x = np.random.default_rng(0).standard_normal((3, 5, 37)).astype(np.float32)
    word = random_words(key, site=0, heads=0, tile=0, rows=range(15), cols=range(37))[0]
    want = np.array([exact(v, format_named("e3m2"), "sr", int(w)) for v, w in zip(x.flat, word.flat)])
    got = round_to(x, "e3m2", "sr", key=key)
    same(got, want.astype(np.float32).reshape(x.shape))
    for block in (16, 32, 64):
        monkeypatch.setattr(formats, "_BLOCK", block)
        same(round_to(x, "e3m2", "sr", key=key), got)
    same(round_to(x[0, :, :20], "e3m2", "sr", key=key), got[0, :, :20])
    assert (round_to(x, "e3m2", "sr", key=Key(6)) != got).any()


def test_sr_never_overflows():
    x = np.array([3.99, 4, 1e30, np.inf], np.float32)
    y = round_with(x, format_named("e2m1"), MODES["sr"], np.zeros(4, np.uint32))
    assert (y == [3, 3, 3, np.inf]).all()


# ---- a user's mode ------------------------------------------------------------------------------

def test_user_mode():
    odd = Mode("rodd", lambda fraction, rest, odd, negative, word: ~odd, "!odd")
    x = samples(format_named("bf16"), np.float32, seed=3)
    rz = round_to(x, "bf16", "rz")
    inexact = np.isfinite(x) & (rz != x)
    want = (rz.view(np.uint32) | (inexact.astype(np.uint32) << 16)).view(np.float32)
    same(round_to(x, "bf16", odd), want)  # max is odd, so nothing overflows
    assert odd.cuda_source == "DEFINE_MODE(rodd, false, !odd)"
    assert cuda_name("fp8_e4m3", odd) == "round_to<4, 3, mode_rodd, true>"


def test_user_mode_with_words():
    sr = Mode("sr16", lambda fraction, rest, odd, negative, word: word >> 16 < fraction >> 16,
              needs_key=True)
    x = np.full(1000, 1.3, np.float32)
    word = random_words(Key(1), site=0, heads=0, tile=0, rows=[0], cols=range(1000))[0, 0]
    fraction = np.uint32((int(x[:1].view(np.uint32)[0]) & 0xFFFF) << 16)
    want = np.where(word >> 16 < fraction >> 16, np.float32(1.3046875), np.float32(1.296875))
    same(round_to(x, "bf16", sr, key=Key(1)), want)
    with pytest.raises(ValueError, match="'sr16' needs a key"):
        round_to(x, "bf16", sr)
    with pytest.raises(ValueError, match="'sr16' has no cuda expression"):
        cuda_name("bf16", sr)


def test_bad_user_mode():
    with pytest.raises(ValueError, match="name must be an identifier, got 'my mode'"):
        Mode("my mode", lambda *a: a[1])
    with pytest.raises(ValueError, match="'rne': the name belongs to a built-in mode"):
        round_to(np.ones(1), "bf16", Mode("rne", lambda *a: a[1]))
    with pytest.raises(TypeError, match="up must return booleans, got uint32"):
        round_to(np.ones(1), "bf16", Mode("m", lambda fraction, rest, odd, negative, word: fraction))


# ---- arrays -------------------------------------------------------------------------------------

@pytest.mark.parametrize("x", [np.ones(3, np.int64), np.ones(3, np.float16), ml_dtypes.bfloat16(1), "a"])
def test_bad_dtype(x):
    with pytest.raises(TypeError, match="x must be float32 or float64, got"):
        round_to(x, "bf16")


@pytest.mark.parametrize("mode", ["rne", "rz", "sr"])
@pytest.mark.parametrize("name", ["bf16", "e3m2", "fp32"])
def test_shapes_and_strides(name, mode):
    x = np.random.default_rng(0).standard_normal((6, 8, 10)).astype(np.float32)
    before = x.copy()
    for view in (x, x[::2, :, ::-1], x.transpose(2, 0, 1), x[0, 0, 0], np.float32(2), x[:0], x[:, :, :0]):
        y = round_to(view, name, mode, key=Key(0))
        assert isinstance(y, np.ndarray) and y.shape == np.shape(view) and y.dtype == np.float32
        same(y, round_to(np.array(view), name, mode, key=Key(0)))
        assert not np.shares_memory(y, x)
    same(x, before)


@pytest.mark.parametrize("name,mode", [("bf16", "rne"), ("e4m3", "rne"), ("e4m3", "rd"), ("e4m3", "sr")])
def test_memory_is_bounded(name, mode):
    x = np.ones((1 << 10, 1 << 12), np.float32)
    tracemalloc.start()
    round_to(x, name, mode, key=Key(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes + (8 << 20)  # the result and some blocks


def test_ulp():
    x = np.array([1, -1, 1.99, 2, 0, 1e-45, 2.0**-126, 3e38, np.inf, np.nan], np.float32)
    want = 2.0**np.array([-7, -7, -7, -6, -133, -133, -133, 120, np.nan, np.nan])
    for dtype in (np.float32, np.float64):
        same(ulp(x.astype(dtype), "bf16"), want)
    assert ulp(np.float64(1e300), "fp8_e4m3") == 32 and ulp(np.float32(0), "fp8_e4m3") == 2.0**-9
    values = np.arange(0x7BFF, dtype=np.uint16).view(np.float16)
    # all but max, where NumPy overflows
    same(ulp(values.astype(np.float32), "fp16"), np.spacing(values).astype(np.float64))


def test_is_representable():
    x = np.array([1, 1.5, 1.25, np.inf, -np.inf, np.nan, -0.0, 448, 464], np.float32)
    assert (is_representable(x, "e2m1") == [1, 1, 0, 1, 1, 1, 1, 0, 0]).all()
    assert (is_representable(x, "fp8_e4m3") == [1, 1, 1, 0, 0, 1, 1, 1, 0]).all()


# ---- CUDA ---------------------------------------------------------------------------------------

def test_header_defines_the_built_in_modes():
    text = (kernels.source_dir() / "formats.cuh").read_text()
    assert re.findall(r"^DEFINE_MODE.*$", text, re.MULTILINE) == [mode.cuda_source for mode in MODES.values()]


USER = Mode("user", lambda fraction, rest, odd, negative, word: odd & ~negative, "odd && !negative")


def every_rounding(pairs):
    """Source of a kernel that rounds x under every (format, mode): y is (pairs, n)."""
    lines = "\n".join(f"    y[{j}LL * n + i] = {cuda_name(*pair)}(x[i], word[i]);"
                      for j, pair in enumerate(pairs))
    return f"""#include "formats.cuh"
{USER.cuda_source}
extern "C" __global__ void every(float* y, const float* x, const unsigned* word, int n) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
{lines}
}}
"""


@pytest.mark.skipif(kernels.nvrtc_reason() is not None, reason=str(kernels.nvrtc_reason()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "newest"])
def test_cuda_compiles(arch, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "cache_dir", lambda: tmp_path)
    pairs = [(name, mode) for name in VARIED for mode in [*MODES.values(), USER]]
    if arch == "newest":
        pairs += [(name, mode) for name in ALL for mode in ("rne", "sr")]
        arch = kernels.newest_architecture()
    path = kernels.compile_cubin("formats_test", arch, headers={"formats_test.cu": every_rounding(pairs)})
    assert path.read_bytes().startswith(b"\x7fELF")


@pytest.mark.skipif(kernels.gpu_reason() is not None, reason=str(kernels.gpu_reason()))
def test_cuda_on_the_gpu():
    cupy = kernels.import_cupy()
    pairs = [(name, mode) for name in VARIED for mode in [*MODES.values(), USER]]
    x = np.concatenate([samples(format_named(name), np.float32, seed=13) for name in VARIED])
    word = np.random.default_rng(3).integers(0, 2**32, x.size, np.uint32)
    y = cupy.empty((len(pairs), x.size), np.float32)
    every = kernels.kernel("formats_test", "every", headers={"formats_test.cu": every_rounding(pairs)})
    every((-(-x.size // 256),), (256,), (y, cupy.asarray(x), cupy.asarray(word), np.int32(x.size)))
    for (name, mode), got in zip(pairs, y.get()):
        same(got, round_with(x, format_named(name), as_mode(mode), word))


@pytest.mark.skipif(kernels.gpu_reason() is not None, reason=str(kernels.gpu_reason()))
def test_cuda_instructions_have_the_bits_of_the_rule():
    """cvt.rn.bf16 and cvt.rn.f16 against the integer steps, on all 2**32 arguments."""
    cupy = kernels.import_cupy()
    rule = Mode("rule", MODES["rne"].up, MODES["rne"].cuda)  # rne by another name takes the general path
    source = f"""#include "formats.cuh"
{rule.cuda_source}
__device__ bool differ(float a, float b) {{
    return __float_as_uint(a) != __float_as_uint(b) && !(a != a && b != b);
}}
extern "C" __global__ void count(unsigned* bad) {{
    const float x = __uint_as_float(blockIdx.x * blockDim.x + threadIdx.x);
    if (differ({cuda_name("bf16", "rne")}(x), {cuda_name("bf16", rule)}(x))) atomicAdd(bad, 1u);
    if (differ({cuda_name("fp16", "rne")}(x), {cuda_name("fp16", rule)}(x))) atomicAdd(bad + 1, 1u);
}}
"""
    bad = cupy.zeros(2, np.uint32)
    kernels.kernel("formats_test", "count", headers={"formats_test.cu": source})((1 << 24,), (256,), (bad,))
    assert bad.get().tolist() == [0, 0]


# The header by the host's compiler: its integer algorithm without a GPU.
HOST = """
#include <cstdio>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __uint2float_rn(unsigned u) { return (float)u; }
#include "formats.cuh"
int main() {
    unsigned in[2];
    std::vector<unsigned> results;
    while (fread(in, 4, 2, stdin) == 2) {
        const float x = __uint_as_float(in[0]);
        const unsigned word = in[1];
CALLS
    }
    fwrite(results.data(), 4, results.size(), stdout);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the CUDA header on the host")
def test_cuda_header_on_the_host(tmp_path):
    pairs = [(name, mode) for name in VARIED for mode in MODES]
    calls = "\n".join(f"results.push_back(__float_as_uint({cuda_name(*pair)}(x, word)));" for pair in pairs)
    (tmp_path / "host.cpp").write_text(HOST.replace("CALLS", calls))
    subprocess.run(["g++", "-std=c++17", "-O1", "-ffp-contract=off", f"-I{kernels.source_dir()}", "-o",
                    tmp_path / "host", tmp_path / "host.cpp"], check=True)
    x = np.concatenate([samples(format_named(name), np.float32, seed=11) for name in VARIED])
    word = np.random.default_rng(2).integers(0, 2**32, x.size, np.uint32)
    done = subprocess.run([tmp_path / "host"], input=np.stack([x.view(np.uint32), word], 1).tobytes(),
                          stdout=subprocess.PIPE, check=True)
    results = np.frombuffer(done.stdout, np.float32).reshape(x.size, len(pairs))
    for (name, mode), got in zip(pairs, results.T):
        same(np.ascontiguousarray(got), round_with(x, format_named(name), MODES[mode], word))


@pytest.mark.parametrize("mode", ["rne", "rz", "rna", "rd", "ru"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2", "e3m2", "e8m20"])
def test_every_nan_stays_nan_in_any_company(name, mode):
    """A NaN of all ones, which every dot product writes, alone in its block: sums of its bits wrap."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001], np.uint32)
    wide = np.array([0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FF8000000000000, 0x7FF0000000000001], np.uint64)
    for x in (*bits.view(np.float32), *wide.view(np.float64)):
        for company in ([], [1.0], [0.0, 1e-30], [np.inf]):
            got = round_to(np.array([x, *company], x.dtype), name, mode)
            assert np.isnan(got[0]) and not np.isnan(got[1:]).any()
