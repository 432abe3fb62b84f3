"""Values that kernels show are the reference's, all of them: dumps and statistics. Cases run in processes side by
side: each compiles kernels of its own."""
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

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
SHAPES = {"causal": (4, 4, 200, 200, 64, True), "group": (4, 2, 130, 190, 40, True), "rows": (4, 1, 100, 70, 128, True),
          "wide": (2, 2, 70, 90, 192, False)}
CASES = {  # precision, dtype, shape
    **{f"{name} {shape}": (as_precision(name), "bf16", shape) for name in ("bf16", "bf16-fa2") for shape in SHAPES},
    "fp32": (as_precision("fp32"), "fp32", "group"), "fp16-fa2": (as_precision("fp16-fa2"), "fp16", "causal"),
    "modes": (as_precision("bf16").round(*ROUNDS), "bf16", "group"),
    "mufu": (as_precision("bf16-fa2").replace(exp="mufu"), "bf16", "causal"),
    "long": (as_precision("bf16").replace(tile=(64, 256)), "bf16", "causal"),
    "plain": (as_precision("bf16").replace(algorithm="plain"), "bf16", "rows"),
    "tiles that blocks overhang": (as_precision("bf16-fa2").replace(tile=(32, 160)), "bf16", "causal"),
    "rows that blocks overhang": (as_precision("bf16-fa2").replace(tile=(48, 48)), "bf16", "rows"),
    "shared columns": (as_precision("bf16-fa2").replace(tile=(64, 272)), "bf16", "wide"),
    "plain, shared columns": (as_precision("bf16").replace(algorithm="plain"), "bf16", "wide"),
    "m_l": (as_precision("bf16").replace(p_bwd_from="m_l", tile=(48, 80)), "bf16", "group"),
    "p_dp": (as_precision("bf16-fa2").replace(delta_from="p_dp"), "bf16", "rows"),
    "heads differ": (as_precision("bf16").round("H1/attn.p=fp16", "H2-3/attn.dk=fp32", "bwd/H0/attn.s=fp32"), "bf16",
                     "group"),
}


def both(arrays, do, options, watch):
    with watch:
        o, saved = flash_attention_forward(*arrays, **options)
        return o, saved.lse, *flash_attention_backward(do, saved)


def drawn(name, seed, batch=2):
    capability = kernels.capability(kernels.import_cupy().cuda.Device().id)
    p, dtype, shape = CASES[name]
    p = p.replace(accumulator="hopper" if capability >= 90 else "ampere")
    heads, kv_heads, tq, tk, d, causal = SHAPES[shape]
    case = Case(heads, kv_heads, tq, tk, d, causal, p, dtype=dtype, distribution="ties", batch=batch)
    *arrays, do = case.inputs(np.random.default_rng(seed))
    return arrays, do, dict(causal=causal, precision=p, key=KEY, fix="on" if shape == "group" else "off")


def dumps(name, seed):
    """What differs between the dump of the GPU and that of the CPU, and between results with and without it."""
    cupy = kernels.import_cupy()
    arrays, do, options = drawn(name, seed)
    taps.BUDGET = 1 << 22  # a few heads at a time
    with tempfile.TemporaryDirectory() as folder:
        cpu, gpu = Path(folder, "cpu.h5"), Path(folder, "gpu.h5")
        want = both(arrays, do, options, recording(cpu, "attn"))
        *there, do_there = (cupy.asarray(x) for x in (*arrays, do))
        got = both(there, do_there, options, recording(gpu, "attn"))
        found = diff(cpu, gpu)
        with h5py.File(gpu) as file:
            wrong = [] if file.attrs["device"] == kernels.device_name() else ["the device's name"]
    wrong += [s.name for s in found.sites if s.differs] + found.only_a + found.only_b
    unwatched = both(there, do_there, options, watching(type("", (), {"wants": lambda *place: False})()))
    for other in (want, unwatched):
        wrong += [f"result {i}" for i, (a, b) in enumerate(zip(got, other)) if not equal(cupy.asnumpy(a), cupy.asnumpy(b))]
    return len(found.sites), wrong


@pytest.fixture(scope="module")
def results(seed, request):
    print("seed", seed)
    wanted = (getattr(item, "callspec", None) for item in request.session.items)
    names = [spec.params["name"] for spec in wanted if spec and spec.params.get("name") in CASES]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        yield {name: pool.submit(dumps, name, seed) for name in dict.fromkeys(names)}


@pytest.mark.parametrize("name", CASES)
def test_a_dump_of_the_gpu_is_the_dump_of_the_cpu(name, results):
    sites, wrong = results[name].result()
    assert sites > 20 and not wrong


def test_statistics_of_the_gpu_are_those_of_the_cpu(seed):
    cupy = kernels.import_cupy()
    arrays, do, options = drawn("bf16 causal", seed)
    want, got = Statistics(), Statistics()
    both(arrays, do, options, watching(want))
    both([cupy.asarray(x) for x in arrays], cupy.asarray(do), options, watching(got))
    for a, b in zip(want.sites(by_head=True), got.sites(by_head=True), strict=True):
        assert (a.site, a.head, a.count, a.ties, a.changed, a.max) == (b.site, b.head, b.count, b.ties, b.changed, b.max)
        assert np.isclose(a.mean, b.mean, rtol=1e-9, atol=1e-12)  # sums in another order
