"""Lists of numbers on the command line."""
import re

MOST = 1 << 20  # numbers of a range


def numbers(option: str, text: str | None) -> list[int] | None:
    """`0,6-8` as [0, 6, 7, 8]; None stays None."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(f"{option} {text!r}: write numbers and ranges, as 0,6-8")
    ranges = [part.partition("-") for part in text.split(",")]
    if any(int(b or a) - int(a) >= MOST for a, _, b in ranges):
        raise ValueError(f"{option} {text!r}: a range has at most {MOST:,} numbers")
    found = sorted({n for a, _, b in ranges for n in range(int(a), int(b or a) + 1)})
    if not found:
        raise ValueError(f"{option} {text!r}: a range goes up, as 6-8")
    return found
