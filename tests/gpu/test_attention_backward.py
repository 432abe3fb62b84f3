"""The backward kernels against the reference, bit for bit, O and L given from the CPU."""
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from cuflash import attention_backward, kernels
from cuflash.attention import Saved, flash_attention_backward, flash_attention_forward
from cuflash.precision import Precision
from cuflash.testing import DTYPES, OUTPUTS, Case, equal
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


# ---- arrays as they come, what O is recomputed under

@pytest.mark.parametrize("name", ["bf16-fa2", "bf16", "fp32"])
@pytest.mark.parametrize("d", [64, 40, 33])
def test_strides_layouts_and_out_give_the_same_bits(name, d, seed):
    cupy = kernels.import_cupy()
    dtype = "fp32" if name == "fp32" else "bf16"
    arrays = Case(4, 2, 130, 140, d, True, Precision.named(name), dtype=dtype, batch=2).inputs(np.random.default_rng(seed))
    arrays = [cupy.asarray(x) for x in arrays]

    def gradients(change, layout="bhtd", out=None):
        q, k, v, do = map(change, arrays)
        saved = flash_attention_forward(q, k, v, causal=True, precision=name, layout=layout)[1]
        wanted = out and tuple(map(out, (q, k, v)))
        found = flash_attention_backward(do, saved, out=wanted)
        assert not wanted or all(x is y for x, y in zip(found, wanted))
        return [cupy.asnumpy(x if layout == "bhtd" else x.swapaxes(1, 2)) for x in found]

    def bthd(x):
        return cupy.ascontiguousarray(x.swapaxes(1, 2))

    def reversed_rows(x):
        return cupy.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1]

    def apart(x):
        return cupy.repeat(x, 2, axis=-1)[..., ::2]

    def loose(x):  # out whose rows start at odd elements
        return cupy.zeros((*x.shape[:-1], d + 3), x.dtype)[..., 1:d + 1]

    want = gradients(lambda x: x)
    for got in (gradients(reversed_rows), gradients(apart), gradients(bthd, "bthd"), gradients(bthd, "bthd", loose),
                gradients(lambda x: x, out=cupy.empty_like), gradients(apart, out=apart), gradients(lambda x: x, out=loose),
                gradients(lambda x: x, out=lambda x: cupy.zeros(x.shape, np.float32))):
        assert all(map(equal, got, want))


@pytest.mark.parametrize("name", ["bf16-fa2", "fp32"])
def test_offsets_beyond_32_bits(name, seed):
    """Two heads that lie 2^31 elements apart, of inputs and of gradients."""
    cupy = kernels.import_cupy()
    far, shape = 1 << 31, (1, 2, 100, 64)
    try:
        buffers = [cupy.zeros(far + 4 * 6400, DTYPES["bf16"]) for _ in range(2)]
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 8 GB of GPU memory")
    inputs, out = ([cupy.lib.stride_tricks.as_strided(x[6400 * i:], shape, (0, 2 * far, 128, 2)) for i in range(4)]
                   for x in buffers)
    p = Precision.named(name).round("attn.dq=bf16", "attn.dk=bf16", "attn.dv=bf16")
    arrays = Case(2, 2, 100, 100, 64, True, p).inputs(np.random.default_rng(seed))
    for x, y in zip(inputs, arrays):
        x[...] = cupy.asarray(y)

    def gradients(q, k, v, do, out=None):
        return flash_attention_backward(do, flash_attention_forward(q, k, v, causal=True, precision=p)[1], out=out)

    want = gradients(*(cupy.ascontiguousarray(x) for x in inputs))
    assert all(equal(cupy.asnumpy(x), cupy.asnumpy(y)) for x, y in zip(gradients(*inputs, out=tuple(out[:3])), want))


@pytest.mark.parametrize("name", ["bf16-fa2", "fp16-fa2", "bf16"])
@pytest.mark.parametrize("fix", ["capped", "capped:cap=80", "qiu-b2"])
def test_o_is_recomputed_under_the_fix(name, fix, seed):
    """delta_from = o_fp32 runs a forward of its own, whose tied rows the fix moves."""
    cupy = kernels.import_cupy()
    accumulator = "hopper" if kernels.capability(cupy.cuda.Device().id) >= 90 else "ampere"
    p = Precision.named(name).replace(delta_from="o_fp32", accumulator=accumulator)
    case = Case(2, 1, 140, 150, 64, True, p, fix, name[:4], "ties")
    inputs = case.inputs(np.random.default_rng(seed))
    got = [cupy.asnumpy(x) for x in case.run([cupy.asarray(x) for x in inputs])]
    for output, a, b in zip(OUTPUTS, got, case.run(inputs)):
        assert equal(a, b), output
