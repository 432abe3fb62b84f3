"""docs/is-it-stable.md says what docs/data says: each of its tables is made again from the CSV files."""
import re
from pathlib import Path

import pytest

from cuflash import deviation_report
from cuflash.deviation import Options, Row, run, settings
from cuflash.model import stable_report
from cuflash.model.study_stable import Drift, Trained
from cuflash.report import as_row, claims_table, read_csv, write_csv

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "is-it-stable.md").read_text(encoding="utf-8")
ROWS, DRIFTS, TRAINED = (read_csv(DOCS / "data" / f"{name}.csv", kind)
                         for name, kind in (("deviation", Row), ("drift", Drift), ("trained", Trained)))
SHOWN = ("fp8_e4m3", "bf16", "fp16", "fp32", "fp64")


@pytest.mark.parametrize("table", [
    claims_table([*deviation_report.claims(ROWS), *stable_report.claims(DRIFTS)]),
    deviation_report.ratios_table([r for r in ROWS if r.format in SHOWN]), deviation_report.others_table(ROWS),
    deviation_report.sites_table(ROWS), deviation_report.lengths_table(ROWS),
    deviation_report.tiles_table(ROWS),
    stable_report.trained_table(TRAINED), stable_report.last_table(DRIFTS),
    stable_report.groups_table([d for d in DRIFTS if d.label in ("bf16", "fp16", "fp32")])
], ids=("claims", "ratios", "others", "sites", "lengths", "tiles", "trained", "last", "groups"))
def test_table(table):
    assert table.count("\n") > 2 and table in PAGE
    assert "nan" not in table


def test_figures_are_there_and_small():
    figures = re.findall(r"\]\((figures/\w+\.png)\)", PAGE)
    assert len(figures) == 7 and all((DOCS / f).stat().st_size < 300_000 for f in figures)


def test_rows_are_made_again_to_the_last_digit(tmp_path):
    """Bit-defined sums and exp: the file's numbers are those of any machine (golden values, in fp64, to 7 digits)."""
    chosen = [s for s in settings(Options()) if s.fp32 in ("none", "all running") and s.figure == "sites"]
    write_csv(tmp_path / "again.csv", [as_row(r, ("ratio",)) for r in run(chosen, Options())])
    again = (tmp_path / "again.csv").read_text().splitlines()
    there = set((DOCS / "data" / "deviation.csv").read_text().splitlines())
    assert len(again) == 1 + 4 * 6 and set(again) <= there
