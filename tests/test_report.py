"""A study's files: what is written is what is read, and nothing is rounded up to a confirmation."""
import dataclasses

import h5py
import pytest

from cuflash.precision import Precision
from cuflash.report import Claim, as_row, read_csv, reproduce, table, verdict, write_csv, write_hdf5


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    count: int
    causal: bool
    value: float

    @property
    def twice(self):
        return 2 * self.value


LINES = [Line("a, b", 3, True, 0.125), Line("c", 4, False, float("nan"))]


def test_csv_and_hdf5_hold_the_rows(tmp_path):
    rows = [as_row(x, ("twice",)) for x in LINES]
    write_csv(tmp_path / "x.csv", rows)
    first, second = read_csv(tmp_path / "x.csv", Line)
    assert first == LINES[0] and second.causal is False and second.value != second.value
    write_hdf5(tmp_path / "x.h5", {"lines": rows}, {"command": "cuflash"})
    with h5py.File(tmp_path / "x.h5") as f:
        assert f.attrs["command"] == "cuflash" and f["lines/name"].asstr()[:].tolist() == ["a, b", "c"]
        assert f["lines/twice"][0] == 0.25 and f["lines/causal"][:].tolist() == [True, False]


def test_verdicts():
    assert [verdict(x)
            for x in ([True, True], [True, False], [False])] == ["confirmed", "in part", "not confirmed"]
    with pytest.raises(ValueError, match="verdict 'yes'; valid: confirmed"):
        Claim("3", "a", "b", "yes", "c")


def test_markdown():
    assert table(("a", "b"), [(1, "|x|")]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 | \\|x\\| |"]
    p = Precision.named("bf16-fa2")
    text = reproduce("cuflash study x", {"numpy": "2"}, {"text": "abc"}, {"ours": p})
    assert "$ cuflash study x" in text and "| SHA-256 of text | abc |" in text and p.digest[:16] in text
