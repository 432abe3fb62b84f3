"""`cuflash study why`: the figures of arXiv 2510.04212 from end to end, one phase after the other, each resumable."""
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cuflash import monte_carlo
from cuflash.explain import explain
from cuflash.model import study_arms
from cuflash.model.limits import Limits
from cuflash.model.run import Run
from cuflash.model.states import layer_states, states_before
from cuflash.model.study_failures import Found, decide, isolate, kept, limit_table, spread_out
from cuflash.model.study_scales import Scale
from cuflash.model.trials import Arm, Study
from cuflash.model.why_measures import DeltaRow, Place, Term, Terms, delta_rows, hottest, record, term_cosine, terms
from cuflash.monte_carlo import Bias

MAPS, ROW = "errors.h5", "row.h5"
PHASES = ("trainings", "isolate", "delta", "monte-carlo", "cures")


@dataclass(frozen=True)
class Likeness:
    """Cosine of the rank-1 terms of the most wrong tokens of two states, as a row of likeness.csv."""

    step_a: int
    token_a: int
    step_b: int
    token_b: int
    cosine: float


@dataclass
class Audited:
    """Of the first run of low precision that fails: its states, δ's errors there, their directions."""

    run: pathlib.Path
    onset: int
    states: list[int]
    delta: list[DeltaRow]
    terms: list[Terms]
    shown: list[Term]
    likeness: list[Likeness]
    place: Place


@dataclass
class Why:
    """Everything that the report is made of; a phase that has not been reached is None or empty."""

    scale: str
    example: str
    trainings: Found
    isolated: Found | None = None
    audited: Audited | None = None
    bias: list[Bias] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    cures: Found | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def every(self) -> list[Found]:
        return [f for f in (self.trainings, self.isolated, self.cures) if f is not None]


def trainings(precision: str) -> list[Arm]:
    """The arms of figures 2 and 7."""
    return [study_arms.base(precision), study_arms.reference(precision), *study_arms.fixes(precision)]


def why(study: Study, scale_name: str, scale: Scale, precision: str, *, states: int = 6, samples: int = 2,
        phases: Sequence[str] = PHASES) -> Why:
    """Trains, audits and measures, in the order of what matters most when time is short."""
    found = Why(scale_name, explain(""), decide(study, trainings(precision)))
    if "delta" in phases:
        found.audited = _audited(study, found, precision, states, samples)
    if "isolate" in phases:
        found.isolated = isolate(study, precision, scale)
    if "cures" in phases:
        found.cures = decide(study, study_arms.cures(precision, short=True))
    if "monte-carlo" in phases:
        low = "bf16" if precision.endswith(".toml") else precision  # a user's may overflow, which has no mean
        names = list(dict.fromkeys((low, "bf16-fa2")))
        found.bias = kept(study.folder / "bias.json", names, Bias, lambda: list(monte_carlo.table(names)))
        found.limits = limit_table(low)
    return found


def _audited(study: Study, found: Why, precision: str, states: int, samples: int) -> Audited | None:
    """None, with a note, where no run of low precision has failed."""
    failed = [t for t in found.trainings.of(study_arms.label(precision)) if t.failed]
    if not failed:
        found.notes.append(f"No run of {precision} has failed, so there is no state before a failure to look at.")
        return None
    run = Run(study.folder / failed[0].folder)
    try:
        steps = states_before(run, failed[0].onset, states)
    except ValueError as e:
        found.notes.append(str(e))
        return None

    def make() -> list[DeltaRow]:
        rows = spread_out(study, steps, lambda step: (delta_rows, run.path, step, range(samples)), "audited")
        return [r for some in rows for r in some]

    rows = kept(study.folder / "delta.json", {"run": failed[0].folder, "states": steps, "samples": samples}, DeltaRow,
                make)
    layer, head = hottest(rows)
    measured, shown = [], []
    for step in steps:
        state, = layer_states(run.path, step, range(samples), [layer])
        one, term = terms(state, head)
        measured.append(one)
        shown.append(term)
    place = record(run.path, steps[-1], state, head, study.folder / MAPS, study.folder / ROW)
    likeness = [Likeness(a.step, a.token, b.step, b.token, term_cosine(a, b))
                for i, a in enumerate(shown) for b in shown[i + 1:]]
    return Audited(run.path, failed[0].onset, steps, rows, measured, [shown[0], shown[-1]][:len(shown)], likeness,
                   place)


def first_touched(found: Found, folder: pathlib.Path) -> dict[str, Run]:
    """The first run of each arm that has one, for figure 13."""
    return {a.name: Run(folder / trials[0].folder) for a in found.arms if (trials := found.of(a.name))}

