"""The vectorised reference against plain loops over the contract, bit for bit, case by case.

Each case is here for what its name says; test_attention_fuzz.py draws further ones. Inputs are fresh
in every run, and the seed is printed.
"""
from fractions import Fraction

import numpy as np
import pytest

from cuflash.attention import flash_attention
from cuflash.formats import MODES, format_named, round_to
from cuflash.philox import Key, random_words
from cuflash.precision import Precision
from tests.slow_attention import differing
from tests.slow_numbers import fma, random_word, round_one

F = np.float32
KEY = Key(2**40 + 7, step=3, layer=2, sample=5)
TILES = ((16, 16), (16, 32), (32, 16))  # forward, dK/dV, dQ
FIXES = ("qiu-b7", "qiu-b2", "capped")


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


def precision(name="fp32", roundings=(), **switches):
    return Precision.named(name).replace(**({"accumulator": "sequential", "tile": TILES} | switches)).round(*roundings)


def inputs(rng, tq, tk, d, heads=1, kv_heads=1, batch=1, q=2.0, k=1.0, v=1.0, ties=True):
    """q, k, v, dO of these standard deviations; `ties`: half of the keys are equal."""
    wide, narrow = (batch, heads, tq, d), (batch, kv_heads, tk, d)
    q, k, v, do = (rng.standard_normal(shape).astype(F) * F(size)
                   for shape, size in ((wide, q), (narrow, k), (narrow, v), (wide, 2)))
    if ties:
        k[:, :, rng.integers(0, tk, tk // 2)] = k[:, :, :1]
    return q, k, v, do


# ---- the loops' own numbers ---------------------------------------------------------------------

def test_fma_of_the_loops_is_exact(rng):
    """Against fractions: the nearest fp32, the even one of two; at cancellations, ties, subnormals."""
    bits = rng.integers(0, 2**32, (3, 3000), np.uint32)
    with np.errstate(all="ignore"):
        a, b, c = (x.view(F) for x in bits)
        b[1000:] = (rng.integers(1, 2**12, 2000) * 2.0**rng.integers(-20, 20, 2000)).astype(F)
        a[1000:] = (rng.integers(1, 2**12, 2000) * 2.0**rng.integers(-140, 20, 2000)).astype(F)
        c[1000:] = -a[1000:] * b[1000:] * (1 + rng.integers(-2, 3, 2000) * F(2**-23))
        c[2000:] = (2.0**rng.integers(-149, 60, 1000)).astype(F)
        for x, y, z in zip(a, b, c):
            got = fma(x, y, z)
            if np.isfinite([x, y, z]).all() and np.isfinite(got):
                exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
                off = [abs(Fraction(float(n)) - exact) if np.isfinite(n) else None
                       for n in (got, np.nextafter(got, F(-np.inf)), np.nextafter(got, F(np.inf)))]
                assert all(n is None or off[0] < n or off[0] == n and not int(got.view(np.int32)) & 1
                           for n in off[1:]), (x, y, z)


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "e2m1", "e8m20"])
def test_rounding_of_the_loops_is_the_librarys(format, rng):
    f = format_named(format)
    with np.errstate(over="ignore"):
        x = np.concatenate([rng.integers(0, 2**32, 300, np.uint32).view(F), rng.standard_normal(300).astype(F),
                            (f.max * rng.uniform(0.9, 1.1, 100)).astype(F),
                            (f.smallest * rng.uniform(-3, 3, 100)).astype(F)])
    words = random_words(KEY, site=7, heads=[3], tile=0, rows=[0], cols=np.arange(x.size))[0, 0]
    own = [random_word(KEY, KEY.sample, 3, 7, 0, 0, column) for column in range(x.size)]
    assert words.tolist() == own
    for mode in MODES:
        with np.errstate(all="ignore"):
            got = np.array([round_one(n, format, mode, word) for n, word in zip(x, _words(x.size))], F)
            want = round_to(x[None], format, mode, key=KEY)[0]
        assert np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(want)), mode


def _words(count):
    """Those that round_to draws for one row: site 0, head 0."""
    return [random_word(KEY, KEY.sample, 0, 0, 0, 0, column) for column in range(count)]


# ---- precisions ---------------------------------------------------------------------------------

MIXED = [f"attn.{s}" for s in (
    "s=e5m4:rz", "s_scaled=e5m5:rna", "m=bf16:rd", "x=fp16", "p=fp8_e5m2", "l_tile=bf16", "pv=e6m5:ru", "o_acc=bf16:rz",
    "delta=bf16", "dpd=fp16", "dv_tile=e8m5", "dq_acc=e8m5:rz")]
PRECISIONS = {
    "fp32": precision(),
    "bf16": precision("bf16"),
    "bf16, m and l, p∘dp": precision("bf16", p_bwd_from="m_l", delta_from="p_dp", l_from="rounded"),
    "bf16-fa2": precision("bf16-fa2"),
    "bf16-fa2, m and l, unrounded": precision(
        "bf16-fa2", ("attn.l=bf16", "attn.o_scaled=bf16", "attn.alpha=fp16", "attn.dk_acc=bf16"),
        p_bwd_from="m_l", delta_from="o_unrounded", l_from="rounded"),
    "bf16-fa2, p∘dp": precision("bf16-fa2", delta_from="p_dp"),
    "fp32 in fa2's order, p∘dp": precision(order="fa2", delta_from="p_dp"),
    "mixed": precision("bf16", MIXED),
}
SHAPES = [(9, 9, 3, True), (20, 35, 2, True), (35, 20, 5, True), (18, 33, 4, False)]
# Fixes act on S alone: one shape with several tiles is enough for them.
CASES = [(shape, "off") for shape in SHAPES] + [(SHAPES[1], fix) for fix in FIXES]


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("shape, fix", CASES)
def test_precisions(shape, fix, name, rng):
    *lengths, causal = shape
    assert differing(*inputs(rng, *lengths), PRECISIONS[name], causal=causal, fix=fix) == []


@pytest.mark.parametrize("order", ["eager", "fa2"])
@pytest.mark.parametrize("d", [65, 70, 96, 97, 130])
def test_delta_of_head_dims_above_64(d, order, rng):
    """More than one block of columns; everything fp32, so that no rounding hides the order of the sums."""
    assert differing(*inputs(rng, 12, 5, d), precision(order=order)) == []


@pytest.mark.parametrize("roundings", [(), ("attn.dk_head=e8m5", "attn.dv_head=e8m5", "attn.p_ds=bf16")])
@pytest.mark.parametrize("name", ["fp32", "bf16-fa2"])
def test_grouped_heads(name, roundings, rng):
    """Shares of four heads, not rounded after their sum, which would hide its order."""
    p = precision(name, (*roundings, "attn.dk=fp32", "attn.dv=fp32"))
    assert differing(*inputs(rng, 7, 9, 3, heads=8, kv_heads=2, batch=2), p, causal=True) == []


@pytest.mark.parametrize("name", ["fp32", "bf16-fa2"])
def test_scopes(name, rng):
    """Layers, directions and heads; dK and dV of a group go by its first head."""
    scoped = ("L2/H1,3/attn.p=e8m4", "bwd/H2/attn.q=e8m3", "fwd/L2/H0/attn.k=e8m5", "L1/attn.o=e8m2",
              "H4/attn.dk=e8m4", "H5/attn.dv=e8m4", "H0/attn.dv=e8m5")
    data = inputs(rng, 7, 9, 3, heads=8, kv_heads=2)
    for layer in (1, 2):
        assert differing(*data, precision(name, scoped), causal=True, key=Key(0, layer=layer)) == []


@pytest.mark.parametrize("scale", [0.3, 1.7, 1e-3])
@pytest.mark.parametrize("name", PRECISIONS)
def test_scales(name, scale, rng):
    assert differing(*inputs(rng, 18, 20, 3), PRECISIONS[name], scale=scale, fix="capped") == []


def test_negative_scale(rng):
    """−0 where q is 0; only `eager` takes it."""
    q, k, v, do = inputs(rng, 18, 20, 3)
    q[0, 0, ::3] = 0
    assert differing(q, k, v, do, precision("bf16"), scale=-0.6, fix="capped") == []


# ---- stochastic rounding ------------------------------------------------------------------------

@pytest.mark.parametrize("switches", [
    {}, {"order": "fa2"}, {"algorithm": "plain"}, {"algorithm": "plain", "order": "fa2"},
    {"delta_from": "p_dp", "p_bwd_from": "m_l"}, {"order": "fa2", "delta_from": "p_dp"}, {"delta_from": "o_fp32"},
], ids=str)
def test_stochastic_rounding_at_every_site(switches, rng):
    """Several tiles, samples, heads and groups, and a key without zeros: each word has its own place."""
    p = precision("fp32", ["attn=e8m4:sr"], **switches)
    data = inputs(rng, 35, 21, 3, heads=4, kv_heads=2, batch=2)
    assert differing(*data, p, causal=True, key=KEY) == []


# ---- fixes --------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, roundings, scale, fix, q", [
    ("fp16-fa2", (), None, "capped", 12),  # the cap of fp16
    ("all-fp16", (), None, "capped", 12),
    ("bf16", ("attn.l=e6m9",), None, "capped", 60),  # a cap between
    ("fp16-fa2", (), 0.3, "capped:cap=30", 40),
    ("bf16-fa2", (), 0.3, "capped", 300),  # shifts that the cap limits: counted
    ("bf16", (), None, "qiu-b2", 2),
    ("bf16", ("attn.s=fp32", "attn.s_scaled=e5m3"), 0.7, "qiu-b2:epsilon=0.1", 1),  # the threshold is rounded
    ("bf16-fa2", ("attn.s=e5m3",), 0.7, "qiu-b2:epsilon=0.1", 1),
    ("bf16-fa2", (), 0.1, "qiu-b2:epsilon=0.1", 3),  # ε/α
    ("bf16-fa2", (), 3.3, "qiu-b7:epsilon=0.4", 1),
    ("fp32", (), 0.7, "qiu-b7:epsilon=0.2,beta=3", 2),
    ("bf16-fa2", (), 0.3, "qiu-b7:beta=1", 2),  # changes no row: its bits stay though α divides back
    ("bf16-fa2", (), 0.3, "capped:cap=0", 2),
    *(("bf16", (), None, "capped", q) for q in (3000, 12000, 80000)),  # a cap near and below m's spacing
    ("bf16-fa2", ("attn.m=e8m3",), 0.3, "capped", 500),
    ("bf16", ("attn.s=fp32", "attn.s_scaled=fp32", "attn.m=e8m5"), None, "capped", 500),  # r_m is not a number of m
    ("bf16", (), None, "qiu-b7", 30),  # every P̄ vanishes: l = 0 in rows that are not empty
    ("bf16-fa2", (), None, "qiu-b7", 30),
    ("fp32", (), None, "qiu-b7", 60),
])
@pytest.mark.parametrize("algorithm", ["flash", "plain"])
def test_fixes(name, roundings, scale, fix, q, algorithm, rng):
    if algorithm == "plain":
        roundings = [r for r in roundings if "l_tile" not in r]
    p = precision(name, roundings, algorithm=algorithm)
    assert differing(*inputs(rng, 24, 40, 3, q=q), p, causal=True, scale=scale, fix=fix) == []


# ---- zeros, infinities, NaN ---------------------------------------------------------------------

@pytest.mark.parametrize("order", ["eager", "fa2"])
def test_signs_of_zero(order, rng):
    """Tiny negative values round to −0: a maximum and Ō are +0 for it, other sites keep it."""
    roundings = [f"attn.{s}=e3m2" for s in ("s", "o_acc", "o", "dq", "dk", "dv")]
    roundings += [] if order == "fa2" else ["attn.s_scaled=e3m2"]
    data = inputs(rng, 20, 36, 6, q=0.02, k=0.5, v=0.003)
    for fix in ("off", "capped"):
        assert differing(*data, precision("fp32", roundings, order=order), causal=True, fix=fix) == []
    data[1][..., :] = np.abs(data[1])
    data[0][..., :] = -np.abs(data[0])
    assert differing(*data, precision("fp32", roundings, order=order), causal=True) == []


@pytest.mark.parametrize("order", ["eager", "fa2"])
def test_running_maximum_of_both_zeros_is_positive(order):
    """One tile's maximum is 0, the other's −0.01, which attn.m rounds to −0."""
    q, k = np.ones((1, 1, 2, 1), F), np.repeat(F([0, -0.01]), 16).reshape(1, 1, 32, 1)
    for keys in (k, k[:, :, ::-1]):
        assert differing(q, keys, keys, q, precision("fp32", ["attn.m=e3m2"], order=order)) == []


def test_masked_entries_are_no_ties_of_a_threshold_of_minus_infinity(rng):
    """ε/α = 100 is past the largest number of attn.s, so every visible entry ties, and no other."""
    p = precision("all-e2m1", order="fa2")
    data = inputs(rng, 4, 4, 2, q=0.5)
    assert differing(*data, p, causal=True, scale=1e-3, fix="qiu-b2:epsilon=0.1") == []


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("p", [
    precision(tile=(16, 16)), precision("bf16-fa2", tile=((16, 16), (16, 16), (16, 32))),
    precision("bf16", algorithm="plain"), precision("bf16", p_bwd_from="m_l", tile=(32, 16)),
], ids=["fp32", "fa2", "plain", "eager"])
def test_nonfinite_rows_reach_the_tiles_that_are_visited_and_no_other(p, name, rng):
    for value, first in ((np.nan, 0), (np.inf, 16), (-np.inf, 32)):
        data = dict(zip(("q", "k", "v", "do"), inputs(rng, 44, 44, 2)))
        row = rng.integers(first, min(first + 16, 44))
        data[name][0, 0, row] = 0
        data[name][0, 0, row, 0] = value
        assert differing(*data.values(), p, causal=True) == [], (value, row)


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-fa2"])
@pytest.mark.parametrize("algorithm", ["flash", "plain"])
def test_logits_of_minus_infinity(name, algorithm, rng):
    """Rows that see only −Inf are empty, those that see one other key are not."""
    q, k, v, do = inputs(rng, 20, 20, 2)
    q[...] = np.abs(q)
    k[0, 0, :7] = 0
    k[0, 0, :7, 0] = -np.inf
    p = precision(name, algorithm=algorithm)
    assert differing(q, k, v, do, p, causal=True, fix="on") == []
    seen = []  # P of an empty row is 0, not 0/0, where it is dumped
    flash_attention(q, k, v, causal=True, precision=p,
                    watch=lambda rnd, site, x, y: seen.append(y[0, :7]) if site == "attn.p" else None)
    assert seen and (algorithm == "flash" or (np.concatenate(seen, axis=-1) == 0).all())


# ---- switches -----------------------------------------------------------------------------------

@pytest.mark.parametrize("fix", ["off", *FIXES])
@pytest.mark.parametrize("name", ["bf16", "bf16-fa2", "fp16-fa2"])
def test_delta_from_o_recomputed_in_fp32(name, fix, rng):
    """All forward sites but the inputs are fp32 then, under the same fix."""
    roundings = ("attn.m=e8m4", "attn.x=e8m5", "attn.o=e8m5", "attn.lse=bf16", "attn.delta_prod=fp32", "attn.ds=fp32",
                 "attn.dq=fp32", "attn.dk=fp32")
    p = precision(name, roundings, delta_from="o_fp32")
    assert differing(*inputs(rng, 20, 35, 3, q=12), p, fix=fix, causal=True) == []


@pytest.mark.parametrize("accumulator", ["hopper", "ampere"])
@pytest.mark.parametrize("name, roundings", [
    ("bf16", ()), ("bf16-fa2", ("attn.p=fp32", "attn.do=fp32")), ("fp16-fa2", ("attn.v=bf16", "attn.k=e8m20")),
    ("bf16", ("attn.p=fp8_e5m2", "attn.ds=tf32"))])
def test_products_that_a_tensor_core_takes_and_those_it_cannot(name, roundings, accumulator, rng):
    """The others are sequential; so is P̄V of delta_from = o_fp32."""
    p = precision(name, (*roundings, "attn.o=fp32", "attn.dv=fp32", "attn.dk=fp32", "attn.dq=fp32"),
                  accumulator=accumulator, delta_from="o_fp32")
    assert differing(*inputs(rng, 18, 20, 3), p, causal=True) == []


@pytest.mark.parametrize("algorithm", ["flash", "plain"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-fa2"])
def test_mufu(name, algorithm, rng):
    p = precision(name, ("attn.lse=fp32",), exp="mufu", algorithm=algorithm)
    assert differing(*inputs(rng, 20, 35, 3), p, causal=True) == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["eager", "fa2"])
@pytest.mark.parametrize("name", ["fp32", "all-e8m6", "all-fp8_e4m3"])
def test_plain(name, order, shape, rng):
    *lengths, causal = shape
    for fix, delta_from, p_bwd_from in (("off", "o", "lse"), ("capped", "p_dp", "m_l")):
        p = precision(name, order=order, algorithm="plain", delta_from=delta_from, p_bwd_from=p_bwd_from)
        assert differing(*inputs(rng, *lengths), p, causal=causal, fix=fix) == []


@pytest.mark.parametrize("name, delta_from", [("all-e8m6", "o"), ("bf16-fa2", "p_dp")])
@pytest.mark.parametrize("tile", [
    ((16, 16), (32, 16), (48, 48)), ((16, 16), (48, 48), (32, 16)), ((32, 48), (16, 32), (16, 16)),
    ((16, 32), (None, 16), (32, None)), ((None, None), (32, None), (None, 16))], ids=str)
def test_backward_tiles_of_two_shapes(name, delta_from, tile, rng):
    """Rows are processed by the least common multiple of two tiles' heights, keys to the end of either's width."""
    p = precision(name, [f"attn.{s}_acc=e8m6" for s in ("dq", "dk", "dv")], tile=tile, delta_from=delta_from)
    assert differing(*inputs(rng, 107, 83, 1), p, causal=True) == []
