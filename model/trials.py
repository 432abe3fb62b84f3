"""Arms × seeds until the sequential test decides: the one loop that every study of failures is made of.

    with Study(folder, common, seeds=range(1, 8), criterion=Criterion(), jobs=2) as study:
        tallies = study.decide([Arm("bf16", {"precision": "bf16"}), Arm("fp32", {"precision": "fp32"})])

Arms of one seed have its weights and its batches in common. Runs lie in FOLDER/runs/ARM/seed-N.
"""
import contextlib
import hashlib
import itertools
import math
import os
import pathlib
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from cuflash.errors import unknown
from cuflash.model import session
from cuflash.model.board import Board
from cuflash.model.config import FIELDS
from cuflash.model.run import Lock
from cuflash.model.runner import STOPPED, Executor, Here, Outcome, Results, Task, look, outcome, processes, work
from cuflash.model.verdict import (
    UNDECIDED,
    Criterion,
    Paired,
    kaplan_meier,
    median_step,
    needed,
    paired,
    sequential,
    spread,
    wilson,
)

MANY = ("round", "set")
SEEDED = ("seed", "data_seed")  # what a number of a run sets: its weights, its batches
FEW = 4  # checkpoints of a run in so many parts, to go on from
FINE = 30  # of an arm whose states before the failure are looked at
KEPT = 6  # of these, the last ones
LONGEST = 60  # name of a folder


@dataclass(frozen=True)
class Arm:
    """One setting: its name, the options that are its own, what it stands for.

    `keep`: checkpoints are written often and stay, with spectral norms, to be looked at. `paper`: what the paper
    says of it, fails or trains. `low`: the arm of low precision that it is set against, where its own options do
    not say it.
    """

    name: str
    options: dict[str, Any]
    note: str = ""
    keep: bool = False
    paper: str = ""
    low: str = ""

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """`NAME: --round attn.o=bf16:sr --fix my.py:MyFix --lr 3e-3`, in the options of `cuflash train`.

        Raises:
            ValueError: no name, or an option that `cuflash train` has not.
        """
        name, colon, rest = text.partition(":")
        if not colon or not name.strip() or name.startswith("-"):
            raise ValueError(f"{text!r}: write 'NAME: --round attn.o=bf16:sr --fix on', options as of cuflash train")
        words, options = shlex.split(rest), dict[str, Any]()
        while words:
            flag, equals, value = words.pop(0).partition("=")
            option = flag.removeprefix("--").replace("-", "_")
            if not flag.startswith("--") or option not in FIELDS:
                raise unknown(f"option of {name.strip()}", flag, ["--" + f.replace("_", "-") for f in FIELDS])
            if not equals and FIELDS[option] is not bool:
                if not words:
                    raise ValueError(f"{text!r}: {flag} needs a value")
                value = words.pop(0)
            value = typed(option, value or "true")
            options[option] = options.get(option, ()) + value if option in MANY else value
        return cls(name.strip(), options, "the user's own")

    @property
    def flags(self) -> str:
        """As `cuflash train` takes it."""
        words = []
        for name, value in self.options.items():
            flag = "--" + name.replace("_", "-")
            words += [f"{flag} {shlex.quote(str(v))}" for v in (value if name in MANY else (value,))]
        return " ".join(words).replace(" True", "")

    @property
    def folder(self) -> str:
        """In runs/. One of bf16 is named without it, whatever the study calls it."""
        name = self.name.removeprefix("bf16: ").replace("Ō", "O-bar")
        precision = pathlib.Path(self.options.get("precision", "bf16")).name.removesuffix(".toml")
        if precision != "bf16" and name != precision and not name.startswith((f"{precision}: ", f"{precision}, ")):
            name = f"{precision} {name}"
        name = re.sub(r"[^A-Za-z0-9.+=_-]+", "-", name).strip("-")
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        if not name.strip("."):  # nothing of it can stand in a path
            return f"arm-{digest}"
        return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{digest}"


def typed(name: str, text: str) -> Any:
    """An option's value from a text.

    Raises:
        ValueError: it is not of the option's type.
    """
    kind: Any = FIELDS[name]
    if name in MANY:
        return (text,)
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"option {name} must be true or false, got {text!r}")
        return text == "true"
    try:
        return kind(text)
    except ValueError as e:
        raise ValueError(f"option {name} must be {kind.__name__}, got {text!r}") from e


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Options over options; --round and --set are added up."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = (*found.get(name, ()), *value) if name in MANY else value
    return found


@dataclass(frozen=True)
class Trial:
    """One run of an arm, as a row of runs.csv."""

    arm: str
    seed: int
    failed: bool
    onset: int
    step: int
    best: float
    loss: float
    val_loss: float
    ms: float
    seconds: float
    folder: str
    message: str

    @classmethod
    def of(cls, arm: str, seed: int, o: Outcome, folder: str) -> "Trial":
        return cls(arm, seed, o.failed, o.onset, o.step, o.best, o.loss, o.val_loss, o.ms, o.seconds, folder,
                   o.message)


@dataclass(frozen=True)
class Tally:
    """What the runs of an arm say, as a row of arms.csv.

    Attributes:
        low, high: 95 % interval of the failure rate.
        onset: median step of failure by Kaplan and Meier, infinite where less than half fail.
        loss, loss_sd: of the last loss of the runs that trained, mean and standard deviation.
        against: the arm that pairs are made with; the next ones are those of `Paired`, A being this arm.
    """

    arm: str
    options: str
    note: str
    paper: str
    verdict: str
    failures: int
    runs: int
    low: float
    high: float
    onset: float
    loss: float
    loss_sd: float
    ms: float
    against: str = ""
    pairs: int = 0
    only_this: int = 0
    only_other: int = 0
    p: float = math.nan
    difference: float = math.nan
    difference_se: float = math.nan
    p_loss: float = math.nan

    @property
    def rate(self) -> float:
        return self.failures / self.runs if self.runs else math.nan


def tally(arm: Arm, trials: Sequence[Trial], against: str = "", others: Sequence[Trial] = ()) -> Tally:
    """From trials in the order of their seeds."""
    failed = [t.failed for t in trials]
    trained = [t.loss for t in trials if not t.failed]
    curve = kaplan_meier([t.onset if t.failed else t.step for t in trials], failed)
    ms = sorted(t.ms for t in trials)
    found: tuple[Any, ...] = ()
    if against and against != arm.name:
        pair: Paired = paired(*({t.seed: (t.failed, t.loss) for t in some} for some in (trials, others)))
        found = (against, pair.pairs, pair.only_a, pair.only_b, pair.p, pair.difference, pair.se, pair.p_loss)
    return Tally(arm.name, arm.flags, arm.note, arm.paper, sequential(failed), sum(failed), len(failed),
                 *wilson(sum(failed), len(failed)), median_step(curve), *spread(trained),
                 ms[len(ms) // 2] if ms else math.nan, *found)


class Study:
    """A folder of runs, and what limits them.

    Args:
        common: options of every arm.
        seeds: at most these, in this order.
        least: so many of them even where fewer decide, for pairs and rates.
        budget: seconds after which runs write a checkpoint and end.
        jobs: runs at once; 0 does them in this process, one after the other.
        executor: instead of `jobs` processes of this machine; anything with `submit(fn, *args)`.
        stop_early: a run ends where it has failed.

    Attributes:
        left: what has not been decided for want of time, a line each.
    """

    def __init__(self, folder: pathlib.Path, common: Mapping[str, Any], *, seeds: Iterable[int], criterion: Criterion,
                 least: int = 0, jobs: int = 1, budget: float = math.inf, executor: Executor | None = None,
                 stop_early: bool = True, board: Board | None = None) -> None:
        self.folder, self.common, self.seeds = folder, dict(common), tuple(seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds}: name one or more, each once")
        if jobs < 0:
            raise ValueError(f"jobs is {jobs}; valid: 1 or more, or 0 for this process")
        self.criterion, self.least, self.stop_early = criterion, least, stop_early
        self.jobs = jobs or 1
        self.board = board or Board()
        self.deadline = time.time() + budget
        self.stop_file = folder / ".stop"
        self.left: list[str] = []
        self.interrupted = False
        self._executor, self._exit = executor or (None if jobs else Here()), contextlib.ExitStack()
        self._pool: Executor | None = None
        self._helpers: Executor | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._exit.enter_context(Lock(self.folder, "study folder"))
        self._exit.callback(self.stop_file.unlink, missing_ok=True)  # once no run is left that asks for it
        self.stop_file.unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._ask)
            self._exit.callback(signal.signal, signal.SIGINT, before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is not None:
            self.stop_file.touch()  # runs of other processes end, too
        self.board.close()
        self._exit.close()

    def _ask(self, number: int, frame: Any) -> None:
        """Ctrl-C: the runs end with a checkpoint; a second one interrupts at once."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.stop_file.touch()
        self.board.say("stopping after this step; once more to stop at once")

    @property
    def over(self) -> bool:
        """Time is spent, or the user asked to stop."""
        return self.interrupted or time.time() >= self.deadline

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            self._executor = self._pool = self._exit.enter_context(processes(self.jobs))
        return self._executor

    @property
    def helpers(self) -> Executor:
        """For work of the CPU alone: more processes than runs at once, where cores allow."""
        if self._helpers is None:
            own = self._executor is None or self._pool is not None
            cores = max(self.jobs, (os.cpu_count() or 1) // 2)
            self._helpers = self._exit.enter_context(processes(cores, one_thread=True)) if own else self.executor
        return self._helpers

    # ---- runs

    def path(self, arm: Arm, seed: int) -> pathlib.Path:
        return self.folder / "runs" / arm.folder / f"seed-{seed}"

    def task(self, arm: Arm, seed: int, seeded: Sequence[str] = SEEDED) -> Task:
        options = merged(self.common, arm.options, dict.fromkeys(seeded, seed))
        often: dict[str, Any] = {"checkpoint_every": max(1, _option(options, "steps") // (FINE if arm.keep else FEW))}
        if arm.keep:
            often["keep"] = self._kept(often | options) if self.stop_early else 0
        else:
            often |= {"keep": 1, "spectral_every": 0}
        return Task(str(self.path(arm, seed)), often | options, self.criterion, self.stop_early, self.deadline,
                    str(self.stop_file), arm.keep)

    def _kept(self, options: Mapping[str, Any]) -> int:
        """Checkpoints that must stay so that KEPT come before a failure: it began a criterion's rows before it shows,
        and the step at which it ends writes one, too."""
        rows = self.criterion.rows * _option(options, "log_every")
        return KEPT + 1 + math.ceil(rows / max(1, options["checkpoint_every"]))

    def decide(self, arms: Sequence[Arm], *, against: Mapping[str, str] | None = None, seeded: Sequence[str] = SEEDED,
               seeds: Sequence[int] = (), test: bool = True) -> list[Tally]:
        """Runs each arm on one seed after the other until its verdict is clear, `jobs` runs at once.

        Args:
            against: the arm that each one is paired with, by name.
            seeded: the options that a seed sets.
            seeds: instead of the study's.
            test: False runs all of the seeds.

        Raises:
            ValueError: two arms of one name, options that are not valid, or a run's folder that has others.
        """
        if len({a.folder for a in arms}) < len(arms):
            raise ValueError(f"arms have names in common: {', '.join(a.name for a in arms)}")
        seeds = tuple(seeds) or self.seeds
        tasks = {(a.name, s): self.task(a, s, seeded) for a in arms for s in seeds}
        done = {key: found for key, task in tasks.items() if (found := self._taken(task)) and found.done}
        undecided = any(self._wanted(a, seeds, done, test) for a in arms)
        results = Results(self.executor) if undecided and not self.over else None
        started: set[tuple[str, int]] = set()
        while results is not None:
            while not self.over and len(results.open) < self.jobs:
                key = self._next(arms, seeds, done, results.open, started, test)
                if key is None:
                    break
                started.add(key)
                self.board.say(f"{_title(*key)}: runs")
                results.submit(key, work, tasks[key])
            if not results.open:
                break
            self._show(results, tasks)
            ended = results.next(self.board.interval)
            if ended is not None:
                key, found = ended
                self.board.say(f"{_title(*key)}: {sentence(found)}")
                if found.done:
                    done[key] = found
        self.board.live([])
        trials = {a.name: self._trials(a, seeds, done) for a in arms}
        other = {a.name: (against or {}).get(a.name, "") for a in arms}
        tallies = [tally(a, trials[a.name], other[a.name], trials.get(other[a.name], ())) for a in arms]
        lines = []
        for t in tallies:
            if test and t.verdict == UNDECIDED:
                used = len(trials[t.arm]) == len(seeds)
                more = needed([x.failed for x in trials[t.arm]])
                lines.append(f"{t.arm}: undecided after {t.runs} run{'s' * (t.runs != 1)}, " + (
                    "all of its seeds; --seeds gives it more" if used else f"{more} more at least"))
            elif not test and t.runs < len(seeds):
                lines.append(f"{t.arm}: {len(seeds) - t.runs} of {len(seeds)} runs")
        self.left += [line for line in lines if line not in self.left]  # studies of one command share arms
        return tallies

    def check(self, arms: Iterable[Arm]) -> None:
        """Before any run begins.

        Raises:
            ValueError: an arm's options are not valid, or its run's folder has others.
        """
        for arm in arms:
            for seed in self.seeds:
                look(self.task(arm, seed))

    def trials(self, arm: Arm, seeds: Sequence[int] = (), seeded: Sequence[str] = SEEDED) -> list[Trial]:
        """The runs of an arm that have ended, of its seeds up to the first that has not."""
        seeds = tuple(seeds) or self.seeds
        tasks = {(arm.name, s): self.task(arm, s, seeded) for s in seeds}
        return self._trials(arm, seeds, {k: o for k, t in tasks.items() if (o := self._taken(t)) and o.done})

    def _trials(self, arm: Arm, seeds: Sequence[int], done: Mapping[tuple[str, int], Outcome]) -> list[Trial]:
        return [Trial.of(arm.name, s, done[arm.name, s], self.path(arm, s).relative_to(self.folder).as_posix())
                for s in _first(arm, seeds, done)]

    @staticmethod
    def _taken(task: Task) -> Outcome | None:
        return look(task)[1]

    def _next(self, arms: Sequence[Arm], seeds: Sequence[int], done: Mapping[tuple[str, int], Outcome],
              running: set[tuple[str, int]], started: set[tuple[str, int]], test: bool) -> tuple[str, int] | None:
        """The next run: of the arm that has had the fewest."""
        found: tuple[int, str, int] | None = None
        for arm in arms:
            seed = next((s for s in self._wanted(arm, seeds, done, test)
                         if (arm.name, s) not in done and (arm.name, s) not in started), None)
            had = sum((arm.name, s) in done or (arm.name, s) in running for s in seeds)
            if seed is not None and (found is None or had < found[0]):
                found = had, arm.name, seed
        return found and found[1:]

    def _wanted(self, arm: Arm, seeds: Sequence[int], done: Mapping[tuple[str, int], Outcome],
                test: bool) -> Sequence[int]:
        """The seeds whose runs may be made at once: no more than could decide an arm."""
        had = [done[arm.name, s].failed for s in _first(arm, seeds, done)]
        more = max(needed(had), self.least - len(had)) if test else len(seeds)
        return seeds[len(had):len(had) + more]

    def _show(self, results: Results, tasks: Mapping[tuple[str, int], Task]) -> None:
        if not self.board.terminal:
            return
        lines = []
        for key in sorted(results.open):
            task = tasks[key]
            try:
                steps = _option(task.options, "steps")
                o = outcome(task.path, self.criterion, steps)
            except (ValueError, OSError):  # it has not begun, or a line is being written
                lines.append(f"  {_title(*key):<40} starts")
                continue
            lines.append(f"  {_title(*key):<40} step {o.step:>6}/{steps}  loss {o.loss:8.4f}  best {o.best:8.4f}  "
                         f"{o.ms:.0f} ms")
        left = self.deadline - time.time()
        self.board.live(lines + ([f"  {left:.0f} s left"] if math.isfinite(left) else []))


def _option(options: Mapping[str, Any], name: str) -> Any:
    return options[name] if name in options else getattr(session.options(None, dict(options)), name)


def _first(arm: Arm, seeds: Sequence[int], done: Mapping[tuple[str, int], Outcome]) -> list[int]:
    """The seeds that have ended, up to the first that has not. Those behind it do not count yet: a run that fails ends
    sooner than one that trains, so the runs that end first are no sample of all."""
    return list(itertools.takewhile(lambda s: (arm.name, s) in done, seeds))


def _title(arm: str, seed: int) -> str:
    return f"{arm}, seed {seed}"


def sentence(o: Outcome) -> str:
    """How a run ended, for a line."""
    if o.state == STOPPED:
        return f"stopped at step {o.step}, loss {o.loss:.4f}"
    if o.failed:
        what = o.message or f"loss {o.loss:.4f}, best {o.best:.4f}"
        return f"fails from step {o.onset}: {what}"
    return f"trains: loss {o.loss:.4f} at step {o.step}, {milliseconds(o.ms)} a step"


def milliseconds(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 100 else f"{ms:,.0f} ms"


