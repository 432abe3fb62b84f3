"""Functions against fp64 mathematics and exact fractions, and the CUDA source against NumPy, bit for bit.

The CUDA source runs here as C++, without a GPU: its intrinsics are plain IEEE operations.
"""
import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cuflash import functions, kernels
from tests.sweep_functions import FUNCTIONS, Errors, domain, every_16_bit

HEADER = Path(__file__).parent.parent / "cuda" / "functions.cuh"
NAN, INF = np.nan, np.inf


def fp32(*values):
    return np.array(values, np.float32)


def same_bits(a, b):
    """Equal to the bit; all NaNs count as equal (numerics §8)."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


# ---- fma -----------------------------------------------------------------------------------------

def nearest_fp32(value: Fraction) -> float:
    """Round to nearest even by integers alone."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    size = round(size / unit) * unit  # Python rounds fractions to even
    size = INF if size >= Fraction(2) ** 128 else float(size)
    return -size if value < 0 else size


def _spread(rng, low, high, n):
    """n random fp32 with exponents in [low, high) and either sign."""
    return np.ldexp(rng.choice([-1.0, 1.0], n) * (1 + rng.integers(0, 1 << 23, n) / 2**23),
                    rng.integers(low, high, n)).astype(np.float32)


def _random(rng, n):
    return _spread(rng, -4, 4, n), _spread(rng, -4, 4, n), _spread(rng, -8, 8, n)


def _cancelling(rng, n):
    a, b = _spread(rng, -4, 4, n), _spread(rng, -4, 4, n)
    return a, b, (-(a.astype(np.float64) * b)).astype(np.float32)


def _near_ties(rng, n):
    """c plus half its last place, a little more or less: fp64 rounds the sum onto the tie."""
    tiny = rng.integers(1, 64, n) * 2.0**-23
    half = rng.integers(0, 2, n) * 2 + 1  # 1 or 3 halves
    a, b = -half * 2.0**-12 * (1 + tiny), rng.choice([-1, 1], n) * 2.0**-12 * (1 - tiny)
    return a.astype(np.float32), b.astype(np.float32), _spread(rng, 0, 1, n)


def _subnormal_ties(rng, n):
    """A subnormal number and half of 2^-149, a little less."""
    tiny = rng.integers(1, 64, n) * 2.0**-23
    a, b = 2.0**-75 * (1 + tiny), rng.choice([-1, 1], n) * 2.0**-75 * (1 - tiny)
    c = rng.integers(-1 << 22, 1 << 22, n) * 2.0**-149
    return a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)


def _subnormal(rng, n):
    return _spread(rng, -80, -60, n), _spread(rng, -80, -60, n), _spread(rng, -149, -120, n)


def _overflow(rng, n):
    """Around the tie between the largest number and 2^128."""
    tiny = rng.integers(-2, 3, n) * 2.0**-23
    a, b = np.float32(2.0**52) * (1 + tiny), np.float32(2.0**51) * (1 - tiny)
    return a.astype(np.float32), b.astype(np.float32), np.full(n, np.finfo(np.float32).max)


@pytest.mark.parametrize("make, naive_fails", [
    (_random, 0), (_cancelling, 0), (_near_ties, 0.3), (_subnormal_ties, 0.3), (_subnormal, 0),
    (_overflow, 0.3)])
def test_fma_equals_exact_fractions(make, naive_fails):
    a, b, c = make(np.random.default_rng(7), 20_000)
    exact = np.array([nearest_fp32(Fraction(p) * Fraction(q) + Fraction(r))
                      for p, q, r in zip(a.tolist(), b.tolist(), c.tolist())], np.float32)
    assert np.array_equal(functions.fma(a, b, c), exact)
    with np.errstate(over="ignore"):
        naive = (a.astype(np.float64) * b + c).astype(np.float32)
    assert np.mean(naive != exact) >= naive_fails  # the trap is a trap


def test_fma_of_zeros_infinities_and_nan():
    a = fp32(0, -0.0, 1, -1, 1, INF, INF, INF, NAN, 1, 1, 1e38, -1e38)
    b = fp32(1, 1, 1, 1, 1, 0, 1, 1, 1, NAN, 1, 1e38, 1e38)
    c = fp32(-0.0, -0.0, -1, 1, -0.0, 1, -INF, INF, 1, 1, NAN, -INF, 1)
    expected = fp32(0, -0.0, 0, 0, 1, NAN, NAN, INF, NAN, NAN, NAN, -INF, -INF)
    assert same_bits(functions.fma(a, b, c), expected)


# ---- accuracy ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_within_the_contract_and_no_step_goes_the_wrong_way(name):
    of = FUNCTIONS[name]
    for values in (every_16_bit(ml_dtypes.bfloat16), every_16_bit(np.float16)):
        errors = Errors(name)
        errors.add(domain(name, values))
        assert errors.largest <= of.bound and errors.violations == 0
    errors = Errors(name)
    for low, high in of.ranges:  # half a million numbers each, evenly over the bits
        first, last = sorted(fp32(low, high).view(np.uint32) & 0x7FFFFFFF)
        bits = np.linspace(first, last, 500_000).astype(np.uint32)
        errors.add(np.sort(np.copysign(bits.view(np.float32), np.float32(low))))
    assert errors.count >= 450_000
    assert errors.largest <= of.bound
    assert abs(errors.mean) < 0.02  # ulp: no bias to speak of; a systematic half place would be 0.5
    assert errors.violations == 0  # so far apart; docs/functions.md has neighbours


def test_rsqrt_is_correctly_rounded_everywhere():
    # √ scales exactly by 4, so the numbers of [1, 4) stand for all. With X = x·2^23 < 2^25 an integer and
    # Y = y·2^24 the result, it must be that (2Y − 1)²·X < 2^73 < (2Y + 1)²·X. The products are within
    # 2^51 of 2^73, so differences modulo 2^64 keep their signs.
    first = int(fp32(1).view(np.uint32)[0])
    for start in range(first, first + (2 << 23), 1 << 20):
        x = np.arange(start, start + (1 << 20), dtype=np.uint32).view(np.float32)
        X = (x.astype(np.float64) * 2**23).astype(np.uint64)
        Y = (functions.rsqrt(x).astype(np.float64) * 2**24).astype(np.uint64)
        assert np.all(((2 * Y - 1) ** 2 * X).view(np.int64) < 0)
        assert np.all(((2 * Y + 1) ** 2 * X).view(np.int64) > 0)


@pytest.mark.parametrize("name", ("exp", "exp2"))
def test_exponentials_are_at_most_1_up_to_0(name):
    bits = np.random.default_rng(3).integers(0, 1 << 31, 1_000_000, dtype=np.uint32)
    x = -bits.view(np.float32)
    y = getattr(functions, name)(x[~np.isnan(x)])
    assert np.all((y >= 0) & (y <= 1))


def test_exponentials_are_the_fused_steps_that_they_stand_for():
    # NumPy takes fp64 for fma here (docs/functions.md): the same steps by functions.fma, exact by other means.
    fma, f = functions.fma, functions
    rng = np.random.default_rng(23)
    x = rng.uniform(-87, 88, 1_000_000).astype(np.float32)
    x[::2] = _spread(rng, -26, 6, 500_000)  # and small ones, of whose r all bits count
    for function, log2e, coefficients in ((f.exp, f.LOG2E, f.EXP_P), (f.exp2, np.float32(1), f.EXP2_P)):
        m = fma(x, log2e, f.ROUND) - f.ROUND
        r = x - m if function is f.exp2 else fma(-m, f.LN2_LOW, fma(-m, f.LN2_HIGH, x))
        w = np.full_like(x, coefficients[-1])
        for c in (*coefficients[-2::-1], np.float32(1)):
            w = fma(w, r, c)
        assert same_bits(function(x), np.ldexp(w, m.astype(np.int32)))


def test_exp2_is_exact_at_integers():
    n = np.arange(-160, 140)
    with np.errstate(over="ignore"):
        assert np.array_equal(functions.exp2(n.astype(np.float32)), np.ldexp(1.0, n).astype(np.float32))


# ---- special values ------------------------------------------------------------------------------

TINY = np.float32(2.0**-149)
SPECIAL = {  # (x, result)
    "exp": [(0, 1), (-0.0, 1), (-INF, 0), (INF, INF), (NAN, NAN), (-103.97, TINY), (-104.001, 0), (-1e38, 0),
            (88.73, INF), (3e38, INF), (TINY, 1), (-TINY, 1)],
    "exp2": [(0, 1), (-0.0, 1), (-INF, 0), (INF, INF), (NAN, NAN), (-149, TINY), (-149.99, TINY), (-150, 0),
             (-1e38, 0), (128, INF), (3e38, INF), (TINY, 1), (-TINY, 1)],
    "log": [(0, -INF), (-0.0, -INF), (1, 0), (INF, INF), (-INF, NAN), (NAN, NAN), (-1, NAN), (-TINY, NAN),
            (TINY, -103.27893)],
    "rsqrt": [(0, INF), (-0.0, -INF), (INF, 0), (-INF, NAN), (NAN, NAN), (-1, NAN), (4, 0.5),
              (TINY, 2.0**74.5), (2.0**-148, 2.0**74)],
    "erf": [(0, 0), (-0.0, -0.0), (INF, 1), (-INF, -1), (NAN, NAN), (4, 1), (-4, -1), (1e38, 1), (TINY, TINY),
            (-TINY, -TINY)],
    "tanh": [(0, 0), (-0.0, -0.0), (INF, 1), (-INF, -1), (NAN, NAN), (10, 1), (-1e38, -1), (TINY, TINY),
             (-TINY, -TINY)],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.filterwarnings("error")
def test_special_values_without_a_warning(name):
    x, y = fp32(*SPECIAL[name]).T.copy()
    result = getattr(functions, name)(x)
    assert same_bits(result, y), list(zip(x, result, y))


@pytest.mark.parametrize("name", ("erf", "tanh"))
def test_odd_functions_are_odd_to_the_bit(name):
    x = np.random.default_rng(5).normal(0, 2, 100_000).astype(np.float32)
    function = getattr(functions, name)
    assert same_bits(function(-x), -function(x))


# ---- tables, blocks, arguments -------------------------------------------------------------------

@pytest.mark.parametrize("name", ("exp", "exp2"))
@pytest.mark.parametrize("format, dtype", [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16),
                                           ("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("tf32", np.float32)])
def test_a_format_never_changes_bits(name, format, dtype):
    function = getattr(functions, name)
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # Inf and every kind of NaN among them
    if format == "bf16":
        values = values.view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # Inf to fp8_e4m3
        values = values.astype(dtype).astype(np.float32)
    assert same_bits(function(values, format), function(values))
    outside = np.random.default_rng(6).normal(0, 9, 70_000).astype(np.float32)
    assert same_bits(function(outside, format), function(outside))
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.all(np.isnan(function(nan, format)))


ALL = [*FUNCTIONS, "fma"]


def _arguments(name, seed, shape):
    rng = np.random.default_rng(seed)
    x = [rng.normal(0, 3, shape).astype(np.float32) for _ in range(3 if name == "fma" else 1)]
    return [abs(v) for v in x] if name in ("log", "rsqrt") else x


@pytest.mark.parametrize("name", ALL)
def test_blocks_strides_and_out_give_the_bits_of_single_elements(name):
    function = getattr(functions, name)
    x = _arguments(name, 11, (3, 20_011))
    whole = function(*x)
    assert whole.shape == (3, 20_011) and whole.dtype == np.float32
    at = np.random.default_rng(12).integers(0, 3 * 20_011, 40)
    for i in at:
        assert same_bits(function(*(v.flat[i:i + 1] for v in x)), whole.flat[i:i + 1])
    assert same_bits(function(*(v.T[::-7] for v in x)), whole.T[::-7])
    out = np.empty((20_011, 3), np.float32).T
    assert function(*x, out=out) is out and same_bits(out, whole)
    for i in range(len(x)):
        inputs = [v.copy() for v in x]
        assert same_bits(function(*inputs, out=inputs[i]), whole)
    assert function(*(v[:, :0] for v in x)).shape == (3, 0)
    assert function(*(v[0, 0] for v in x)).shape == ()


def test_fma_broadcasts():
    a, b, c = np.ones((4, 1), np.float32), np.arange(5, dtype=np.float32), np.float32(2)
    assert np.array_equal(functions.fma(a, b, c), np.tile(b + 2, (4, 1)))


def test_threads_do_not_share_scratch():
    x = np.random.default_rng(13).normal(0, 3, (8, 300_000)).astype(np.float32)
    with ThreadPoolExecutor(8) as pool:
        for part, result in zip(x, pool.map(functions.erf, x)):
            assert same_bits(result, functions.erf(part))


def test_other_dtypes_and_shapes_are_refused():
    x = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="x: got dtype float64, valid: float32"):
        functions.exp(np.zeros(3))
    with pytest.raises(TypeError, match="b: got dtype int64, valid: float32"):
        functions.fma(x, 1, x)
    with pytest.raises(ValueError, match=r"out: got float32 \(2,\), valid: a float32 array of shape \(3,\)"):
        functions.log(x, out=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="out: got list, valid"):
        functions.log(x, out=[0, 0, 0])
    with pytest.raises(ValueError, match="'bf16'"):
        functions.exp(x, "bf61")


# ---- the CUDA source -----------------------------------------------------------------------------

def test_cuda_has_the_same_constants():
    found = {}
    for name, many, body in re.findall(r"constexpr float (\w+)(\[\])? = ([^;]+);", HEADER.read_text()):
        values = [np.float32(value) for value in re.findall(r"[-+.\de]+(?=f)", body)]
        found[name] = tuple(values) if many else values[0]
    ours = {name: value for name, value in vars(functions).items()
            if name.isupper() and not name.startswith("_") and isinstance(value, (tuple, np.float32))}
    assert found == ours and len(found) == 13
    bits = dict(re.findall(r"constexpr int (\w+) = (0x\w+);", HEADER.read_text()))
    assert int(bits["SQRT_HALF_BITS"], 16) == functions._SQRT_HALF_BITS


# The intrinsics of CUDA as the IEEE operations that they are; the compiler may not fuse (-ffp-contract=off).
HOST = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
static inline int __float_as_int(float x) { int i; std::memcpy(&i, &x, 4); return i; }
static inline float __int_as_float(int i) { float x; std::memcpy(&x, &i, 4); return x; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline double __dsqrt_rn(double x) { return std::sqrt(x); }
static inline double __drcp_rn(double x) { return 1 / x; }
static inline float __double2float_rn(double x) { return (float)x; }
#include "functions.cuh"
#define EXPORT(name, expression) \
    extern "C" void run_##name(const float* in, float* out, long n) \
    { for (long i = 0; i < n; i++) { float x = in[i]; out[i] = expression; } }
EXPORT(exp, exp_defined(x))
EXPORT(exp_small, exp_defined<true>(x))
EXPORT(exp_narrow, exp_narrow(x))
EXPORT(exp2, exp2_defined(x))
EXPORT(exp2_small, exp2_defined<true>(x))
EXPORT(exp2_narrow, exp2_narrow(x))
EXPORT(log, log_defined(x))
EXPORT(rsqrt, rsqrt_defined(x))
EXPORT(erf, erf_defined(x))
EXPORT(tanh, tanh_defined(x))
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to run cuda/functions.cuh on the CPU")
    folder = tmp_path_factory.mktemp("functions")
    (folder / "host.cpp").write_text(HOST)
    library = folder / "host.so"
    subprocess.run([compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror",
                    "-Wno-unknown-pragmas", "-shared", "-fPIC", f"-I{HEADER.parent}", "-o", library,
                    folder / "host.cpp"], check=True)
    loaded = ctypes.CDLL(str(library))

    def run(name: str, x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        getattr(loaded, f"run_{name}")(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p),
                                       ctypes.c_long(x.size))
        return out
    return run


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cuda_source_gives_the_same_bits(host, name):
    function = getattr(functions, name)
    for first in range(0, 1 << 32, 1 << 29):  # 10.8 million of all bit patterns, NaNs included
        x = np.arange(first, first + (1 << 29), 397, dtype=np.uint32).view(np.float32)
        y = function(x)
        assert same_bits(host(name, x), y)
        if name in ("exp", "exp2"):
            assert same_bits(host(f"{name}_small", x)[~(x > 40)], y[~(x > 40)])
            narrow = abs(x) <= (86 if name == "exp" else 125)
            assert same_bits(host(f"{name}_narrow", x)[narrow], y[narrow])
    low, high = fp32(*(abs(end) for end in FUNCTIONS[name].ranges[0])).view(np.uint32)
    x = np.random.default_rng(17).integers(min(low, high), max(low, high), 1_000_000, dtype=np.uint32)
    x = np.concatenate([x.view(np.float32), -x.view(np.float32), fp32(*SPECIAL[name])[:, 0]])
    assert same_bits(host(name, x), function(x))


KERNEL = """#include "functions.cuh"
extern "C" __global__ void all(float* x) {
    float v = x[threadIdx.x];
    x[threadIdx.x] = exp_defined(v) + exp_defined<true>(v) + exp_narrow(v)
                   + exp2_defined(v) + exp2_defined<true>(v) + exp2_narrow(v)
                   + log_defined(v) + rsqrt_defined(v) + erf_defined(v) + tanh_defined(v);
}
"""


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "newest"))
def test_cuda_source_compiles(arch, tmp_path, monkeypatch):
    (tmp_path / "functions_all.cu").write_text(KERNEL)
    monkeypatch.setattr(kernels, "source_dir", lambda: tmp_path)
    arch = kernels.newest_architecture() if arch == "newest" else arch
    used = kernels.resources("functions_all", arch, headers={HEADER.name: HEADER.read_text()})
    assert used["all"].stack == used["all"].spill_stores == 0  # constants are folded, not kept in an array
