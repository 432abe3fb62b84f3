"""The reference's own values, laid down as a kernel does, are shown as the reference shows them."""
from types import SimpleNamespace
from unittest import mock

import h5py
import numpy as np
import pytest

from cuflash import kernels, taps
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.attention_arguments import validated
from cuflash.attention_forward import compile_arguments
from cuflash.diff import diff
from cuflash.dump import Recorder, read, recording
from cuflash.fixes import as_fix
from cuflash.kernel_header import TAPPED
from cuflash.precision import as_precision
from cuflash.statistics import Statistics
from cuflash.testing import KEY, Case
from cuflash.tied_rows import TiedRows
from cuflash.watching import watching
from tests.attention_backward_cases import BackwardCase, compilations

needs_nvrtc = pytest.mark.skipif(kernels.nvrtc_reason() is not None, reason=str(kernels.nvrtc_reason()))
CASES = {  # precision, switches, heads, kv_heads, Tq, Tk, causal
    "bf16": ("bf16", {}, 2, 1, 150, 150, True),
    "bf16-fa2": ("bf16-fa2", {"tile": (64, 48)}, 4, 2, 70, 100, True),
    "one tile": ("bf16", {"tile": (None, None)}, 2, 2, 40, 33, False),
    "plain": ("bf16", {"algorithm": "plain"}, 2, 1, 50, 64, True),
    "plain fa2": ("bf16-fa2", {"algorithm": "plain"}, 1, 1, 20, 30, False),
    "p_dp": ("bf16", {"delta_from": "p_dp", "tile": (16, 32)}, 2, 1, 90, 60, True),  # with empty rows
    "m_l": ("bf16-fa2", {"p_bwd_from": "m_l", "delta_from": "o_unrounded"}, 1, 1, 33, 65, True),
    "one key": ("bf16", {}, 2, 2, 9, 1, True),
    "heads differ": ("bf16", {"round": ("H1/attn.p=fp16", "H2/attn.dk=fp32")}, 4, 2, 40, 40, True),
    "a head differs": ("bf16", {"round": ("H1/attn.p=fp16",)}, 3, 3, 40, 40, True),
}


class Kernel:
    """Keeps what the reference shows, and lays it down in the planes of taps."""

    def __init__(self):
        self.pieces = []

    def __call__(self, rnd, site, x, y):
        for g, (sample, head) in enumerate(zip(rnd.samples, rnd.heads)):
            self.pieces.append((rnd.direction, site, int(sample), int(head), rnd.q, rnd.k, rnd.tile, x[g].copy(),
                                y[g].copy()))

    def fill(self, tap):
        p, seen = tap.rnd.precision, {}
        for direction, site, sample, head, q, k, tile, x, y in self.pieces:
            if site not in tap.planes or direction != tap.rnd.direction:
                continue
            if sample != tap.rnd.samples[0] or head not in tap.heads:
                continue
            start = {"q": q, "k": k}
            axes = p.axes_of(site)
            time = 0
            if site == "attn.m":
                time = seen[head, q, tile] = seen.get((head, q, tile), -1) + 1
            at = tap.heads.index(head), time, tile if p.tile_of(site, tap.head_dim) is not None else 0
            r0, c0 = start.get(axes[0], 0), start.get(axes[1], 0) if len(axes) == 2 else 0
            for plane, value in zip(tap.planes[site], (x, y)):
                value = value if value.ndim == 2 else value[:, None]
                plane[at][r0:r0 + value.shape[0], c0:c0 + value.shape[1]] = value


def replay(kernel, call, watch, lse):
    """Forward and backward as launches on a GPU would show them."""
    with mock.patch.object(kernels, "import_cupy", lambda: SimpleNamespace(zeros=np.zeros)):
        device = lse.view(type("DeviceArray", (np.ndarray,), {"get": lambda self: np.asarray(self)}))
        for direction in ("fwd", "bwd"):
            arrays = [None] * 5 + [device]
            for _, key, sample in taps.launches(call, direction, watch, arrays):
                assert key.sample == call.key.sample + sample.number
                for tap in sample:
                    kernel.fill(tap)
                for tap in sample.sums():
                    kernel.fill(tap)


def drawn(name, seed=3):
    base, switches, heads, kv_heads, tq, tk, causal = CASES[name]
    rounds = switches.get("round", ())
    p = as_precision(base).replace(**{k: v for k, v in switches.items() if k != "round"}).round(*rounds)
    p = p.replace(accumulator="sequential")
    case = Case(heads, kv_heads, tq, tk, 16, causal, p, dtype="fp32", batch=2)
    q, k, v, do = case.inputs(np.random.default_rng(seed))
    return (q, k, v), do, dict(causal=causal, precision=p, key=KEY)


def attend(qkv, do, options, kernel):
    with watching(kernel):
        o, saved = flash_attention_forward(*qkv, **options)
        flash_attention_backward(do, saved)
    call = validated(*qkv, options["causal"], None, options["precision"], "off", "bhtd", options["key"])
    return call, saved.lse.reshape(2, *saved.lse.shape[-2:])


@pytest.mark.parametrize("budget", [1, 1 << 30], ids=["a head at a time", "all heads"])
@pytest.mark.parametrize("name", CASES)
def test_a_dump_of_taps_is_the_dump_of_the_reference(name, budget, tmp_path, monkeypatch):
    monkeypatch.setattr(taps, "BUDGET", budget)
    qkv, do, options = drawn(name)
    kernel = Kernel()
    with recording(tmp_path / "a.h5", "attn"):
        call, lse = attend(qkv, do, options, kernel)
    monkeypatch.setattr(kernels, "device_name", lambda: "a GPU")
    recorder = Recorder(tmp_path / "b.h5", "attn")
    replay(kernel, call, recorder, lse)
    recorder.finish()
    recorder.close()
    found = diff(tmp_path / "a.h5", tmp_path / "b.h5")
    assert found.first is None and len(found.sites) > 20
    files = [h5py.File(tmp_path / name) for name in ("a.h5", "b.h5")]
    names = []
    for file in files:
        sites = []
        file.visititems(lambda path, x, sites=sites: sites.append(x) if isinstance(x, h5py.Dataset) else None)
        names.append([x.name for x in sorted(sites, key=lambda x: x.attrs["order"])])
    assert names[0] == names[1]


@pytest.mark.parametrize("name", ["bf16", "p_dp", "plain"])
def test_statistics_of_taps_are_those_of_the_reference(name):
    qkv, do, options = drawn(name)
    kernel, want, got = Kernel(), Statistics(), Statistics()
    with watching(want):
        call, lse = attend(qkv, do, options, kernel)
    replay(kernel, call, got, lse)
    for a, b in zip(want.sites(by_head=True), got.sites(by_head=True), strict=True):
        assert (a.site, a.head, a.count, a.ties, a.changed, a.max) == (b.site, b.head, b.count, b.ties, b.changed, b.max)
        assert np.isclose(a.mean, b.mean, rtol=1e-9, atol=1e-12)  # sums in another order
        assert np.isclose(a.se, b.se, rtol=1e-6, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", ["bf16", "bf16-fa2", "m_l"])
def test_ties_are_followed_from_tile_to_tile(name):
    """As audit does; it must see what a tile did to Ō before the next tile's P̄."""
    (q, k, v), do, options = drawn(name)
    k = np.sign(k[..., :1]) * np.ones_like(k)  # S has two values, so that all rows have ties
    kernel, want, got = Kernel(), TiedRows(), TiedRows()
    with watching(want):
        call, lse = attend((np.ones_like(q), k, -2 - np.abs(v)), do, options, kernel)
    replay(kernel, call, got, lse)
    counts = [[getattr(x, n) for n in ("rows", "values", "ties", "away", "toward")] for x in (want, got)]
    assert counts[0] == counts[1] and want.first == got.first and want.ties > 20


@pytest.mark.parametrize("sites", ["attn.pv", "bwd/attn.dk_acc", "attn.dq_tile,attn.lse"])
def test_a_dump_of_few_sites_knows_that_it_is_causal(sites, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "device_name", lambda: "a GPU")
    qkv, do, options = drawn("bf16")
    kernel = Kernel()
    with recording(tmp_path / "a.h5", sites):
        call, lse = attend(qkv, do, options, kernel)
    recorder = Recorder(tmp_path / "b.h5", sites)
    replay(kernel, call, recorder, lse)
    recorder.finish()
    recorder.close()
    for e in read(tmp_path / "b.h5").entries:
        assert e.causal and (e.visible() is None) == ("tile" not in e.axes)
    assert [s.values for s in diff(tmp_path / "a.h5", tmp_path / "b.h5").sites] == [
        s.values for s in diff(tmp_path / "b.h5", tmp_path / "a.h5").sites]


def test_a_watch_says_which_samples_and_sites_it_wants():
    qkv, do, options = drawn("bf16")
    call = validated(*qkv, True, None, options["precision"], "off", "bhtd", KEY)

    class Second:
        def wants(self, direction, layer, module, site, sample):
            return site == "attn.p" and sample == KEY.sample + 1

    found = list(taps.launches(call, "fwd", Second(), [qkv[0], None]))
    assert [(len(arrays[0]), key.sample - KEY.sample, sample and sample.sites(False)) for arrays, key, sample in found
            ] == [(1, 0, None), (1, 1, ["attn.p"])]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["bf16", "bf16-fa2"])
def test_kernels_compile_with_taps(name, arch):
    capability = int(arch[3:5])
    g, defines, header = compile_arguments(as_precision(name), as_fix("off"), 64, 0, 0, "bfloat16", "bfloat16", False,
                                           True, "hopper" if capability == 90 else "ampere", capability, True)
    jobs = [("attention_forward", defines, {"precision.cuh": header})]
    jobs += compilations([BackwardCase(name, "group", "normal", "bf16", False)], capability)
    for source, defines, headers in jobs:
        kernels.compile_cubin(source, arch, dict(defines) | TAPPED, dict(headers))


def test_without_a_watch_a_call_is_one_launch():
    qkv, _, options = drawn("bf16")
    call = validated(*qkv, True, None, options["precision"], "off", "bhtd", KEY)
    arrays = [object()]
    assert list(taps.launches(call, "fwd", None, arrays)) == [(arrays, KEY, None)]
