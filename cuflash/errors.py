"""Error messages that say what was given and what is valid."""
import difflib
import re
from collections.abc import Iterable


def unknown(kind: str, got: object, valid: Iterable[str]) -> ValueError:
    """A ValueError for a word that is not one of `valid`, naming the nearest valid ones."""
    valid = list(valid)
    longer = [v for v in valid if got and v.startswith(str(got))]  # fp8 is half of fp8_e4m3
    near = list(dict.fromkeys(longer + difflib.get_close_matches(str(got), valid, n=3, cutoff=0.5)))[:3]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(valid) if len(valid) <= 40 else ", ".join(valid[:40]) + ", …"
    return ValueError(f"unknown {kind} {got!r}: {hint + ' ' if hint else ''}valid: {listed}")


def ranges(numbers: Iterable[int]) -> str:
    """[0, 6, 7, 8] as `0, 6-8`; `none` for no number. Long lists are cut."""
    found: list[list[int]] = []
    for n in sorted({int(n) for n in numbers}):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in found[:20]]
    return ", ".join(shown + ["…"] * (len(found) > 20)) or "none"


def install(*extras: str) -> str:
    """How to install one of cuflash's extras, which works from a clone as from an archive."""
    return f"install the extra {' or '.join(extras)}: pip install '.[{extras[0]}]' in cuflash's source folder"


def last_line(error: BaseException) -> str:
    """The last line of a message that has a word in it, without the frames and advice that some packages add."""
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w", line)]
    return lines[-1] if lines else type(error).__name__
