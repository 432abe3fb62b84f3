"""Errors of cuflash.functions against fp64 mathematics; prints the table of docs/functions.md.

    PYTHONPATH=. python -m tests.sweep_functions            # 1 fp32 number in 16, half a minute
    PYTHONPATH=. python -m tests.sweep_functions --step 1   # every one, a quarter of an hour

The truth is NumPy's or math.erf's fp64 value: its own error, about 1 ulp of fp64, is 2^-29 ulp of fp32.
"""
import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from cuflash import functions

RUN = 1 << 16  # consecutive fp32 numbers taken together, so that monotonicity is seen between neighbours


def _erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(value) for value in x.tolist()])


class Function(NamedTuple):
    """What is swept of one function: its truth in fp64, ranges of x, ascending, and its direction."""

    truth: Callable[[np.ndarray], np.ndarray]
    ranges: tuple[tuple[float, float], ...]
    bound: float  # ulp, numerics section 6
    falling: bool = False


TINY = 2.0**-26  # below it exp x = 1 + x rounds to 1, and erf x, tanh x are linear
FUNCTIONS = {
    "exp": Function(np.exp, ((-104, -TINY), (TINY, 88.73)), 1.05),
    "exp2": Function(np.exp2, ((-151, -TINY), (TINY, 128)), 1.05),
    "log": Function(np.log, ((2.0**-149, 3.4e38),), 1.0),
    "rsqrt": Function(lambda x: 1 / np.sqrt(x), ((2.0**-149, 3.4e38),), 0.5, falling=True),
    "erf": Function(_erf, ((TINY, 4),), 2.0),
    "tanh": Function(np.tanh, ((TINY, 10),), 2.0),
}


def ulp_error(y: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(y − truth) in units of fp32's last place at the truth; NaN where fp32 has no finite value for it."""
    exponent = np.maximum(np.frexp(truth)[1] - 1, -126)
    fits = np.abs(truth) < 2.0**128 * (1 - 2.0**-25)
    return np.where(fits, np.ldexp(y - truth, 23 - exponent), np.nan)


def every_16_bit(dtype: type) -> np.ndarray:
    """Every finite number of bf16 or fp16, as fp32, ascending, −0 left out."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def runs(low: float, high: float, step: int) -> Iterator[np.ndarray]:
    """Ascending runs of consecutive fp32 numbers, one run in `step`, from a range that excludes 0."""
    first, last = sorted(int(np.float32(abs(end)).view(np.uint32)) for end in (low, high))
    for start in range(first, last, RUN * step):
        x = np.arange(start, min(start + RUN, last + 1), dtype=np.uint32).view(np.float32)
        yield x if low > 0 else -x[::-1]


class Errors:
    """Extreme and mean errors in ulp, and steps against the function's direction, over blocks of x."""

    def __init__(self, name: str):
        self.function = getattr(functions, name)
        self.of = FUNCTIONS[name]
        self.count = self.violations = 0
        self.low, self.high, self.total = math.inf, -math.inf, 0.0

    def add(self, x: np.ndarray) -> None:
        """Take in x, an ascending block; blocks need not be neighbours."""
        y = self.function(x)
        with np.errstate(all="ignore"):  # Inf, where fp32 ends
            error = ulp_error(y, self.of.truth(x.astype(np.float64)))
            steps = np.diff(y)
        error = error[np.isfinite(error)]
        self.violations += int(np.count_nonzero(steps > 0 if self.of.falling else steps < 0))
        if error.size:
            self.count += error.size
            self.total += math.fsum(error)
            self.low, self.high = min(self.low, error.min()), max(self.high, error.max())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def largest(self) -> float:
        return max(-self.low, self.high)


def domain(name: str, x: np.ndarray) -> np.ndarray:
    """The part of x that counts: all of it for exp and exp2; erf and tanh are odd to the bit."""
    return x if name in ("exp", "exp2") else x[x > 0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of cuflash.functions, as a table.")
    parser.add_argument("--step", type=int, default=16, help="one run of fp32 numbers in this many")
    parser.add_argument("functions", nargs="*", default=[*FUNCTIONS], metavar="function",
                        help="only these: " + ", ".join(FUNCTIONS))
    arguments = parser.parse_args()
    step = arguments.step
    for name in set(arguments.functions) - set(FUNCTIONS):
        parser.error(f"function: got {name!r}, valid: {', '.join(FUNCTIONS)}")
    print("| function | arguments | number | error, ulp | mean | not monotone |")
    print("|---|---|---|---|---|---|")
    for name in arguments.functions:
        of = FUNCTIONS[name]
        ranges = ", ".join(f"{low:.4g} to {high:.4g}" for low, high in of.ranges)
        sets = {"every bf16": [domain(name, every_16_bit(ml_dtypes.bfloat16))],
                "every fp16": [domain(name, every_16_bit(np.float16))],
                ("every fp32" if step == 1 else f"1 fp32 in {step}") + f", {ranges}":
                    (x for low, high in of.ranges for x in runs(low, high, step))}
        for label, blocks in sets.items():
            errors = Errors(name)
            for x in blocks:
                errors.add(x)
            print(f"| `{name}` | {label} | {errors.count:,} | {errors.low:+.3f} to {errors.high:+.3f} | "
                  f"{errors.mean:+.4f} | {errors.violations} |", flush=True)


if __name__ == "__main__":
    main()
