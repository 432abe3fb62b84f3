"""What sites measure, against direct computation and against biases that are known."""
import ml_dtypes
import numpy as np
import pytest

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.formats import round_to
from cuflash.precision import Precision
from cuflash.sites import Rounder
from cuflash.statistics import SIGNIFICANT, Statistics


def watched(site="attn.s", rounding="bf16", heads=(0,)):
    stats = Statistics()
    return stats, Rounder(Precision.named("fp32").round(f"{site}={rounding}"), watch=stats, heads=heads,
                          samples=(0,) * len(heads))


def paper_case(rows, seed):
    """Two exact ties, V in [−4, −2], a rest of the same sign below 1e-4: each row a sample of its own."""
    rng = np.random.default_rng(seed)
    q = np.ones((rows, 1, 1, 64), np.float32)
    k = np.zeros((rows, 1, 3, 64), np.float32)
    k[:, :, 2] = -1.5  # S = −12: P̄ = 6e-6
    v = round_to(rng.uniform(-4, -2, (rows, 1, 3, 64)).astype(np.float32), "bf16")
    return q, k, v


def test_counts_against_bf16_bits():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 40, 50)).astype(np.float32)
    x[0, 0, :4] = [1 + 2**-8, -(1 + 3 * 2**-8), 1e-41, 3.4e38]  # two ties, one vanishes, one overflows
    x[0, 1, 0] = np.inf
    stats, rnd = watched()
    y = rnd("attn.s", x)
    s = stats.site("attn.s")
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    counted = np.isfinite(x) & np.isfinite(expected)
    e = (expected[counted] - x[counted]) / 2.0 ** np.maximum(
        np.frexp(x[counted].astype(np.float64))[1] - 8, -133
    )
    assert np.array_equal(y, expected)
    assert (s.count, s.overflow, s.underflow, s.ties, s.nonfinite) == (2000, 1, 1, 2, 1)
    assert s.changed == np.count_nonzero(e) + 1  # the overflow changed too
    assert s.mean == pytest.approx(e.mean(), rel=1e-12)  # sums of 2000 fp64 numbers in another order
    assert s.away == pytest.approx((e * np.sign(x[counted])).mean(), rel=1e-12)
    assert s.max == np.abs(e).max() == 0.5


def test_saturation_is_an_overflow_and_ordinary_rounding_to_the_largest_is_not():
    x = np.float32([[[440, 455, 479, 480, 1000, -1000]]])
    stats, rnd = watched(rounding="fp8_e4m3")
    rnd("attn.s", x)
    assert stats.site("attn.s").overflow == 3  # a whole ulp (32) beyond 448 or more


def test_masked_entries_do_not_count():
    x = np.full((2, 4, 4), 1 + 2**-8, np.float32)
    stats, rnd = watched(heads=(0, 1))
    rnd.at(visible=np.tril(np.ones((4, 4), bool)))
    rnd("attn.s", x)
    s = stats.site("attn.s")
    assert (s.count, s.ties) == (20, 20)
    per_row = np.ones((2, 4, 4), bool)
    per_row[1, 2:] = False  # empty rows differ between heads
    rnd.at(visible=per_row)
    rnd("attn.s", x)
    assert stats.site("attn.s", head=0).count == 10 + 16
    assert stats.site("attn.s", head=1).count == 10 + 8


def test_by_head_and_layer():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, h, 33, 16)).astype(np.float32) for h in (4, 2, 2))
    stats = Statistics()
    flash_attention_forward(q, k, v, causal=True, precision="bf16", watch=stats)
    for site in ("attn.s", "attn.l", "attn.o"):
        whole, heads = stats.site(site), [stats.site(site, head=h) for h in range(4)]
        for name in ("count", "changed", "ties"):
            assert getattr(whole, name) == sum(getattr(s, name) for s in heads)
        assert whole.mean == pytest.approx(
            np.average([s.mean for s in heads], weights=[s.count for s in heads])
        )
        assert whole.max == max(s.max for s in heads)
    assert stats.site("attn.s").count == 2 * 4 * 33 * 34 // 2
    with pytest.raises(ValueError, match="did you mean 'attn.dq'|valid: attn.q"):
        stats.site("attn.qq")


def test_standard_error_sees_rows_and_columns_that_err_alike():
    """64 columns of one error each, repeated over 500 rows, are 64 draws and not 32,000."""
    rng = np.random.default_rng(3)
    column = rng.standard_normal((1, 1, 64)).astype(np.float32)
    for x in (np.repeat(column, 500, axis=1), np.repeat(column, 500, axis=1).swapaxes(1, 2).copy()):
        stats, rnd = watched()
        rnd("attn.s", x)
        s = stats.site("attn.s")
        e = round_to(column, "bf16").astype(np.float64) - column
        e /= 2.0**(np.frexp(column)[1] - 8)
        assert s.se == pytest.approx(e.std(ddof=1) / 8, rel=1e-9)


def test_independent_errors_have_the_plain_standard_error():
    rng = np.random.default_rng(4)
    x = rng.uniform(1, 2, (1, 200, 200)).astype(np.float32)
    stats, rnd = watched()
    rnd("attn.s", x)
    s = stats.site("attn.s")
    # uniform errors of ±½ ulp: √(1/12)/200. The larger of two estimates from 200 clusters, each good to 5 %
    assert s.se == pytest.approx(np.sqrt(1 / 12) / 200, rel=0.2)
    assert abs(s.z) < SIGNIFICANT


@pytest.mark.parametrize("site", ["attn.pv", "attn.o_acc"])
def test_the_papers_case(site):
    stats = Statistics()
    precision = Precision.named("bf16")
    if site == "attn.o_acc":
        precision = precision.round("attn.pv=fp32")  # then the next rounding of the same value has the bias
    flash_attention_forward(*paper_case(512, seed=5), precision=precision, watch=stats)
    s = stats.site(site)
    assert s.mean == pytest.approx(-0.25, abs=0.01)
    assert s.away == -s.mean  # all values are negative
    assert s.mean + 6 * s.se < 0 and 0 < s.se < 0.01


def test_normal_inputs_have_no_bias_and_rz_has_half_an_ulp_toward_zero():
    rng = np.random.default_rng(6)
    q, k, v, do = (rng.standard_normal((1, 4, 256, 64)).astype(np.float32) for _ in range(4))
    stats = Statistics()
    o, saved = flash_attention_forward(q, k, v, precision="bf16", watch=stats)
    flash_attention_backward(do, saved, watch=stats)
    for site in ("q", "k", "v", "s", "pv", "o_acc", "o", "do", "dp", "ds", "dq_tile", "dk_tile", "dv_tile"):
        s = stats.site("attn." + site)  # values symmetric about 0, so errors are too
        assert abs(s.z) < SIGNIFICANT, s
        assert abs(s.away) < 0.01, s
    stats = Statistics()
    flash_attention_forward(q, k, v, precision=Precision.named("bf16").round("attn=bf16:rz"), watch=stats)
    for site in ("q", "k", "v", "s", "pv"):
        s = stats.site("attn." + site)
        assert s.away == pytest.approx(-0.5, abs=0.01) and s.away_z < -100, s
        assert abs(s.z) < SIGNIFICANT, s


def test_fp32_and_fp64_sites_only_count():
    x = np.ones((1, 3, 3), np.float32)
    for name in ("fp32", "fp64"):
        stats = Statistics()
        Rounder(Precision.named(name), watch=stats)("attn.s", x)
        s = stats.site("attn.s")
        assert (s.count, s.changed, s.mean, s.se, s.bias) == (9, 0, 0.0, 0.0, 0.0)


def test_watching_changes_no_bits():
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, 50, 16)).astype(np.float32) for _ in range(3))
    plain = flash_attention_forward(q, k, v, precision="bf16")[0]
    assert np.array_equal(plain, flash_attention_forward(q, k, v, precision="bf16", watch=Statistics())[0])
