"""Trainings as jobs: one idempotent folder each, handed to anything with `submit(fn, *args)` and `.result()`.

A folder that is there and finished is taken as it is, one that was interrupted goes on from its last
checkpoint, one of other options is a ValueError. How a run ended is in its `outcome.toml`.
"""
import contextlib
import math
import multiprocessing
import os
import pathlib
import queue
import signal
import statistics
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

from cuflash import NUMERICS_VERSION, kernels
from cuflash.model import blas, session
from cuflash.model.config import TrainConfig, resolve
from cuflash.model.data import load
from cuflash.model.run import CONFIG, METRICS, Run, to_toml, write_whole
from cuflash.model.train import NonFinite, train
from cuflash.model.verdict import Criterion

OUTCOME = "outcome.toml"
LOG = "log.txt"
RUNNING, FAILED, FINISHED, STOPPED = "running", "failed", "finished", "stopped"


@dataclass(frozen=True)
class Task:
    """A run to be done: its folder and options, and when it ends.

    Attributes:
        stop_early: ends where the criterion is met, not at the last step.
        deadline: time.time() at which it writes a checkpoint and ends.
        stop_file: a file that has the same effect once it exists.
        keep: checkpoints of a run that has ended are kept.
    """

    path: str
    options: dict[str, Any]
    criterion: Criterion
    stop_early: bool = True
    deadline: float = math.inf
    stop_file: str = ""
    keep: bool = False


@dataclass(frozen=True)
class Outcome:
    """How far a run is: `state` is failed, finished, stopped (to go on) or running.

    `step` is the last logged one, `onset` that where a failure began (-1: none). `best` and `loss` are the
    lowest and the last loss, `val_loss` that at the end, `ms` the median time of a step, `seconds` all of them.
    """

    state: str
    step: int
    onset: int = -1
    best: float = math.nan
    loss: float = math.nan
    val_loss: float = math.nan
    ms: float = math.nan
    seconds: float = 0.0
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.state == FAILED

    @property
    def done(self) -> bool:
        return self.state in (FAILED, FINISHED)


class Executor(Protocol):
    """What runs are handed to."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any: ...


# ---- one run --------------------------------------------------------------------------------------

def outcome(path: str | os.PathLike[str], criterion: Criterion, steps: int, stop_early: bool = True) -> Outcome:
    """Of a run folder, from its files alone; ends that another criterion brought about do not count.

    Raises:
        ValueError: no run folder.
    """
    run = Run(path)
    rows = [r for r in run.metrics if r["step"] <= steps] if (run.path / METRICS).exists() else []
    note = tomllib.loads((run.path / OUTCOME).read_text("utf-8")) if (run.path / OUTCOME).exists() else {}
    nonfinite = bool(note.get("nonfinite")) and note["step"] <= steps
    last = int(rows[-1]["step"]) if rows else 0
    ended = not nonfinite and note.get("step", -1) >= steps
    onset = criterion.onset(rows, ended=ended)
    if onset is None and nonfinite:
        onset = note["step"]
    over = ended or nonfinite or stop_early and onset is not None and bool(note)
    state = STOPPED if not over else FINISHED if onset is None else FAILED
    before = [0, *(r["step"] for r in rows)]
    losses = [r["loss"] for r in rows]
    validated = [r["val_loss"] for r in rows if not math.isnan(r["val_loss"])]
    return Outcome(state, last, -1 if onset is None else onset, min(losses, default=math.nan),
                   losses[-1] if losses else math.nan, validated[-1] if ended and validated else math.nan,
                   statistics.median(r["ms"] for r in rows[1:] or rows) if rows else math.nan,
                   sum(r["ms"] * (r["step"] - b) for r, b in zip(rows, before)) / 1000,
                   note.get("message", "") if nonfinite else "")


def look(task: Task) -> tuple[TrainConfig, Outcome | None]:
    """The run's options resolved, and how far it is; None where it has not begun.

    Raises:
        ValueError: options that are not valid, or a folder of other ones.
    """
    config = session.options(None, task.options)
    config.resolved_precision().check_scopes(config.n_layer, config.n_head)
    if not (pathlib.Path(task.path) / CONFIG).exists():
        return config, None
    stored = Run(task.path).config
    version = stored["environment"]["numerics_version"]
    if version != NUMERICS_VERSION:
        raise ValueError(f"{task.path} is a run of numerics version {version}, this is {NUMERICS_VERSION}; give "
                         "another folder")
    theirs = resolve(stored["train"])
    changed = config.changed(theirs)
    if config.log_every != theirs.log_every:  # a resume may change it, but the criterion counts logged losses
        changed.append("log_every")
    if not changed:  # files that the options name may have been written anew
        changed = [f"the text of {config.precision}"] * (
            stored["precision"]["digest"] != config.resolved_precision().digest)
        changed += [f"the text of {file}" for file, sha in config.user_files().items()
                    if stored["user_files"].get(file) != sha]
    if changed:
        raise ValueError(f"{task.path} is a run of other options: {', '.join(changed)} differ; give another folder")
    return config, outcome(task.path, task.criterion, config.steps, task.stop_early)


def work(task: Task) -> Outcome:
    """Does the run, or what is left of it; what a job of an executor is."""
    config, found = look(task)
    path = pathlib.Path(task.path)
    if found is not None and found.done:
        return found
    if found is None:
        run = session.start(str(path), config, ["study", path.parent.name, path.name])
    else:
        may_change = ("steps", "checkpoint_every", "keep", "eval_every", "spectral_every")
        run = _resumed(path, config, {name: getattr(config, name) for name in may_change})
    nonfinite = ""
    with run, open(path / LOG, "a", encoding="utf-8", buffering=1) as log:
        (path / OUTCOME).unlink(missing_ok=True)  # it goes on, perhaps from its beginning
        stop = _Stop(task, run.folder)
        try:
            if run.trainer.state.step < config.steps:
                train(run.trainer, run.folder, lambda text: print(text, file=log), resumed=run.resumed, stop=stop)
        except NonFinite as e:
            nonfinite = str(e)
            log.write(nonfinite + "\n")
        if nonfinite or stop.failed or not stop.asked:
            step = run.trainer.state.step + bool(nonfinite)
            note = {"step": step, "nonfinite": bool(nonfinite), "message": nonfinite}
            write_whole(path / OUTCOME, lambda partial: partial.write_text(to_toml(note), encoding="utf-8"))
            if not task.keep and not stop.asked:
                # An early end may turn out to be none under another criterion, so its checkpoint stays.
                last = 1 if stop.failed and not nonfinite else 0
                for _, file in run.folder.checkpoints()[:-last or None]:
                    file.unlink()
        del run.trainer
    free_gpu(config)
    return outcome(path, task.criterion, config.steps, task.stop_early)


def free_gpu(config: TrainConfig) -> None:
    """Gives back what CuPy has kept of a training that is over: the next one's arrays have other sizes."""
    if config.device != "cpu" and kernels.gpu_reason() is None:
        kernels.import_cupy().get_default_memory_pool().free_all_blocks()


def _resumed(path: pathlib.Path, config: TrainConfig, given: dict[str, Any]) -> session.Session:
    """The run again; one that has its last checkpoint but no outcome yet, too."""
    found = Run(path).checkpoints()
    if found and found[-1][0] >= config.steps:
        return session.Session(Run(path), config, load(config.data), resumed=True)
    return session.resume(str(path), given, None)


class _Stop:
    """Asked after each step: the criterion is met, time is over, or the study was told to end."""

    def __init__(self, task: Task, run: Run) -> None:
        self.task, self.run = task, run
        self.failed = self.asked = False
        self._seen = -1

    def __call__(self) -> bool:
        task = self.task
        self.asked = time.time() >= task.deadline or bool(task.stop_file) and os.path.exists(task.stop_file)
        metrics = self.run.path / METRICS
        if task.stop_early and (size := metrics.stat().st_size) != self._seen:
            self._seen = size
            self.failed = task.criterion.onset(self.run.metrics) is not None
        return self.asked or self.failed


# ---- many runs ------------------------------------------------------------------------------------

class Here:
    """An executor of this process: each job is done when it is submitted."""

    class _Done:
        def __init__(self, value: Any) -> None:
            self.value = value

        def result(self) -> Any:
            return self.value

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        return self._Done(fn(*args))


@contextlib.contextmanager
def processes(jobs: int, one_thread: bool = False) -> Iterator[Executor]:
    """So many processes of this machine, started afresh; they end with this one, however it ends.

    one_thread: of BLAS in each, unless its environment variables say otherwise.
    """
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_worker, initargs=(one_thread,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _worker(one_thread: bool) -> None:
    """Ctrl-C is the parent's, who asks the runs to end; a parent that was killed takes its workers along."""
    if one_thread:
        blas.one_thread_if_small(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        wait([parent.sentinel])  # type: ignore[union-attr]
        os._exit(1)  # files are whole at any moment

    if parent is not None:
        threading.Thread(target=follow, daemon=True).start()


class Results:
    """Jobs by name; `next(timeout)` gives one that has ended. Only `.result()` of a job is used."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._ended = executor, queue.SimpleQueue[tuple[Any, Any, BaseException | None]]()
        self.open: set[Any] = set()

    def submit(self, name: Any, fn: Callable[..., Any], *args: Any) -> None:
        job = self._executor.submit(fn, *args)
        self.open.add(name)
        threading.Thread(target=self._wait, args=(name, job), daemon=True).start()

    def _wait(self, name: Any, job: Any) -> None:
        try:
            self._ended.put((name, job.result(), None))
        except BaseException as e:  # noqa: BLE001 (raised again by `next`, in the thread that asks)
            self._ended.put((name, None, e))

    def next(self, timeout: float) -> tuple[Any, Any] | None:
        """(name, result), or None when none has ended in so many seconds.

        Raises:
            Whatever the job has raised.
        """
        try:
            name, value, error = self._ended.get(timeout=timeout)
        except queue.Empty:
            return None
        self.open.discard(name)
        if isinstance(error, BrokenExecutor):
            raise OSError("a process that worked for this study was killed, for want of memory perhaps; the same "
                          "command goes on") from error
        if error is not None:
            raise error
        return name, value

