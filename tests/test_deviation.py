"""Deviation of flash attention: rows against direct calls, and the effects that figures 3 to 6 rest on."""
import dataclasses
import hashlib

import numpy as np
import pytest

from cuflash.attention import flash_attention, plain_attention
from cuflash.deviation import (
    EMULATIONS,
    GROUPS,
    SHAPES,
    Options,
    Setting,
    emulation,
    inputs,
    measures,
    precisions,
    read_activations,
    run,
    settings,
)
from cuflash.dump import recording
from cuflash.formats import is_representable, round_to
from cuflash.site_table import SITES

SMALL = Options(length=128, queries=32, head_dim=16, draws=2, lengths=(64, 128), tiles=(32,))


def test_measures_against_direct_computation():
    rng = np.random.default_rng(51)
    a, b = rng.standard_normal((2, 3, 5, 4))
    found = measures(a, b)
    for i in range(3):
        d = (a - b)[i].ravel()
        assert found[i, 0] == np.abs(d).max()
        # sums of fp64 numbers in another order
        assert found[i, 1:] == pytest.approx(
            [np.abs(d).mean(), np.sqrt(np.mean((d - d.mean())**2))], rel=1e-12)


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "e8m5"])
def test_emulations(format):
    tile, fa2 = (emulation(e, format).table() for e in EMULATIONS)
    assert {r.format for s, r in tile.items() if s.startswith("attn.")} == {format}
    for site in ("q", "k", "v", "p", "o"):
        assert fa2[f"attn.{site}"].format == format
    for site in {s for group in GROUPS.values() for s in group} | {"attn.m", "attn.s"}:
        assert fa2[site].format == "fp32"
    assert emulation("fa2", "bf16").name == "bf16-fa2" and emulation("bf16", "").base == "bf16-paper"
    assert emulation("fa2", "fp16").table() == emulation("fp16-fa2", "").table()


def test_settings_cover_the_figures_and_keep_a_tile_s_area():
    found = settings(SMALL)
    assert {s.figure for s in found} == {"3-4", "5", "6", "sites"} and len(set(found)) == len(found)
    assert {s.format for s in found if s.figure == "3-4"} == set(SMALL.formats)
    assert {s.length for s in found if s.figure == "5"} == {64, 128}
    sides = {s.shape: s.tile for s in found if s.figure == "6"}
    assert sides == {"square": (32, 32), "wide": (16, 64), "tall": (64, 16)} and set(sides) == set(SHAPES)
    assert {s.fp32 for s in found if s.figure == "sites"} == set(GROUPS)
    assert not {site for group in GROUPS.values() for site in group} - set(SITES)
    assert set(precisions(found,
                          "sequential")) > {"per-tile bf16", "fa2 bf16", "plain bf16", "bf16", "fa2 fp64"}


@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy"])
def test_inputs_are_repeated_and_of_their_kind(kind):
    a, b = inputs(kind, 4096, SMALL), inputs(kind, 4096, SMALL)
    q, k, v = a
    assert all((x == y).all() for x, y in zip(a, b)) and not (k[0] == k[1]).any() and not (k == v).any()
    assert q.shape == (2, 32, 16) and k.shape == v.shape == (2, 4096, 16) and k.dtype == np.float32
    # 131,072 draws: the mean is within 5 standard errors, Student's t with 3 degrees has no fourth moment
    mean, std = {"normal": (0, 1), "uniform": (0.5, 12**-0.5), "heavy": (0, 1)}[kind]
    assert k.mean() == pytest.approx(mean, abs=5 * std / 362) and k.std() == pytest.approx(std, rel=0.2)
    assert (np.abs(k).max() > 15) == (kind == "heavy")


@pytest.mark.parametrize("setting", [
    Setting("3-4", "normal", "bf16", "per-tile", 128, (16, 16)),
    Setting("5", "heavy", "fp16", "fa2", 100, (16, 32)),
    Setting("sites", "uniform", "bf16", "per-tile", 128, (16, 16), fp32="l"),
    Setting("3-4", "normal", "bf16", "bf16", 128, (32, 32))
],
                         ids=lambda s: f"{s.emulation}-{s.format}-{s.fp32}")
def test_a_row_against_direct_calls(setting):
    rows = run([setting], SMALL)
    q, k, v = (round_to(x, setting.format) for x in inputs(setting.input, setting.length, SMALL))
    golden = plain_attention(*(x.astype(np.float64) for x in (q, k, v)))
    plain = plain_attention(q, k, v, precision=setting.plain("sequential")).astype(np.float64)
    flash = flash_attention(q, k, v, precision=setting.flash("sequential")).astype(np.float64)
    assert is_representable(flash.astype(np.float32), setting.format).all()
    for draw, row in enumerate(rows):
        f, p, g = flash[draw], plain[draw], golden[draw]
        assert row.flash_plain_max == np.abs(f - p).max() > 0
        assert row.flash_golden_max == np.abs(f - g).max() and row.plain_golden_max == np.abs(p - g).max()
        assert row.ratio == row.flash_golden_max / row.plain_golden_max
        assert (row.draw, row.tiles) == (draw, -(-setting.length // setting.tile[1]))
        assert row.golden_std == pytest.approx(g.std(), rel=1e-12)  # the same sum in another order


def test_threads_and_order_change_nothing():
    chosen = [s for s in settings(SMALL) if s.format in ("bf16", "fp64")]
    one, two = run(chosen, SMALL, jobs=1), run(chosen[::-1], SMALL, jobs=2)
    assert len(one) == 2 * len(chosen)
    assert sorted(one, key=repr) == sorted(two, key=repr)


def test_fp64_differs_in_its_last_bits_alone():
    rows = run(
        [Setting("3-4", k, "fp64", e, 128, (16, 16)) for k in ("normal", "uniform") for e in EMULATIONS],
        SMALL)
    assert all(r.plain_golden_max == 0 and np.isnan(r.ratio) for r in rows)
    # outputs below 4: sums of 128 terms are off by some units of 2^-52
    assert all(0 < r.flash_golden_max < 100 * 2.0**-52 for r in rows)


def test_rounding_l_and_o_for_each_tile_is_what_costs():
    o = dataclasses.replace(SMALL, length=1024, draws=2, head_dim=32)
    chosen = [
        Setting("sites", "uniform", "bf16", "per-tile", 1024, (16, 16), fp32=g)
        for g in ("none", "l, o_scaled, o_acc")
    ]
    chosen += [
        Setting("6", "uniform", "bf16", "per-tile", 1024, (16, 256)),
        Setting("3-4", "uniform", "bf16", "fa2", 1024, (16, 16))
    ]
    rows = run(chosen, o)
    per_tile, both, large, fa2 = (rows[i:i + 2] for i in range(0, 8, 2))
    for a, b, c, d in zip(per_tile, both, large, fa2):
        assert a.ratio > 4 and b.ratio < 1 and d.ratio < 1
        assert c.flash_plain_max < a.flash_plain_max / 2


def test_query_rows_of_a_tile_change_no_bits():
    chosen = [Setting("6", "normal", "bf16", "per-tile", 128, (br, 32), str(br)) for br in (16, 32, 128)]
    rows = run(chosen, SMALL)
    kept = [[dataclasses.replace(r, shape="", tile_rows=0) for r in rows if r.shape == str(br)]
            for br in (16, 32, 128)]
    assert kept[0] == kept[1] == kept[2]


def test_activations_of_a_dump(tmp_path):
    rng = np.random.default_rng(52)
    q = rng.standard_normal((2, 4, 48, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, 48, 16), dtype=np.float32)
    path = tmp_path / "a.h5"
    with recording(path, "attn.q,attn.k,attn.v"):
        flash_attention(q, k, v, causal=True, precision="fp32")
    found = read_activations(path, count=8)
    assert found.causal and found.sha256 == hashlib.sha256(
        path.read_bytes()).hexdigest() and found.name == "a.h5, layer 0"
    assert (found.q == q.reshape(8, 48, 16)).all() and (found.k == np.repeat(k, 2, axis=1).reshape(8, 48,
                                                                                                   16)).all()
    assert len(read_activations(path, count=3).q) == 3
    row = run([Setting("3-4", "activations", "bf16", "per-tile", 48, (16, 16))], SMALL, found)[5]
    precision = emulation("per-tile", "bf16").replace(tile=(16, 16), accumulator="sequential")
    rounded = [round_to(x[5][None], "bf16") for x in (found.q, found.k, found.v)]
    flash = flash_attention(*rounded, causal=True, precision=precision).astype(np.float64)
    golden = plain_attention(*(x.astype(np.float64) for x in rounded), causal=True)
    assert row.causal and row.flash_golden_max == np.abs(flash - golden).max()
    with pytest.raises(ValueError, match="needs a dump"):
        inputs("activations", 48, SMALL)


def test_arrays_are_taken_to_the_device_but_for_fp64():
    taken = []

    def to_device(x):
        taken.append(x)
        return x.copy()

    run([Setting("3-4", "normal", f, "per-tile", 32, (16, 16)) for f in ("bf16", "fp64")],
        SMALL,
        to_device=to_device)
    assert len(taken) == 3 and all(x.dtype == np.float32 for x in taken)


@pytest.mark.parametrize("options, words", [({
    "inputs": ("norml", )
}, "unknown input 'norml': did you mean 'normal'"), ({
    "formats": ("fp17", )
}, "unknown format"), ({
    "tiles": (48, )
}, "tiles has 48"), ({
    "draws": 0
}, "draws is 0; valid: 1 or more"), ({
    "tile": 8
}, "tile is 8")])
def test_mistakes(options, words):
    with pytest.raises(ValueError, match=words):
        Options(**options)
