"""Verdicts follow the rows: rows that are made to hold a claim, and the same made not to."""
import dataclasses
import itertools
import math

import numpy as np
import pytest

from cuflash.deviation import EMULATIONS, GROUPS, LENGTH_FORMATS, SHAPES, TILE_FORMATS, Options, Row
from cuflash.deviation_report import claims, figures, mean_of, ratio_of, sections, tau, tiles_table
from cuflash.plot import save

BITS = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}


def row(figure, **fields):
    given = {
        "input": "normal",
        "format": "bf16",
        "emulation": "per-tile",
        "fp32": "none",
        "length": 1024,
        "queries": 8,
        "head_dim": 8,
        "causal": False,
        "shape": "square",
        "tile_rows": 16,
        "tile_keys": 16,
        "tiles": 64,
        "draw": 0,
        "flash": 1e-2,
        "plain": 1e-3
    } | fields
    flash, plain = given.pop("flash"), given.pop("plain")
    return Row(figure=figure,
               mantissa_bits=BITS[given["format"]],
               flash_plain_max=flash,
               flash_plain_mean=flash / 4,
               flash_plain_std=flash / 3,
               flash_golden_max=flash,
               flash_golden_mean=flash / 4,
               flash_golden_std=flash / 3,
               plain_golden_max=plain,
               plain_golden_mean=plain / 4,
               plain_golden_std=plain / 3,
               golden_std=1 / given["tiles"],
               **given)


def papers():
    """Rows as the paper says that they are."""
    rows = []
    for f, e, draw in itertools.product(BITS, EMULATIONS, range(2)):
        size = 2.0**-BITS[f] * (1 + draw / 8)
        rows.append(
            row("3-4", format=f, emulation=e, draw=draw, flash=10 * size, plain=size if f != "fp64" else 0.0))
    for n, f, e, draw in itertools.product((256, 512, 1024), LENGTH_FORMATS, EMULATIONS, range(2)):
        rows.append(
            row("5",
                length=n,
                tiles=n // 16,
                format=f,
                emulation=e,
                draw=draw,
                flash=n * 1e-6 * (1 + draw / 8)))
    for t, (shape, (a, b)), f, e in itertools.product((32, 64), SHAPES.items(), TILE_FORMATS, EMULATIONS):
        root = math.isqrt(a * b)
        keys = t * b // root
        rows.append(
            row("6",
                shape=shape,
                tile_rows=t * a // root,
                tile_keys=keys,
                format=f,
                emulation=e,
                flash=1 / keys))
    return rows + [row("sites", fp32=g, flash=1e-2 if g == "none" else 1e-3) for g in GROUPS]


def verdicts(rows):
    found = claims(rows)
    assert [c.figure for c in found] == ["3", "4", "4", "5", "6c", "6a", "6b"]
    return [c.verdict for c in found]


def test_rows_as_the_paper_says():
    assert verdicts(papers()) == ["confirmed"] * 7


@pytest.mark.parametrize("claim, change", [(0, lambda r: {
    "flash_plain_max": 1.0
} if r.figure == "3-4" and r.format == "fp32" else {}),
                                           (1, lambda r: {
                                               "flash_golden_max": 2.0
                                           } if (r.figure, r.format) == ("3-4", "bf16") else {}),
                                           (2, lambda r: {
                                               "flash_golden_max": r.plain_golden_max / 3
                                           } if (r.figure, r.emulation) == ("3-4", "fa2") else {}),
                                           (3, lambda r: {
                                               "flash_plain_max": 1 / r.length
                                           } if r.figure == "5" else {}),
                                           (4, lambda r: {
                                               "flash_plain_max": 1e-3
                                           } if r.figure == "6" and r.shape == "square" else {}),
                                           (5, lambda r: {
                                               "flash_plain_max": r.tile_keys * 1e-3
                                           } if r.figure == "6" and r.shape != "square" else {}),
                                           (6, lambda r: {
                                               "flash_plain_max": 2.0 + (r.shape == "tall")
                                           } if r.figure == "6" and r.shape != "square" else {})])
def test_each_claim_can_fail(claim, change):
    rows = [dataclasses.replace(r, **change(r)) for r in papers()]
    assert verdicts(rows)[claim] == "not confirmed"


def test_formats_that_are_not_there_decide_nothing():
    some = [r for r in papers() if r.figure != "6" and r.format in ("bf16", "fp32")]
    first = claims(some)[0]
    assert (first.figure, first.verdict) == ("3", "confirmed") and first.paper.endswith("(bf16, fp32)")
    assert [c.figure for c in claims([r for r in papers() if r.figure == "3-4" and r.format == "fp16"])] == []
    assert "nan" not in tiles_table([r for r in papers() if r.format == "bf16"])


def test_in_part_where_one_input_holds():
    other = [
        dataclasses.replace(r, input="uniform", flash_golden_max=r.plain_golden_max * 2) for r in papers()
        if r.figure == "3-4"
    ]
    assert verdicts(papers() + other)[1] == "in part"


def test_tau_against_pairs_counted_one_by_one():
    rng = np.random.default_rng(53)
    x, y = rng.integers(0, 5, 30), rng.integers(0, 9, 30)
    pairs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i in range(30) for j in range(i)
             if x[i] != x[j]]
    assert tau(x, y) == pytest.approx(np.mean([a * b for a, b in pairs]), rel=1e-12)
    assert tau([1, 2, 3], [4, 5, 6]) == 1 and tau([1, 2], [1, 1]) == 0 and tau([1, 1], [1, 2]) == 0


def test_means_and_ratios():
    rows = [row("3-4", flash=f, plain=1.0) for f in (1.0, 4.0)]
    assert mean_of(rows, "flash_golden_max") == 2.5 and ratio_of(rows) == pytest.approx(2, rel=1e-12)
    assert math.isnan(ratio_of([])) and math.isnan(ratio_of([row("3-4", plain=0.0)]))


def test_sections_and_figures(tmp_path):
    rows = papers()
    text = sections(rows, Options(), 12.0)
    assert "It took 12 s." in text and "| normal | bf16 | 0.0083 | 0.083 | 10.00 |" in text
    drawn = figures(rows)
    assert set(drawn) == {"figure_3", "figure_4", "figure_5", "figure_6", "figure_sites"}
    for name, figure in drawn.items():
        assert f"]({name}.png)" in text
        assert all(ax.get_xlabel() or ax.get_subplotspec().rowspan.stop < ax.get_gridspec().nrows
                   for ax in figure.axes)
    save(drawn["figure_4"], tmp_path / "x.svg")
    assert "max |error|" in (tmp_path / "x.svg").read_text()
    assert set(figures([r for r in rows if r.figure == "5"])) == {"figure_5"}
