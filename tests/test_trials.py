"""The loop of every study: which runs are done, in which order, what they add up to."""
import math

import pytest

from cuflash.model.run import Run
from cuflash.model.runner import Outcome
from cuflash.model.states import states_before
from cuflash.model.trials import KEPT, Arm, Tally, Trial, merged, sentence, tally, typed
from cuflash.model.verdict import Criterion
from tests.tiny_study import HOT, TINY, Quiet, study

COLD = Arm("cold", {"precision": "bf16"})
FAILING = Arm("hot", {"precision": "bf16"} | HOT)


class Oracle:
    """An executor that trains nothing: writes how a run would end into a table that the study reads."""

    def __init__(self, monkeypatch, fails):
        self.fails, self.done, self.order = fails, {}, []
        monkeypatch.setattr("cuflash.model.trials.look", lambda task: (None, self.done.get(task.path)))

    def submit(self, fn, task):
        arm, seed = task.path.split("/")[-2:]
        self.order.append((arm, int(seed.removeprefix("seed-"))))
        failed = self.fails(arm, self.order[-1][1])
        self.done[task.path] = Outcome("failed" if failed else "finished", 24, 10 if failed else -1, 1.0,
                                       9.0 if failed else 2.0, ms=3.0, seconds=1.0)

        class Job:
            def result(job):
                return self.done[task.path]
        return Job()


def decided(tmp_path, monkeypatch, fails, arms, **options):
    oracle = Oracle(monkeypatch, fails)
    with study(tmp_path, TINY, executor=oracle, board=Quiet(), **options) as s:
        return s.decide(arms, against={"hot": "cold"}), oracle, s


def test_seeds_are_taken_until_the_test_decides(tmp_path, monkeypatch):
    (hot, cold), oracle, s = decided(tmp_path, monkeypatch, lambda arm, seed: arm == "hot", [FAILING, COLD])
    assert (hot.verdict, hot.failures, hot.runs) == ("fails", 2, 2)
    assert (cold.verdict, cold.failures, cold.runs) == ("trains", 0, 5) and s.left == []
    assert oracle.order == [("hot", 1), ("cold", 1), ("hot", 2), ("cold", 2), ("cold", 3), ("cold", 4), ("cold", 5)]
    assert (hot.only_this, hot.only_other, hot.p) == (2, 0, 0.5)
    assert hot.onset == 10 and math.isinf(cold.onset) and math.isnan(hot.loss) and cold.loss == 2.0


def test_a_rate_of_one_third_is_settled_by_more_seeds(tmp_path, monkeypatch):
    (found,), _, _ = decided(tmp_path, monkeypatch, lambda arm, seed: seed in (2, 5), [COLD], seeds=range(1, 8))
    # ln 10 a failure, −0.64 a clean run: 1.66 after two, 0.38 … 2.68 after the fifth, then below the bound again
    assert (found.verdict, found.failures) == ("undecided", 2) and found.runs == 7


def test_least_takes_more_and_used_up_seeds_are_told(tmp_path, monkeypatch):
    (hot,), _, s = decided(tmp_path, monkeypatch, lambda arm, seed: True, [FAILING], least=4)
    assert (hot.verdict, hot.runs) == ("fails", 4)
    (cold,), _, s = decided(tmp_path, monkeypatch, lambda arm, seed: False, [COLD], seeds=(1, 2))
    assert cold.verdict == "undecided"
    s.decide([COLD])
    assert s.left == ["cold: undecided after 2 runs, all of its seeds; --seeds gives it more"]


def test_no_more_runs_at_once_than_could_decide(tmp_path, monkeypatch):
    started = []

    class Slow(Oracle):
        def submit(self, fn, task):
            started.append(len(started))
            return super().submit(fn, task)
    oracle = Slow(monkeypatch, lambda arm, seed: True)
    with study(tmp_path, TINY, executor=oracle, board=Quiet()) as s:
        s.jobs = 5
        found, = s.decide([FAILING])
    assert (found.runs, len(started)) == (2, 2)


def test_runs_count_in_the_order_of_their_seeds_however_they_end(tmp_path, monkeypatch):
    """Failures end first: two of them, while the runs of earlier seeds were stopped, prove nothing yet."""
    class Stopping(Oracle):
        def submit(self, fn, task):
            job = super().submit(fn, task)
            if not self.done[task.path].failed:
                job.result = lambda found=Outcome("stopped", 3): found
                del self.done[task.path]
            return job
    oracle = Stopping(monkeypatch, lambda arm, seed: seed in (2, 4))
    with study(tmp_path, TINY, executor=oracle, board=Quiet(), seeds=range(1, 6), least=4) as s:
        s.jobs = 4
        found, = s.decide([COLD])
    assert oracle.order == [("cold", seed) for seed in (1, 2, 3, 4)]
    assert (found.verdict, found.failures, found.runs) == ("undecided", 0, 0) and s.trials(COLD) == []
    on = Oracle(monkeypatch, lambda arm, seed: False)
    on.done = dict(oracle.done)
    with study(tmp_path, TINY, executor=on, board=Quiet(), seeds=range(1, 6)) as s:
        found, = s.decide([COLD])
    assert on.order == [("cold", 1), ("cold", 3)] and (found.verdict, found.failures, found.runs) == ("fails", 2, 4)


def test_a_gap_is_filled_before_the_arm_goes_on(tmp_path, monkeypatch):
    oracle = Oracle(monkeypatch, lambda arm, seed: False)
    with study(tmp_path, TINY, executor=oracle, board=Quiet(), seeds=range(1, 8)) as s:
        for seed in (2, 3, 4, 5, 6):
            oracle.submit(None, s.task(COLD, seed))
        oracle.order.clear()
        found, = s.decide([COLD])
    assert oracle.order == [("cold", 1)] and (found.verdict, found.runs) == ("trains", 6)


def test_time_that_is_spent_leaves_a_note_and_no_runs(tmp_path, monkeypatch):
    found, oracle, s = decided(tmp_path, monkeypatch, lambda arm, seed: True, [FAILING, COLD], budget=0)
    assert oracle.order == [] and [t.verdict for t in found] == ["undecided"] * 2
    assert s.left == [f"{name}: undecided after 0 runs, 2 more at least" for name in ("hot", "cold")]


def test_real_runs_are_made_once(tmp_path):
    board = Quiet()
    with study(tmp_path, TINY, board=board) as s:
        first = s.decide([FAILING, COLD], against={"hot": "cold"})
    assert [(t.verdict, t.runs) for t in first] == [("fails", 2), ("trains", 5)]
    assert sum(line.endswith(": runs") for line in board.lines) == 7
    assert any(line.startswith("hot, seed 1: fails from step ") for line in board.lines)
    again = Quiet()
    with study(tmp_path, TINY, board=again) as s:
        assert str(s.decide([FAILING, COLD], against={"hot": "cold"})) == str(first) and again.lines == []
        trials = s.trials(COLD)
    assert [t.seed for t in trials] == [1, 2, 3, 4, 5] and trials[0].folder == "runs/cold/seed-1"
    other = pytest.raises(ValueError, match="runs/cold/seed-1 is a run of other options: lr")
    with study(tmp_path, TINY | {"lr": 1e-3}, board=Quiet()) as s, other:
        s.decide([COLD])


def test_an_interrupt_stops_runs_and_leaves_a_note(tmp_path):
    board = Quiet()
    with study(tmp_path, TINY | {"steps": 100000}, board=board) as s:
        real = s.executor.submit

        def submit(fn, task):
            s._ask(2, None)  # as Ctrl-C
            return real(fn, task)
        s._executor.submit = submit
        found, = s.decide([COLD])
    assert found.runs == 0 and s.interrupted and s.left
    assert "cold, seed 1: stopped at step 0" in board.lines[-1] and not s.stop_file.exists()


def test_two_studies_of_one_folder_at_once_are_refused(tmp_path):
    """The second one neither stops the first one's runs nor takes its stop file away."""
    with study(tmp_path, TINY, board=Quiet()) as s:
        s.stop_file.touch()
        with pytest.raises(ValueError, match="study folder .* is in use"):
            study(tmp_path, TINY).__enter__()
        assert s.stop_file.exists()
    with study(tmp_path, TINY, board=Quiet()):
        assert not s.stop_file.exists()


def test_checkpoints_from_before_a_failure_stay_however_long_the_criterion_s_mean(tmp_path):
    arm = Arm("hot", {"precision": "bf16", "lr": 1.0, "grad_clip": 0.0, "warmup_steps": 120, "log_every": 1}, keep=True)
    with study(tmp_path, TINY | {"steps": 120}, board=Quiet(), criterion=Criterion(margin=0.2, rows=30)) as s:
        s.decide([arm], seeds=(1,), test=False)
        trial, = s.trials(arm, (1,))
    assert trial.failed and trial.onset > 20 and trial.step >= trial.onset + 29
    assert len(states_before(Run(s.folder / trial.folder), trial.onset, 99)) >= min(KEPT, (trial.onset - 2) // 4)


def test_bad_studies(tmp_path):
    for options, message in (({"seeds": ()}, "seeds"), ({"seeds": (1, 1)}, "each once"), ({"jobs": -1}, "jobs is -1")):
        with pytest.raises(ValueError, match=message):
            study(tmp_path, TINY, **options)
    with study(tmp_path, TINY, board=Quiet()) as s, pytest.raises(ValueError, match="names in common: cold, cold"):
        s.decide([COLD, COLD])


# ---- arms -------------------------------------------------------------------------------------------

def test_arm_as_text():
    arm = Arm.parse("O sr: --round attn.o=bf16:sr --round attn.l=fp32 --fix on --lr 3e-3 --qk-norm --steps=7")
    assert arm.options == {"round": ("attn.o=bf16:sr", "attn.l=fp32"), "fix": "on", "lr": 3e-3, "qk_norm": True,
                           "steps": 7}
    assert arm.flags == ("--round attn.o=bf16:sr --round attn.l=fp32 --fix on --lr 0.003 --qk-norm --steps 7")
    assert Arm.parse(f"again: {arm.flags}").options == arm.options
    for text, message in (("--fix on", "write 'NAME: "), ("a: --fixx on", "did you mean '--fix'"),
                          ("a: --lr", "--lr needs a value"), ("a: --lr x", "lr must be float, got 'x'"),
                          ("a: on", "unknown option of a")):
        with pytest.raises(ValueError, match=message):
            Arm.parse(text)


def test_options_of_types():
    assert typed("bias", "true") is True and typed("steps", "3") == 3 and typed("round", "a=b") == ("a=b",)
    with pytest.raises(ValueError, match="true or false"):
        typed("bias", "yes")
    assert merged({"round": ("a",), "lr": 1}, {"round": ("b",), "lr": 2}) == {"round": ("a", "b"), "lr": 2}


def test_folders_of_arms():
    assert Arm("Ō fp32", {}).folder == "O-bar-fp32"
    assert Arm("attn fp32", {"precision": "bf16-fa2"}).folder == "bf16-fa2-attn-fp32"
    assert Arm("bf16: fix on", {"precision": "bf16"}).folder == "fix-on"
    assert Arm("x", {"precision": "some/where/mine.toml"}).folder == "mine-x"
    one, two = (Arm("low in layer 1 only", {"precision": p}).folder for p in ("bf16", "low.toml"))
    assert (one, two) == ("low-in-layer-1-only", "low-low-in-layer-1-only")
    assert Arm("low, lr 0.1", {"precision": "low.toml"}).folder == "low-lr-0.1"
    odd = [Arm(name, {}).folder for name in ("α", "β", "..", ".")]
    assert len(set(odd)) == 4 and all(name.startswith("arm-") for name in odd)
    one, two = Arm("a" * 99 + "1", {}).folder, Arm("a" * 99 + "2", {}).folder
    assert one != two and len(one) < 80


def test_tally():
    trials = [Trial("a", s, f, 5 if f else -1, 20, 1.0, loss, math.nan, 2.0, 1.0, "", "")
              for s, f, loss in ((1, True, 9.0), (2, False, 2.0), (3, False, 4.0))]
    found = tally(Arm("a", {}), trials, "b", [Trial("b", s, False, -1, 20, 1.0, 1.0, math.nan, 2.0, 1.0, "", "")
                                             for s in (1, 2, 3)])
    assert isinstance(found, Tally) and found.rate == pytest.approx(1 / 3)
    assert (found.loss, found.onset) == (3.0, math.inf)
    assert (found.only_this, found.only_other, found.difference) == (1, 0, 2.0) and found.difference_se == 1.0


def test_sentences():
    assert sentence(Outcome("finished", 20, loss=1.5, ms=12.0)) == "trains: loss 1.5000 at step 20, 12 ms a step"
    assert sentence(Outcome("finished", 20, loss=1.5, ms=1290.4)).endswith(" 1,290 ms a step")
    assert sentence(Outcome("failed", 20, 7, 1.0, 3.0)) == "fails from step 7: loss 3.0000, best 1.0000"
    assert sentence(Outcome("stopped", 4, loss=2.0)) == "stopped at step 4, loss 2.0000"
