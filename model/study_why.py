"""`cuflash study why`: the figures of arXiv 2510.04212 from end to end, one phase after the other, each resumable."""
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from cuflash import monte_carlo
from cuflash.explain import explain
from cuflash.model import study_arms
from cuflash.model.limits import Limits
from cuflash.model.run import Run
from cuflash.model.states import NoState, layer_states, states_before
from cuflash.model.study_failures import Found, decide, isolate, keep, kept, key_of, limit_table, spread_out, stored
from cuflash.model.study_scales import Scale
from cuflash.model.trials import Arm, Study
from cuflash.model.why_measures import (
    DeltaRow,
    Place,
    Term,
    Terms,
    delta_rows,
    hottest,
    read_terms,
    record,
    term_cosine,
    terms,
    write_terms,
)
from cuflash.monte_carlo import Bias

BIAS = "bias.json"
DELTA, LOOKED, SHOWN, MAPS, ROW = "delta.json", "looked.json", "terms.h5", "errors.h5", "row.h5"
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


@dataclass(frozen=True)
class Looked:
    """What `Audited` has of its hottest head, as looked.json keeps it."""

    terms: list[Terms]
    likeness: list[Likeness]
    place: Place

    def typed(self) -> "Looked":
        """From JSON's dictionaries."""
        rows = cast("dict[str, Any]", vars(self))
        return Looked([Terms(**t) for t in rows["terms"]], [Likeness(**x) for x in rows["likeness"]],
                      Place(**rows["place"]))


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
        if stored(study.folder / BIAS, names, Bias) is None and study.over:
            study.left.append("figure 6: the bias of Ō over many random rows")
        else:
            found.bias = kept(study.folder / BIAS, names, Bias, lambda: list(monte_carlo.table(names)))
            found.limits = limit_table(low)
    return found


def _audited(study: Study, found: Why, precision: str, states: int, samples: int) -> Audited | None:
    """None, with a note, where no run of low precision has failed, or with what is left, where time is over.

    What it takes from checkpoints is kept beside the report, so that they are needed once.
    """
    failed = [t for t in found.trainings.of(study_arms.label(precision)) if t.failed]
    if not failed:
        found.notes.append(f"No run of {precision} has failed, so there is no state before a failure to look at.")
        return None
    run, onset = Run(study.folder / failed[0].folder), failed[0].onset
    key = key_of(run, onset, states, samples)

    def make() -> list[DeltaRow]:
        steps = states_before(run, onset, states)
        rows = spread_out(study, steps, lambda step: (delta_rows, run.path, step, range(samples)), "audited")
        return [r for some in rows for r in some]

    try:
        if stored(study.folder / DELTA, key, DeltaRow) is None and study.over:
            study.left.append("figures 3 to 6, 11 and 12, of a run that fails")
            return None
        rows = kept(study.folder / DELTA, key, DeltaRow, make)
        looked = _looked(study, run, rows, key, samples)
    except NoState as e:
        found.notes.append(str(e))
        return None
    shown = read_terms(study.folder / SHOWN)
    return Audited(run.path, onset, _steps(rows), rows, looked.terms, shown, looked.likeness, looked.place)


def _steps(rows: Sequence[DeltaRow]) -> list[int]:
    """Of the checkpoints, one before that of the pass."""
    return sorted({r.step - 1 for r in rows})


def _looked(study: Study, run: Run, rows: Sequence[DeltaRow], key: object, samples: int) -> Looked:
    """The hottest head in each state; writes the terms that are shown, the maps of errors, and a row's dump."""
    files = [study.folder / name for name in (SHOWN, MAPS, ROW)]
    if all(f.is_file() for f in files) and (found := stored(study.folder / LOOKED, key, Looked)):
        return found[0].typed()
    layer, head = hottest(rows)
    measured, shown, state = [], [], None
    for step in _steps(rows):
        if step not in dict(run.checkpoints()):
            raise NoState(f"{run.path} has no checkpoint of step {step} any more: figures 4 to 6 and 12 cannot be made")
        state, = layer_states(run.path, step, range(samples), [layer])
        one, term = terms(state, head)
        measured.append(one)
        shown.append(term)
    assert state is not None
    (study.folder / LOOKED).unlink(missing_ok=True)  # of the files that are now written anew
    write_terms(files[0], [shown[0], shown[-1]][:len(shown)])
    place = record(run.path, _steps(rows)[-1], state, head, *files[1:])
    likeness = [Likeness(a.step, a.token, b.step, b.token, term_cosine(a, b))
                for i, a in enumerate(shown) for b in shown[i + 1:]]
    found = Looked(measured, likeness, place)
    keep(study.folder / LOOKED, key, [found])
    return found
