"""Verdicts on weights follow the drifts: drifts that are made to hold a claim, and the same made not to."""
import dataclasses
import math

import pytest

from cuflash.model.stable_report import claims, figures, groups_table, last_table, ratio, sections, series
from cuflash.model.study_stable import KINDS, Drift, Trained, pairs

SIZES = dict(zip(KINDS, (1.0, 5.0, 3.0)))  # of the drifts, as the paper has them


def papers(**scale):
    """A drift of each pair at steps 0 to 100, growing; scale changes a kind's size."""
    found = []
    for p in pairs((1, 2)):
        for step in range(0, 101, 25):
            w = 1e-5 * SIZES[p.kind] * scale.get(p.kind, 1) * (step + (p.kind == KINDS[1]))
            found += [
                Drift(**dataclasses.asdict(p),
                      step=step,
                      name=name,
                      equal=0.5,
                      max_abs=3 * w,
                      mean_abs=2 * w,
                      wasserstein=w * (1 + i),
                      size=0.1) for i, name in enumerate(("all", "wte", "h.0.ln_1.weight", "h.0"))
            ]
    return found


def verdicts(found):
    return [c.verdict for c in claims(found)]


def test_drifts_as_the_paper_says():
    assert verdicts(papers()) == ["confirmed"] * 3


def test_each_claim_can_fail():
    assert verdicts(papers(**{KINDS[1]: 0.1})) == ["confirmed", "not confirmed", "confirmed"]
    assert verdicts(papers(**{KINDS[2]: 0.5})) == ["confirmed", "confirmed", "not confirmed"]
    shrinking = [
        dataclasses.replace(d, wasserstein=1e-3 / (1 + d.step)) if d.kind == KINDS[0] else d
        for d in papers()
    ]
    assert verdicts(shrinking)[0] == "not confirmed"
    one = [
        dataclasses.replace(d, wasserstein=d.wasserstein / 9) if
        (d.kind, d.label) == (KINDS[2], "bf16") else d for d in papers()
    ]
    assert verdicts(one)[2] == "in part"


def test_ratio_is_geometric_and_leaves_step_0_out():
    a = [dataclasses.replace(papers()[0], step=s, wasserstein=w) for s, w in ((0, 9.0), (1, 2.0), (2, 8.0))]
    b = [dataclasses.replace(d, wasserstein=w) for d, w in zip(a, (1.0, 1.0, 1.0))]
    assert ratio(a, b) == (pytest.approx(4, rel=1e-12), 1.0)
    assert all(math.isnan(x) for x in ratio(a, []))


def test_tables_and_figures():
    found = papers()
    assert len(series(found)) == len(pairs((1, 2))) == len(last_table(found).splitlines()) - 2
    lines = groups_table(found).splitlines()
    assert [line.split(" | ")[0].strip("| ")
            for line in lines[2:]] == ["h.0", "wte", "h.0.ln_1.weight", "all"]
    assert lines[-1].split(" | ")[1] == "0.01"  # 1e-5 · 100 / 0.1 of flash / plain in bf16
    text = sections(found,
                    [Trained("bf16-flash-1", 100, 2.5, "bf16-fa2", "0" * 64, 12.0, "step 101: loss is nan")])
    assert "| bf16-flash-1 | 100 | 2.5000 | 12 | step 101: loss is nan |" in text
    for name, figure in figures(found).items():
        assert f"]({name}.png)" in text and figure.legends[0].get_texts()[0].get_text() == "bf16"
