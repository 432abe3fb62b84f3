"""Lengths, masks and tile ranges of attention: which keys a query sees, which tiles are visited.

Causal masks align bottom-right: query i sees key j iff j ≤ i + Tk − Tq. A tile is visited iff one
of its Br × Bc entries is visible (numerics.md section 7).
"""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def _mask(rows: int, keys: int, offset: int) -> np.ndarray:
    return np.arange(keys) <= np.arange(rows)[:, None] + offset


@dataclass(frozen=True)
class Shape:
    """The lengths of one attention and its mask."""

    tq: int
    tk: int
    causal: bool

    def last_key(self, row: int) -> int:
        """The last key that query `row` sees; below 0 if it sees none."""
        return row + self.tk - self.tq if self.causal else self.tk - 1

    def visible(self, q0: int, q1: int, k0: int, k1: int) -> np.ndarray | None:
        """Mask (q1 − q0, k1 − k0), True where visible; None where all are. Not to be changed."""
        if self.last_key(q0) >= k1 - 1:
            return None
        make = _mask if (q1 - q0) * (k1 - k0) <= 1 << 17 else _mask.__wrapped__
        return make(q1 - q0, k1 - k0, q0 - k0 + self.tk - self.tq)

    def key_tiles(self, bc: int | None, descending: bool) -> Iterator[tuple[int, int, int]]:
        """Key tiles (index, first key, end) in the order of the sum."""
        bc = bc or max(self.tk, 1)
        count = -(-self.tk // bc)
        for j in reversed(range(count)) if descending else range(count):
            yield j, j * bc, min((j + 1) * bc, self.tk)

    def query_tiles(self, br: int | None, descending: bool, q0: int = 0,
                    q1: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Query tiles (index, first row, end) of rows q0 to q1, q0 a multiple of Br, in the order of the sum."""
        br, q1 = br or max(self.tq, 1), self.tq if q1 is None else q1
        tiles = range(q0 // br, -(-q1 // br))
        for i in reversed(tiles) if descending else tiles:
            yield i, i * br, min((i + 1) * br, q1)

    def first_row(self, k0: int, br: int | None) -> int:
        """First row of the first query tile that visits the key tile starting at k0 (may be ≥ tq)."""
        if not self.causal:
            return 0
        row = max(0, k0 - (self.tk - self.tq))
        return row // (br or max(self.tq, 1)) * (br or max(self.tq, 1))

    def key_end(self, q1: int, bc: int | None) -> int:
        """End of the last key tile visited by a query tile that ends before row q1; 0 if none is."""
        bc = bc or max(self.tk, 1)
        return min(self.tk, max(0, self.last_key(q1 - 1) // bc + 1) * bc)
