"""The backward kernels against the reference, bit for bit, O and L given from the CPU."""
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from cuflash import attention_backward, kernels
from cuflash.attention import Saved, flash_attention_backward
from cuflash.testing import equal
from tests.attention_backward_cases import CASES, BackwardCase, compilations, reference


SOME = [case for case in CASES if case.shape in ("group", "causal", "long", "d128 group")][::3]


def compile_one(job: tuple, arch: str) -> None:
    source, defines, headers = job
    kernels.compile_cubin(source, arch, dict(defines), dict(headers))


@pytest.fixture(scope="module")
def references(seed, request) -> dict[BackwardCase, Future]:
    """The CPU's results, computed by other processes while kernels run; kernels are compiled there before."""
    print("seed", seed)
    cupy = kernels.import_cupy()
    capability = kernels.capability(cupy.cuda.Device().id)
    accumulator = "hopper" if capability >= 90 else "ampere"
    wanted = (getattr(item, "callspec", None) for item in request.session.items)
    cases = [spec.params["case"] for spec in wanted if spec and isinstance(spec.params.get("case"), BackwardCase)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        futures = {case: pool.submit(reference, case, seed + i, accumulator)
                   for i, case in enumerate(dict.fromkeys(cases))}
        jobs = compilations(list(futures), capability)
        for compiled in [pool.submit(compile_one, job, kernels.architecture(capability)) for job in jobs]:
            compiled.result()
        yield futures


def on_gpu(do: np.ndarray, saved: Saved, strided: bool) -> list[np.ndarray]:
    cupy = kernels.import_cupy()

    def up(x):
        if x is None:
            return None
        y = cupy.asarray(x if x.dtype.name in ("float32", "bfloat16", "float16") else x.astype(np.float32))
        if strided and x.ndim == 4:
            b, h, t, d = x.shape
            wide = cupy.full((b, h, t + 1, d + 3), np.nan, y.dtype)
            wide[:, :, 1:, :d] = y
            y = wide[:, :, 1:, :d]
        return y

    there = Saved(*map(up, (saved.q, saved.k, saved.v, saved.o, saved.lse)), m=up(saved.m), l=up(saved.l),
                  o_unrounded=up(saved.o_unrounded), precision=saved.precision, causal=saved.causal,
                  key=saved.key)
    return [cupy.asnumpy(x) for x in flash_attention_backward(up(do), there)]


def describe(got: np.ndarray, want: np.ndarray) -> str:
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    differ = ~same
    at = tuple(int(n) for n in np.argwhere(differ)[0])
    return f"{np.count_nonzero(differ)} of {got.size} differ, first at {at}: {got[at]!r}, not {want[at]!r}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, references):
    do, saved, want = references[case].result()
    for name, a, b in zip(("dq", "dk", "dv"), on_gpu(do, saved, case.strided), want):
        assert equal(a, b), f"{name}: {describe(a.astype(np.float32), b.astype(np.float32))}"


@pytest.mark.parametrize("case", SOME, ids=str)
def test_steps_of_rows_change_no_bits(case, references, monkeypatch):
    """A scratch so small that heads and query tiles go one by one."""
    monkeypatch.setattr(attention_backward, "SCRATCH", 1 << 14)
    monkeypatch.setattr(attention_backward, "_BLOCKS", 1)
    do, saved, want = references[case].result()
    assert all(map(equal, on_gpu(do, saved, case.strided), want))
