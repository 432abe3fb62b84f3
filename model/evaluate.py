"""Loss of a model on a text, under any precision, with the standard error of differences between two."""
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cuflash.fixes import Fix
from cuflash.model.checkpoint import Header
from cuflash.model.data import Data
from cuflash.model.gpt import GPT, Params
from cuflash.philox import Key
from cuflash.precision import Precision

SPLITS = ("val", "train")


@dataclass(frozen=True)
class Evaluation:
    """Mean losses of batches of blocks, nats a token."""

    precision: Precision
    fix: Fix
    losses: np.ndarray
    sizes: np.ndarray  # blocks of each batch

    @property
    def loss(self) -> float:
        return float(np.average(self.losses, weights=self.sizes))

    def se(self, other: "Evaluation | None" = None) -> float:
        """Standard error of the loss, or of its difference to another one's on the same batches; NaN for one."""
        values = self.losses if other is None else self.losses - other.losses
        n = len(values)
        if n < 2:
            return math.nan
        deviations = self.sizes / self.sizes.mean() * (values - np.average(values, weights=self.sizes))
        return float(np.sqrt((deviations**2).sum() / (n - 1) / n))


def blocks(data: Data, split: str, block_size: int, count: int | None) -> np.ndarray:
    """Tokens (n, block_size + 1) of consecutive blocks, each with its last target; the rest is left out."""
    tokens = getattr(data, split)
    n = (len(tokens) - 1) // block_size
    n = n if count is None else min(n, count)
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[:n * block_size:block_size]


def evaluate(header: Header, params: Params, precision: Precision, fix: Fix, text: np.ndarray, batch_size: int,
             advance: Callable[[int], object] = lambda n: None) -> Evaluation:
    """Of the blocks (n, block_size + 1), each by itself; CuPy parameters run on their GPU.

    advance: called with the number of blocks done after each batch.
    """
    model, losses, sizes = GPT(header.model, params, precision, fix), [], []
    for first in range(0, len(text), batch_size):
        part = text[first:first + batch_size].astype(np.int64)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a loss of NaN says so itself
            losses.append(model.loss(part[:, :-1], part[:, 1:], Key(header.seed, sample=first)))
        sizes.append(len(part))
        advance(len(part))
    return Evaluation(precision, model.fix, np.array(losses, np.float64), np.array(sizes))
