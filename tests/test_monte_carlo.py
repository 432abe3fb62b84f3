"""The bias of Ō and O in rows built to have it, against what is known of it."""
import json

import numpy as np
import pytest

from cuflash.monte_carlo import bias, table
from tests.test_cli import run


@pytest.mark.parametrize("rest", [1e-6, 1e-5, 1e-4])
def test_two_ties_and_a_small_rest_give_a_quarter_ulp(rest):
    o_bar, o = bias("bf16", 2, rest, seed=1)
    # Sums of two bf16 numbers in [2, 4) are ties half of the time, and the rest turns each by half an ulp.
    # Ō itself holds the rest, 3·rest/2⁻⁵ ulp, that is lost in rounding: 0.01 at 1e-4.
    assert o_bar.mean == pytest.approx(-0.25 + 3 * rest * 2**5, abs=0.01) and o.mean == pytest.approx(
        -0.25, abs=0.01)
    assert o_bar.se == pytest.approx(np.sqrt(1 / 16) / np.sqrt(512 * 64),
                                     rel=0.05)  # errors of −½ and 0, equally often


def test_no_rest_or_no_tie_or_a_running_sum_in_fp32_has_no_bias():
    for precision, ties, rest in (("bf16", 2, 0.0), ("bf16", 4, 0.0), ("bf16", 1, 1e-6),
                                  ("bf16-fa2", 2, 1e-4), ("fp16-fa2", 2, 1e-4)):
        for b in bias(precision, ties, rest, seed=2):
            assert abs(b.mean) < max(4 * b.se, 1e-3), b
    assert {b.format
            for b in bias("fp16-fa2", 2, 0.0)} == {"fp16"} and {b.format
                                                                for b in bias("fp32", 2, 0.0)} == {"bf16"}


def test_a_fix_takes_most_of_it_away():
    for b in bias("bf16", 2, 1e-5, fix="on", seed=3):
        assert abs(b.mean) < 0.05
    assert len(list(table(["bf16"], ties=(1, 2), rests=(0.0, 1e-3), rows=8))) == 8


@pytest.mark.parametrize("arguments", [("fp64", 2, 0.1), ("bf16", 0, 0.1), ("bf16", 2, 1.0),
                                       ("bf16", 2, -0.1)])
def test_mistakes(arguments):
    with pytest.raises(ValueError, match="precision fp64|valid: 1 or more, and 0 up to but not 1"):
        bias(*arguments)


def test_the_command(tmp_path):
    text = run("audit", "--monte-carlo", "--precision", "bf16", "--json", str(tmp_path / "x.json"))
    assert "2 at P̄ = 1" in text and "fix off: mean error in ulp of bf16" in text and max(
        map(len, text.splitlines())) <= 100
    rows = json.loads((tmp_path / "x.json").read_text())["bias"]
    two = next(b for b in rows if (b["x"], b["ties"], b["rest"]) == ("o_bar", 2, 1e-5))
    assert two["mean"] == pytest.approx(-0.25, abs=0.01) and f"{two['mean']:+.4f}" in text
    assert "drop" in run("audit", ".", "--monte-carlo", code=2)
    text = run("audit", "--monte-carlo", "-o", str(tmp_path / "x.h5"), "--heads", "0", "--no-cures", code=2)
    assert "draws its own inputs: drop --heads, --cures, --out" in text and not (tmp_path / "x.h5").exists()
