"""Lists of numbers: read, and written back in messages."""
import pytest

from cuflash.cli.numbers import numbers
from cuflash.errors import ranges


def test_ranges_are_read_and_written():
    assert numbers("--rows", "8,0,6-7,7") == [0, 6, 7, 8] and numbers("--rows", None) is None
    assert ranges([8, 0, 6, 7, 7]) == "0, 6-8" and ranges([]) == "none" and ranges([3, 4]) == "3, 4"
    assert ranges(range(64, 1001)) == "64-1000"
    assert ranges(range(0, 1000, 2)).endswith("38, …") and len(ranges(range(0, 1000, 2))) < 100


@pytest.mark.parametrize("text, message", [("x", "write numbers and ranges"), ("8-6", "a range goes up"),
                                           ("0-99999999999", "a range has at most 1,048,576 numbers")])
def test_mistakes(text, message):
    with pytest.raises(ValueError, match=f"--rows '{text}': {message}"):
        numbers("--rows", text)
