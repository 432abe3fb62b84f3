"""A run as a job: one folder, taken, resumed or refused; ended early, by time, by a file; killed."""
import dataclasses
import math
import multiprocessing
import os
import pathlib
import shutil
import signal
import time

import pytest

from cuflash.model.run import CONFIG, Run
from cuflash.model.runner import FAILED, FINISHED, STOPPED, Here, Results, Task, look, outcome, processes, work
from cuflash.model.verdict import Criterion
from tests.tiny_study import CRITERION, HOT, TINY, overflowing


def task(path, **options):
    own = ("stop_early", "deadline", "stop_file", "keep", "criterion")
    given = {name: options.pop(name) for name in own if name in options}
    return Task(str(path), TINY | {"precision": "bf16", "checkpoint_every": 6} | options,
                given.pop("criterion", CRITERION), **given)


def metrics(path):
    """Without the timings, which no two runs share."""
    return [{k: v for k, v in row.items() if k not in ("ms", "tokens_per_s", "mfu")} for row in Run(path).metrics]


def same(a, b):
    return str(metrics(a)) == str(metrics(b))  # NaN is NaN


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, work(task(path))


def test_a_run_that_ends(whole):
    path, found = whole
    assert (found.state, found.step, found.onset) == (FINISHED, 24, -1) and found.loss < 5.6
    assert found.best <= found.loss and math.isfinite(found.val_loss) and found.ms > 0 and found.seconds > 0
    assert (path / "log.txt").read_text().count("step 24/24") == 1
    assert Run(path).checkpoints() == []  # nobody asked to keep them


def test_a_finished_run_is_taken_as_it_is(whole):
    path, found = whole
    before = {f: f.stat().st_mtime_ns for f in path.rglob("*") if f.is_file()}
    assert work(task(path)) == found and look(task(path))[1] == found
    assert before == {f: f.stat().st_mtime_ns for f in path.rglob("*") if f.is_file()}


def test_other_options_are_refused(whole):
    path, _ = whole
    with pytest.raises(ValueError, match="is a run of other options: lr, min_lr differ; give another folder"):
        work(task(path, lr=1e-3))
    with pytest.raises(ValueError, match="other options: log_every differ"):  # the criterion counts logged losses
        look(task(path, log_every=1))
    assert look(task(path, keep=True))[1].done  # how often checkpoints are written is none of them


@pytest.mark.parametrize("how", ["deadline", "file"])
def test_a_stopped_run_goes_on_bit_for_bit(whole, tmp_path, how):
    path, found = whole
    stop = tmp_path / "stop"
    stop.touch()
    half = task(tmp_path / "run", **({"deadline": 0.0} if how == "deadline" else {"stop_file": str(stop)}))
    stopped = work(half)
    assert (stopped.state, Run(half.path).checkpoints()[-1][0]) == (STOPPED, 1)  # after its first step
    assert work(task(half.path)).loss == found.loss and same(half.path, path)


def test_a_run_without_its_outcome_is_looked_at_again(whole, tmp_path):
    """Killed between its last checkpoint and the note of its end."""
    path = tmp_path / "run"
    work(task(path, keep=True))
    (path / "outcome.toml").unlink()
    assert look(task(path))[1].state == STOPPED
    again = work(task(path, keep=True))
    assert again.state == FINISHED and same(path, whole[0])


def test_a_failing_run_ends_early_and_goes_on_under_another_criterion(tmp_path):
    early = task(tmp_path / "run", **HOT)
    found = work(early)
    assert found.state == FAILED and found.step < 24 and found.onset <= found.step - 2
    assert work(early) == found
    assert look(dataclasses.replace(early, criterion=Criterion(margin=99)))[1].state == STOPPED
    on = work(dataclasses.replace(early, stop_early=False))
    assert (on.state, on.step, on.onset) == (FAILED, 24, found.onset)
    whole = task(tmp_path / "whole", **HOT, stop_early=False)
    work(whole)
    assert same(early.path, whole.path)


def test_more_steps_extend_a_run(tmp_path):
    path = tmp_path / "run"
    assert work(task(path, steps=12, keep=True)).step == 12
    assert work(task(path)).step == 24
    assert outcome(path, CRITERION, 12).step == 12  # and the shorter study reads what it asked for


def test_an_extension_that_was_cut_off_is_no_end(tmp_path):
    """Its checkpoints were gone, so it began anew: the shorter study must not take what there is for a whole run."""
    path, stop = tmp_path / "run", tmp_path / "stop"
    short = task(path, steps=12)
    found = work(short)
    stop.touch()
    assert found.state == FINISHED and work(task(path, stop_file=str(stop))).step < 12
    assert look(short)[1].state == STOPPED
    again = work(short)
    assert (again.state, again.step, again.loss) == (FINISHED, 12, found.loss)


def test_a_precision_whose_text_has_changed_is_another(tmp_path):
    low, fix = pathlib.Path(overflowing(tmp_path)), tmp_path / "mine.py"
    text = "import numpy as np\nfrom cuflash import Fix\n\n\nclass Mine(Fix):\n    name = 'mine'\n\n    " \
           "def rule(self, r_m, ties):\n        return r_m + np.float32(1)\n"
    fix.write_text(text)
    mine = task(tmp_path / "run", precision=str(low), fix=f"{fix}:Mine", steps=4)
    assert work(mine).done
    fix.write_text(text.replace("(1)", "(2)"))
    with pytest.raises(ValueError, match="is a run of other options: the text of .*mine.py differ"):
        look(mine)
    fix.write_text(text)
    low.write_text(low.read_text().replace("e2m4", "e4m3"))
    with pytest.raises(ValueError, match="is a run of other options: the text of .*low.toml differ"):
        work(mine)


def test_runs_of_another_numerics_version_are_not_taken(tmp_path, monkeypatch):
    work(task(tmp_path / "run", steps=2))
    monkeypatch.setattr("cuflash.model.runner.NUMERICS_VERSION", 10**6)
    with pytest.raises(ValueError, match="is a run of numerics version"):
        look(task(tmp_path / "run", steps=2))


def test_a_loss_that_is_not_finite_is_a_failure(tmp_path):
    found = work(task(tmp_path / "run", precision=overflowing(tmp_path), seed=2))
    assert found.state == FAILED and "the first value that is not finite appeared at site" in found.message
    assert found.onset > found.step  # no row of that step
    assert work(task(tmp_path / "run", precision=overflowing(tmp_path), seed=2)) == found


def test_a_run_that_never_learns(tmp_path):
    found = work(task(tmp_path / "run", steps=4, criterion=Criterion.parse("learned=1.0")))
    assert (found.state, found.onset) == (FAILED, 4)


# ---- executors --------------------------------------------------------------------------------------

def square(x):
    if x < 0:
        raise ValueError("a negative number")
    return x * x


def test_results_of_anything_with_submit():
    results = Results(Here())
    for x in (2, 3):
        results.submit(x, square, x)
    assert {results.next(5), results.next(5)} == {(2, 4), (3, 9)} and not results.open
    assert results.next(0.01) is None


def test_a_worker_that_was_killed_is_told():
    with processes(1) as pool:
        results = Results(pool)
        results.submit("a", os._exit, 9)
        with pytest.raises(OSError, match="was killed, for want of memory perhaps; the same command goes on"):
            results.next(60)


class Later:
    """As a cluster's: submit gives a job at once, whose result may be a mistake."""

    def submit(self, fn, *args):
        class Job:
            def result(self):
                return fn(*args)
        return Job()


def test_a_mistake_in_a_job_is_raised_where_results_are_asked_for():
    results = Results(Later())
    results.submit("a", square, -1)
    with pytest.raises(ValueError, match="a negative number"):
        results.next(5)


def child(path):
    """A process that has a worker of its own at work."""
    with processes(1) as pool:
        Results(pool).submit("run", work, task(path, steps=100000, checkpoint_every=3))
        time.sleep(600)


def test_a_killed_study_takes_its_workers_along_and_the_run_goes_on(tmp_path, whole):
    path = tmp_path / "run"
    process = multiprocessing.get_context("spawn").Process(target=child, args=(str(path),))
    process.start()
    try:
        deadline = time.time() + 60
        while not (path / CONFIG).exists() or not Run(path).checkpoints():
            assert time.time() < deadline, "the run has not begun within a minute"
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    deadline = time.time() + 30
    while True:  # the worker lets go of the folder
        try:
            with Run(path).lock():
                break
        except ValueError:
            assert time.time() < deadline, "the worker outlives its study"
            time.sleep(0.02)
    shutil.copytree(path, tmp_path / "copy")
    step = Run(path).checkpoints()[-1][0]
    found = work(task(path, steps=step + 4))
    reference = work(task(tmp_path / "reference", steps=step + 4))
    assert found.loss == reference.loss and same(path, tmp_path / "reference")
