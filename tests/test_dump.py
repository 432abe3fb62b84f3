"""Dumps: every value that a site gave, bit for bit, where it lies; files whole or absent."""
import errno
import os
import re
import shutil
import subprocess
import sys

import h5py
import ml_dtypes
import numpy as np
import pytest

from cuflash.attention import flash_attention, flash_attention_backward, flash_attention_forward
from cuflash.dump import MINUS_INF, Recorder, Selection, read, recording
from cuflash.linear import round_weight
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.site_table import SITES
from cuflash.sites import Rounder

BF16 = ml_dtypes.bfloat16
needs_h5dump = pytest.mark.skipif(
    shutil.which("h5dump") is None, reason="h5dump (hdf5-tools) is not installed")


def inputs(batch, heads, kv_heads, tq, tk, d, seed):
    rng = np.random.default_rng(seed)
    shapes = ((batch, heads, tq, d), (batch, kv_heads, tk, d), (batch, kv_heads, tk, d), (batch, heads, tq,
                                                                                          d))
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def attend(q, k, v, do, **options):
    o, saved = flash_attention_forward(q, k, v, **options)
    return o, *flash_attention_backward(do, saved)


class Pieces:
    """Every piece that a watch was shown, with where it lies: what a dump must hold."""

    def __init__(self):
        self.seen = []

    def __call__(self, rnd, site, x, y):
        self.seen.append(
            (rnd.direction, site, list(rnd.samples), list(rnd.heads), rnd.q, rnd.k, rnd.tile, rnd.visible,
             y.copy()))

    def check(self, dump, rows=None):
        """Compares all pieces with a dump of layer 0, all heads; counts what they cover."""
        last, covered = None, {}
        arrays = {name: dump[name].astype(np.float64) for name in dump}
        for direction, site, samples, heads, q, k, tile, visible, y in self.seen:
            e = dump.entry(site, direction=direction)
            y = y.astype(np.float64)
            if "query" in e.axes and "key" in e.axes and visible is not None:
                y = np.where(visible, y, -np.inf if site in MINUS_INF else 0)
            again = (site, q, tile, heads) == last if site == "attn.m" else False
            last = None if again else (site, q, tile, heads)
            for sample, head, value in zip(samples, heads, y):
                where = [e.samples.index(sample), e.heads.index(head)]
                where += [int(again)] if "of" in e.axes else []
                where += [tile] if "tile" in e.axes else []
                where += [slice(q, q + len(value)) if "query" in e.axes else slice(0, len(value))]
                where += [slice(k, k + value.shape[1])] if e.axes[-1] == "key" and value.ndim == 2 else []
                np.testing.assert_array_equal(arrays[e.name][tuple(where)], value, err_msg=e.name)
                covered.setdefault(e.name, np.zeros(e.shape, bool))[tuple(where)] = True
        assert sorted(covered) == sorted(arrays)
        for name, array in arrays.items():
            fill = -np.inf if name.rpartition("/")[2] in MINUS_INF else 0
            assert (array[~covered[name]] == fill).all(), name
        return covered


# ---- attention ----------------------------------------------------------------------------------

CASES = [
    # precision, changes, causal, (batch, heads, kv_heads, tq, tk, d)
    ("bf16", {}, True, (2, 2, 2, 300, 300, 16)),
    ("bf16", {"tile": (16, 32)}, True, (1, 2, 1, 70, 90, 8)),
    ("bf16-fa2", {"tile": (32, 16)}, True, (2, 4, 2, 61, 50, 8)),  # rows 0 to 10 see no key
    ("bf16", {"delta_from": "p_dp", "p_bwd_from": "m_l"}, False, (1, 1, 1, 33, 47, 8)),
    ("bf16", {"algorithm": "plain"}, True, (1, 2, 2, 40, 40, 8)),
    ("bf16-fa2", {"delta_from": "o_fp32"}, True, (1, 1, 1, 20, 20, 8)),
    ("all-fp8_e4m3", {}, True, (1, 1, 1, 40, 40, 8)),
    ("all-fp8_e5m2", {}, True, (1, 1, 1, 40, 40, 8)),
    ("all-tf32", {}, False, (1, 1, 1, 20, 20, 8)),
    ("fp16-fa2", {}, False, (3, 1, 1, 5, 7, 4)),
    ("fp64", {}, True, (1, 1, 1, 20, 20, 8)),
]


@pytest.mark.parametrize("name, changes, causal, shape", CASES)
def test_a_dump_holds_what_the_sites_gave(tmp_path, name, changes, causal, shape):
    q, k, v, do = inputs(*shape, seed=1)
    precision = Precision.named(name).replace(**changes)
    pieces = Pieces()
    if precision.is_fp64:
        q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    without = attend(q, k, v, do, causal=causal, precision=precision)
    with recording(tmp_path / "x.h5"):
        o, saved = flash_attention_forward(q, k, v, causal=causal, precision=precision, watch=pieces)
        results = o, *flash_attention_backward(do, saved, watch=pieces)
    assert all(np.array_equal(a, b) for a, b in zip(without, results))  # a dump changes nothing
    dump = read(tmp_path / "x.h5")
    if name == "all-fp8_e4m3":  # it has no Inf: a masked entry reads as its lowest number
        for e in dump.entries:
            if e.site in MINUS_INF:
                assert (dump[e.name].astype(np.float32)[np.broadcast_to(~e.visible(), e.shape)] == -448).all()
        pieces.seen = [p for p in pieces.seen if p[1] not in MINUS_INF]
        dump.entries = [e for e in dump.entries if e.site not in MINUS_INF]
    pieces.seen = [p for p in pieces.seen if p[1] not in precision.merged]
    covered = pieces.check(dump)
    for e in dump.entries:  # what is not there is what the file says is not
        visible = e.visible()
        if visible is not None and "tile" in e.axes:
            assert np.array_equal(covered[e.name], np.broadcast_to(visible, e.shape)), e.name
    for site, value in zip(("attn.o", "attn.dq", "attn.dk", "attn.dv"), results):
        found = dump.read(site)
        assert found.dtype == value.dtype and np.array_equal(found, value)
    expected = {s for s in SITES if s.startswith("attn.") and s not in precision.merged}
    assert {e.site for e in dump.entries} == expected - (MINUS_INF if name == "all-fp8_e4m3" else set())
    assert Precision.from_toml(dump.attributes["precision"]) == precision


def test_narrowed(tmp_path):
    q, k, v, do = inputs(3, 4, 2, 40, 40, 8, seed=2)
    with recording(tmp_path / "all.h5"):
        attend(q, k, v, do, causal=True, precision="bf16", key=Key(0, layer=3, sample=5))
    rows = [0, 7, *range(20, 31)]
    with recording(tmp_path / "some.h5", layers=[3], heads=[1, 2], batch=[7, 5], rows=rows):
        attend(q, k, v, do, causal=True, precision="bf16", key=Key(0, layer=3, sample=5))
    whole, some = read(tmp_path / "all.h5"), read(tmp_path / "some.h5")
    assert list(whole) == list(some)
    for e in some.entries:
        expected = whole[e.name]
        assert e.samples == (5, 7) and e.heads == ((0, 2) if e.site in ("attn.dk", "attn.dv") else (1, 2))
        expected = expected[[0, 2]] if e.site in ("attn.dk", "attn.dv") else expected[[0, 2]][:, [1, 2]]
        if "query" in e.axes:
            assert e.rows == tuple(rows)
            expected = np.take(expected, rows, axis=e.axes.index("query"))
        assert np.array_equal(some[e.name], expected), e.name
    one = some.read("attn.p", sample=7, head=2)
    assert np.array_equal(one, whole["fwd/L03/attn.p"][2, 2][rows]) and one.ndim == 2
    assert np.array_equal(one.astype(np.float32) == 0, ~some.entry("attn.p").visible()[0, 0])


@pytest.mark.parametrize("chosen, groups", [([1], (0,)), ([3], (2,)), ([2, 3], (2,)), ([0, 3], (0, 2))])
def test_chosen_heads_bring_the_gradients_of_their_own_groups_alone(tmp_path, chosen, groups):
    q, k, v, do = inputs(2, 4, 2, 20, 20, 8, seed=21)
    for name, heads in (("all", None), ("some", chosen)):
        with recording(tmp_path / f"{name}.h5", "attn.dk,attn.dv", heads=heads):
            _, _, dk, dv = attend(q, k, v, do, precision="bf16")
    whole, some = read(tmp_path / "all.h5"), read(tmp_path / "some.h5")
    for site, value in (("attn.dk", dk), ("attn.dv", dv)):
        assert whole.entry(site).heads == (0, 2) and np.array_equal(whole.read(site), value)
        assert some.entry(site).heads == groups
        assert np.array_equal(some.read(site), value[:, [g // 2 for g in groups]])


def test_heads_that_round_differently_lie_in_their_order(tmp_path):
    q, k, v, do = inputs(2, 3, 3, 20, 20, 8, seed=22)
    precision = Precision.named("bf16").round("H1/attn.o=fp32")
    with recording(tmp_path / "x.h5"):
        results = attend(q, k, v, do, precision=precision)
    dump = read(tmp_path / "x.h5")
    assert all(e.heads == (0, 1, 2) for e in dump.entries)
    for site, value in zip(("attn.o", "attn.dq", "attn.dk", "attn.dv"), results):
        assert np.array_equal(dump.read(site), value)


@pytest.mark.parametrize("tq, tk", [(5, 1), (1, 5), (5, 5)])
def test_lengths_and_whether_attention_was_causal(tmp_path, tq, tk):
    q, k, v, do = inputs(1, 1, 1, tq, tk, 8, seed=23)
    for causal in (False, True):
        with recording(tmp_path / "x.h5"):
            attend(q, k, v, do, causal=causal, precision="bf16")
        assert {(e.causal, e.lengths) for e in read(tmp_path / "x.h5").entries} == {(causal, (tq, tk))}


@pytest.mark.parametrize("narrow, message", [
    ({"heads": [4]}, "heads 4: there is no such one; seen: 0-3"),
    ({"batch": [1, 2]}, "batch 2: there is no such one; seen: 0, 1"),
    ({"layers": [1]}, "layers 1: there is no such one; seen: 0"),
    ({"sites": "linear.y"}, "nothing was recorded for .*x.h5: no value of the chosen sites"),
    ({"rows": [20]}, "rows 20: fwd/L00/attn.q has rows 0 to 19"),
    ({"rows": []}, r"rows \[\]: give numbers from 0 on"),
    ({"sites": "attn.pp"}, "unknown site 'attn.pp': did you mean 'attn.p'"),
    ({"sites": "fw/attn.p"}, "unknown scope of a site 'fw'"),
    ({"sites": "attn.s,attn.pv"}, "site attn.pv does not exist on its own under order=fa2"),
])
def test_mistakes(tmp_path, narrow, message):
    q, k, v, do = inputs(2, 4, 4, 20, 20, 8, seed=3)
    with pytest.raises(ValueError, match=message):
        with recording(tmp_path / "x.h5", **narrow):
            attend(q, k, v, do, precision="bf16-fa2")
    assert os.listdir(tmp_path) == []


def test_a_second_call_at_the_same_place_is_refused_and_elsewhere_is_not(tmp_path):
    q, k, v, do = inputs(1, 2, 2, 20, 20, 8, seed=4)
    with pytest.raises(ValueError,
                       match="step_00000000/fwd/L00/attn.o came twice: a recording takes one pass"):
        with recording(tmp_path / "x.h5", "attn.o"):
            flash_attention(q, k, v, precision="bf16")
            flash_attention(q, k, v, precision="bf16")
    with recording(tmp_path / "x.h5", "attn.o,attn.p"):
        first = flash_attention(q, k, v, precision="bf16", key=Key(0, 9))
        second = flash_attention(k, v, q, precision="bf16", key=Key(0, 9, sample=1))
        third = flash_attention(v, q, k, precision="bf16", key=Key(0, 9, layer=1))
    dump = read(tmp_path / "x.h5")
    assert np.array_equal(dump["fwd/L00/attn.o"], np.concatenate([first, second]))
    assert np.array_equal(dump["fwd/L01/attn.o"], third) and dump.attributes["step"] == 9
    with pytest.raises(ValueError, match="has step 9, now came step 10"):
        with recording(tmp_path / "y.h5"):
            flash_attention(q, k, v, precision="bf16", key=Key(0, 9))
            flash_attention(q, k, v, precision="bf16", key=Key(0, 10))


@pytest.mark.parametrize("tq, options, what", [
    (20, {"precision": "fp32"}, "of another precision"),
    (20, {"precision": "bf16", "causal": True}, "of other lengths, heads or mask"),
    (30, {"precision": "bf16"}, "of other lengths, heads or mask"),
    (10, {"precision": "bf16"}, "of other lengths, heads or mask"),
])
def test_calls_at_one_place_are_alike(tmp_path, tq, options, what):
    """Their values would not fit in one dataset, or be rounded or cut by it."""
    def record(layer):
        with recording(tmp_path / "x.h5", "attn.s,attn.o"):
            for length, number, other in ((20, 0, {"precision": "bf16"}), (tq, 1, options)):
                q, k, v, _ = inputs(1, 2, 2, length, length, 8, seed=26)
                flash_attention(q, k, v, key=Key(0, layer=layer * number, sample=number), **other)
    with pytest.raises(ValueError, match=f"step_00000000/fwd/L00/attn.s came {what} than before: give such calls"):
        record(0)
    assert os.listdir(tmp_path) == []
    record(1)
    assert read(tmp_path / "x.h5").entry("attn.s", layer=1).lengths == (tq, tq)


def test_heads_that_round_differently_share_a_dataset_of_fp32(tmp_path):
    q, k, v, _ = inputs(2, 3, 3, 20, 20, 8, seed=5)
    precision = Precision.named("bf16").round("H1/attn.s=fp16")
    pieces = Pieces()
    with recording(tmp_path / "x.h5"):
        flash_attention(q, k, v, precision=precision, watch=pieces)
    dump = read(tmp_path / "x.h5")
    pieces.check(dump)
    assert dump.read("attn.s").dtype == np.float32 and dump.entry("attn.s").format == "fp16,bf16"
    assert dump.read("attn.p").dtype == BF16


def test_long_sequences_take_many_chunks(tmp_path):
    q, k, v, _ = inputs(1, 1, 1, 700, 2100, 4, seed=6)
    pieces = Pieces()
    with recording(tmp_path / "x.h5", "fwd/attn"):
        flash_attention(q, k, v, precision="bf16", causal=True, watch=pieces)
    pieces.check(read(tmp_path / "x.h5"))


def test_outside_the_block_nothing_is_watched(tmp_path):
    q, k, v, _ = inputs(1, 1, 1, 4, 4, 4, seed=7)
    with recording(tmp_path / "x.h5", "attn.o"):
        flash_attention(q, k, v, precision="bf16")
    flash_attention(q, k, v, precision="bf16")
    flash_attention(q, k, v, precision="bf16")


# ---- the network --------------------------------------------------------------------------------

def small_gpt(precision="bf16", bias=True):
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=11, bias=bias)
    return GPT(config, init_params(config, 1), Precision.named(precision))


def test_a_training_pass(tmp_path):
    rng = np.random.default_rng(8)
    x, y = rng.integers(0, 11, (2, 4, 12))
    plain, plain_grads, _ = small_gpt().loss_and_grads(x, y, Key(0, 7))
    model, grads = small_gpt(), {}
    with recording(tmp_path / "x.h5", "all"):
        loss, grads, _ = model.loss_and_grads(x, y, Key(0, 7))
        for name, g in grads.items():
            rnd = model.rounder(name, Key(0, 7))
            round_weight(rnd, "grad", g)
    assert loss == plain and all(np.array_equal(grads[n], plain_grads[n]) for n in grads)
    dump = read(tmp_path / "x.h5")
    assert dump["fwd/lm_head/logits"].shape == (4, 12, 11) and dump["fwd/L01/c_fc/linear.y"].shape == (4, 12,
                                                                                                       64)
    assert np.array_equal(dump["fwd/L01/c_attn/linear.w"].astype(np.float32),
                          model.params["h.1.attn.c_attn.weight"].astype(BF16).astype(np.float32))
    assert dump["fwd/L01/c_attn/linear.w.bias"].shape == (48,)
    for name, dataset in (("h.1.ln_1.weight", "L01/ln_1/grad"), ("h.1.ln_1.bias", "L01/ln_1/grad.bias"),
                          ("wpe", "wpe/grad"), ("h.0.mlp.c_fc.bias", "L00/c_fc/grad.bias"),
                          ("h.0.mlp.c_fc.weight", "L00/c_fc/grad")):
        assert np.array_equal(dump[f"bwd/{dataset}"], grads[name]), name
    assert np.array_equal(dump["bwd/L00/c_fc/linear.dw"][0].astype(np.float32), grads["h.0.mlp.c_fc.weight"])
    names = list(dump)
    assert names[0] == "fwd/wte/embed" and names.index("fwd/L01/attn.p") < names.index(
        "bwd/L01/attn.s") < names.index("bwd/L00/attn.s")
    assert dump.read("linear.y", layer=1, module="c_fc").dtype == BF16
    with pytest.raises(ValueError, match="linear.y is in several places .* name one by layer= or module="):
        dump.read("linear.y", layer=1)
    with pytest.raises(ValueError, match="unknown site in .*'attn.pq': did you mean .*'attn.p'"):
        dump.read("attn.pq")
    with pytest.raises(ValueError, match="head 2 is not in fwd/L00/attn.p"):
        dump.read("attn.p", layer=0, head=2)


def test_the_weights_of_a_norm_of_q_and_k_are_no_biases(tmp_path):
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12, vocab_size=11, qk_norm=True, bias=True)
    model = GPT(config, init_params(config, 1), Precision.named("bf16"))
    x, y = np.random.default_rng(24).integers(0, 11, (2, 4, 12))
    with recording(tmp_path / "x.h5", "all"):
        _, grads, _ = model.loss_and_grads(x, y, Key(0, 1))
        for name, g in grads.items():
            round_weight(model.rounder(name, Key(0, 1)), "grad", g)
    dump = read(tmp_path / "x.h5")
    for name in ("ln_q", "ln_k"):
        assert np.array_equal(dump[f"bwd/L00/attn.{name}/grad"], grads[f"h.0.attn.{name}.weight"])
    assert not any("ln_q" in n and n.endswith(".bias") for n in dump) and "bwd/L00/ln_1/grad.bias" in list(dump)


def test_micro_batches_lengthen_the_samples(tmp_path):
    rng = np.random.default_rng(9)
    x, y = rng.integers(0, 11, (2, 4, 12))
    model, grads = small_gpt(bias=False), {}
    with recording(tmp_path / "x.h5", ["attn", "linear", "ln.y"], layers=[1], batch=[1, 2, 3], rows=[0, 5]):
        for i in (0, 2):
            _, grads, _ = model.loss_and_grads(x[i:i + 2], y[i:i + 2], Key(0, 1, sample=i), grads=grads,
                                               n_micro=2)
    dump = read(tmp_path / "x.h5")
    assert all(e.layer in (1, None) for e in dump.entries)
    assert dump.entry("attn.p").samples == (1, 2, 3) and dump.read("attn.p").shape == (3, 2, 2, 12)
    assert dump.read("linear.dw", layer=1, module="c_fc").shape == (2, 64, 16)
    assert dump.read("ln.y", module="ln_1").shape == (3, 2, 16)
    assert "fwd/ln_f/ln.y" in list(dump)  # in no layer


def test_selection():
    wanted = Selection(["fwd/attn.s", "c_fc/linear", "gelu.y"])
    assert ("fwd", "", "attn.s") in wanted and ("bwd", "",
                                                "attn.s") not in wanted and ("fwd", "",
                                                                             "attn.s_scaled") not in wanted
    assert ("bwd", "c_fc", "linear.dy") in wanted and ("bwd", "c_attn", "linear.dy") not in wanted
    assert ("fwd", "c_fc", "gelu.y") in wanted and ("fwd", "wte", "embed") not in wanted
    assert ("fwd", "wte", "embed") in Selection("all")
    with pytest.raises(ValueError, match="no sites"):
        Selection([])


# ---- the file -----------------------------------------------------------------------------------

def test_attributes(tmp_path):
    q, k, v, do = inputs(1, 2, 2, 20, 20, 8, seed=10)
    with recording(tmp_path / "x.h5", attributes={"fix": "off"}):
        o, saved = flash_attention_forward(q, k, v, causal=True, precision="bf16", key=Key(77, 3))
        flash_attention_backward(do, saved, precision="fp32")
    with h5py.File(tmp_path / "x.h5") as f:
        assert f.attrs["seed"] == 77 and f.attrs["step"] == 3 and f.attrs["device"] == "cpu" and f.attrs[
            "fix"] == "off"
        assert Precision.from_toml(f.attrs["precision"]) == Precision.named("bf16")
        p = f["step_00000003/fwd/L00/attn.p"]
        assert (p.attrs["site"], p.attrs["format"], p.attrs["mode"]) == ("attn.p", "bf16", "rne")
        assert p.attrs["axes"].tolist() == ["sample", "head", "query", "key"] == [d.label for d in p.dims]
        assert p.compression == "gzip" and p.shuffle and p.chunks
        np.testing.assert_array_equal(p[...],
                                      read(tmp_path / "x.h5").read("attn.p").astype(np.float32))  # plain h5py
        assert Precision.from_toml(
            f["step_00000003/bwd/L00/attn.ds"].attrs["precision"]) == Precision.named("fp32")


@needs_h5dump
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "fp32"])
def test_h5dump_prints_numbers(tmp_path, format):
    values = np.float32([0, -0.0, 1, -2.5, 448, 2**-6, 2**-9, -np.inf if format != "fp8_e4m3" else -448])
    rnd = Rounder(Precision.named("fp32").round(f"attn.o={format}"))
    recorder = Recorder(tmp_path / "x.h5", "attn.o")
    for site, x in (("attn.q", values), ("attn.k", values), ("attn.o", values)):
        recorder(rnd, site, x.reshape(1, 8, 1), x.reshape(1, 8, 1))
    recorder.finish()
    recorder.close()
    text = subprocess.run(
        ["h5dump", "-y", "-d", "/step_00000000/fwd/L00/attn.o", "-A", "0",
         str(tmp_path / "x.h5")], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"DATA \{(.*?)\}", text, re.S)[1].replace(",", " ").split()
    if format == "fp8_e4m3":  # uint8 of its bits: HDF5 would read 448 as NaN
        assert [int(n) for n in numbers] == values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()
    else:
        assert [float(n) for n in numbers] == [float(f"{v:g}") for v in values]  # it prints 6 digits
    assert np.array_equal(read(tmp_path / "x.h5").read("attn.o").astype(np.float32).reshape(-1), values)


class _Full:
    """A disk with room for `room` bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.file.tell() + len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 3000, 30_000, 200_000])
def test_a_full_disk(tmp_path, room):
    q, k, v, do = inputs(1, 2, 2, 150, 150, 16, seed=11)
    with recording(tmp_path / "x.h5"):
        attend(q, k, v, do, precision="bf16")
    before = (tmp_path / "x.h5").read_bytes()
    assert len(before) > 200_000
    with pytest.raises(OSError, match=r"cannot write .*x\.h5: No space left on device"):
        with recording(tmp_path / "x.h5") as recorder:
            recorder._sink._file = _Full(recorder._sink._file, room)
            attend(q, k, v, do, precision="bf16")
    assert os.listdir(tmp_path) == ["x.h5"] and (tmp_path / "x.h5").read_bytes() == before
    del recorder  # and HDF5 has let go of the file: a new one can be written
    with recording(tmp_path / "x.h5"):
        attend(q, k, v, do, precision="bf16")
    assert len(read(tmp_path / "x.h5")) > 40


def test_an_error_in_the_block_leaves_no_file(tmp_path):
    q, k, v, do = inputs(1, 1, 1, 20, 20, 8, seed=12)
    with pytest.raises(KeyError):
        with recording(tmp_path / "x.h5"):
            attend(q, k, v, do, precision="bf16")
            raise KeyError("mine")
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="cannot write .*nowhere/x.h5: No such file or directory"):
        with recording(tmp_path / "nowhere/x.h5"):
            pass


KILLED = """
import sys, numpy as np
from cuflash.attention import flash_attention
from cuflash.dump import recording
q = np.ones((1, 4, 400, 16), np.float32)
with recording(sys.argv[1]):
    flash_attention(q, q, q, precision="bf16")
    print("here", flush=True)
    sys.stdin.read()
"""


def test_a_kill_leaves_the_earlier_file_whole(tmp_path):
    path = tmp_path / "x.h5"
    q, k, v, _ = inputs(1, 1, 1, 20, 20, 8, seed=13)
    with recording(path):
        o = flash_attention(q, k, v, precision="bf16")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    process.kill()
    process.wait()
    assert np.array_equal(read(path).read("attn.o"), o)


def test_foreign_and_damaged_files(tmp_path):
    q, k, v, _ = inputs(1, 1, 1, 20, 20, 8, seed=14)
    path = tmp_path / "x.h5"
    with recording(path):
        flash_attention(q, k, v, precision="bf16")
    (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:2000])
    (tmp_path / "text.h5").write_text("hello")
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["x"] = np.zeros(3)
    whole, data = path.read_bytes(), read(path)
    with h5py.File(path, "r") as f:
        at = f[data.entries[0].dataset].id.get_chunk_info(0)
    (tmp_path / "chunk.h5").write_bytes(whole[:at.byte_offset] + bytes(at.size) + whole[at.byte_offset + at.size:])
    with pytest.raises(ValueError, match="chunk.h5: fwd/L00/attn.q is damaged"):
        read(tmp_path / "chunk.h5").read("attn.q")
    for name, message in (("cut", "damaged, cut short or not HDF5"), ("text",
                                                                      "damaged, cut short or not HDF5"),
                          ("other", "but not a dump of cuflash"), ("none", "no such file")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / f"{name}.h5")


def test_a_name_as_diff_prints_it(tmp_path):
    q, k, v, _ = inputs(1, 2, 2, 20, 20, 8, seed=15)
    with recording(tmp_path / "x.h5"):
        for layer in range(2):
            flash_attention(q + layer, k, v, precision="bf16", key=Key(0, layer=layer))
    d = read(tmp_path / "x.h5")
    for name in ("fwd/L01/attn.p", "L01/attn.p", "step_00000000/fwd/L01/attn.p"):
        assert np.array_equal(d.read(name), d["fwd/L01/attn.p"]) and d.entry(name).layer == 1
    assert np.array_equal(d.read("L01/attn.p", head=1, sample=0), d.read("attn.p", layer=1, head=1, sample=0))
    with pytest.raises(ValueError, match="unknown site in .*x.h5 'fwd/L02/attn.p': did you mean 'fwd/L0[01]/attn.p'"):
        d.read("fwd/L02/attn.p")
    with pytest.raises(ValueError, match="fwd/L01/attn.p is not in .* at layer 0; it has fwd/L01/attn.p"):
        d.read("fwd/L01/attn.p", layer=0)
    with pytest.raises(ValueError, match="attn.p is in several places"):
        d.read("attn.p")
