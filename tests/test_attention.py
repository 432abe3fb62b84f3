"""flash_attention on NumPy arrays: mathematics, masks, layouts, switches, and the hard inputs."""
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import Key, Precision, round_to
from cuflash.attention import Saved, flash_attention, flash_attention_backward, flash_attention_forward, plain_attention
from cuflash.formats import storage_dtype
from cuflash.testing import equal
from tests import golden

BF16 = ml_dtypes.bfloat16
U32, U16 = 2.0**-24, 2.0**-9  # unit roundoff of fp32 and bf16


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def inputs(rng, b, hq, hk, tq, tk, d, dtype=np.float32):
    return [normal(rng, b, h, t, d, dtype=dtype) for h, t in ((hq, tq), (hk, tk), (hk, tk), (hq, tq))]


def run(q, k, v, do, **options):
    o, saved = flash_attention_forward(q, k, v, **options)
    return o, saved, flash_attention_backward(do, saved)


# ---- mathematics --------------------------------------------------------------------------------

SHAPES = st.tuples(st.integers(1, 2), st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), st.integers(1, 200),
                   st.integers(1, 200), st.sampled_from([1, 7, 16, 63, 64, 80, 96, 160, 256]), st.booleans(), st.integers(0, 2**32))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SHAPES, st.sampled_from(["eager", "fa2"]), st.sampled_from(["flash", "plain"]))
def test_fp32_agrees_with_golden(shape, order, algorithm):
    b, (hq, hk), tq, tk, d, causal, seed = shape
    q, k, v, do = inputs(np.random.default_rng(seed), b, hq, hk, tq, tk, d)
    p = Precision.named("fp32").replace(order=order, algorithm=algorithm)
    o, _, (dq, dk, dv) = run(q, k, v, do, causal=causal, precision=p)
    # A logit is a sum of d products and has error e = (d + 3)·u·|q||k|/√d; so has exp(S − L), to first order,
    # relative to P (twice, once for m or L), and every further sum of n terms adds n·u relative to its absolute sum.
    e = (d + 3) * U32 * (np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()) / np.sqrt(d)
    rel = 4 * e + 2 * (tq + tk + d) * U32
    big_v, big_do = np.abs(v).max(), np.abs(do).max()
    assert np.abs(o - golden.attention(q, k, v, causal)).max() <= rel * big_v
    ds = 2 * d * big_do * big_v  # bounds |dP| + |δ|
    bounds = rel * ds * np.abs(k).max(), rel * ds * np.abs(q).max() * tq * hq, rel * big_do * tq * hq
    for got, want, bound in zip((dq, dk, dv), golden.gradients(do, q, k, v, causal), bounds):
        assert np.abs(got - want).max() <= bound


def test_golden_gradients_agree_with_finite_differences():
    q, k, v, do = inputs(np.random.default_rng(1), 1, 2, 1, 5, 7, 3, np.float64)
    for i, x in enumerate((q, k, v)):
        gradient = golden.gradients(do, q, k, v, True)[i]
        for at in np.ndindex(x.shape):
            h, kept = 1e-5, x[at]
            sides = []
            for x[at] in (kept - h, kept + h):
                sides.append((golden.attention(q, k, v, True) * do).sum())
            x[at] = kept
            # central differences: h²/6 · third derivative, which is O(10) here, and 1e-16/h of rounding
            assert abs((sides[1] - sides[0]) / (2 * h) - gradient[at]) < 1e-8


@pytest.mark.parametrize("fix", ["off", "capped"])
@pytest.mark.parametrize("order", ["eager", "fa2"])
def test_fp64_agrees_with_golden(order, fix):
    q, k, v, do = inputs(np.random.default_rng(2), 2, 4, 2, 150, 200, 24, np.float64)
    k[:, :, 9] = k[:, :, 120]
    o, _, grads = run(q, k, v, do, causal=True, fix=fix, precision=Precision.named("fp64").replace(order=order))
    # 200 terms of size ~1, u = 1e-16
    assert np.abs(o - golden.attention(q, k, v, True)).max() < 1e-13
    for got, want in zip(grads, golden.gradients(do, q, k, v, True)):
        assert np.abs(got - want).max() < 1e-12


@pytest.mark.parametrize("tile", [(16, 16), (128, 64), (None, None)])
def test_error_of_bf16_is_explained_by_its_roundings(tile):
    """|O − golden| stays within the first-order sum of the bounds of the roundings on the way."""
    rng = np.random.default_rng(3)
    q, k, v, _ = (x.astype(BF16) for x in inputs(rng, 1, 4, 4, 200, 200, 64))
    o = flash_attention(q, k, v, precision=Precision.named("bf16").replace(tile=tile))
    logit = np.abs(np.einsum("bhqd,bhkd->bhqk", golden.widen(q, 4), golden.widen(k, 4))).max() / 8
    tiles = 1 if tile[1] is None else -(-200 // tile[1])
    # x gets errors at s, s_scaled, m, x (each ≤ u·2·logit); P̄ one at p; Ō three a tile (pv, o_scaled, o_acc), l and dm
    # one a tile (dm: absolute u·2·logit in the exponent), o one. 1.05 covers second order and fp32.
    exponent = (4 + tiles) * U16 * 2 * logit
    bound = 1.05 * np.abs(v.astype(float)).max() * (2 * exponent + U16 * (1 + 4 * tiles + 1))
    error = np.abs(o.astype(float) - golden.attention(q, k, v)).max()
    assert U16 / 4 < error <= bound


@pytest.mark.parametrize("name", ["bf16", "bf16-fa2", "fp16-fa2"])
def test_without_its_roundings_a_precision_is_fp32(name):
    q, k, v, do = inputs(np.random.default_rng(4), 1, 2, 2, 60, 60, 32)
    p = Precision.named(name).replace({"attn": "fp32"}, accumulator="sequential")
    fp32 = Precision.named("fp32").replace(order=p.order, accumulator="sequential", tile=p.tile)
    for a, b in zip(run(q, k, v, do, precision=p)[2], run(q, k, v, do, precision=fp32)[2]):
        assert equal(a, b)


# ---- fixes --------------------------------------------------------------------------------------

@pytest.mark.parametrize("roundings", [(), ("attn.m=e8m3",), ("attn.l=fp16",)], ids=str)
@pytest.mark.parametrize("name", ["bf16", "bf16-fa2", "bf16-paper", "fp16-fa2"])
def test_the_recommended_fix_makes_no_nan(name, roundings):
    """Tied rows of every size, of either sign: where `off` is finite, `on` is."""
    rng = np.random.default_rng(8)
    p = Precision.named(name).round(*roundings)
    dtype = np.float16 if name == "fp16-fa2" else BF16
    for size in 2.0 ** np.arange(-4, 9, 0.5):
        q, k, v, do = inputs(rng, 1, 2, 2, 32, 32, 16)
        q[..., 0], k[..., 0] = np.where(rng.random(q.shape[:-1]) < 0.5, -size, size), size
        k[:, :, 8:] = k[:, :, :8].repeat(3, axis=2)
        q, k, v, do = (x.astype(dtype) for x in (q, k, v, do))
        off, on = (run(q, k, v, do, precision=p, fix=fix) for fix in ("off", "on"))
        for a, b in zip((off[0], *off[2]), (on[0], *on[2])):
            assert not (np.isfinite(a.astype(float)) & ~np.isfinite(b.astype(float))).any(), size


# ---- switches -----------------------------------------------------------------------------------

def seen(site, **options):
    """Values at a site during a forward of fixed inputs, in order, joined over keys."""
    found = []
    q, k, v, _ = (x.astype(BF16) for x in inputs(np.random.default_rng(5), 1, 1, 1, 100, 100, 32))
    flash_attention(q, k, v, watch=lambda rnd, name, x, y: found.append(y.copy()) if name == site else None, **options)
    return np.concatenate(found, axis=-1)


@pytest.mark.parametrize("name", ["bf16", "bf16-fa2"])
def test_tiles_that_hold_all_keys_give_the_same_bits(name):
    """A tile of 128 or 512 or the whole axis is one tile of 100 keys; 64 are two, so O differs but S does not."""
    p = Precision.named(name)
    same = [seen("attn.o", precision=p.replace(tile=t, accumulator="hopper")) for t in ((128, 128), (64, 512), (None, None))]
    assert equal(same[0], same[1]) and equal(same[0], same[2])
    two = p.replace(tile=(128, 64), accumulator="hopper")
    assert not equal(seen("attn.o", precision=two), same[0])
    s = seen("attn.s", precision=two)
    if p.order == "fa2":  # its tiles descend
        s = np.concatenate([s[..., 36:], s[..., :36]], axis=-1)
    assert equal(s, seen("attn.s", precision=p.replace(accumulator="hopper")))


def test_plain_differs_from_one_tile_by_where_it_divides():
    p = Precision.named("bf16").replace(tile=(None, None), accumulator="hopper")
    plain = p.replace(algorithm="plain")
    for site in ("attn.s", "attn.s_scaled", "attn.m", "attn.x", "attn.l"):
        assert equal(seen(site, precision=p), seen(site, precision=plain))
    assert not equal(seen("attn.p", precision=p), seen("attn.p", precision=plain))
    q, k, v, _ = inputs(np.random.default_rng(5), 1, 1, 1, 100, 100, 32)
    assert equal(plain_attention(q, k, v, precision=p), flash_attention(q, k, v, precision=plain))


@pytest.mark.parametrize("name", ["bf16", "bf16-fa2"])
def test_forward_bits_do_not_depend_on_br(name):
    p = Precision.named(name).replace(accumulator="hopper")
    assert equal(seen("attn.o", causal=True, precision=p.replace(tile=(16, 32))), seen("attn.o", causal=True, precision=p.replace(tile=(None, 32))))


@pytest.mark.parametrize("delta_from", ["o", "o_unrounded", "o_fp32", "p_dp"])
@pytest.mark.parametrize("name", ["bf16", "bf16-fa2"])
def test_delta_from(name, delta_from):
    """Each way to δ gives right gradients; the cures give a δ nearer to golden's than the rounded O does."""
    q, k, v, do = (x.astype(BF16) for x in inputs(np.random.default_rng(6), 1, 4, 2, 130, 130, 64))
    deltas = {}
    for way in ("o", delta_from):
        p = Precision.named(name).replace(delta_from=way)
        o, saved = flash_attention_forward(q, k, v, causal=True, precision=p)
        found = []
        grads = flash_attention_backward(do, saved, watch=lambda rnd, site, x, y: found.append(y.ravel()) if site == "attn.delta" else None)
        rows = np.concatenate(found)
        deltas[way] = np.sort(rows)  # p_dp meets its rows in another order
        for got, want in zip(grads, golden.gradients(do, q, k, v, True)):
            # bf16 gradients of size ~1 to 10: a few bf16 ulps
            assert np.abs(got.astype(float) - want).max() < 0.03 * np.abs(want).max()
    want = np.sort((golden.attention(q, k, v, True) * do.astype(float)).sum(-1).ravel())
    error = {way: np.sqrt(np.mean((d - want)**2)) for way, d in deltas.items()}
    if delta_from != "o":
        # under `bf16`, Ō itself was rounded at every tile, and P∘dP takes bf16 products
        assert error[delta_from] < {"bf16": {"o_fp32": 0.5}.get(delta_from, 1), "bf16-fa2": 0.75}[name] * error["o"]


def test_layer_and_head_scopes_round_only_there():
    q, k, v, do = inputs(np.random.default_rng(7), 2, 4, 2, 50, 50, 16)
    base, scoped = Precision.named("bf16"), Precision.named("bf16").round("L1/H1,3/attn=fp32", "bwd/L1/H1/attn.s=bf16")
    for layer in (0, 1):
        key = Key(0, layer=layer)
        o, saved, (dq, dk, dv) = run(q, k, v, do, precision=scoped, key=key)
        plain_o, _, (plain_dq, _, _) = run(q, k, v, do, precision=base, key=key)
        fp32_o, _, (fp32_dq, _, _) = run(q, k, v, do, precision=base.replace({"attn": "fp32"}), key=key)
        wide = [] if layer == 0 else [1, 3]
        for h in range(4):
            assert equal(o[:, h], (fp32_o if h in wide else plain_o)[:, h])
        assert equal(dq[:, 3], (fp32_dq if wide else plain_dq)[:, 3])
        assert equal(dq[:, 0], plain_dq[:, 0])
        assert equal(dq[:, 1], fp32_dq[:, 1]) is False or layer == 0


def test_backward_under_another_precision():
    q, k, v, do = inputs(np.random.default_rng(8), 1, 2, 2, 40, 40, 16)
    _, saved = flash_attention_forward(q, k, v, precision="bf16")
    a = flash_attention_backward(do, saved, precision="fp32")
    by_hand = Saved(q, k, v, saved.o, saved.lse, precision="fp32")
    for x, y in zip(a, flash_attention_backward(do, by_hand)):
        assert equal(x, y) and x.dtype == np.float32


# ---- the array as given -------------------------------------------------------------------------

def test_layouts_strides_and_leading_axes():
    rng = np.random.default_rng(9)
    q, k, v, do = inputs(rng, 2, 4, 2, 33, 33, 16)
    p = Precision.named("bf16").replace(accumulator="sequential")  # BLAS's bits depend on strides
    want = run(q, k, v, do, causal=True, precision=p)
    t = lambda x: x.transpose(0, 2, 1, 3)  # noqa: E731
    for back in (np.ascontiguousarray, lambda x: x):
        o, saved, grads = run(*(back(t(x)) for x in (q, k, v, do)), causal=True, precision=p, layout="bthd")
        for a, b in zip((o, *grads), (want[0], *want[2])):
            assert a.shape == t(b).shape and equal(a, t(b))
        assert equal(saved.lse, want[1].lse)
    wide = np.repeat(q, 2, axis=-1)[..., ::2], np.flip(np.flip(k, 2).copy(), 2), v, do
    assert equal(run(*wide, causal=True, precision=p)[2][0], want[2][0])
    five = [x.reshape(1, 2, *x.shape[1:]) for x in (q, k, v, do)]
    assert equal(run(*five, causal=True, precision=p)[2][1].reshape(k.shape), want[2][1])
    single = flash_attention(q[0, 0], k[0, 0], v[0, 0], causal=True, precision=p)
    assert single.shape == (33, 16) and equal(single, want[0][0, 0])


def test_fp64_inputs_are_rounded_once():
    """1 + 2^-8 + 2^-40 is above the middle of two bf16 numbers; through fp32 it would be the middle itself."""
    x = np.full((1, 16), 1 + 2.0**-8 + 2.0**-40)
    o = flash_attention(np.ones((1, 16)), np.ones((1, 16)), x, precision="bf16")
    assert (o.astype(float) == 1 + 2.0**-7).all()


@pytest.mark.parametrize("dtype, name", [(np.float32, "fp32"), (BF16, "bf16-fa2"), (np.float16, "fp16-fa2"), (np.float64, "fp64")])
def test_default_precision_follows_the_dtype(dtype, name):
    q, k, v, do = inputs(np.random.default_rng(11), 1, 1, 1, 5, 5, 8, dtype)
    o, saved, (dq, dk, dv) = run(q, k, v, do)
    assert saved.precision.name == name and {x.dtype for x in (o, dq, dk, dv)} == {np.dtype(dtype)}
    assert plain_attention(q, k, v).dtype == np.dtype(dtype)


# ---- hard inputs --------------------------------------------------------------------------------

ORDERS = pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-fa2"])


def test_huge_equal_logits():
    """q = k = v = 133120 (pytorch 121558): the log of l is lost in L, so backward needs m and l."""
    x = np.full((1, 1, 40, 64), 133120, BF16)
    do = normal(np.random.default_rng(12), 1, 1, 40, 64)
    for name in ("bf16", "bf16-fa2"):
        o, saved, grads = run(x, x, x, do, precision=name)
        assert (o == x).all() and np.isfinite(saved.lse).all()
        assert all(np.isfinite(g.astype(float)).all() for g in grads)
        _, saved, (dq, dk, dv) = run(x, x, x, do, precision=Precision.named(name).replace(p_bwd_from="m_l"))
        want = np.broadcast_to(do.astype(BF16).astype(float).mean(axis=2, keepdims=True), dv.shape)
        # P is 1/40 in bf16, off by at most u; dV is rounded once more, and 40 terms of mixed sign add up
        assert np.abs(dv.astype(float) - want).max() <= 2 * U16 * np.abs(do).mean() * 2


@ORDERS
@pytest.mark.parametrize("tq, tk", [(2, 5), (5, 2)])
def test_causal_aligns_bottom_right(name, tq, tk):
    q, k, v, do = inputs(np.random.default_rng(13), 1, 2, 2, tq, tk, 16)
    o, saved, (dq, dk, dv) = run(q, k, v, do, causal=True, precision=name)
    unseen = max(tq - tk, 0)  # leading rows that see no key
    assert (o[:, :, :unseen] == 0).all() and (saved.lse[:, :, :unseen] == -np.inf).all() and (dq[:, :, :unseen] == 0).all()
    tolerance = {"fp32": 1e-5}.get(name, 0.05)  # 5 terms of size ~1 in fp32; a few bf16 ulps of ~2
    for got, want in zip((o, dq, dk, dv), (golden.attention(q, k, v, True), *golden.gradients(do, q, k, v, True))):
        assert np.abs(got.astype(float) - want).max() < tolerance


@ORDERS
def test_no_keys_and_no_queries(name):
    q, k, v, do = inputs(np.random.default_rng(14), 1, 2, 2, 3, 0, 16)
    o, saved, (dq, dk, dv) = run(q, k, v, do, precision=name, fix="on")
    assert (o == 0).all() and (saved.lse == -np.inf).all() and (dq == 0).all() and dk.shape == k.shape
    q, k, v, do = inputs(np.random.default_rng(14), 1, 2, 2, 0, 3, 16)
    o, _, (dq, dk, dv) = run(q, k, v, do, precision=name)
    assert o.shape == q.shape and (dk == 0).all() and (dv == 0).all()
    q, k, v, do = inputs(np.random.default_rng(14), 0, 2, 2, 3, 3, 16)
    assert run(q, k, v, do, precision=name)[0].shape == q.shape


@ORDERS
@pytest.mark.parametrize("tq, d", [(192, 63), (193, 80), (193, 96), (192, 160)])
def test_lengths_and_head_dims_that_fill_no_tile(name, tq, d):
    q, k, v, do = inputs(np.random.default_rng(15), 1, 1, 1, tq, tq, d)
    o, _, grads = run(q, k, v, do, causal=True, precision=name)
    relative = {"fp32": 1e-5}.get(name, 0.03)
    for got, want in zip((o, *grads), (golden.attention(q, k, v, True), *golden.gradients(do, q, k, v, True))):
        assert np.abs(got.astype(float) - want).max() < relative * np.abs(want).max()


@ORDERS
@pytest.mark.parametrize("fix", ["off", "on"])
def test_infinite_and_nan_rows(name, fix):
    q, k, v, do = inputs(np.random.default_rng(16), 1, 1, 1, 40, 40, 16)
    q[..., 0] = np.abs(q[..., 0]) + 1
    clean, _, clean_grads = run(q, k, v, do, precision=name, fix=fix)
    bad = q.copy()
    bad[0, 0, 3, 5] = np.nan
    o, saved, (dq, dk, dv) = run(bad, k, v, do, precision=name, fix=fix)
    assert np.isnan(o[0, 0, 3].astype(float)).all() and np.isnan(saved.lse[0, 0, 3])
    others = np.arange(40) != 3
    assert equal(o[0, 0, others], clean[0, 0, others]) and np.isnan(dk.astype(float)).all()
    # −Inf logits of one key: k = −Inf where q > 0 and 0 elsewhere; that key takes no part
    keys = k.copy()
    keys[0, 0, 7] = 0
    keys[0, 0, 7, 0] = -np.inf
    o, _ = flash_attention_forward(q, keys, v, precision=name, fix=fix)
    others = np.arange(40) != 7
    without = golden.attention(q, keys[:, :, others], v[:, :, others])
    assert np.abs(o.astype(float) - without).max() < {"fp32": 1e-5}.get(name, 0.03)
    # all logits of a row −Inf: an empty row
    keys = np.zeros_like(k)
    keys[..., 0] = -np.inf
    o, saved, (dq, dk, dv) = run(q, keys, v, do, precision=name, fix=fix)
    assert (o == 0).all() and (saved.lse == -np.inf).all() and (dv == 0).all()
    # a +Inf logit gives a NaN row
    keys = k.copy()
    keys[0, 0, 7] = 0
    keys[0, 0, 7, 0] = np.inf
    o, saved = flash_attention_forward(q, keys, v, precision=name, fix=fix)
    assert np.isnan(o.astype(float)).all() and np.isnan(saved.lse).all()


@ORDERS
def test_nonfinite_v_reaches_every_row_of_visited_tiles(name):
    q, k, v, _ = inputs(np.random.default_rng(17), 1, 1, 1, 64, 64, 16)
    v[0, 0, 20, 3] = np.nan
    p = Precision.named(name).replace(tile=(16, 16), accumulator="sequential")
    o = flash_attention(q, k, v, causal=True, precision=p)
    assert np.array_equal(np.isnan(o[0, 0, :, 3].astype(float)), np.arange(64) >= 16)
    assert not np.isnan(np.delete(o[0, 0].astype(float), 3, axis=1)).any()


@ORDERS
def test_logits_of_minus_1e5_beside_a_mask(name):
    """A mask by a finite sentinel would beat them (flashinfer 4452)."""
    q, k, v, do = inputs(np.random.default_rng(18), 1, 1, 1, 20, 20, 16)
    q[0, 0, 10], q[0, 0, 10, 0] = 0, 1
    k[..., 0] = -4e5
    o, saved, grads = run(q, k, v, do, causal=True, precision=name)
    want = golden.attention(*(np.asarray(x, BF16) if name != "fp32" else x for x in (q, k, v)), True)
    # the row's logits are all equal: its O is the mean of the visible V
    assert np.abs(o[0, 0, 10].astype(float) - want[0, 0, 10]).max() < {"fp32": 1e-5}.get(name, 0.02)
    assert np.isfinite(saved.lse).all() and all(np.isfinite(g.astype(float)).all() for g in grads)


@ORDERS
def test_garbage_beside_the_arrays_is_not_read(name):
    q, k, v, do = inputs(np.random.default_rng(19), 1, 2, 2, 21, 37, 18)
    padded = []
    for x in (q, k, v, do):
        big = np.full((*x.shape[:2], x.shape[2] + 11, x.shape[3] + 5), np.nan, np.float32)
        big[:, :, 4:4 + x.shape[2], 2:2 + x.shape[3]] = x
        padded.append(big[:, :, 4:4 + x.shape[2], 2:2 + x.shape[3]])
    for a, b in zip(run(q, k, v, do, causal=True, precision=name)[2], run(*padded, causal=True, precision=name)[2]):
        assert equal(a, b)


def test_stochastic_rounding_is_a_function_of_place_alone():
    """Same words whatever the batch, the tiles that execute, or how often: and another key gives others."""
    q, k, v, do = inputs(np.random.default_rng(20), 3, 2, 1, 40, 40, 16)
    p = Precision.named("bf16").replace({"attn": "bf16:sr"}, accumulator="sequential")
    o, _, grads = run(q, k, v, do, causal=True, precision=p, key=Key(1, step=5, layer=2))
    again = run(q[1:2], k[1:2], v[1:2], do[1:2], causal=True, precision=p, key=Key(1, step=5, layer=2, sample=1))
    assert equal(again[0], o[1:2])
    for a, b in zip(again[2], grads):
        assert equal(a, b[1:2])
    assert not equal(flash_attention(q, k, v, causal=True, precision=p, key=Key(1, step=6, layer=2)), o)


def test_stochastic_rounding_gives_backward_the_forwards_scores():
    """At D = 24, where α is no power of two: at 16 α·S is in bf16 already and nothing is drawn."""
    found = {"fwd": [], "bwd": []}
    drawn = 0

    def watch(rnd, site, x, y):
        nonlocal drawn
        if site == "attn.s_scaled":
            found[rnd.direction].append(y)
            drawn += np.count_nonzero(y != round_to(x, "bf16"))

    q, k, v, do = inputs(np.random.default_rng(21), 1, 1, 1, 64, 64, 24)
    p = Precision.named("bf16").round("attn.s_scaled=bf16:sr").replace(
        accumulator="sequential", tile=((16, 16), (32, 32), (32, 64)))
    _, saved = flash_attention_forward(q, k, v, precision=p, key=Key(3), watch=watch)
    flash_attention_backward(do, saved, watch=watch)
    # off the nearest in a quarter of the values, on average over all discarded fractions
    assert drawn > 2 * 64 * 64 // 8
    assert equal(np.concatenate(found["fwd"], axis=-1), np.concatenate(found["bwd"], axis=1))


@pytest.mark.parametrize("name", ["all-fp8_e5m2", "all-fp8_e4m3", "all-e5m4", "all-e4m3", "all-e3m4", "all-e2m3", "all-e7m3", "fp16-fa2", "bf16"])
@pytest.mark.parametrize("top", [0.001, 1, 10, 40])
def test_on_makes_no_nan_that_off_does_not_make(name, top):
    """Rows of equal logits, of every sign and size: the cap keeps e^−shift in every format that it goes through."""
    q, k, v = np.full((1, 1, 4, 16), 1, np.float32), np.full((1, 1, 8, 16), top, np.float32), np.ones((1, 1, 8, 16), np.float32)
    for p in (Precision.named(name), Precision.named("bf16").replace({"attn.l": "fp16"}), Precision.named("bf16").replace({"attn.p": "e5m7"})):
        for sign in (1, -1):
            off, on = (flash_attention(q, sign * k, v, precision=p, fix=fix).astype(float) for fix in ("off", "on"))
            assert np.array_equal(np.isfinite(off), np.isfinite(on))
            assert (off == 0).all() or np.nanmax(np.abs(on - off), initial=0) <= 0.3  # fp8's last places


def test_fixes_of_users_in_place_and_derived():
    from cuflash.fixes import Capped, Fix

    class InPlace(Fix):
        def rule(self, r_m, ties):
            r_m += 5
            return r_m

    class Derived(Capped):
        name = "derived"

        def rule(self, r_m, ties):
            return r_m + np.float32(3)

    x = np.ones((1, 1, 4, 16), np.float32)
    p = Precision.named("fp16-fa2").replace(p_bwd_from="m_l")
    for fix, shift in ((InPlace(), 5), (Derived(), 3)):
        _, saved = flash_attention_forward(x, x, x, precision=p, fix=fix)
        assert saved.stats.tolist()[:2] == [4, 4] and np.allclose(saved.m / 4, 4 + shift)  # m is unscaled; α = 1/4


@pytest.mark.parametrize("name", ["all-e4m3", "all-e3m4", "all-fp8_e4m3", "all-e6m9"])
def test_every_format_can_be_an_output(name):
    q, k, v, do = inputs(np.random.default_rng(22), 1, 2, 1, 20, 20, 16)
    o, saved, grads = run(q, k, v, do, precision=name)
    assert saved.o is o and {o.dtype, *(g.dtype for g in grads)} == {storage_dtype(name[4:]) or np.dtype(np.float32)}


def test_memory_of_plain_and_of_long_masks_is_bounded():
    import tracemalloc
    q = np.ones((1, 4096, 16), np.float32)
    for p in (Precision.named("fp32").replace(algorithm="plain"), Precision.named("bf16").replace(tile=(None, 128))):
        tracemalloc.start()
        flash_attention(q[0], q[0], q[0], causal=True, precision=p)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 32 << 20 and kept < 12 << 20  # T × T would be 64 MiB an array
