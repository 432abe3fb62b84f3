"""The forward kernel against the reference, bit for bit, on inputs drawn afresh."""
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import pytest

from cuflash import kernels
from cuflash.attention import Saved, flash_attention, flash_attention_backward, flash_attention_forward
from cuflash.attention_forward import compile_arguments, scale_in_bf16
from cuflash.fixes import as_fix
from cuflash.precision import Precision
from cuflash.testing import DTYPES, KEY, Case, equal
from cuflash.testing import OUTPUTS as CASE_OUTPUTS

OUTPUTS = ("o", "lse", "m", "l", "o_unrounded", "stats")


def precision(name: str, *rounds: str, **switches: object) -> Precision:
    """A precision under which forward returns all of OUTPUTS."""
    return Precision.named(name).replace(p_bwd_from="m_l", delta_from="o_unrounded", **switches).round(*rounds)


# A mode at every site that `fa2` has, and the sites that it merges away.
MIXED_FA2 = ("attn.s=bf16:rz", "attn.m=bf16:rd", "attn.x=bf16:sr", "attn.p=fp16:sr", "attn.v=fp16",
             "attn.alpha=e5m7:ru", "attn.l=bf16:sr", "attn.o_scaled=e8m11:rz", "attn.o_acc=bf16:sr",
             "attn.o=fp16:ru", "attn.lse=bf16:rd", "attn.dm=e8m6:rz")
MIXED = (*MIXED_FA2, "attn.s_scaled=e6m9:rna", "attn.l_tile=bf16:sr", "attn.l_scaled=e8m12:rz", "attn.pv=bf16:rna")
TILES = ((512, 512), (64, 32), (16, 16), (128, None), (32, 144), (None, 48), (256, 64))


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    precision: Precision
    d: int
    fix: str = "off"
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.precision.name}-{self.d}-{self.fix}-{self.dtype}"


VARIANTS = [
    *(Variant(precision("bf16"), d) for d in (7, 40, 64, 128, 256)),
    *(Variant(precision("bf16-fa2"), d) for d in (33, 64, 80, 128, 160, 192, 256)),
    *(Variant(precision(name), 64, fix) for name in ("bf16", "bf16-fa2")
      for fix in ("qiu-b2", "qiu-b7", "capped", "capped:cap=3")),
    Variant(precision("fp16-fa2"), 64, "off", "fp16"), Variant(precision("fp16-fa2"), 128, "capped", "fp16"),
    Variant(precision("bf16"), 48, "capped", "fp32"), Variant(precision("fp32"), 64, "off", "bf16"),
    *(Variant(precision("fp32"), d, fix, "fp32") for d, fix in ((20, "capped"), (64, "off"), (256, "off"))),
    Variant(precision("fp32", order="fa2"), 48, "off", "fp32"),
    *(Variant(precision(name, order=order), 32, fix, "fp32") for order in ("eager", "fa2")
      for name, fix in (("all-fp8_e5m2", "qiu-b7"), ("all-fp8_e4m3", "off"), ("all-tf32", "off"), ("all-e6m9:rz", "capped"))),
    Variant(precision("all-bf16:sr"), 32), Variant(precision("all-fp16:rna"), 32, "off", "fp16"),
    Variant(precision("bf16", *MIXED), 32), Variant(precision("bf16-fa2", *MIXED_FA2), 32, "qiu-b2"),
    Variant(precision("bf16", *MIXED, accumulator="sequential"), 32),
    Variant(precision("bf16-fa2", accumulator="sequential"), 128),
    *(Variant(precision(name, tile=tile), 64, "qiu-b2" if tile[1] in (512, 144) else "off")
      for name in ("bf16", "bf16-fa2") for tile in TILES),
    Variant(precision("bf16", tile=(512, 512)), 256), Variant(precision("bf16-fa2", tile=(128, 192)), 144, "capped"),
    Variant(precision("fp32", tile=(64, 256)), 32, "qiu-b2", "fp32"),
    *(Variant(precision(name, algorithm="plain"), d, fix)
      for name, d, fix in (("bf16", 64, "qiu-b2"), ("bf16-fa2", 24, "off"), ("bf16", 208, "off"))),
    Variant(precision("fp32", algorithm="plain"), 64, "off", "fp32"),
    Variant(precision("bf16", l_from="rounded"), 64), Variant(precision("bf16-fa2", l_from="rounded"), 64),
    *(Variant(precision(name, exp="mufu"), d, fix)
      for name, d, fix in (("bf16", 64, "capped"), ("bf16-fa2", 64, "off"), ("bf16-fa2", 128, "off"))),
    Variant(precision("bf16-fa2", "H0/attn.p=fp16:sr", "H2-3/attn.o=fp32", "L1/attn.s=bf16"), 64, "capped"),
    Variant(precision("bf16", "attn.k=bf16:sr", "attn.v=fp8_e5m2:sr", "attn.q=e8m5:rz"), 64, "off", "fp32"),
]
SHAPES = [  # heads, kv_heads, Tq, Tk, causal, distribution, batch
    (2, 2, 256, 256, True, "normal", 1), (2, 1, 200, 333, True, "ties", 1), (1, 1, 77, 130, False, "heavy", 2),
    (4, 2, 150, 60, True, "one_sign", 1), (1, 1, 129, 257, True, "huge", 1), (4, 1, 40, 145, False, "infinite", 1),
    (2, 2, 65, 190, True, "nan", 1), (1, 1, 300, 17, False, "tiny", 1), (4, 4, 1, 100, True, "flat", 1),
    (2, 2, 20, 0, False, "normal", 2),
]
PER_VARIANT = 4
CASES = [(variant, SHAPES[(PER_VARIANT * i + j) % len(SHAPES)])  # the shapes take turns
         for i, variant in enumerate(VARIANTS) for j in range(PER_VARIANT)]
CASES += [(Variant(precision(name), 64), (2, 1, 1024, 1024, True, "ties", 1)) for name in ("bf16", "bf16-fa2")]


def case_of(variant: Variant, shape: tuple, accumulator: str) -> Case:
    heads, kv_heads, tq, tk, causal, distribution, batch = shape
    p = variant.precision
    p = p.replace(accumulator=accumulator) if p.accumulator == "auto" else p
    return Case(heads, kv_heads, tq, tk, variant.d, causal, p, variant.fix, variant.dtype, distribution, batch)


def outputs(case: Case, inputs: list) -> list:
    o, saved = flash_attention_forward(*inputs[:3], causal=case.causal, precision=case.precision, fix=case.fix, key=KEY)
    return [o, *(getattr(saved, name) for name in OUTPUTS[1:])]


def reference(case: Case, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = case.inputs(np.random.default_rng(seed))
    return inputs, outputs(case, inputs)


def compile_for(case: Case, accumulator: str, capability: int) -> None:
    """Puts the case's kernels in the cache; runs beside others, where CuPy would do one after another."""
    for head in range(case.heads if case.precision.overrides else 1):
        out = case.precision.sites_for("fwd", KEY.layer, "", head)["attn.o"].format
        out = {"bf16": "bfloat16", "fp16": "float16"}.get(out, "float32")
        core = "sequential" if case.precision.accumulator == "sequential" else accumulator
        _, defines, text = compile_arguments(case.precision, as_fix(case.fix), case.d, KEY.layer, head,
                                             DTYPES[case.dtype].name, out, case.d % 8 == 0, True, core, capability,
                                             scale_in_bf16(case.d ** -0.5))
        kernels.compile_cubin("attention_forward", kernels.architecture(capability), defines,
                              {"precision.cuh": text})


@pytest.fixture(scope="module")
def references(seed, request) -> dict[tuple, Future]:
    """The CPU's results, by other processes while kernels run; kernels are compiled there before."""
    print("seed", seed)
    capability = kernels.capability(kernels.import_cupy().cuda.Device().id)
    accumulator = "hopper" if capability >= 90 else "ampere"
    chosen = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = [spec.params["at"] for spec in chosen if spec and "at" in spec.params]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        cases = {i: case_of(*CASES[i], accumulator) for i in wanted}
        compiled = [pool.submit(compile_for, cases[i], accumulator, capability)
                    for i in {CASES[i][0]: i for i in wanted}.values()]
        futures = {i: (case, pool.submit(reference, case, seed + i)) for i, case in cases.items()}
        for future in compiled:
            future.result()
        yield futures


@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1][5]}-{i}")
def test_equals_the_reference(at, references):
    cupy = kernels.import_cupy()
    case, future = references[at]
    inputs, want = future.result()
    got = outputs(case, [cupy.asarray(x) for x in inputs])
    for name, a, b in zip(OUTPUTS, got, want):
        a = cupy.asnumpy(a)
        if not equal(a, b):
            x, y = a.astype(np.float32), b.astype(np.float32)
            differ = np.argwhere((x != y) & ~(np.isnan(x) & np.isnan(y)) | (np.signbit(x) != np.signbit(y)) & ~np.isnan(y))
            first = tuple(map(int, differ[0]))
            pytest.fail(f"{name} differs in {len(differ)} of {b.size}, first at {first}: kernel {x[first]}, "
                        f"reference {y[first]}; {case}")


# ---- arrays as they come

def draw(seed, *shape):
    cupy = kernels.import_cupy()
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(DTYPES["bf16"]))


@pytest.mark.parametrize("d", [64, 40])
def test_strides_layouts_and_copies_give_the_same_bits(seed, d):
    cupy = kernels.import_cupy()
    q, k, v = (draw((seed, i), 2, 3, 130, d) for i in range(3))
    want = flash_attention(q, k, v, causal=True)
    wide = cupy.full((2, 3, 131, d + 3), np.nan, q.dtype)

    def loose(x):  # rows that start at no multiple of 16 bytes
        wide_x = wide.copy()
        wide_x[:, :, 1:, 3:] = x
        return wide_x[:, :, 1:, 3:]

    def apart(x):  # the last axis is not contiguous: copied
        return cupy.repeat(x, 2, axis=-1)[..., ::2]

    def reversed_heads(x):  # a negative stride
        return cupy.ascontiguousarray(x[:, ::-1])[:, ::-1]

    for change in (loose, apart, reversed_heads):
        got = flash_attention(*map(change, (q, k, v)), causal=True)
        assert equal(cupy.asnumpy(got), cupy.asnumpy(want)), change.__name__
    bthd = (cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    got = flash_attention(*bthd, causal=True, layout="bthd")
    assert equal(cupy.asnumpy(got.swapaxes(1, 2)), cupy.asnumpy(want))


def test_out_is_written_in_place_wider_or_strided_and_refused_narrower(seed):
    cupy = kernels.import_cupy()
    q, k, v = (draw((seed, i), 2, 3, 70, 33) for i in range(3))
    want = cupy.asnumpy(flash_attention(q, k, v))
    for dtype in (q.dtype, np.float32):
        strided = cupy.zeros((2, 3, 70, 36), dtype)[..., 1:34]
        for out in (cupy.zeros(q.shape, dtype), strided):
            assert flash_attention(q, k, v, out=out) is out
            assert equal(cupy.asnumpy(out), want)
    with pytest.raises(ValueError, match="narrowing"):
        flash_attention(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), out=q.copy())


def test_more_heads_than_a_grid_has_rows(seed):
    cupy = kernels.import_cupy()
    q, k, v = (draw((seed, i), 300, 256, 2, 16) for i in range(3))
    last = tuple(x[-1:, -2:] for x in (q, k, v))
    assert equal(cupy.asnumpy(flash_attention(q, k, v)[-1:, -2:]), cupy.asnumpy(flash_attention(*last)))


def test_offsets_beyond_32_bits(seed):
    cupy = kernels.import_cupy()
    far = 1 << 31
    try:
        buffer = cupy.zeros(far + 4096 * 64, DTYPES["bf16"])
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 4 GB of GPU memory")
    heads = cupy.lib.stride_tricks.as_strided(buffer, (1, 2, 100, 64), (0, 2 * far, 128, 2))
    heads[...] = draw(seed, 1, 2, 100, 64)
    want = flash_attention(*[cupy.ascontiguousarray(heads)] * 3, causal=True)
    assert equal(cupy.asnumpy(flash_attention(heads, heads, heads, causal=True)), cupy.asnumpy(want))
    flash_attention(*[heads.copy()] * 3, causal=True, out=heads)
    assert equal(cupy.asnumpy(heads), cupy.asnumpy(want))


def test_runs_on_the_current_stream_and_repeats_itself(seed):
    cupy = kernels.import_cupy()
    q, k, v = (draw((seed, i), 4, 8, 512, 64) for i in range(3))
    want = cupy.asnumpy(flash_attention(q, k, v, causal=True, fix="on"))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        results = [flash_attention(q, k, v, causal=True, fix="on") for _ in range(5)]
        stream.synchronize()
    assert all(equal(cupy.asnumpy(x), want) for x in results)


def test_another_device_has_its_own_kernels_and_stream(seed):
    cupy = kernels.import_cupy()
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    arrays = [draw((seed, i), 2, 4, 130, 64) for i in range(4)]
    o, saved = flash_attention_forward(*arrays[:3], causal=True, fix="on")
    want = [cupy.asnumpy(x) for x in (o, *flash_attention_backward(arrays[3], saved))]
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.use()
        q, k, v, do = (cupy.asarray(cupy.asnumpy(x)) for x in arrays)
    o, saved = flash_attention_forward(q, k, v, causal=True, fix="on")  # device 0 is the current one
    got = [o, *flash_attention_backward(do, saved)]
    with cupy.cuda.Device(1):
        stream.synchronize()
        cupy.cuda.Stream.null.use()
    assert all(x.device.id == 1 for x in (*got, saved.lse, saved.stats))
    assert all(equal(cupy.asnumpy(x), y) for x, y in zip(got, want))
    with pytest.raises(ValueError, match="k lies on .*1.*, q on .*0.*: move them to one device"):
        flash_attention(arrays[0], k, v)


@pytest.mark.parametrize("name, scale", [("bf16", -0.3), ("bf16", 0.0), ("bf16", -2.0), ("bf16", 1e-3), ("fp32", -1.5),
                                         ("bf16-fa2", 0.3), ("bf16-fa2", 1e-3), ("bf16-fa2", 4.0)])
def test_any_scale(name, scale, seed):
    cupy = kernels.import_cupy()
    accumulator = "hopper" if kernels.capability(cupy.cuda.Device().id) >= 90 else "ampere"
    case = Case(2, 1, 140, 150, 64, True, Precision.named(name).replace(accumulator=accumulator), distribution="ties")
    inputs = case.inputs(np.random.default_rng(seed))
    results = []
    for there in (np.asarray, cupy.asarray):
        q, k, v, do = map(there, inputs)
        o, saved = flash_attention_forward(q, k, v, causal=True, scale=scale, precision=case.precision, fix="on")
        results.append([o, saved.lse, saved.stats, *flash_attention_backward(do, saved)])
    for what, a, b in zip(CASE_OUTPUTS, *results):
        assert equal(a, cupy.asnumpy(b)), what


def test_refuses_what_a_kernel_cannot_do(seed):
    cupy = kernels.import_cupy()
    q = draw(seed, 1, 1, 16, 16)
    with pytest.raises(TypeError, match="float64.*astype"):
        flash_attention(*[q.astype(np.float64)] * 3)
    with pytest.raises(TypeError, match="k is a numpy array and q a cupy array"):
        flash_attention(q, cupy.asnumpy(q), q)
    with pytest.raises(ValueError, match="library"):
        flash_attention(q, q, q, precision=Precision.named("bf16").replace(accumulator="library"))


def test_saved_carries_what_backward_needs_and_no_more(seed):
    q = draw(seed, 2, 2, 40, 16)
    o, saved = flash_attention_forward(q, q, q)
    assert isinstance(saved, Saved) and saved.q is q and saved.o is o
    assert (saved.m, saved.l, saved.o_unrounded) == (None, None, None)
    assert saved.lse.shape == (2, 2, 40) and saved.stats.shape == (3,)
