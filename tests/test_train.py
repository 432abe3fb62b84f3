"""Training: the command as a user types it, repeated, resumed, killed, stopped."""
import csv
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.kernels import gpu_reason
from cuflash.model import config, data, train
from cuflash.model.run import Run

# Options of a model that takes milliseconds a step.
TINY = (
    "--n-layer",
    "1",
    "--n-embd",
    "16",
    "--n-head",
    "2",
    "--block-size",
    "16",
    "--batch-size",
    "4",
    "--log-every",
    "2",
    "--data",
    "synthetic:words,size=20000",
    "--warmup-steps",
    "2",
)


def cuflash(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def rows(path: pathlib.Path) -> list[dict[str, str]]:
    """metrics.csv, timings aside."""
    with open(path / "metrics.csv", newline="") as f:
        return [
            {k: v for k, v in row.items() if k not in train.TIMINGS} for row in csv.DictReader(f)
        ]


def contents(path: pathlib.Path) -> dict[str, bytes]:
    """Every dataset and attribute of a run's last checkpoint."""
    found: dict[str, bytes] = {}
    with h5py.File(Run(path).checkpoints()[-1][1]) as f:
        f.visititems(
            lambda name, item: (
                found.__setitem__(name, item[()].tobytes()) if isinstance(item, h5py.Dataset) else None
            )
        )
        found |= {name: str(value).encode() for name, value in f.attrs.items()}
    return found


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_from_start_to_text(here):
    output = cuflash("train", "--precision", "bf16", "--fix", "on", "--steps", 8, *TINY).splitlines()
    assert output[0].startswith(
        "precision bf16-paper | fix capped:beta=2,cap=80 | accumulator library (auto) | device cpu, "
    )
    assert output[1].startswith("model nano: ") and "context 16 | batch 4" in output[1]
    assert output[2].startswith(
        "data synthetic:words,size=20000: 18,000 tokens, 2,000 for validation, SHA-256 "
    )
    fields = [part.split()[0] for part in output[3].split(" | ")]
    assert (
        fields[:4] == ["step", "loss", "norm", "lr"]
        and fields[-1] == "ties"
        and output[3].startswith("step 2/8 | loss ")
    )
    run = Run(here / "runs" / "nano-bf16-paper-capped")
    assert [r["step"] for r in run.metrics] == [2, 4, 6, 8] and [s for s, _ in run.checkpoints()] == [8]
    assert (
        f"validation loss {run.metrics[-1]['val_loss']:.4f} nats a token; unigram entropy of the text"
        in output[-2]
    )
    stored = run.config
    assert stored["train"]["precision"] == "bf16" and stored["precision"]["sites"]["attn.s"] == "bf16"
    assert {"numpy", "blas", "numerics_version", "git_commit", "command", "device"} <= set(
        stored["environment"]
    )
    assert stored["data"]["sha256"] == data.load("synthetic:words,size=20000").sha256
    text = cuflash("sample", run.path, "--tokens", 20, "--prompt", "The ")
    assert text.startswith("The ")
    assert text == cuflash("sample", run.path, "--tokens", 20, "--prompt", "The ", "--step", 8)


def test_two_runs_give_the_same_metrics_and_the_same_weights(here):
    for out in ("a", "b"):
        cuflash("train", "--steps", 6, "--eval-every", 3, "--out", out, *TINY)
    assert rows(here / "a") == rows(here / "b") and len(rows(here / "a")) == 4
    assert [r["val_loss"] != "" for r in rows(here / "a")] == [False, True, False, True]
    assert contents(here / "a") == contents(here / "b")


def test_micro_batches_and_another_batch_size_see_the_same_text(here):
    """In fp64, where sums differ by rounding alone, below 1e-12."""
    common = ("--steps", 4, "--precision", "fp64", *TINY)
    cuflash("train", "--out", "a", *common)
    cuflash("train", "--out", "b", *common, "--batch-size", 2, "--grad-accum", 2)
    for a, b in zip(rows(here / "a"), rows(here / "b"), strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-12)
        assert float(a["norm"]) == pytest.approx(float(b["norm"]), rel=1e-11)


@pytest.mark.parametrize("extra", [(), ("--round", "linear=bf16:sr", "--round", "attn.o=bf16:sr")])
def test_a_resumed_run_equals_one_never_stopped(here, extra):
    common = (*TINY, "--checkpoint-every", 5, "--keep", 0, *extra)
    cuflash("train", "--steps", 15, "--out", "whole", *common)
    cuflash("train", "--steps", 15, "--out", "cut", *common)
    for step in (10, 15):
        Run(here / "cut").checkpoint_path(step).unlink()
    output = cuflash("train", "--resume", "--out", "cut")
    assert "resumed at step 5 of 15" in output and "step 6/15" in output and "step 4/15" not in output
    assert rows(here / "whole") == rows(here / "cut")
    assert contents(here / "whole") == contents(here / "cut")


def test_a_run_with_no_checkpoint_yet_resumes_from_its_beginning(here):
    cuflash("train", "--steps", 4, "--out", "a", *TINY)
    cuflash("train", "--steps", 4, "--out", "b", *TINY)
    Run(here / "b").checkpoint_path(4).unlink()
    cuflash("train", "--resume", "--out", "b")
    assert contents(here / "a") == contents(here / "b") and rows(here / "a") == rows(here / "b")


def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(here):
    """SIGKILL after a random part of a second, again and again until a run ends."""
    common = ["--steps", "40", *TINY, "--checkpoint-every", "3", "--log-every", "1"]
    cuflash("train", "--out", "whole", *common)
    command = [sys.executable, "-m", "cuflash.cli.main", "train", "--out", "cut"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    rng, kills = np.random.default_rng(1), 0
    while kills < 4 and not (here / "cut" / "checkpoints" / "step_00000040.h5").exists():
        more = ["--resume"] if (here / "cut" / "config.toml").exists() else common
        process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, env=environment, bufsize=0)
        process.stdout.read(1)  # the heading: setting up is over
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        process.communicate(timeout=60)
        kills += 1
    if not (here / "cut" / "checkpoints" / "step_00000040.h5").exists():
        cuflash("train", "--resume", "--out", "cut")
    assert rows(here / "whole") == rows(here / "cut")
    assert contents(here / "whole") == contents(here / "cut")


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminal")
def test_in_a_terminal_lines_stand_above_a_bar(here):
    import pty
    import termios
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    process = subprocess.Popen(
        [sys.executable, "-m", "cuflash.cli.main", "train", "--steps", "6", "--out", "a", *TINY],
        stdout=theirs,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    output = b""
    try:
        while block := os.read(ours, 4096):
            output += block
    except OSError:  # Linux's way to say that the other end has closed
        pass
    assert process.wait(timeout=60) == 0
    text = output.decode(errors="replace")
    assert "step 6/6 | loss" in text and "/6 [" in text and "step" in text.rsplit("/6 [", 1)[1]


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT as a terminal does")
def test_ctrl_c_stops_after_the_step_with_a_checkpoint(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "cuflash.cli.main", "train", "--steps", "100000", "--out", "a", *TINY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for text in process.stdout:
        if text.startswith("step 4/"):
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    step = Run(here / "a").checkpoints()[-1][0]
    assert step >= 4 and f"stopped at step {step}; cuflash train --resume --out a continues" in output


@pytest.mark.parametrize("precision", ["bf16", "bf16-fa2", "fp16-fa2", "fp32"])
def test_loss_falls_below_the_unigram_entropy(here, precision):
    """A text of one sentence: half the entropy of its single bytes, and more, is soon learnt."""
    (here / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    c = config.resolve(
        {
            "n_layer": 1,
            "n_embd": 32,
            "n_head": 2,
            "block_size": 16,
            "batch_size": 8,
            "data": "text",
            "steps": 80,
            "lr": 1e-2,
            "warmup_steps": 10,
            "precision": precision,
            "fix": "on",
        }
    )
    d = data.load(c.data)
    trainer = train.Trainer(c, d)
    losses = [trainer.step().loss for _ in range(c.steps)]
    assert np.mean(losses[-10:]) < d.unigram_entropy() / 2


# ---- what is not finite

def exploding(**options) -> train.Trainer:
    c = config.resolve(
        {
            "n_layer": 2,
            "n_embd": 16,
            "n_head": 2,
            "block_size": 16,
            "batch_size": 2,
            "steps": 20,
            "data": "synthetic:words,size=20000",
            "lr": 1e-3,
        }
        | options
    )
    return train.Trainer(c, data.load(c.data))


@pytest.mark.parametrize(
    "name,place",
    [("h.1.mlp.c_fc.weight", "fwd/L1/c_fc/linear.y"), ("h.0.attn.c_attn.weight", "fwd/L0/c_attn/linear.y")],
)
def test_the_first_value_that_is_not_finite_is_named(name, place):
    trainer = exploding(precision="bf16")
    trainer.step()
    trainer.state.params[name][:, 0] = 3e38  # bf16 ends at 3.39e38
    before = {n: p.copy() for n, p in trainer.state.params.items()}
    with pytest.raises(
        train.NonFinite,
        match=f"step 2: loss is nan; the first value that is not finite appeared at site {place}",
    ):
        trainer.step()
    assert trainer.state.step == 1
    assert all(np.array_equal(p, before[n]) for n, p in trainer.state.params.items())


def test_a_run_that_explodes_stops_and_keeps_the_state_before(here, monkeypatch):
    step = train.Trainer.step

    def late(self):
        if self.state.step == 5:
            self.state.params["wpe"][0] = 3e38  # finite, but its square is not
        return step(self)

    monkeypatch.setattr(train.Trainer, "step", late)
    output = cuflash("train", "--steps", 8, "--out", "a", "--checkpoint-every", 2, *TINY, code=2)
    assert "Error: step 6: " in output and "appeared at site" in output and "Traceback" not in output
    assert "the state before that step is kept in a/checkpoints/step_00000005.h5" in output
    assert [s for s, _ in Run(here / "a").checkpoints()] == [2, 4, 5]


def test_weights_that_are_not_finite_are_not_kept(here, monkeypatch):
    step = train.Trainer.step

    def late(self):
        if self.state.step == 5:
            self.state.params["wpe"][0] = np.nan
        return step(self)

    monkeypatch.setattr(train.Trainer, "step", late)
    output = cuflash("train", "--steps", 8, "--out", "a", "--checkpoint-every", 2, *TINY, code=2)
    assert "appeared at site fwd/wte/embed; the weights were so already, from the update before" in output
    assert [s for s, _ in Run(here / "a").checkpoints()] == [2, 4]


# ---- refusals

@pytest.mark.parametrize("arguments,message", [
    (("--precision", "bf61"), "unknown precision 'bf61': did you mean"),
    (("--round", "attn.oo=fp32"), "unknown site 'attn.oo'"),
    (("--fix", "onn"), "unknown fix 'onn': did you mean 'on'"),
    (("--set", "tile=100,100"), "multiple of 16"),
    (("--n-head", 5), "n_head 5 does not divide n_embd 16"),
    (("--data", "nowhere"), "--data nowhere: no such file or folder"),
    (("--block-size", 4000), "fewer than one block of 4000"),
    *([(("--device", "gpu"), "--device gpu: ")] if gpu_reason() else []),
    (("--steps", 0), "--steps is 0; valid: at least 1"),
    (("--resume",), "--resume: say which run with --out DIR"),
    (("--resume", "--out", "nothing"), "--resume --out nothing: no such folder"),
    (("--config", "nothing.toml"), "--config nothing.toml: no such file"),
])
def test_bad_options(here, arguments, message):
    output = cuflash("train", *TINY, *arguments, code=2)
    assert message in output and "Traceback" not in output
    assert not any(here.iterdir())  # nothing half-written


def test_bad_runs(here):
    cuflash("train", "--steps", 4, "--out", "a", *TINY)
    assert "holds a run already" in cuflash("train", "--steps", 4, "--out", "a", *TINY, code=2)
    assert "has its 4 steps already; a larger --steps goes on" in cuflash(
        "train", "--resume", "--out", "a", code=2
    )
    lr = config.PRESETS["nano"]["lr"]
    assert f"--lr {lr} -> 0.5" in cuflash(
        "train", "--resume", "--out", "a", "--lr", 0.5, "--steps", 9, code=2
    )
    assert "--n-embd 16 -> 32" in cuflash("train", "--resume", "--out", "a", "--n-embd", 32, code=2)
    with Run("a").lock():
        assert "run folder a is in use" in cuflash("train", "--resume", "--out", "a", "--steps", 9, code=2)
    stored = here / "a" / "config.toml"
    text = stored.read_text()
    stored.write_text(text.replace("numerics_version = 1", "numerics_version = 99"))
    assert "numerics version 99" in cuflash("train", "--resume", "--out", "a", "--steps", 9, code=2)
    stored.write_text(text.replace("seed = 1", "seed = 2"))
    assert "is of another run: its seed is 1" in cuflash(
        "train", "--resume", "--out", "a", "--steps", 9, code=2
    )
    stored.write_text(text)
    Run("a").checkpoint_path(4).write_bytes(b"junk")
    assert "damaged, cut short or not HDF5" in cuflash(
        "train", "--resume", "--out", "a", "--steps", 9, code=2
    )
    assert "damaged, cut short or not HDF5" in cuflash("sample", "a", code=2)


def test_a_full_disk_is_named(here, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    output = cuflash("train", "--steps", 4, "--out", "a", *TINY, code=2)
    assert (
        "cannot write a/config.toml: No space left on device" in output
        and not (here / "a" / "config.toml").exists()
    )


def test_dry_run_writes_nothing(here):
    output = cuflash("train", "--dry-run", *TINY)
    assert all(word in output for word in ("parameters 7,", "memory about", "MiB", "FLOPs", "time about"))
    assert not any(here.iterdir())


def test_a_config_file_is_overridden_by_flags(here):
    cuflash("train", "--steps", 2, "--out", "a", *TINY, "--lr", 0.25)
    output = cuflash("train", "--config", "a/config.toml", "--steps", 3, "--out", "b")
    assert "step 3/3" in output and "lr 2.5e-1" in output


# ---- small parts

def test_z_scores_look_back():
    z = train.ZScore([])
    assert [z.add(v) for v in (1.0, 3.0)] == [0.0, 0.0]
    assert z.add(5.0) == 3.0  # (5 − 2)/1
    for _ in range(200):
        z.add(7.0)
    assert len(z.values) == train.Z_WINDOW and z.add(7.0) == 0.0


def test_the_line():
    row = {
        "step": 120,
        "loss": 3.2101,
        "loss_z": 0.3,
        "norm": 0.82,
        "lr": 9.8e-4,
        "ms": 41.2,
        "tokens_per_s": 398_000.0,
        "ties": 31,
        "rows": 1000,
        "loss_scale": 1.0,
    }
    assert (
        train.line(row, 1000)
        == "step 120/1000 | loss 3.2101 (+0.3z) | norm 0.82 | lr 9.8e-4 | 41.2 ms | 398k tok/s | ties 3.1 %"
    )
    assert train.line(row | {"val_loss": 2.5, "tokens_per_s": 8_400.0}, 1000).endswith(
        "8.4k tok/s | ties 3.1 % | val 2.5000"
    )
    assert train.line(row | {"mfu": 0.412, "loss_scale": 1024.0}, 1000).endswith(
        "398k tok/s | mfu 41 % | ties 3.1 % | scale 1024"
    )


def test_the_columns_hold_what_is_written():
    trainer = exploding(precision="bf16", fix="on")
    row = train._row(trainer, trainer.step(), train.ZScore([]), train.ZScore([]), 5.0)
    assert set(row) | {"val_loss", "mfu"} == set(train.columns(2))
    assert row["ties"] == row["ties_L0"] + row["ties_L1"] and row["rows"] == 2 * 16 * 2 * 2
    assert math.isfinite(row["loss"])


def test_the_sampled_text_holds_no_control_characters(here):
    text = cuflash("train", "--steps", 1, "--out", "a", *TINY)  # untrained, so of all bytes
    text += cuflash("sample", "a", "--tokens", 300, "--temperature", 5)
    assert r"\x" in text and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
