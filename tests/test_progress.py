"""Progress where stderr is a terminal and where it is none."""
import sys

import pytest
from cuflash.cli import progress
from cuflash.cli.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_few_seconds(clock, capsys):
    with Progress(2000, "row", "audit") as p:
        p.advance(5)
        clock[0] += 9.9
        p.to(10)
        clock[0] += 0.2
        p.to(1200)
        clock[0] += 5
        p.advance()
        clock[0] += 5
        p.advance()
    assert capsys.readouterr().err.splitlines() == ["audit: 1,200 of 2,000 rows, 10 s", "audit: 1,202 of 2,000 rows, 20 s"]


def test_what_is_quick_shows_nothing(clock, capsys):
    with Progress(3, "case") as p:
        p.advance(3)
    assert capsys.readouterr() == ("", "")


def test_a_bar_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "DELAY", 0)
    with Progress(4, "case", "check") as p:
        p.to(3)
        assert p._bar.n == 3 and p.done == 3
    assert "check" in capsys.readouterr().err
