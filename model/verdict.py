"""When a training has failed, and what several of them prove: rates with intervals, a sequential test, exact tests.

    criterion = Criterion.parse("margin=0.5,rows=3")
    criterion.onset(run.metrics)            # the step where the failure began, or None
    sequential([True, True])                # "fails"
"""
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cuflash.errors import unknown

FAILS, TRAINS, UNDECIDED = "fails", "trains", "undecided"


@dataclass(frozen=True)
class Criterion:
    """A training has failed when its loss is not finite, or the mean of `rows` logged losses in a row lies `margin`
    nats above the least such mean before, or, with `learned`, when the least one at the end is above that.

    A mean, because one batch is easier than another: its noise, divided by √rows, must stay well below the margin.
    """

    margin: float = 0.5
    rows: int = 3
    learned: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin > 0):
            raise ValueError(f"criterion: margin is {self.margin}; valid: nats above 0")
        if self.rows < 1:
            raise ValueError(f"criterion: rows is {self.rows}; valid: 1 or more")
        if math.isnan(self.learned):
            raise ValueError("criterion: learned is nan; valid: nats")

    @classmethod
    def parse(cls, text: str, default: "Criterion | None" = None) -> "Criterion":
        """`margin=0.5,rows=3`; what is not named is the default's.

        Raises:
            ValueError: an unknown name, or no number.
        """
        kinds = {"margin": float, "rows": int, "learned": float}
        given = {}
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if name not in kinds:
                raise unknown("part of a criterion", name, kinds)
            try:
                given[name] = kinds[name](value)
            except ValueError as e:
                raise ValueError(f"criterion {text!r}: {name} must be a number, got {value!r}") from e
        return dataclasses.replace(default or cls(), **given)

    def __str__(self) -> str:
        parts = [f"margin={self.margin:g}", f"rows={self.rows}"]
        return ",".join(parts + [f"learned={self.learned:g}"] * math.isfinite(self.learned))

    @property
    def text(self) -> str:
        """As a sentence of a report."""
        mean = f"the mean of {self.rows} logged losses in a row" if self.rows > 1 else "a logged loss"
        end = f", or never falls to {self.learned:g}" if math.isfinite(self.learned) else ""
        return (f"a training fails when its loss is not finite, or {mean} rises {self.margin:g} nats above its least "
                f"so far{end}")

    def onset(self, rows: Sequence[Mapping[str, float]], *, ended: bool = False) -> int | None:
        """The first of the logged steps whose mean shows a failure, None where there is none.

        Args:
            rows: of metrics.csv.
            ended: no row follows, so that `learned` applies.
        """
        least, together = math.inf, min(self.rows, len(rows))
        for i, row in enumerate(rows):
            if not math.isfinite(row["loss"]):
                return int(row["step"])
            first = i + 1 - together
            if first < 0:
                continue
            mean = math.fsum(r["loss"] for r in rows[first:i + 1]) / together
            if mean > least + self.margin:
                return int(rows[first]["step"])
            least = min(least, mean)
        return int(rows[-1]["step"]) if ended and rows and least > self.learned else None


# ---- one arm --------------------------------------------------------------------------------------

class Sprt(NamedTuple):
    """Wald's sequential test of a failure rate of p0 against one of p1."""

    p0: float = 0.05
    p1: float = 0.5
    alpha: float = 0.05
    beta: float = 0.05

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the log likelihood ratio: at or below the first it trains, at or above the second it fails."""
        return math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)

    @property
    def steps(self) -> tuple[float, float]:
        """What a run that trains, and one that fails, adds to it."""
        return math.log((1 - self.p1) / (1 - self.p0)), math.log(self.p1 / self.p0)


WALD = Sprt()


def sequential(failed: Sequence[bool], test: Sprt = WALD) -> str:
    """The verdict of the runs in their order, up to the first that decides it.

    Source: Wald, Sequential Tests of Statistical Hypotheses, 1945.
    """
    ratio, (low, high) = 0.0, test.bounds
    for one in failed:
        ratio += test.steps[one]
        if ratio <= low:
            return TRAINS
        if ratio >= high:
            return FAILS
    return UNDECIDED


def needed(failed: Sequence[bool], test: Sprt = WALD) -> int:
    """The fewest further runs that could decide; 0 where it is decided."""
    if sequential(failed, test) != UNDECIDED:
        return 0
    return next(n for n in range(1, 1000)
                if any(sequential([*failed, *[all_of_them] * n], test) != UNDECIDED for all_of_them in (True, False)))


def wilson(failures: int, runs: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a rate; (0, 1) of no run. Source: Wilson, JASA 22, 1927."""
    if not runs:
        return 0.0, 1.0
    p, shrink = failures / runs, 1 + z * z / runs
    centre = (p + z * z / (2 * runs)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / runs + (z / (2 * runs))**2)
    return (max(0.0, centre - half) if failures else 0.0), (min(1.0, centre + half) if failures < runs else 1.0)


class Survival(NamedTuple):
    """At a step of failure: runs that had come so far, failures there, the share that is left after it."""

    step: int
    at_risk: int
    failures: int
    share: float


def kaplan_meier(steps: Sequence[int], failed: Sequence[bool]) -> list[Survival]:
    """Steps to failure; a run that did not fail says that it lived to its last step.

    Source: Kaplan and Meier, JASA 53, 1958.
    """
    share, found = 1.0, []
    for step in sorted({s for s, f in zip(steps, failed, strict=True) if f}):
        at_risk = sum(s >= step for s in steps)
        failures = sum(f and s == step for s, f in zip(steps, failed))
        share *= 1 - failures / at_risk
        found.append(Survival(step, at_risk, failures, share))
    return found


def median_step(curve: Sequence[Survival]) -> float:
    """Where half of the runs have failed; infinite if half never do."""
    return next((float(s.step) for s in curve if s.share <= 0.5), math.inf)


# ---- two arms that share their seeds --------------------------------------------------------------

@dataclass(frozen=True)
class Paired:
    """Two arms on the seeds that both have: who failed alone, and how their last losses differ.

    `p` is the exact two-sided McNemar test's, `p_loss` the sign test's on the differences of the last loss
    (where both trained); `difference` is their mean, `se` its standard error.
    """

    pairs: int
    only_a: int
    only_b: int
    p: float
    difference: float
    se: float
    p_loss: float


def binomial(successes: int, trials: int) -> float:
    """Two-sided p of so many successes, or as few, at a rate of one half."""
    tail = min(successes, trials - successes)
    return min(1.0, 2 * sum(math.comb(trials, k) for k in range(tail + 1)) / 2**trials)


def paired(a: Mapping[int, tuple[bool, float]], b: Mapping[int, tuple[bool, float]]) -> Paired:
    """Compares (failed, last loss) by seed.

    Source: McNemar, Psychometrika 12, 1947, with the binomial distribution.
    """
    seeds = sorted(a.keys() & b.keys())
    only_a = sum(a[s][0] and not b[s][0] for s in seeds)
    only_b = sum(b[s][0] and not a[s][0] for s in seeds)
    differences = [a[s][1] - b[s][1] for s in seeds if not (a[s][0] or b[s][0])]
    n = len(differences)
    mean = sum(differences) / n if n else math.nan
    se = math.sqrt(sum((d - mean)**2 for d in differences) / (n - 1) / n) if n > 1 else math.nan
    up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Paired(len(seeds), only_a, only_b, binomial(only_a, only_a + only_b), mean, se, binomial(up, up + down))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; NaN where there are too few."""
    n = len(values)
    mean = sum(values) / n if n else math.nan
    return mean, math.sqrt(sum((v - mean)**2 for v in values) / (n - 1)) if n > 1 else math.nan


