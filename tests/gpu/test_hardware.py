"""The tensor core against `cuflash.dot`, bit for bit (numerics.md, section 5).

Everything that cuflash promises about tensor cores rests on these. Each case is the product of two
matrices, a million results of one instruction under one distribution of operands.
"""
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import h5py
import numpy as np
import pytest

from cuflash import kernels
from cuflash.accumulators import dot_fp32
from cuflash.formats import Format, format_named

SIZE = 1024  # rows and columns
RECORDED = 12  # rows and columns of each case that go to tests/record


@dataclass(frozen=True)
class Instruction:
    kernel: str
    format: str
    rows: int
    columns: int
    group: int  # products at once
    starts: bool = True  # from c, not from zero


INSTRUCTIONS = [Instruction(f"mma_{name}", name, 16, 8, 8 if name == "tf32" else 16)
                for name in ("bf16", "fp16", "tf32")]
WGMMA = [Instruction(f"wgmma_{name}_n{columns}", name, 64, columns, 16, starts=columns != 128)
         for name in ("bf16", "fp16") for columns in (8, 64, 128)]


# ---- operands: a (M, K), b (K, N) hold values of the format, c (M, N) of fp32

def draw(rng: np.random.Generator, format: Format, shape, low: float, high: float) -> np.ndarray:
    """Values of either sign, significands and exponents in [low, high] uniform, as far as the format goes."""
    low, high = (int(np.clip(e, format.emin, format.emax)) for e in (low, high))
    significand = 1 + rng.integers(0, 2 ** format.mantissa_bits, shape) * 0.5 ** format.mantissa_bits
    magnitude = np.ldexp(significand, rng.integers(low, high + 1, shape))
    return (magnitude * rng.choice([-1, 1], shape)).astype(np.float32)


def subnormals(rng: np.random.Generator, format: Format, shape) -> np.ndarray:
    """Subnormal values and zeros of either sign."""
    digits = rng.integers(-2 ** format.mantissa_bits + 1, 2 ** format.mantissa_bits, shape)
    digits >>= rng.integers(0, format.mantissa_bits + 1, shape)
    return np.ldexp(digits.astype(np.float64), format.emin - format.mantissa_bits).astype(np.float32)


def sprinkle(rng: np.random.Generator, x: np.ndarray, share: float, values) -> np.ndarray:
    at = rng.random(x.shape) < share
    x[at] = rng.choice(np.asarray(values, np.float32), np.count_nonzero(at))
    return x


FP32 = format_named("fp32")


def near_one(rng, format, m, n, k):
    return draw(rng, format, (m, k), -4, 1), draw(rng, format, (k, n), -4, 1), draw(rng, FP32, (m, n), -6, 5)


def wide(rng, format, m, n, k):
    a, b = draw(rng, format, (m, k), -30, 30), draw(rng, format, (k, n), -30, 30)
    return a, b, draw(rng, FP32, (m, n), -60, 60)


def widest(rng, format, m, n, k):
    """All exponents whose products stay finite; mostly one term hides the others."""
    a, b = draw(rng, format, (m, k), -126, 62), draw(rng, format, (k, n), -126, 62)
    return a, b, draw(rng, FP32, (m, n), -126, 126)


def one_sign(rng, format, m, n, k):
    return tuple(map(np.abs, near_one(rng, format, m, n, k)))


def cancelling(rng, format, m, n, k):
    """Neighbours in k cancel, all of them or all but a last digit; what stays meets a small c."""
    a, b = draw(rng, format, (m, k), -8, 8), draw(rng, format, (k, n), -8, 8)
    a[:, 1::2] = a[:, ::2]
    b[1::2] = -b[::2]
    digit = np.uint32(1 << (23 - format.mantissa_bits))
    b.view(np.uint32)[...] += digit * rng.choice(np.array([0, 0, 0, 1], np.uint32), b.shape)
    return a, b, draw(rng, FP32, (m, n), -40, 10)


def cancelling_c(rng, format, m, n, k):
    """c is minus the product, to a few units in its last place."""
    a, b, _ = wide(rng, format, m, n, k) if rng.random() < 0.5 else near_one(rng, format, m, n, k)
    c = -(a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    return a, b, (c.view(np.int32) + rng.integers(-3, 4, c.shape, dtype=np.int32)).view(np.float32)


def zeros(rng, format, m, n, k):
    """Zero times something huge, among products that are tiny: has a zero term an exponent?"""
    a, b = draw(rng, format, (m, k), -80, -40), draw(rng, format, (k, n), -80, -40)
    for i in range(k):
        kind = rng.integers(4)
        if kind == 0:
            a[:, i], b[i] = rng.choice([0.0, -0.0], m), draw(rng, format, n, 90, 127)
        elif kind == 1:
            a[:, i], b[i] = draw(rng, format, m, 90, 127), rng.choice([0.0, -0.0], n)
        elif kind == 2:
            sprinkle(rng, a[:, i], 0.5, [0.0, -0.0])
    return a, b, sprinkle(rng, draw(rng, FP32, (m, n), -150, -80), 0.7, [0.0, -0.0])


def underflowing(rng, format, m, n, k):
    """Products around and below 2^-149, on a c that is zero, subnormal or the smallest normal."""
    exponent = rng.integers(-92, -66, (m, 1)) + rng.integers(0, 5, (m, k))  # whole rows stay below 2^-149
    a = np.ldexp(draw(rng, format, (m, k), 0, 0), np.clip(exponent, format.emin, format.emax))
    b = draw(rng, format, (k, n), -72, -69)
    c = np.where(rng.random((m, n)) < 0.5, subnormals(rng, FP32, (m, n)), draw(rng, FP32, (m, n), -126, -120))
    c = sprinkle(rng, c.astype(np.float32), 0.5, [0.0, -0.0, 2.0 ** -149, -2.0 ** -149])
    return a, sprinkle(rng, b, 0.1, [0.0]), c


def subnormal_operands(rng, format, m, n, k):
    a, b = subnormals(rng, format, (m, k)), draw(rng, format, (k, n), -10, 126)
    swap = rng.random(k) < 0.5
    a[:, swap] = draw(rng, format, (m, np.count_nonzero(swap)), -10, 126)
    b[swap] = subnormals(rng, format, (np.count_nonzero(swap), n))
    return a, b, sprinkle(rng, subnormals(rng, FP32, (m, n)), 0.3, [0.0, 2.0 ** -60, -1.0])


def all_subnormal(rng, format, m, n, k):
    c = sprinkle(rng, subnormals(rng, FP32, (m, n)), 0.3, [0.0, -0.0])
    return subnormals(rng, format, (m, k)), subnormals(rng, format, (k, n)), c


def overflowing(rng, format, m, n, k):
    """Products and sums around 2^128, some of which would cancel."""
    a, b = draw(rng, format, (m, k), 58, 66), draw(rng, format, (k, n), 58, 63)
    if rng.random() < 0.5:
        a[:, 1::2] = a[:, ::2]
        b[1::2] = -b[::2]
    largest = np.finfo(np.float32).max
    return a, b, sprinkle(rng, draw(rng, FP32, (m, n), 118, 127), 0.1, [largest, -largest])


def special(rng, format, m, n, k):
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0]
    a, b, c = near_one(rng, format, m, n, k)
    return sprinkle(rng, a, 0.03, values), sprinkle(rng, b, 0.03, values), sprinkle(rng, c, 0.03, values)


def bits(rng, format, m, n, k):
    """Any bit pattern, NaNs, infinities and subnormals among them."""
    def any_of(format, shape):
        if format.name == "fp16":
            return rng.integers(0, 2 ** 16, shape, dtype=np.uint16).view(np.float16).astype(np.float32)
        words = rng.integers(0, 2 ** 32, shape, dtype=np.uint32)
        return (words >> (23 - format.mantissa_bits) << (23 - format.mantissa_bits)).view(np.float32)
    return any_of(format, (m, k)), any_of(format, (k, n)), any_of(FP32, (m, n))


DISTRIBUTIONS: list[Callable] = [
    near_one, wide, widest, one_sign, cancelling, cancelling_c, zeros, underflowing, subnormal_operands,
    all_subnormal, overflowing, special, bits]


# ---- running and comparing

def run(instruction: Instruction, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c by the instruction; b is (K, N)."""
    cupy = kernels.import_cupy()
    (m, k), n = a.shape, b.shape[1]
    d = cupy.empty((m, n), np.float32)
    launch = kernels.kernel("hardware", instruction.kernel)
    grid = (n // instruction.columns, m // instruction.rows)
    threads = 2 * instruction.rows if instruction.rows == 64 else 32
    launch(grid, (threads,), (cupy.asarray(stored(a, instruction.format)),
                              cupy.asarray(stored(np.ascontiguousarray(b.T), instruction.format)),
                              cupy.asarray(c), d, np.int32(n), np.int32(k)))
    return d.get()


def stored(x: np.ndarray, format: str) -> np.ndarray:
    """The bits of values as the instruction takes them."""
    if format == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if format == "fp16":
        return x.astype(np.float16).view(np.uint16)
    return x.view(np.uint32)


def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))


def check(instruction: Instruction, distribution: Callable, size: int, k: int, seed: int, record) -> None:
    case = f"{instruction.kernel} {distribution.__name__} K={k}"
    print(f"seed {seed}")
    rng = np.random.default_rng([seed, zlib.crc32(case.encode())])
    format = format_named(instruction.format)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b, c = distribution(rng, format, size, size, k)
    if not instruction.starts:
        c = np.zeros_like(c)
    got = run(instruction, a, b, c)
    expected = dot_fp32(a, b, c, "hopper", instruction.format, instruction.format)
    equal = same(got, expected)
    wrong = np.argwhere(~equal)
    if record is not None:
        record(instruction, distribution.__name__, a, b, c, got, wrong)
    if len(wrong):
        lines = [f"{case}, seed {seed}: {len(wrong)} of {equal.size} results differ"]
        for i, j in wrong[:3]:
            lines.append(f"[{i}, {j}] a {_hex(a[i])}\n   b {_hex(b[:, j])}\n   c {_hex(c[i, j])} gives "
                         f"{_hex(got[i, j])} = {got[i, j]}, dot {_hex(expected[i, j])} = {expected[i, j]}")
        pytest.fail("\n".join(lines))


def _hex(x: np.ndarray) -> str:
    return " ".join(f"{word:08x}" for word in np.atleast_1d(x).view(np.uint32))


@pytest.fixture(scope="module")
def record(record_folder):
    """Keeps a corner of every case, and all that differs, in hardware_sm<capability>.h5."""
    if record_folder is None:
        yield None
        return
    cupy = kernels.import_cupy()
    kept: dict[str, list] = {}
    differing: dict[str, list] = {}

    def keep(instruction, distribution, a, b, c, d, wrong):
        r = slice(RECORDED)
        if a.shape[1] == 16:
            kept.setdefault(instruction.kernel, []).append((distribution, a[r], b[:, r], c[r, r], d[r, r]))
        if len(wrong):
            i, j = wrong[:2000].T
            case = f"{instruction.kernel} {distribution} {a.shape[1]}"
            differing[case] = [a[i], b[:, j].T, c[i, j], d[i, j]]

    yield keep
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    capability = f"{properties['major']}{properties['minor']}"
    with h5py.File(record_folder / f"hardware_sm{capability}.h5", "w") as file:
        file.attrs["device"] = properties["name"].decode()
        file.attrs["driver"] = cupy.cuda.runtime.driverGetVersion()
        file.attrs["nvrtc"] = "%d.%d" % cupy.cuda.nvrtc.getVersion()
        for name, cases in kept.items():
            group = file.create_group(name)
            group.attrs["distributions"] = [case[0] for case in cases]
            for part, at in zip("abcd", range(1, 5), strict=True):
                words = np.stack([case[at] for case in cases]).view(np.uint32)
                group.create_dataset(part, data=words, compression="gzip", shuffle=True)
        for name, parts in differing.items():
            for part, words in zip("abcd", parts, strict=True):
                file[f"differing/{name}/{part}"] = words.view(np.uint32)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.kernel)
def test_mma(instruction, distribution, seed, record):
    check(instruction, distribution, SIZE, 16, seed, record)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("instruction", WGMMA, ids=lambda i: i.kernel)
def test_wgmma(instruction, distribution, seed, record):
    if kernels.capability(0) != 90:
        pytest.skip("wgmma is an instruction of sm_90 alone")
    check(instruction, distribution, SIZE, 16, seed, record)


@pytest.mark.parametrize("distribution", [near_one, wide, cancelling, bits], ids=lambda f: f.__name__)
@pytest.mark.parametrize("instruction", INSTRUCTIONS + WGMMA, ids=lambda i: i.kernel)
def test_groups_chain(instruction, distribution, seed, record):
    """Each group starts from the one before; 208 = 3 · 64 + 16, and the wgmma kernels issue four in a row."""
    if instruction in WGMMA and kernels.capability(0) != 90:
        pytest.skip("wgmma is an instruction of sm_90 alone")
    check(instruction, distribution, SIZE // 2, 208, seed, record)
