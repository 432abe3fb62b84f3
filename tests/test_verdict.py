"""Verdicts against values computed another way: products of probabilities, roots of equations, enumeration."""
import itertools
import math
from fractions import Fraction

import pytest

from cuflash.model.verdict import (
    Criterion,
    Sprt,
    binomial,
    kaplan_meier,
    median_step,
    needed,
    paired,
    sequential,
    spread,
    wilson,
)


def rows(*losses, every=10):
    return [{"step": every * (i + 1), "loss": loss} for i, loss in enumerate(losses)]


# ---- failure --------------------------------------------------------------------------------------

def test_a_run_fails_where_the_mean_of_its_loss_rises():
    c = Criterion(margin=0.5, rows=3)
    assert c.onset(rows(5, 3, 2, 2, 2, 3, 2, 2.4, 2.0)) is None  # one hard batch
    assert c.onset(rows(5, 3, 2, 2, 2, 2.5, 2.6, 2.5, 2.0)) == 60
    assert c.onset(rows(5, 3, 2, 2, 2, 2.5, 2.5, 2.5)) is None  # at the margin is not above it
    assert c.onset(rows(2, 3)) is None  # no mean to compare with
    assert Criterion(margin=0.5, rows=1).onset(rows(5, 3, 3.51)) == 30


def test_the_least_mean_is_of_all_before_and_one_easy_batch_does_not_lower_it():
    assert Criterion(margin=1, rows=2).onset(rows(2, 2, 2.4, 2.8, 3.1, 3.2)) == 50
    assert Criterion(margin=1, rows=2).onset(rows(4, 4, 2, 4, 4.1, 4.2)) == 40
    assert Criterion(margin=1.2, rows=2).onset(rows(4, 4, 2, 4, 4.1, 4.2)) is None


def test_a_loss_that_is_not_finite_fails_at_once():
    assert Criterion().onset(rows(5, math.nan)) == 20
    assert Criterion(rows=1).onset(rows(5, 6, math.inf)) == 20  # it had risen before
    assert Criterion().onset([]) is None


def test_a_run_that_never_learns():
    c = Criterion.parse("learned=2.5")
    assert c.onset(rows(5, 3), ended=True) == 20 and c.onset(rows(5, 3)) is None
    assert c.onset(rows(5, 2.4, 2.4, 2.4), ended=True) is None and Criterion().onset(rows(5, 5), ended=True) is None


def test_criterion_as_text():
    c = Criterion.parse("rows=5,margin=0.25")
    assert c == Criterion(0.25, 5) and Criterion.parse(str(c)) == c and Criterion.parse("") == Criterion()
    assert "0.25 nats" in c.text and "5 logged losses" in c.text
    assert Criterion.parse("rows=2", c) == Criterion(0.25, 2) and Criterion.parse("", c) == c
    with pytest.raises(ValueError, match="unknown part of a criterion 'margn': did you mean 'margin'"):
        Criterion.parse("margn=1")
    with pytest.raises(ValueError, match="rows must be a number, got 'x'"):
        Criterion.parse("rows=x")
    with pytest.raises(ValueError, match="valid: nats above 0"):
        Criterion.parse("margin=0")
    with pytest.raises(ValueError, match="rows is 0"):
        Criterion.parse("rows=0")
    with pytest.raises(ValueError, match="learned is nan"):
        Criterion.parse("learned=nan")


# ---- the sequential test ----------------------------------------------------------------------------

def by_products(failed, p0=Fraction(1, 20), p1=Fraction(1, 2)):
    """The likelihood ratio itself, exactly, against Wald's bounds 19 and 1/19."""
    ratio = Fraction(1)
    for one in failed:
        ratio *= p1 / p0 if one else (1 - p1) / (1 - p0)
        if ratio <= Fraction(1, 19):
            return "trains"
        if ratio >= 19:
            return "fails"
    return "undecided"


def test_sequential_against_products_of_probabilities():
    for n in range(9):
        for failed in itertools.product((False, True), repeat=n):
            assert sequential(failed) == by_products(failed), failed


def test_five_clean_runs_or_two_failures_decide():
    assert [sequential([False] * n) for n in (4, 5)] == ["undecided", "trains"]
    assert [sequential([True] * n) for n in (1, 2)] == ["undecided", "fails"]
    assert sequential([True, True, False, False]) == "fails"  # decided by the second one


def test_error_rates_are_as_asked():
    """Exact probabilities of a wrong verdict, summed over all sequences that end (Wald: at most alpha, beta, about)."""
    def wrong(rate, verdict):
        total, open_ = 0.0, {(): 1.0}
        for _ in range(40):
            after = {}
            for (failures, runs), weight in ((k or (0, 0), w) for k, w in open_.items()):
                for one, p in ((True, rate), (False, 1 - rate)):
                    key = (failures + one, runs + 1)
                    ratio = key[0] * Sprt().steps[1] + (key[1] - key[0]) * Sprt().steps[0]
                    low, high = Sprt().bounds
                    if low < ratio < high:
                        after[key] = after.get(key, 0) + weight * p
                    elif (ratio >= high) == (verdict == "fails"):
                        total += weight * p
            open_ = after
        return total, sum(open_.values())
    for rate, verdict in ((0.05, "fails"), (0.5, "trains")):
        p, unfinished = wrong(rate, verdict)
        assert unfinished < 1e-4 and p < 0.05 / 0.95  # Wald's bound on either error


def test_needed():
    assert [needed([False] * n) for n in range(6)] == [2, 2, 2, 2, 1, 0]
    assert needed([True]) == 1 and needed([True, True]) == 0


# ---- rates ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("failures, runs", [(0, 5), (1, 5), (3, 7), (7, 7), (20, 50)])
def test_wilson_solves_its_equation(failures, runs):
    """Its ends are the rates p with |p̂ − p| = z √(p(1−p)/n), found by bisection."""
    z, observed = 1.959964, failures / runs

    def root(inside, outside):
        for _ in range(200):
            middle = (inside + outside) / 2
            if abs(observed - middle) <= z * math.sqrt(middle * (1 - middle) / runs):
                inside = middle
            else:
                outside = middle
        return inside
    near = min(max(observed, 1e-12), 1 - 1e-12)
    low, high = wilson(failures, runs)
    assert low == pytest.approx(root(near, 0) if failures else 0, abs=1e-9)
    assert high == pytest.approx(root(near, 1) if failures < runs else 1, abs=1e-9)
    assert wilson(0, 0) == (0, 1)


def redistributed(steps, failed):
    """Efron's redistribution to the right: a run that leaves gives its mass to those that stay longer."""
    runs = sorted(zip(steps, failed), key=lambda r: (r[0], not r[1]))
    mass = [Fraction(1, len(runs))] * len(runs)
    for i, (_, fails) in enumerate(runs):
        if not fails and i + 1 < len(runs):
            share = mass[i] / (len(runs) - i - 1)
            mass = [m + share if j > i else m for j, m in enumerate(mass)]
            mass[i] = Fraction(0)
    return lambda step: 1 - float(sum(m for (s, f), m in zip(runs, mass) if f and s <= step))


@pytest.mark.parametrize("steps, failed", [
    ([100, 200, 300, 400], [True, True, False, True]), ([50, 50, 60, 70, 70], [True, False, True, False, True]),
    ([10, 20], [False, False]), ([30, 30, 30], [True, True, True])])
def test_kaplan_meier_against_redistribution(steps, failed):
    survival = redistributed(steps, failed)
    curve = kaplan_meier(steps, failed)
    assert [c.step for c in curve] == sorted({s for s, f in zip(steps, failed) if f})
    assert all(c.share == pytest.approx(survival(c.step), abs=1e-12) for c in curve)
    assert median_step(curve) == next((s for s in sorted(steps) if survival(s) <= 0.5 + 1e-12), math.inf)


# ---- pairs --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", range(9))
def test_binomial_against_enumeration(n):
    for k in range(n + 1):
        extreme = sum(abs(2 * sum(tosses) - n) >= abs(2 * k - n) for tosses in itertools.product((0, 1), repeat=n))
        assert binomial(k, n) == pytest.approx(extreme / 2**n)


def test_paired():
    a = {s: (s <= 5, 2.0) for s in range(1, 8)}          # fails for 5 of 7 seeds
    b = {s: (s == 1, 1.0 + s / 10) for s in range(1, 9)}  # for one of them, and a seed more
    found = paired(a, b)
    assert (found.pairs, found.only_a, found.only_b) == (7, 4, 0) and found.p == pytest.approx(2 / 2**4)
    # seeds 6 and 7 trained in both: 2 − 1.6 and 2 − 1.7
    assert found.difference == pytest.approx(0.35) and found.se == pytest.approx(0.05)
    assert found.p_loss == 0.5
    assert math.isnan(paired({1: (True, 2.0)}, {1: (True, 2.0)}).difference)


def test_spread():
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2))) and math.isnan(spread([])[0])
    assert math.isnan(spread([1.0])[1])
