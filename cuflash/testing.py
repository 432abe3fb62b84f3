"""Kernels against the reference, bit for bit: of a user's own fix or mode, or of the whole card.

`check(MyFix)` compares the Python and the CUDA body of a plugin; `check_device()` is what
`cuflash info --check` runs.
"""
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuflash import kernels
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.fixes import Fix, as_fix
from cuflash.formats import MODES, Mode, cuda_name, format_named, round_with
from cuflash.philox import Key
from cuflash.precision import Precision

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
DISTRIBUTIONS = ("normal", "heavy", "ties", "one_sign", "huge", "tiny", "flat", "infinite", "nan")
OUTPUTS = ("o", "lse", "stats", "dq", "dk", "dv")
KEY = Key(7, step=3, layer=1, sample=5)


class Case(NamedTuple):
    """One attention: shape, mask, precision, fix, dtype of the arrays, distribution of the inputs."""

    heads: int
    kv_heads: int
    tq: int
    tk: int
    d: int
    causal: bool
    precision: Precision
    fix: Fix | str = "off"
    dtype: str = "bf16"
    distribution: str = "normal"
    batch: int = 1

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray]:
        """q, k, v, dO: (batch, heads, T, d) of the case's dtype."""
        q, do = (rng.standard_normal((self.batch, self.heads, self.tq, self.d)) for _ in range(2))
        k, v = (rng.standard_normal((self.batch, self.kv_heads, self.tk, self.d)) for _ in range(2))
        tq, tk = self.tq, self.tk
        match self.distribution:
            case "heavy":  # rows and single values far from the rest
                rows = (np.exp(1.5 * rng.standard_normal((*x.shape[:-1], 1))) for x in (q, k, v, do))
                q, k, v, do = (x * row * np.where(rng.random(x.shape) < 0.02, 20, 1)
                               for x, row in zip((q, k, v, do), rows))
            case "ties":  # repeated keys: several reach the maximum, within a tile and across
                q *= 2
                k[:, :, tk // 3:] = k[:, :, rng.integers(0, max(tk // 3, 1), tk - tk // 3)]
            case "one_sign":  # what biased roundings need: V of one sign, and ties
                v = -2 - np.abs(v) / 2
                k[:, :, ::5] = k[:, :, :1]
            case "huge":
                q, k = q * 30, k * 10
            case "tiny":
                q, k, v, do = q * 1e-4, k * 1e-3, v * 1e-20, do * 1e-18
            case "flat":  # all logits 0
                q *= 0
            case "infinite" | "nan":
                bad = np.nan if self.distribution == "nan" else np.inf
                q[:, :, tq // 2, 0], k[:, :, tk // 4, 1 % self.d] = bad, -bad
                v[:, :, tk // 2, 0], do[:, :, tq // 3, 0] = bad, bad
        with np.errstate(over="ignore"):
            return [x.astype(np.float32).astype(DTYPES[self.dtype]) for x in (q, k, v, do)]

    def run(self, inputs: list[Any]) -> list[Any]:
        """o, lse, stats, dq, dk, dv on the machine that the inputs lie on."""
        q, k, v, do = inputs
        o, saved = flash_attention_forward(q, k, v, causal=self.causal, precision=self.precision, fix=self.fix, key=KEY)
        return [o, saved.lse, saved.stats, *flash_attention_backward(do, saved)]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, all NaNs alike; NumPy arrays of any dtype, floats compared in fp32."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "iu":
        return np.array_equal(a, b)
    a, b = a.astype(np.float32), b.astype(np.float32)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return False
    return np.array_equal(np.where(np.isnan(a), 0, a).view(np.int32), np.where(np.isnan(b), 0, b).view(np.int32))


def differences(case: Case, rng: np.random.Generator) -> list[str]:
    """Names of the outputs in which kernel and reference differ on fresh inputs; needs a GPU."""
    cupy = kernels.import_cupy()
    inputs = case.inputs(rng)
    got = [cupy.asnumpy(x) for x in case.run([cupy.asarray(x) for x in inputs])]
    return [name for name, a, b in zip(OUTPUTS, got, case.run(inputs)) if not equal(a, b)]


def device_cases(accumulator: str) -> list[Case]:
    """The cases of `cuflash info --check`: every precision, fix and distribution once, small enough for seconds."""
    named = [("bf16", "bf16"), ("bf16-fa2", "bf16"), ("fp16-fa2", "fp16"), ("fp32", "fp32"), ("all-fp8_e5m2", "fp32")]
    fixes = ("off", "qiu-b7", "qiu-b2", "capped")
    cases = []
    for i, distribution in enumerate(DISTRIBUTIONS):
        for j, (name, dtype) in enumerate(named):
            d, fix = (64, 128, 40)[(i + j) % 3], fixes[(i + j) % 4]
            p = Precision.named(name).replace(accumulator=accumulator, exp=("defined", "mufu")[i % 2])
            cases.append(Case(2, 1 + j % 2, 130 + 9 * i, 150 + 7 * j, d, (i + j) % 4 != 0, p, fix, dtype, distribution))
    return cases


def check_device(seed: int, jobs: int | None = None) -> Iterator[tuple[Case, list[str]]]:
    """Each case and the outputs that differ, as they are found; needs a GPU (`kernels.gpu_reason`).

    Args:
        seed: of the inputs.
        jobs: processes, which compile kernels and compute references side by side; by default as many as there
            are cores, at most 16.
    """
    cupy = kernels.import_cupy()
    capability = kernels.capability(cupy.cuda.Device().id)
    accumulator = "hopper" if capability >= 90 else "ampere"  # newer ones are held against the newest model
    cases = device_cases(accumulator)
    jobs = jobs or min(16, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = {pool.submit(_differences, case, (seed, i)): case for i, case in enumerate(cases)}
        for future in as_completed(found):
            yield found[future], future.result()


def _differences(case: Case, seed: tuple[int, int]) -> list[str]:
    return differences(case, np.random.default_rng(seed))


def check(plugin: Fix | type[Fix] | Mode | str, seed: int = 0) -> None:
    """Compares the Python and the CUDA body of a user's fix or mode on a GPU, bit for bit.

    Args:
        plugin: a Fix (class, instance or text such as `my.py:MyFix`) or a Mode.
        seed: of the inputs.

    Raises:
        AssertionError: they differ; the message says where first.
        ValueError: there is no CUDA body, or no GPU to run it on.
    """
    reason = kernels.gpu_reason()
    if reason:
        raise ValueError(f"the CUDA body needs a GPU: {reason}")
    rng = np.random.default_rng(seed)
    if isinstance(plugin, Mode):
        _check_mode(plugin, rng)
        return
    fix = as_fix(plugin)
    for name in ("bf16", "bf16-fa2"):
        for distribution in ("ties", "flat", "huge", "one_sign"):
            p = Precision.named(name).replace(accumulator="sequential")
            wrong = differences(Case(2, 1, 140, 150, 32, True, p, fix, distribution=distribution), rng)
            if wrong:
                raise AssertionError(f"fix {fix}: kernel and reference differ in {', '.join(wrong)} under {name}, "
                                     f"{distribution} inputs, seed {seed}")
    print(f"fix {fix}: kernel and reference give the same bits")


def _check_mode(mode: Mode, rng: np.random.Generator) -> None:
    cupy = kernels.import_cupy()
    x = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    words = rng.integers(0, 1 << 32, x.size, dtype=np.uint32)
    define = "" if mode.name in MODES else mode.cuda_source
    for name in ("bf16", "fp16", "fp8_e5m2", "e4m3"):
        source = f"""#include "formats.cuh"
{define}
extern "C" __global__ void user_mode(const float* x, const unsigned* words, float* y, int n) {{
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) y[i] = {cuda_name(name, mode)}(x[i], words[i]);
}}
"""
        kernel = kernels.kernel("user_mode", "user_mode", {}, {"user_mode.cu": source})
        y = cupy.empty(x.size, np.float32)
        kernel((x.size // 256,), (256,), (cupy.asarray(x), cupy.asarray(words), y, np.int32(x.size)))
        got, want = cupy.asnumpy(y), round_with(x, format_named(name), mode, words)
        if not equal(got, want):
            i = next(i for i in range(x.size) if not equal(got[i:i + 1], want[i:i + 1]))
            raise AssertionError(f"mode {mode.name}: {x[i]!r} with word {words[i]:#x} in {name} gives {got[i]!r} "
                                 f"by CUDA and {want[i]!r} by Python")
    print(f"mode {mode.name}: CUDA and Python give the same bits")
