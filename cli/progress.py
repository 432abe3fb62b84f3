"""Progress on stderr: a bar in a terminal, a line every few seconds in a file or a pipe."""
import sys
import time
from types import TracebackType
from typing import Self

EVERY = 10.0  # seconds between lines
DELAY = 2.0   # what takes less is not shown


class Progress:
    """Counts to `total`; a context manager. `what` is being done, in `unit`s."""

    def __init__(self, total: int, unit: str, what: str = "") -> None:
        self.done, self.total, self.unit, self.what = 0, total, unit, what
        self._begun = self._said = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm
            self._bar = tqdm(total=total, unit=unit, desc=what or None, unit_scale=total >= 10000, delay=DELAY, leave=False,
                             dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def advance(self, count: int = 1) -> None:
        self.to(self.done + count)

    def to(self, done: int) -> None:
        """So many are done in all."""
        if self._bar is not None:
            self._bar.update(done - self.done)
        self.done = done
        now = time.monotonic()
        if self._bar is None and now - self._said >= EVERY:
            self._said = now
            print(f"{self.what + ': ' if self.what else ''}{done:,} of {self.total:,} {self.unit}s, "
                  f"{now - self._begun:.0f} s", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
