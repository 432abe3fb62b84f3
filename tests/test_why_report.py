"""Verdicts follow the rows: rows that are made to hold a claim, and the same made not to."""
import dataclasses
import math
import pathlib

import pytest

from cuflash.model import why_report
from cuflash.model.limits import Limits
from cuflash.model.study_failures import Found
from cuflash.model.study_why import Audited, Likeness
from cuflash.model.trials import Arm, Tally
from cuflash.model.why_measures import DeltaRow, Place, Terms
from cuflash.monte_carlo import Bias


def tally_of(name, verdict, paper=""):
    failures, runs = {"fails": (2, 2), "trains": (0, 5), "undecided": (1, 3)}[verdict]
    return Tally(name, "--precision bf16", f"note of {name}", paper, verdict, failures, runs, 0.1, 0.9,
                 40.0 if failures == runs else math.inf, 1.5, 0.1, 3.0)


def found(**verdicts):
    """bf16, fp32 and arms `a` (the paper: trains), `b` (fails), `own` (not in the paper)."""
    paper = {"bf16": "fails", "fp32": "trains", "a": "trains", "b": "fails"}
    tallies = [tally_of(n, v, paper.get(n, "")) for n, v in verdicts.items()]
    return Found([Arm(n, {}) for n in verdicts], tallies, [])


def verdicts(claims):
    return [c.verdict for c in claims]


def test_rows_of_the_isolation_table():
    c = why_report.outcome_claims(found(bf16="fails", fp32="trains", a="trains", b="trains", own="fails"), "§ 3.2")
    assert verdicts(c) == ["confirmed", "not confirmed"] and "(0 of 5 runs failed)" in c[0].measured
    c = why_report.outcome_claims(found(bf16="fails", fp32="trains", a="undecided", b="fails"), "§ 3.2")
    assert verdicts(c) == ["undecided", "confirmed"]


def test_nothing_is_cured_where_nothing_fails():
    for base, reference, expected in (("trains", "trains", "confirmed"), ("undecided", "trains", "confirmed"),
                                      ("fails", "fails", "undecided"), ("fails", "undecided", "undecided")):
        c = why_report.outcome_claims(found(bf16=base, fp32=reference, a="trains", b="fails"), "§ 3.2")
        assert verdicts(c) == ["undecided", expected] and "nothing to cure was shown" in c[0].why
    c = why_report.outcome_claims(found(bf16="fails", fp32="fails", a="fails", b="trains"), "§ 3.2")
    assert verdicts(c) == ["undecided"] * 2 and "no failure of low precision was shown" in c[1].why


def test_a_part_that_trains_says_nothing_where_the_whole_does():
    c = why_report.outcome_claims(found(bf16="trains", fp32="trains", b="trains"), "§ 3.2")
    assert verdicts(c) == ["undecided"]
    assert why_report.outcome_claims(Found([], [], []), "§ 3.2") == []


def test_rows_with_ties_count_before_the_failure(saved_run, monkeypatch):
    def claim(ties, onset=-1):
        monkeypatch.setattr(type(saved_run), "metrics", property(lambda run: [
            {"step": 10.0 * (i + 1), "ties": float(n), "rows": 100.0} for i, n in enumerate(ties)]))
        return why_report.touched_claim(saved_run, "bf16, seed 2", onset)
    rising = claim([1, 2, 3, 4, 50, 60], 50)
    assert rising.verdict == "confirmed" and "4.00% at step 40, tau +1.00" in rising.measured
    assert claim([4, 3, 2, 1, 50, 60, 70, 80, 90], 50).verdict == "not confirmed"  # what comes after is no sign before
    assert claim([1, 2, 3, 4]).verdict == "undecided" and "does not fail" in claim([1, 2, 3]).why
    assert claim([], 1).verdict == claim([5], 20).verdict == "undecided"


@pytest.mark.parametrize("base, reference, expected", [
    ("fails", "trains", "confirmed"), ("trains", "trains", "not confirmed"), ("fails", "fails", "not confirmed"),
    ("trains", "fails", "not confirmed"), ("undecided", "trains", "undecided"), ("fails", "undecided", "undecided")])
def test_low_precision_against_fp32(base, reference, expected):
    first, *_ = why_report.outcome_claims(found(bf16=base, fp32=reference), "2, 7")
    assert (first.figure, first.verdict) == ("2", expected)
    pairs = dataclasses.replace(tally_of("bf16", "fails"), runs=7, pairs=5, only_this=4)
    assert "of 5 seeds that both have 4 fail in low precision alone" in why_report.outcome_claims(
        Found([], [pairs, tally_of("fp32", "trains")], []), "2, 7")[0].why
    assert why_report.outcome_claims(found(bf16=base, fp32=reference), "§ 3.2") == []


def audited(mean=1e-6, growth=0.1, cosine=0.95, sigma=6.0):
    rows = [DeltaRow(step, layer, head, 100, mean, 1e-7, 1e-4, 0.7, growth if head < 0 else math.nan,
                     (sigma if layer == 1 else 2.0) if head < 0 else math.nan)
            for step in (11, 21) for layer in (0, 1, 2) for head in (-1, 0, 1)]
    terms = [Terms(step, 1, 0, 32, cosine, 1.5) for step in (11, 21)]
    return Audited(pathlib.Path("run"), 30, [10, 20], rows, terms, [], [Likeness(11, 3, 21, 4, -cosine)],
                   Place(21, 1, 0, 0, 3, 2))


def test_claims_of_a_failing_run():
    assert verdicts(why_report.audit_claims(audited())) == ["confirmed"] * 4
    for changed, place in (({"mean": 3e-7}, 0), ({"growth": -0.1}, 1), ({"cosine": 0.5}, 2)):
        expected = ["confirmed"] * 4
        expected[place] = "not confirmed"
        assert verdicts(why_report.audit_claims(audited(**changed))) == expected
    assert verdicts(why_report.audit_claims(audited(sigma=3.0)))[3] == "in part"  # the second layer, but no outlier


def bias_rows(two, one):
    return [Bias("bf16", "o_bar", "bf16", ties, rest, two if ties > 1 else one, 0.01)
            for ties in (1, 2, 3) for rest in (1e-5, 1e-4)]


def test_claim_of_the_bias():
    assert why_report.bias_claim(bias_rows(-0.2, 0.01), "bf16").verdict == "confirmed"
    assert why_report.bias_claim(bias_rows(-0.2, -0.2), "bf16").verdict == "in part"
    assert why_report.bias_claim(bias_rows(0.0, -0.2), "bf16").verdict == "not confirmed"


def test_claim_of_the_limits():
    low, high = (Limits("qiu-b7:beta=1", "bf16", "above 0", i, n, n) for i, n in ((0.3, math.inf), (0.001, 15.5)))
    assert why_report.limits_claim([low, high]).verdict == "confirmed"
    assert why_report.limits_claim([low]).verdict == why_report.limits_claim([high]).verdict == "in part"
    table = why_report.limits_table([low, high])
    assert "nowhere" in table and "15.5" in table


def test_table_of_arms():
    t = dataclasses.replace(tally_of("a", "trains"), against="fp32", p=0.25, only_this=2, difference=0.1,
                            difference_se=0.02, p_loss=0.5)
    line = why_report.arms_table([t], {"a": 7.25}).splitlines()[-1]
    for part in ("**trains**", "0/5", "10% to 90%", "1.5000 ± 0.1", "2 / 0", "0.25", "+0.1000 ± 0.02", "7.25"):
        assert part in line
    assert "ms a step, alone" in why_report.arms_table([t], {}) and "alone" not in why_report.arms_table([t])
    assert "1.5000 ± ?" in why_report.arms_table([dataclasses.replace(t, loss_sd=math.nan)])


def test_cures_are_ranked_by_where_they_train_then_by_cost():
    cells = {"bf16": "ft", "attn fp32": "tt", "slow": "tt", "fast": "tt", "half": "ff"}  # at rates 1 and 2
    word = {"f": "fails", "t": "trains"}
    arms = [Arm(f"{n}, lr {lr}", {"precision": "bf16-fa2" if n == "fast" else "bf16", "lr": lr},
                low="" if n == "bf16" else f"bf16, lr {lr}") for lr in (1, 2) for n in cells]  # fast: of another one
    tallies = [tally_of(a.name, word[cells[a.name.split(",")[0]][a.options["lr"] - 1]]) for a in arms]
    ms = {a.name: {"slow": 20.0, "fast": 11.0}.get(a.name.split(",")[0], 10.0) for a in arms}
    rows = why_report.cure_ranking(Found(arms, tallies, []), ms)
    assert [(r.cure, r.trains, r.fails, r.settings, r.cost) for r in rows] == [
        ("attn fp32", 1, 0, 1, 1.0), ("fast", 1, 0, 1, 1.1), ("slow", 1, 0, 1, 2.0), ("half", 0, 1, 1, 1.0)]
    assert "| fast | 1 | 0 | 1 | 1.100 |" in why_report.ranking_table(rows)
    assert math.isnan(why_report.cure_ranking(Found(arms, tallies, []), {})[0].cost)
    at_two = Found([a for a in arms if a.options["lr"] == 2], [t for t in tallies if t.arm.endswith("2")], [])
    assert why_report.cure_ranking(at_two, ms) == [] and "nothing to cure" in why_report.ranking_table([])


def test_what_is_left_is_said():
    assert why_report.left([]) == "" and "- a: undecided" in why_report.left(["a: undecided"])
