"""What a study says while it works: lines that stay, and in a terminal a table of what runs below them."""
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO


class Board:
    """Writes to a stream; one that is no terminal gets the lines alone."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()
        self.interval = 1.0 if self.terminal else 5.0  # seconds between looks at what runs
        self._lines: list[str] = []

    def say(self, text: str) -> None:
        """A line that stays."""
        shown = self._lines
        self._erase()
        self.stream.write(text + "\n")
        self._draw(shown)

    def live(self, lines: Sequence[str]) -> None:
        """What stands below, in place of what stood there."""
        if self.terminal:
            self._erase()
            self._draw(lines)

    def close(self) -> None:
        self.live([])

    def _erase(self) -> None:
        if self._lines:
            self.stream.write(f"\x1b[{len(self._lines)}A\x1b[J")
            self._lines = []

    def _draw(self, lines: Sequence[str]) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._lines = [line[:width] for line in lines]
        self.stream.writelines(line + "\n" for line in self._lines)
        self.stream.flush()
