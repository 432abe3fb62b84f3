"""cuflash study why, isolate, bisect, sweep, cures as a user types them: the folders they leave, what they say."""
import csv
import os
import signal
import subprocess
import sys
import time

import h5py
import pytest

from cuflash import plot
from cuflash.model.run import Run
from tests.test_cli import mistake, run
from tests.tiny_study import FLAGS, overflowing

FEW = ["--seeds", "1-2", "--steps", "12"]  # two failures decide, two clean runs do not


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.fixture(scope="module")
def low(tmp_path_factory):
    """The flags of an overflowing precision, and a study's folder."""
    folder = tmp_path_factory.mktemp("why")
    return [*FLAGS, *FEW, "--precision", overflowing(folder), "-o", str(folder / "study")], folder / "study"


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of a small study's time; test_why and test_bisect look at figures."""
    monkeypatch.setattr("cuflash.report.write_figures", lambda folder, figures: None)


def test_why(low, monkeypatch):
    flags, folder = low
    words = ["study", "why", *flags, "--states", "2", "--samples", "1"]
    monkeypatch.setattr("sys.argv", ["cuflash", *words])
    save = plot.save
    monkeypatch.setattr("cuflash.plot.save", lambda figure, path, dpi=200: save(figure, path, dpi)
                        if path.suffix == ".png" else None)
    text = run(*words)
    report = (folder / "report.md").read_text()
    claims = rows_of(folder / "claims.csv")
    assert {c["figure"] for c in claims} == {"2", "2, 7", "13", "§ 3.2", "5, 12", "5", "4", "3, 11", "6, claim 3",
                                             "App. C"}
    for c in claims:
        assert f"**{c['verdict']}**" in report and f"{c['paper']}: {c['verdict']}" in text
    arms, runs = rows_of(folder / "arms.csv"), rows_of(folder / "runs.csv")
    for a in arms:
        mine = [r for r in runs if r["arm"] == a["arm"]]
        assert (len(mine), sum(r["failed"] == "True" for r in mine)) == (int(a["runs"]), int(a["failures"]))
    by_name = {a["arm"]: a["verdict"] for a in arms}
    assert by_name["low"] == "fails" and by_name["attn fp32"] == "undecided"  # of two seeds
    assert "left: attn fp32: undecided after 2 runs, all of its seeds" in text and "## Undecided" in report
    for name in ("figure_2_7_curves", "figure_3_11", "figure_4", "figure_5", "figure_5_12", "figure_6", "figure_13",
                 "bias"):
        assert f"]({name}.png)" in report and (folder / f"{name}.png").stat().st_size > 5000
    sha = Run(folder / runs[0]["folder"]).config["data"]["sha256"]
    assert sha in report and "$ cuflash study why --data synthetic:words" in report and "0xC0968717" in report
    with h5py.File(folder / "study.h5") as f:
        assert f.attrs["command"].startswith("cuflash study why") and len(f["runs/seed"]) == len(runs)
    monkeypatch.setattr("cuflash.report.write_figures", lambda folder, figures: None)
    for file in folder.rglob("checkpoints/*.h5"):  # what was taken from them is kept
        file.rename(file.with_suffix(".away"))
    for name in ("delta_rows", "layer_states", "record"):
        monkeypatch.setattr(f"cuflash.model.study_why.{name}", None)
    again = run(*words)
    for file in folder.rglob("checkpoints/*.away"):
        file.rename(file.with_suffix(".h5"))
    assert ": runs\n" not in again and rows_of(folder / "claims.csv") == claims
    assert rows_of(folder / "runs.csv") == runs


def test_isolate_takes_the_runs_that_are_there(low, no_figures):
    flags, folder = low
    text = run("study", "isolate", *flags, "--arm", "own: --round attn.o_acc=fp32")
    assert "own, seed 1: trains" in text and (folder / "runs" / "low-own" / "seed-2").is_dir()
    assert "attn fp32, seed" not in text
    assert {r["arm"] for r in rows_of(folder / "isolate" / "arms.csv")} >= {"low", "tiling off", "own"}
    assert {c["figure"] for c in rows_of(folder / "isolate" / "claims.csv")} == {"§ 3.2"}
    assert "is a run of other options: lr, min_lr differ" in mistake("study", "isolate", *flags, "--lr", "1e-3")


def test_bisect(low):
    flags, folder = low
    words = ["study", "bisect", *flags, "--samples", "1", "--states", "2", "--horizon", "8", "--kind", "failing"]
    text = run(*words)
    assert "minimal failing set: attn.o_acc" in text and "runs of forks" in text
    decisions = rows_of(folder / "bisect" / "decisions.csv")
    assert f"{sum(int(d['runs']) for d in decisions)} runs of forks" in text
    report = (folder / "bisect" / "report.md").read_text()
    assert "**attn.o_acc" in report and "screening.png" in report
    assert rows_of(folder / "bisect" / "ranking.csv")[0]["site"] in ("attn", "attn.o_acc")
    source = folder / "runs" / "low" / "seed-1"
    again = run(*words, "--run", str(source))
    assert "minimal failing set: attn.o_acc" in again
    assert "--onset 3 is of a run" in mistake(*words, "--onset", "3")
    earlier = run(*words, "--run", str(source), "--onset", "4", "--states", "1", "--top", "1")
    assert "minimal failing set: attn.o_acc" in earlier
    report = (folder / "bisect" / "report.md").read_text()
    assert "fails from step 4; states of steps 2." in report
    plain = [w for w in FLAGS if w not in ("--jobs", "0", "--option", "log_every=2")]
    run("train", *plain, "--steps", "2", "--out", str(folder / "sound"))
    assert "has not failed: a training fails when" in mistake(*words, "--run", str(folder / "sound"))


def test_sweep(tmp_path, no_figures):
    out = tmp_path / "s"
    run("study", "sweep", *FLAGS, "--seeds", "1", "--steps", "4", "--what", "gamma,bits", "-o", str(out))
    assert len(rows_of(out / "sweep" / "arms.csv")) == 2 + 4 + 8
    limits = rows_of(out / "sweep" / "limits.csv")
    report = (out / "sweep" / "report.md").read_text()
    assert "`qiu-b7:beta=8,epsilon=0`" in report and len(limits) == 30
    assert "did you mean 'bits'" in mistake("study", "sweep", *FLAGS, "--what", "bit", "-o", str(out))


def test_cures(tmp_path, no_figures):
    out = tmp_path / "s"
    flags = [*FLAGS, "--seeds", "1", "--steps", "4", "-o", str(out), "--only-own"]
    run("study", "cures", *flags, "--lrs", "1e-3,2e-3", "--cure", "mine: --fix capped:cap=60", "--time-steps", "1")
    arms = rows_of(out / "cures" / "arms.csv")
    assert [a["arm"] for a in arms] == [f"{name}, lr {lr}" for lr in ("0.001", "0.002") for name in (
        "bf16", "attn fp32", "mine")]
    assert len(rows_of(out / "cures" / "timing.csv")) == 6
    assert "| ms a step, alone |" in (out / "cures" / "report.md").read_text()
    assert "write 'NAME: " in mistake("study", "cures", *flags, "--cure", "fix on")
    assert "--lrs 'x'" in mistake("study", "cures", *flags, "--lrs", "x")


def test_a_budget_writes_what_is_there(tmp_path):
    text = run("study", "isolate", *FLAGS, "--budget", "0", "--heads", "0", "-o", str(tmp_path / "s"))
    assert text.startswith("up to 105 runs (15 arms, 7 seeds) of 24 steps of 32 tokens, on the CPU\n")
    assert "the budget is spent; the same command goes on" in text and "left: bf16: undecided after 0 runs" in text
    assert "## Undecided" in (tmp_path / "s" / "isolate" / "report.md").read_text()
    text = run("study", "isolate", *FLAGS, "--budget", "0", "-o", str(tmp_path / "t"))  # no run to choose heads by
    assert "left: bf16: 1 of 1 runs" in text and (tmp_path / "t" / "isolate" / "report.md").exists()
    text = run("study", "why", *FLAGS, "--budget", "0", "-o", str(tmp_path / "u"))
    assert "left: figure 6: the bias" in text and "figure 2: low-precision attention fails" in text


def test_why_of_a_run_that_fails_in_its_first_step(tmp_path, no_figures):
    out = tmp_path / "s"
    text = run("study", "why", *FLAGS, "--seeds", "1-2", "--steps", "4", "--option", "log_every=10", "--option",
               "fix=shift:offset=1e4,epsilon=1e30", "--phases", "trainings,delta,isolate", "-o", str(out))
    assert "bf16 fails (2 of 2 runs failed, median from step 1)" in text
    report = (out / "report.md").read_text()
    assert "no checkpoint from before step 1" in report and "No row of chosen heads" in report
    assert "0 logged steps before step 1" in {c["figure"]: c["measured"] for c in rows_of(out / "claims.csv")}["13"]


def test_forked_studies(tmp_path, no_figures):
    """From a checkpoint; QK-norm would be another model."""
    source = tmp_path / "r"
    plain = [w for w in FLAGS if w not in ("--jobs", "0", "--option", "log_every=2")]
    run("train", *plain, "--precision", "bf16", "--out", str(source), "--log-every", "2")
    flags = [*FLAGS, "--steps", "30", "--fork", f"{source}@24", "--seeds", "1", "-o", str(tmp_path / "s")]
    run("study", "cures", *flags, "--time-steps", "0")
    names = {r["arm"] for r in rows_of(tmp_path / "s" / "cures" / "arms.csv")}
    assert {"bf16", "bf16-fa2", "capped, m fp32"} <= names and "QK-norm" not in names
    assert (Run(tmp_path / "s" / "runs" / "bf16" / "seed-1").metrics[0]["step"]) == 26
    run("study", "isolate", *flags)


def test_the_paper_s_scale_says_its_cost_first(tmp_path):
    out = tmp_path / "s"
    tiny = [*FLAGS, "--option", "min_lr=1e-5", "-o", str(out), "--scale", "paper", "--grad-accum", "1", "--option",
            "vocab_size=256", "--heads", "0"]
    text = run("study", "isolate", *tiny, "--ms", "100", "--seeds", "1-3")
    assert "a run is 24 steps of 32 tokens: 768 tokens" in text
    assert "at 100 ms a step" in text and "the 45 runs that may be needed" in text  # 15 arms, 3 seeds
    assert "--yes begins" in text and not (out / "runs").exists()
    run("study", "isolate", *tiny, "--ms", "100", "--yes", "--budget", "0")
    assert "--scale paper needs --data" in mistake("study", "why", "--scale", "paper", "-o", str(out))


def test_mistakes_in_an_arm_are_found_before_any_run(tmp_path):
    words = ["study", "isolate", *FLAGS, "-o", str(tmp_path / "s")]
    assert "did you mean 'attn.p'" in mistake(*words, "--arm", "mine: --round attn.pw=fp32")
    assert "there is no head 7" in mistake(*words, "--heads", "7")
    assert not (tmp_path / "s" / "runs").exists()


def test_mistakes(tmp_path):
    out = ["-o", str(tmp_path / "s")]
    assert "unknown --scale 'hours'" in mistake("study", "why", "--scale", "hours", *out)
    assert "did you mean 'delta'" in mistake("study", "why", "--phases", "dleta", *out)
    assert "unknown part of a criterion" in mistake("study", "why", "--fail", "marge=1", *out)
    assert "layers 0 to 1" in mistake("study", "why", *FLAGS, "--layer", "2", *out)
    assert "layers 0 to 1" in mistake("study", "isolate", *FLAGS, "--layer", "2", *out)
    assert "unknown precision 'bf17'" in mistake("study", "isolate", *FLAGS, "--precision", "bf17", *out)
    assert "nothing to bisect" in mistake("study", "bisect", *FLAGS, "--seeds", "1", "--steps", "2", *out)


def test_ctrl_c_leaves_checkpoints_and_a_report(tmp_path):
    """In a process of its own, with workers: exit code 130, and the same command goes on."""
    words = [w for w in FLAGS if w not in ("--jobs", "0")]
    command = [sys.executable, "-c", "from cuflash.cli.main import main; main()", "study", "cures", *words, "--steps",
               "100000", "--jobs", "2", "--only-own", "-o", str(tmp_path / "s")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    metrics = tmp_path / "s" / "runs" / "bf16" / "seed-1" / "metrics.csv"
    deadline = time.time() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.time() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert "stopping after this step" in text and "bf16, seed 1: stopped at step " in text and "Traceback" not in text
    assert Run(metrics.parent).checkpoints() and (tmp_path / "s" / "cures" / "report.md").exists()
    assert not (tmp_path / "s" / ".stop").exists()
