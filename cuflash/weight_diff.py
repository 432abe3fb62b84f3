"""Two checkpoints compared weight by weight: the measures of arXiv 2405.02803, figures 7 and 8."""
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cuflash import hdf5
from cuflash.diff import BLOCK, opened
from cuflash.dump_file import datasets

if TYPE_CHECKING:
    import h5py

Blocks = Callable[[], Iterable[np.ndarray]]


@dataclass(frozen=True)
class WeightDiff:
    """One weight of two checkpoints.

    Share of equal bits, largest and mean |A − B|, exact Wasserstein-1 distance of the two sets of values.
    """

    name: str
    shape: tuple[int, ...]
    equal: float
    max_abs: float
    mean_abs: float
    wasserstein: float

    @property
    def differs(self) -> bool:
        return self.equal < 1


def diff_weights(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[WeightDiff]:
    """Each weight of two checkpoints, then each layer's together (`h.0`, …), then all of them (`all`).

    Source: the measures of arXiv 2405.02803, figures 7 and 8.

    Raises:
        ValueError: a file is no checkpoint or is damaged; the models differ.
    """
    with opened(a) as file_a, opened(b) as file_b:
        try:
            weights = [_weights(file_a), _weights(file_b)]
            for path, found in zip((a, b), weights):
                if not found:
                    raise ValueError(f"{path} is not a checkpoint: it has no group params")
            shapes = [{n: d.shape for n, d in w.items()} for w in weights]
            if shapes[0] != shapes[1]:
                wrong = next(n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n))
                raise ValueError(
                    f"{a} and {b} are of different models: {wrong} has shape {shapes[0].get(wrong)} in the "
                    f"first, {shapes[1].get(wrong)} in the second")
            layers: dict[str, list[str]] = {}
            for name in weights[0]:
                if layer := re.match(r"h\.\d+(?=\.)", name):
                    layers.setdefault(layer[0], []).append(name)
            groups = {name: [name] for name in weights[0]} | layers | {"all": list(weights[0])}
            return [_weight(group, [weights[0][n] for n in names], [weights[1][n] for n in names])
                    for group, names in groups.items()]
        except OSError as e:
            raise ValueError(f"{a} or {b} is damaged: {e}") from e


def _weights(file: "h5py.File") -> dict[str, "h5py.Dataset"]:
    return {d.name.removeprefix("/params/"): d for d in datasets(file["params"])} if "params" in file else {}


def _weight(name: str, a: list["h5py.Dataset"], b: list["h5py.Dataset"]) -> WeightDiff:
    shape = a[0].shape if len(a) == 1 else (sum(d.size for d in a),)
    same = total = 0
    largest = sum_abs = 0.0
    for x, y in zip(_read_blocks(a), _read_blocks(b)):
        d = np.abs(x.astype(np.float64) - y)
        same += int(np.count_nonzero((x == y) & (np.signbit(x) == np.signbit(y)) | np.isnan(x) & np.isnan(y)))
        total += d.size
        largest, sum_abs = float(np.maximum(largest, d.max(initial=0))), sum_abs + float(d.sum())
    distance = wasserstein(lambda: _read_blocks(a), lambda: _read_blocks(b))
    return WeightDiff(name, shape, same / total if total else 1.0, largest, sum_abs / max(total, 1), distance)


def _read_blocks(found: list["h5py.Dataset"]) -> Iterator[np.ndarray]:
    for dataset in found:
        for where in hdf5.blocks(dataset.shape, BLOCK):
            yield hdf5.read_array(dataset, where)


def wasserstein(a: Blocks, b: Blocks, limit: int = 1 << 22) -> float:
    """The Wasserstein-1 distance ∫|F_a − F_b| of two sets of numbers, exactly, by sorting.

    The numbers are sorted a range of values at a time, so that about `limit` of each are in memory; the
    blocks are read again for each range. NaN where a number is not finite, or a set is empty.

    Args:
        a, b: give the blocks of each set, anew at every call.
    """
    counts = [np.zeros(1 << 16, np.int64) for _ in range(2)]
    for count, blocks in zip(counts, (a, b)):
        for x in blocks():
            if not np.isfinite(x).all():
                return math.nan
            count += np.bincount(_bucket(x), minlength=len(count))
    na, nb = (int(c.sum()) for c in counts)
    if not na or not nb:
        return math.nan
    common = math.gcd(na, nb)
    step_a, step_b = nb // common, -na // common  # the step of F_a − F_b at a number, times na·nb/common
    total, level, last = 0.0, 0, None
    for low, high in _ranges(np.maximum(*counts), limit):
        both = [np.concatenate([x.reshape(-1)[_between(x, low, high)] for x in blocks()])
                for blocks in (a, b)]
        z = np.concatenate(both).astype(np.float64)
        order = np.argsort(z, kind="stable")
        z = z[order]
        levels = level + np.cumsum(np.where(order < len(both[0]), step_a, step_b))
        total += abs(level) * (z[0] - last) if last is not None else 0.0
        total += float((np.abs(levels[:-1]) * np.diff(z)).sum())
        level, last = int(levels[-1]), z[-1]
    return float(total) / (na * nb // common)


def _bucket(x: np.ndarray) -> np.ndarray:
    """The 16 leading bits of numbers as integers of the same order."""
    bits = x.astype(np.float64).reshape(-1).view(np.uint64)
    top = (bits >> np.uint64(48)).astype(np.int64)
    return np.where(top >> 15, 0xFFFF - top, top | 0x8000)


def _between(x: np.ndarray, low: int, high: int) -> np.ndarray:
    bucket = _bucket(x)
    return (bucket >= low) & (bucket < high)


def _ranges(counts: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of buckets with at most `limit` numbers, unless one bucket has more."""
    low, held = 0, 0
    for i in np.flatnonzero(counts).tolist():
        if held and held + counts[i] > limit:
            yield low, i
            low, held = i, 0
        held += int(counts[i])
    yield low, len(counts)
