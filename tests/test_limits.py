"""Where a fix stops working, against the exponentials themselves."""
import math

import numpy as np
import pytest

from cuflash.attention import flash_attention_forward
from cuflash.fixes import as_fix
from cuflash.model.limits import limits
from cuflash.model.study_arms import UNCONDITIONAL

STEP = 2.0**-7  # r_m is a bf16 number, so a threshold is known to one of its digits
VANISHES = 134 * math.log(2)  # e^−x rounds to 0 in bf16, subnormals and all, beyond it
ONE = -math.log(1 - 2.0**-9)  # e^−x rounds to 1 in bf16 up to it


@pytest.mark.parametrize("beta", [1.5, 2, 3, 4, 6, 8])
def test_the_paper_s_rule(beta):
    above, below = limits(f"qiu-b7:beta={beta:g}", "bf16")
    assert above.zero == pytest.approx(VANISHES / (beta - 1), rel=2 * STEP) and above.nan >= above.zero
    assert above.inert == pytest.approx(ONE / (beta - 1), rel=2 * STEP)
    assert below.zero == pytest.approx(VANISHES, rel=2 * STEP)  # m = 0 there, whatever β
    assert below.inert == pytest.approx(ONE, rel=2 * STEP)


def test_no_fix_and_one_that_never_fails():
    for side in limits("off", "bf16"):
        assert side.inert == 512 and math.isinf(side.nan) and math.isinf(side.zero)
    for side in limits("capped", "bf16"):
        assert side.inert == 0 and math.isinf(side.nan) and math.isinf(side.zero)


def test_gamma_near_one_rounds_back_to_one():
    assert limits("shift:beta=2,gamma=0.999", "bf16")[1].inert == 512
    assert limits("shift:beta=2,gamma=0", "bf16")[1].inert < 0.01


def test_fp16_vanishes_sooner():
    above, _ = limits("qiu-b2", "fp16-fa2")
    assert above.zero == pytest.approx(25 * math.log(2), rel=2 * STEP)  # below half of 2^−24


def test_shift():
    """β·r_m above zero, γ·r_m below, and the offset; with a tolerance beyond every S on all rows of two keys or more."""
    fix = as_fix("shift:beta=3,gamma=0.5,offset=0.25")
    r_m = np.array([2, -1, 0], np.float32)
    assert fix.new_maximum(r_m, np.array([2, 2, 2])).tolist() == [6.25, -0.25, 0.25]
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, 2, 20, 16), dtype=np.float32)
    for epsilon, changed in ((UNCONDITIONAL, 2 * 19), (0.0, 0)):  # no two scores are equal in fp32
        o, saved = flash_attention_forward(q, k, v, causal=True, precision="fp32",
                                           fix=f"shift:offset=1,epsilon={epsilon:g}")
        assert int(saved.stats[1]) == changed
        plain, _ = flash_attention_forward(q, k, v, causal=True, precision="fp32")
        # a shift of the maximum changes nothing but roundings: some ulp of fp32
        assert np.abs(o - plain).max() < 1e-5
