"""`cuflash study isolate | sweep | cures | bisect`: what each runs and measures; model/why_report.py writes it up."""
import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from cuflash.model import blas, session, study_arms
from cuflash.model.bisect import FAILING, SAVING, Bisection, Decision, Subset, Undecided
from cuflash.model.config import TrainConfig, resolve
from cuflash.model.data import load
from cuflash.model.layers import LAYERS
from cuflash.model.limits import Limits, limits
from cuflash.model.run import CONFIG, Run, write_whole
from cuflash.model.runner import free_gpu
from cuflash.model.screen import ALL, Ranked, Screened, ranking, screen
from cuflash.model.states import states_before
from cuflash.model.study_scales import Scale
from cuflash.model.train import Trainer
from cuflash.model.trials import Arm, Results, Study, Tally, Trial, merged, milliseconds
from cuflash.model.verdict import Criterion

T = TypeVar("T")


def kept(path: pathlib.Path, key: Any, kind: type, make: Callable[[], list[Any]]) -> list[Any]:
    """Rows of a dataclass, from a JSON file if it has them under this key, else made and written there."""
    rows = stored(path, key, kind)
    if rows is None:
        rows = make()
        keep(path, key, rows)
    return rows


def stored(path: pathlib.Path, key: Any, kind: type) -> list[Any] | None:
    """Rows that `keep` has written under this key."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text("utf-8"))
    return [kind(**row) for row in found["rows"]] if found["key"] == json.loads(json.dumps(key)) else None


def keep(path: pathlib.Path, key: Any, rows: Sequence[Any]) -> None:
    text = json.dumps({"key": key, "rows": [asdict(r) for r in rows]}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def key_of(run: Run, onset: int, states: int, samples: int) -> dict[str, Any]:
    """What is measured at the states before a failure depends on, without the checkpoints themselves, which may be
    gone by now."""
    config = hashlib.sha256((run.path / CONFIG).read_bytes()).hexdigest()
    return {"run": f"{run.path.parent.name}/{run.path.name}", "config": config, "onset": onset, "states": states,
            "samples": samples}


@dataclass
class Found:
    """What a study of arms found: arms in their order, tallies, runs; notes of what could not be done."""

    arms: list[Arm]
    tallies: list[Tally]
    trials: list[Trial]
    notes: list[str] = field(default_factory=list)

    def tally(self, name: str) -> Tally | None:
        return next((t for t in self.tallies if t.arm == name), None)

    def of(self, name: str) -> list[Trial]:
        return [t for t in self.trials if t.arm == name]


def decide(study: Study, arms: Sequence[Arm]) -> Found:
    """Each arm paired with its control, fp32 attention."""
    tallies = study.decide(arms, against=study_arms.controls(arms))
    return Found(list(arms), tallies, [t for a in arms for t in study.trials(a)])


def isolate(study: Study, precision: str, scale: Scale, own: Sequence[Arm] = ()) -> Found:
    """The isolation table; the run of low precision comes first where heads are chosen by it."""
    config = resolve({name: value for name, value in study.common.items() if name != "fork"})
    heads, notes = scale.heads, list[str]()
    if heads is None:
        base, seeds = study_arms.base(precision), study.seeds[:1]
        study.check(own)
        study.decide([base], seeds=seeds, test=False)
        first = study.trials(base, seeds)
        if not first:
            return Found([], [], [])
        heads = strongest_heads(Run(study.folder / first[0].folder), scale.layer)
        if not heads:
            notes = [f"No row of chosen heads: {first[0].folder} has no spectral norms to choose them by; `--heads` "
                     "names them."]
    rows = study_arms.isolation(precision, n_layer=config.n_layer, layer=scale.layer, heads=heads)
    found = decide(study, [*rows, *own])
    return dataclasses.replace(found, notes=notes)


def strongest_heads(run: Run, layer: int) -> tuple[int, ...]:
    """The half of a layer's heads whose W_Q had the largest spectral norms at the end of a run; none where it has
    measured none, as one that failed in its first step."""
    name = f"spectral/L{layer:02d}/q_heads"
    layers = run.layers if (run.path / LAYERS).is_file() else {}
    norms = layers[name] if name in list(layers) else np.empty((0, 1))
    norms = norms[np.isfinite(norms).all(axis=1)]
    if not len(norms):
        return ()
    last = norms[-1]
    return tuple(sorted(np.argsort(-last, kind="stable")[:max(1, len(last) // 2)].tolist()))


# ---- sweep ----------------------------------------------------------------------------------------

LIMIT_BETAS = (1.001, 1.01, 1.1, *study_arms.BETAS)


def limit_table(precision: str) -> list[Limits]:
    """Where each fix, and each β and γ, stops working."""
    fixes = [f"qiu-b7:beta={b:g}" for b in LIMIT_BETAS] + ["qiu-b2", "capped"]
    fixes += [f"shift:beta=2,gamma={g:g}" for g in study_arms.GAMMAS]
    return [row for f in fixes for row in limits(f, precision)]


# ---- cures ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step of an arm that ran alone: the fastest of some."""

    arm: str
    options: str
    ms: float


def timings(study: Study, arms: Sequence[Arm], steps: int) -> list[Timing]:
    """Each arm by itself, one after the other, in a process of the study's executor; kept in timing.json.

    Once time is over, those that have been measured.
    """
    path = study.folder / "timing.json"
    key = {"common": study.common, "steps": steps, "device": session.device(
        session.options(None, merged(study.common, arms[0].options)))}
    known = {(t.arm, t.options): t for t in stored(path, key, Timing) or ()}
    for arm in arms:
        if (arm.name, arm.flags) in known or study.over:
            continue
        results = Results(study.executor)
        results.submit(arm.name, step_ms, merged(study.common, arm.options), steps)
        while (ended := results.next(study.board.interval)) is None:
            pass
        found = Timing(arm.name, arm.flags, ended[1])
        known[arm.name, arm.flags] = found
        keep(path, key, list(known.values()))
        study.board.say(f"{arm.name}: {milliseconds(found.ms)} a step, alone")
    missing = [a.name for a in arms if (a.name, a.flags) not in known]
    if missing:
        study.left.append(f"time of a step alone: {len(missing)} of {len(arms)} arms")
    return [known[a.name, a.flags] for a in arms if a.name not in missing]


RATE = 3e14  # FLOP/s, a third of an H200's peak


def step_ms(options: dict[str, Any], steps: int) -> float:
    """The fastest of so many steps of a new training, in milliseconds, after two that compile and allocate."""
    config = session.options(None, options)
    blas.one_thread_if_small(config.n_embd)
    trainer, best = Trainer(config, load(config.data)), float("inf")
    for i in range(steps + 2):
        begun = time.perf_counter()
        trainer.settled(trainer.step())
        if i >= 2:
            best = min(best, 1000 * (time.perf_counter() - begun))
    del trainer
    free_gpu(config)
    return best


def expected_ms(config: TrainConfig) -> tuple[float, str]:
    """Milliseconds of a step, and how they are known: one micro-batch measured on a GPU, else a stated rate."""
    if session.use_gpu(config):
        one = merged(config.to_dict(), {"grad_accum": 1})
        return config.grad_accum * step_ms(one, 2), "measured on one micro-batch"
    flops = config.gpt().flops_per_token() * config.batch_size * config.grad_accum * config.block_size
    return flops / RATE * 1000, f"at a stated rate of {RATE / 1e12:g} TFLOP/s, as no GPU is here to measure"


def spread_out(study: Study, names: Sequence[T], job: Callable[[T], tuple[Any, ...]], done: str) -> list[Any]:
    """What job(name), a function and its arguments, gives for each name; several at once on the CPU."""
    results, found = Results(study.helpers), dict[T, Any]()
    for name in names:
        results.submit(name, *job(name))
    while results.open:
        if ended := results.next(study.board.interval):
            found[ended[0]] = ended[1]
            study.board.live([f"  {done} {len(found)} of {len(names)}"])
    study.board.live([])
    study.board.say(f"{done} {len(names)} {'state' if len(names) == 1 else 'states'}"
                    + (" and layers" if names and isinstance(names[0], tuple) else ""))
    return [found[name] for name in names]


# ---- bisect ---------------------------------------------------------------------------------------

@dataclass
class Bisected:
    """What `bisect` found. `failing` and `saving` are None where there is no such set, `why` says why."""

    run: str
    onset: int
    states: list[int]
    screened: list[Screened]
    ranked: list[Ranked]
    decisions: list[Decision] = field(default_factory=list)
    failing: Subset | None = None
    saving: Subset | None = None
    why: dict[str, str] = field(default_factory=dict)
    runs: int = 0


def failing_run(study: Study, precision: str) -> Trial | None:
    """The first run of low precision that fails, over the study's seeds; None where none does yet."""
    arm = study_arms.base(precision)
    for seed in study.seeds:
        study.decide([arm], seeds=(seed,), test=False)
        found = study.trials(arm, (seed,))
        if not found:
            return None
        if found[0].failed:
            return found[0]
    return None


def screened(study: Study, run: Run, onset: int, states: int, samples: int, out: pathlib.Path) -> list[Screened]:
    """Screens so many states before the failure, several at once, kept in screen.json."""
    def make() -> list[Screened]:
        steps = states_before(run, onset, states)
        layers = range(resolve(run.config["train"]).n_layer)
        rows = spread_out(study, [(step, layer) for step in steps for layer in layers],
                          lambda place: (screen, run.path, place[0], range(samples), [place[1]]), "screened")
        return [row for some in rows for row in some]
    return kept(out / "screen.json", key_of(run, onset, states, samples), Screened, make)


def bisect(study: Study, run: Run, onset: int, out: pathlib.Path, *, states: int = 3, samples: int = 2, top: int = 3,
           horizon: int = 0, kinds: Sequence[str] = (FAILING, SAVING)) -> Bisected:
    """Screens the states before a failure, then looks for the minimal sets on forks of the first of them.

    Args:
        onset: the step where the failure shows.
        top: sites that are tried alone, at most.
        horizon: steps of a fork; 0: `forked_steps`.

    Raises:
        ValueError: the run has no state from before its failure, its precision rounds otherwise in some layers or
            heads, or the horizon is too short for the criterion.
    """
    config = resolve(run.config["train"])
    if places := study_arms.own_places(config.resolved_precision()):
        raise ValueError(f"{run.path}: its precision has roundings of their own in some places ({', '.join(places)}), "
                         "which a set of sites cannot stand for; bisect a run whose attention rounds alike everywhere")
    if horizon and horizon // config.log_every <= study.criterion.rows:
        raise ValueError(f"--horizon {horizon}: has {horizon // config.log_every} logged losses, and no fork can fail "
                         f"before the mean of {study.criterion.rows} rises above an earlier one: give "
                         f"{(study.criterion.rows + 1) * config.log_every} or more")
    rows = screened(study, run, onset, states, samples, out)
    steps = sorted({r.step - 1 for r in rows})
    found = Bisected(str(run.path), onset, steps, rows, ranking(rows))
    end = steps[0] + (horizon or forked_steps(onset - steps[0], study.criterion, config.log_every))
    fork = f"{run.path}@{steps[0]}"
    options = {"steps": end, "round": config.round}
    search = Bisection(study, fork, config.resolved_precision(), options, out / "decisions.json", config.n_layer,
                       config.n_head)
    ranked = [r.site for r in found.ranked if r.site != ALL]
    for kind in kinds:
        try:
            subset, why = search.minimal(kind, ranked, top)
        except Undecided as e:
            subset, why = None, "time is over"
            study.left.append(f"bisect, the minimal {kind} set: at {e}")
        found.why[kind] = why
        if kind == FAILING:
            found.failing = subset
        else:
            found.saving = subset
    found.decisions, found.runs = search.decisions, search.runs
    return found


def forked_steps(before: int, criterion: Criterion, log_every: int) -> int:
    """How long a fork goes on that begins so many steps before a failure: twice as long, and two means of the
    criterion more, one to begin with and one that has risen; ten logged ones at least."""
    return max(2 * before + 2 * criterion.rows * log_every, 10 * log_every)

