"""The studies of arms on real runs: what is measured beside them, and what is kept."""
import dataclasses

import pytest

from cuflash.model import study_failures
from cuflash.model.bisect import FAILING, SAVING
from cuflash.model.config import resolve
from cuflash.model.run import Run
from cuflash.model.study_failures import (
    Found,
    bisect,
    decide,
    expected_ms,
    failing_run,
    forked_steps,
    isolate,
    kept,
    limit_table,
)
from cuflash.model.study_scales import MINUTES
from cuflash.model.trials import Arm
from cuflash.model.verdict import Criterion
from tests.tiny_study import TINY, Quiet, overflowing, study


SHORT = TINY | {"steps": 16}  # the overflow comes before


@dataclasses.dataclass(frozen=True)
class Row:
    x: int


def test_kept_rows_are_made_once_for_a_key(tmp_path):
    made = []

    def make():
        made.append(1)
        return [Row(len(made))]
    path = tmp_path / "sub" / "rows.json"
    assert [kept(path, key, Row, make) for key in ((1, 2), (1, 2), (1, 3))] == [[Row(1)], [Row(1)], [Row(2)]]


@pytest.fixture(scope="module")
def overflow(tmp_path_factory):
    """A precision that overflows, with its study's folder."""
    folder = tmp_path_factory.mktemp("overflow")
    return folder, overflowing(folder)


def test_isolation_finds_the_site(overflow):
    folder, low = overflow
    with study(folder / "study", SHORT, board=Quiet(), seeds=(1, 2)) as s:  # two failures decide
        found = isolate(s, low, MINUTES, [Arm.parse(f"own: --precision {low} --round attn.o_acc=fp32")])
    verdicts = {t.arm: t.verdict for t in found.tallies}
    trains = {"attn fp32", "plain attention", "O fp32", "Ō fp32", "bf16-fa2", "own"}  # where Ō is in more than e2m4
    assert {name for name, v in verdicts.items() if v == "undecided"} == trains
    assert {v for name, v in verdicts.items() if name not in trains} == {"fails"}
    heads = next(a for a in found.arms if a.name.startswith("O fp32 in heads"))
    layers = Run(folder / "study" / found.of("low")[0].folder).layers["spectral/L01/q_heads"][-1]
    assert heads.name == f"O fp32 in heads {layers.argmax()}"  # the stronger half of two
    assert found.tally("own").runs == 2 and found.tally("nobody") is None


def test_bisection_finds_the_site(overflow, tmp_path):
    folder, low = overflow
    with study(folder / "study", SHORT, board=Quiet(), seeds=range(1, 6)) as s:
        trial = failing_run(s, low)
        run = Run(s.folder / trial.folder)
        found = bisect(s, run, trial.onset, tmp_path, states=2, samples=1, top=1, horizon=6)
    assert found.failing.sites == found.saving.sites == ("attn.o_acc",) and found.why == {FAILING: "", SAVING: ""}
    assert len(found.states) == 2 and found.states[-1] + 1 < trial.onset
    assert found.runs == sum(d.runs for d in found.decisions) > 0
    again = Quiet()
    with study(folder / "study", SHORT, board=again, seeds=range(1, 6)) as s:
        assert bisect(s, run, trial.onset, tmp_path, states=2, samples=1, top=1, horizon=6) == found
    assert again.lines == []


def test_bisection_needs_no_checkpoint_once_it_is_done(overflow, tmp_path):
    """And another state's runs lie beside the first one's."""
    folder, low = overflow
    whole, out = tmp_path / "study", tmp_path / "out"
    with study(whole, SHORT, board=Quiet(), seeds=(1, 2)) as s:
        trial = failing_run(s, low)
        run = Run(s.folder / trial.folder)
        options = {"samples": 1, "top": 1, "horizon": 6, "kinds": [FAILING]}
        found = bisect(s, run, trial.onset, out, states=2, **options)
        later = bisect(s, run, trial.onset, tmp_path / "later", states=1, **options)
        assert later.states == found.states[1:] and later.failing.sites == found.failing.sites
        with pytest.raises(ValueError, match="--horizon 4: has 2 logged losses, and no fork can .* give 6 or more"):
            bisect(s, run, trial.onset, out, states=2, horizon=4)
    for _, file in run.checkpoints():
        file.unlink()
    again = Quiet()
    with study(whole, SHORT, board=again, seeds=(1, 2)) as s:
        assert bisect(s, run, trial.onset, out, states=2, **options) == found and again.lines == []


def test_a_precision_with_places_of_its_own_is_not_bisected(tmp_path):
    arm = Arm("low", {"precision": "bf16", "round": ("L1/attn.o=e4m3",)})
    with study(tmp_path, TINY | {"steps": 2}, board=Quiet(), seeds=(1,)) as s:
        s.decide([arm])
        with pytest.raises(ValueError, match="roundings of their own in some places .L1.attn.o=."):
            bisect(s, Run(s.path(arm, 1)), 2, tmp_path)


def test_a_fork_has_room_for_two_means_of_the_criterion():
    assert forked_steps(190, Criterion(rows=10), 10) == 2 * 190 + 200
    assert forked_steps(5, Criterion(rows=1), 10) == 100
    for before in (5, 50):
        for rows in (1, 10, 40):
            rising = [{"step": 10 * (i + 1), "loss": 1.0 if 10 * (i + 1) <= before else 9.0}
                      for i in range(forked_steps(before, Criterion(rows=rows), 10) // 10)]
            assert (Criterion(rows=rows).onset(rising) is None) == (before < 10)  # with no row from before it, never


def test_a_run_that_failed_in_its_first_step_has_no_heads_to_choose_by(tmp_path):
    hot = TINY | {"steps": 4, "log_every": 10, "fix": "shift:offset=1e4,epsilon=1e30"}  # exp underflows: O is NaN
    with study(tmp_path, hot, board=Quiet(), seeds=(1, 2)) as s:
        found = isolate(s, "bf16", MINUTES)
    assert found.tally("bf16").verdict == "fails" and not any("heads" in a.name for a in found.arms)
    assert "`--heads` names them" in found.notes[0]


def test_a_precision_that_never_fails_has_no_failing_run(tmp_path):
    with study(tmp_path, TINY | {"steps": 4}, board=Quiet(), seeds=(1, 2)) as s:
        assert failing_run(s, "bf16") is None
    with study(tmp_path, TINY | {"steps": 4}, board=Quiet(), seeds=(1, 2), budget=0) as s:
        assert isolate(s, "fp16-fa2", MINUTES) == Found([], [], []) and s.left


def test_times_of_arms_that_run_alone(tmp_path):
    arms = [Arm("a", {"precision": "bf16"}), Arm("b", {"precision": "fp32"})]
    with study(tmp_path, TINY, board=Quiet()) as s:
        found = study_failures.timings(s, arms, 2)
        assert [t.arm for t in found] == ["a", "b"] and all(0 < t.ms < 1e4 for t in found)
        assert study_failures.timings(s, arms, 2) == found  # to the last digit: it was kept
    more = [*arms, Arm("c", {"precision": "fp32"})]
    with study(tmp_path, TINY, board=Quiet(), budget=0) as s:  # what is there is given all the same
        assert study_failures.timings(s, more, 2) == found and s.left == ["time of a step alone: 1 of 3 arms"]
    with study(tmp_path, TINY, board=Quiet()) as s:
        assert study_failures.timings(s, more, 2)[:2] == found and len(s.board.lines) == 1


def test_a_cost_without_a_gpu_states_its_rate():
    c = resolve(TINY | {"precision": "bf16"})
    ms, how = expected_ms(c)
    assert ms == pytest.approx(1000 * c.gpt().flops_per_token() * 32 / 3e14) and "300 TFLOP/s" in how


@pytest.mark.parametrize("jobs", [0, 1])
def test_work_that_is_spread_out_comes_back_in_order(tmp_path, jobs):
    board = Quiet()
    with study(tmp_path, TINY, board=board, jobs=jobs) as s:
        assert study_failures.spread_out(s, [(3, 1), (2, 5)], lambda place: (pow, *place), "raised") == [3, 32]
    assert board.lines == ["raised 2 states and layers"]


def test_limit_table():
    rows = limit_table("bf16")
    assert {r.side for r in rows} == {"above 0", "below 0"} and len({r.fix for r in rows}) == len(rows) / 2


def test_decide_gives_the_runs_with_the_tallies(tmp_path):
    with study(tmp_path, TINY | {"steps": 4}, board=Quiet(), seeds=(1, 2)) as s:
        found = decide(s, [Arm("a", {"precision": "bf16"})])
    assert [(t.arm, t.seed) for t in found.trials] == [("a", 1), ("a", 2)] == [(t.arm, t.seed) for t in found.of("a")]
