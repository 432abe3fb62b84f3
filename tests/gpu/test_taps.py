"""Values that kernels show are the reference's, all of them: dumps, statistics, watches."""
import h5py
import numpy as np
import pytest

from cuflash import kernels, taps
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.diff import diff
from cuflash.dump import recording
from cuflash.precision import as_precision
from cuflash.statistics import Statistics
from cuflash.testing import KEY, Case, equal
from cuflash.watching import watching

ROUNDS = ("attn.p=bf16:sr", "attn.o_acc=e8m9:rz", "attn.ds=bf16:sr", "attn.k=bf16:sr", "attn.delta_prod=fp8_e5m2")
PRECISIONS = {
    "bf16": as_precision("bf16"), "bf16-fa2": as_precision("bf16-fa2"), "fp32": as_precision("fp32"),
    "fp16-fa2": as_precision("fp16-fa2"), "modes": as_precision("bf16").round(*ROUNDS),
    "mufu": as_precision("bf16-fa2").replace(exp="mufu"), "long": as_precision("bf16").replace(tile=(64, 256)),
    "plain": as_precision("bf16").replace(algorithm="plain"),
    "p_dp": as_precision("bf16-fa2").replace(delta_from="p_dp"),
    "heads differ": as_precision("bf16").round("H1/attn.p=fp16", "H2-3/attn.dk=fp32", "bwd/H0/attn.s=fp32"),
}
SHAPES = {"causal": (4, 4, 200, 200, 64, True), "group": (4, 2, 130, 190, 40, True), "rows": (4, 1, 100, 70, 128, True)}


def core():
    capability = kernels.capability(kernels.import_cupy().cuda.Device().id)
    return "hopper" if capability >= 90 else "ampere"


def both(arrays, do, options, watch):
    with watch:
        o, saved = flash_attention_forward(*arrays, **options)
        return o, saved.lse, *flash_attention_backward(do, saved)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_dump_of_the_gpu_is_the_dump_of_the_cpu(name, shape, seed, tmp_path, monkeypatch):
    print("seed", seed)
    cupy = kernels.import_cupy()
    heads, kv_heads, tq, tk, d, causal = SHAPES[shape]
    p = PRECISIONS[name].replace(accumulator=core())
    dtype = "fp16" if name == "fp16-fa2" else "fp32" if name == "fp32" else "bf16"
    case = Case(heads, kv_heads, tq, tk, d, causal, p, dtype=dtype, distribution="ties", batch=2)
    *arrays, do = case.inputs(np.random.default_rng(seed))
    options = dict(causal=causal, precision=p, key=KEY, fix="on" if shape == "group" else "off")
    monkeypatch.setattr(taps, "BUDGET", 1 << 22)  # a few heads at a time
    want = both(arrays, do, options, recording(tmp_path / "cpu.h5", "attn"))
    there = [cupy.asarray(x) for x in (*arrays, do)]
    got = both(there[:3], there[3], options, recording(tmp_path / "gpu.h5", "attn"))
    found = diff(tmp_path / "cpu.h5", tmp_path / "gpu.h5")
    assert not [(s.name, s.equal) for s in found.sites if s.differs]
    assert not found.only_a and not found.only_b
    with h5py.File(tmp_path / "gpu.h5") as file:
        assert file.attrs["device"] != "cpu"
    for a, b in zip(got, want):
        assert equal(cupy.asnumpy(a), b)
    unwatched = both(there[:3], there[3], options, watching(lambda *args: None))
    assert all(equal(cupy.asnumpy(a), cupy.asnumpy(b)) for a, b in zip(unwatched, got))


@pytest.mark.parametrize("name", ["bf16", "bf16-fa2"])
def test_statistics_of_the_gpu_are_those_of_the_cpu(name, seed):
    print("seed", seed)
    cupy = kernels.import_cupy()
    p = PRECISIONS[name].replace(accumulator=core())
    *arrays, do = Case(2, 1, 150, 150, 64, True, p, distribution="one_sign", batch=2).inputs(np.random.default_rng(seed))
    want, got = Statistics(), Statistics()
    both(arrays, do, dict(causal=True, precision=p), watching(want))
    both([cupy.asarray(x) for x in arrays], cupy.asarray(do), dict(causal=True, precision=p), watching(got))
    for a, b in zip(want.sites(by_head=True), got.sites(by_head=True), strict=True):
        assert (a.site, a.head, a.count, a.ties, a.changed, a.max) == (b.site, b.head, b.count, b.ties, b.changed, b.max)
        assert np.isclose(a.mean, b.mean, rtol=1e-9, atol=1e-12)  # sums in another order
