"""Error messages that say what was given and what is valid."""
import difflib
from collections.abc import Iterable


def unknown(kind: str, got: object, valid: Iterable[str]) -> ValueError:
    """A ValueError for a word that is not one of `valid`, naming the nearest valid ones."""
    valid = list(valid)
    near = difflib.get_close_matches(str(got), valid, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
    listed = ", ".join(valid) if len(valid) <= 40 else ", ".join(valid[:40]) + ", …"
    return ValueError(f"unknown {kind} {got!r}: {hint + ' ' if hint else ''}valid: {listed}")
